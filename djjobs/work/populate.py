"""populate(reserve_jobs=True): schedule, then work in this process or in several."""

from __future__ import annotations

import logging
import multiprocessing as mp
from collections.abc import Callable
from typing import Any

from ..errors import DjJobsError
from ..interrupt import Stop
from ..queue.claim import Claims
from ..queue.finish import Finisher
from ..queue.identity import Claimant
from ..queue.keys import Keys
from ..queue.leases import is_looked_after, recover_once
from ..queue.queue import Queue
from ..settings import settings
from .bars import ProgressBar
from .budget import Budget
from .current_job import Desk
from .execute import Executor, Outcome
from .loop import Options, Results, Scheduling, work
from .monitor_process import Pulse
from .pool import Line, SlotLine
from .processes import work_in_processes

__all__ = ["populate"]

logger = logging.getLogger("djjobs")


def populate(queue: Queue, keys: Keys, options: Options, schedule: Callable[[], bool]) -> dict[str, Any]:
    """Work off the jobs of these keys and return what DataJoint's populate would.

    Parameters
    ----------
    schedule
        Called before the work, and again when somebody else's scheduling came to nothing; says whether it was limited.
    """
    settings.insist_on_lease()
    table, results = keys.table, Results()
    processes = options.processes or mp.cpu_count()
    if processes > 1 and "fork" not in mp.get_all_start_methods():
        raise DjJobsError(
            f"processes={processes} for {keys.label} needs a system that can fork. "
            "Start several Python processes instead, each with populate(reserve_jobs=True)."
        )
    finisher = Finisher(queue, keys, options.keep_completed)
    claimant = Claimant()
    claims = Claims(queue, keys, options.order, options.priority, claimant, options.automatic)
    scheduling = Scheduling(schedule, keys.label)
    with Stop() as stop:
        # A stop that comes meanwhile waits for the statement to end, so that no mark is left behind.
        if not is_looked_after(queue, finisher.table_name):
            recover_once(queue, {finisher.table_name: finisher})
        scheduling.now()
        stop.check()
    context = mp.get_context("fork") if processes > 1 else None
    budget = Budget(options.max_calls, options.limit, context)
    with ProgressBar(type(table).__name__, options.display_progress, lambda: budget.most(claims.available())) as bar:

        def report(outcome: Outcome) -> None:
            results.add(outcome, options.return_exception_objects)
            bar.update(outcome)
            if outcome.error is not None and outcome.error_to_raise(options.suppress_errors) is None:
                _tell_of_suppressed(type(table).__name__, outcome)

        def run(line: Line, claims: Claims, report: Callable[[Outcome], None]) -> None:
            with Stop(queue.db.interrupt) as stop:
                desk = Desk(line.page, stop)
                line.listen(desk)
                executor = Executor(finisher, options.make_kwargs, desk)
                work(
                    queue,
                    claims,
                    executor,
                    options,
                    budget=budget,
                    stop=stop,
                    begin=line.begin,
                    scheduling=scheduling,
                    report=report,
                )

        def run_slot(line: SlotLine, number: int) -> None:
            mine = claimant.for_slot(number)
            of_slot = Claims(queue, keys, options.order, options.priority, mine, options.automatic)
            run(line, of_slot, line.report)

        if context is None:
            with Stop() as stop:
                try:
                    with Pulse(claimant, finisher) as pulse:
                        run(pulse, claims, report)
                finally:
                    # A signal that came while the worker signed off.
                    stop.check()
        else:
            suppress = options.suppress_errors
            work_in_processes(context, processes, finisher, claimant, run_slot, report, budget, suppress)
    return results.as_dict()


def _tell_of_suppressed(name: str, outcome: Outcome) -> None:
    """As DataJoint does, at ERROR and where it does; an error that is not the last word on its job is a warning."""
    if outcome.retry_in is None:
        logging.getLogger("datajoint").error("%s %s: %s", name, outcome.key, outcome.message)
    else:
        logger.warning("%s %s is tried again in %.0f s: %s", name, outcome.key, outcome.retry_in, outcome.message)
