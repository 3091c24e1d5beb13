"""populate(reserve_jobs=True): schedule, then work in this process or in several."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from typing import Any

from .budget import Budget
from .claiming import Claims
from .errors import DjJobsError
from .executing import Outcome
from .keys import Keys
from .processes import work_in_processes
from .progress import ProgressBar
from .queue import Queue
from .stopping import Stop
from .working import Options, Results, work

__all__ = ["populate"]


def populate(queue: Queue, keys: Keys, options: Options, schedule: Callable[[], Any]) -> dict[str, Any]:
    """Work off the jobs of these keys and return what DataJoint's populate would.

    Parameters
    ----------
    schedule
        Called before the work, and again when somebody else's scheduling came to nothing.
    """
    table, results = keys.table, Results()
    processes = options.processes or mp.cpu_count()
    if processes > 1 and "fork" not in mp.get_all_start_methods():
        raise DjJobsError(
            f"processes={processes} for {keys.label} needs a system that can fork. "
            "Start several Python processes instead, each with populate(reserve_jobs=True)."
        )
    claims = Claims(queue, keys, options.order, options.priority)
    with Stop() as stop:
        # A stop that comes meanwhile waits for the statement to end, so that no mark is left behind.
        schedule()
        stop.check()
    context = mp.get_context("fork") if processes > 1 else None
    budget = Budget(options.max_calls, options.limit, context)
    with ProgressBar(type(table).__name__, options.display_progress, lambda: budget.most(claims.available())) as bar:

        def report(outcome: Outcome) -> None:
            results.add(outcome, options.return_exception_objects)
            bar.update(outcome)

        def run(report: Callable[[Outcome], None]) -> None:
            with Stop(queue.db.interrupt) as stop:
                work(queue, keys, claims, options, budget=budget, stop=stop, reschedule=schedule, report=report)

        if context is None:
            run(report)
        else:
            work_in_processes(context, processes, queue, keys, run, report, stop=budget.spend_all)
    return results.as_dict()
