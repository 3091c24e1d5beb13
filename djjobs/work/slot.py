"""A slot of `djjobs worker`: it looks for jobs, runs them, and waits to be called when there are none."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import LeaseLost
from ..events.watch import HeldEvents
from ..interrupt import Stop
from ..queue.claim import Claims, Job
from ..queue.identity import Claimant
from .budget import Budget, Pace
from .current_job import Desk
from .execute import Executor, Outcome, clean_up_after
from .options import Bench, WorkerOptions, one_a_connection
from .pool import SlotLine

__all__ = ["Shared", "SlotWork"]

logger = logging.getLogger("djjobs")

#: A job is not begun if the longest one of its table, and a bit, would not fit into the time that is left.
_MARGIN = 1.2


@dataclass
class Shared:
    """What the slots of a worker get from their supervisor."""

    benches: list[Bench]
    options: WorkerOptions
    claimant: Claimant
    budget: Budget
    deadline: float | None
    #: How long the longest job of each table took, for all slots to know.
    longest: MutableSequence[float]
    #: Cancelled jobs whose slot was killed, for the next one to clean up after: table and key.
    to_clean: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)


class SlotWork:
    """What a slot does: look for jobs, upstream first, run them, and wait to be called when there are none."""

    def __init__(self, shared: Shared, line: SlotLine, number: int) -> None:
        self._benches, self._options, self._budget = shared.benches, shared.options, shared.budget
        self._line, self._deadline, self._longest = line, shared.deadline, shared.longest
        self._to_clean = list(shared.to_clean)
        self._claimant = claimant = shared.claimant.for_slot(number)
        self._claims = [Claims(b.queue, b.keys, self._options.order, None, claimant) for b in self._benches]
        self._paces = [Pace() for _ in self._benches]
        self._jobs_done = 0
        self._is_limited = False
        self._events = HeldEvents(db.connection for db in one_a_connection(self._benches))

    def run(self) -> None:
        # Ctrl-C in a terminal reaches the whole group; it is the supervisor's to decide.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        databases = [bench.queue.db for bench in self._benches]
        with Stop(databases[0].interrupt, signals=(signal.SIGTERM,)) as stop, contextlib.ExitStack() as patience:
            for db in databases:
                patience.enter_context(db.patient(float("inf"), unless=lambda: stop.requested is not None))
            for db in one_a_connection(self._benches):
                db.reconnect()
            desk = Desk(self._line.page, stop)
            self._line.listen(desk)
            for table, key in self._to_clean:
                clean_up_after(table, key)
            self._executors = [Executor(bench.finisher, None, desk, bench.number) for bench in self._benches]
            with self._events:
                self._work(stop)

    def _work(self, stop: Stop) -> None:
        while not self._is_over():
            stop.check()
            if self._is_late():
                self._line.send("retired")
                break
            self._events.act()
            if self._look(stop):
                continue
            wait = self._options.drain and any(bench.has_retries() for bench in self._benches)
            self._line.send("waiting" if wait else "limited" if self._is_limited else "idle")
            self._line.wait_until_called(stop)
        self._see_to_runs(stop)

    def _look(self, stop: Stop) -> bool:
        """Run what is there for the first table that has jobs; schedule if none has. Whether there were any."""
        for bench in self._benches:
            if self._run_some(bench, stop):
                return True
        self._is_limited = False
        for bench in self._benches:
            self._is_limited |= bench.schedule(at_once=self._options.drain or self._options.once)
            if self._run_some(bench, stop):
                return True
        self._see_to_runs(stop)
        return False

    def _see_to_runs(self, stop: Stop) -> None:
        for executor in self._executors:
            executor.runs.look(self._claimant, stop)

    def _run_some(self, bench: Bench, stop: Stop) -> bool:
        number = bench.number
        if not self._fits(number):
            return False
        room = self._budget.take(self._paces[number].batch)
        jobs = self._claims[number].take(room) if room else []
        self._budget.put_back(room - len(jobs))
        if not jobs:
            return False
        self._line.send("working")
        try:
            while jobs and not self._budget.ended and not self._is_used_up() and self._fits(number):
                stop.check()
                self._run(bench, jobs.pop(0), jobs, stop)
                self._events.act(more_jobs=bool(jobs))
        finally:
            self._budget.put_back(len(jobs))
            bench.finisher.give_back(jobs)
        return True

    def _run(self, bench: Bench, job: Job, rest: list[Job], stop: Stop) -> None:
        name = bench.finisher.name
        about = {"table": name, "key": job.key}
        logger.info("%s %s started", name, job.key, extra={**about, "event": "job started"})
        with self._paces[bench.number].timing():
            outcome = self._executors[bench.number].run(job, stop)
        self._longest[bench.number] = max(self._longest[bench.number], outcome.seconds)
        self._jobs_done += 1
        if not outcome.made and outcome.error is None:
            self._budget.refund_call()
        _log(name, outcome)
        self._line.report(outcome)
        self._executors[bench.number].runs.job_over(job, rest, stop)

    def _is_over(self) -> bool:
        return self._budget.is_spent or self._is_used_up()

    def _is_used_up(self) -> bool:
        most = self._options.max_jobs_per_process
        return most is not None and self._jobs_done >= most

    # -- the time that is left -----------------------------------------------------------------------------------

    def _fits(self, number: int) -> bool:
        return self._deadline is None or time.monotonic() + self._longest[number] * _MARGIN < self._deadline

    def _is_late(self) -> bool:
        return not any(self._fits(bench.number) for bench in self._benches)


def _log(name: str, outcome: Outcome) -> None:
    about = {"table": name, "key": outcome.key, "seconds": round(outcome.seconds, 3)}
    if isinstance(outcome.error, LeaseLost):
        logger.warning("%s %s was given to another", name, outcome.key, extra={**about, "event": "job lost"})
    elif outcome.cancelled:
        logger.info("%s %s cancelled", name, outcome.key, extra={**about, "event": "job cancelled"})
    elif outcome.error is None:
        what = "done" if outcome.made else "was done already"
        logger.info(
            "%s %s %s in %.2f s", name, outcome.key, what, outcome.seconds, extra={**about, "event": "job done"}
        )
    else:
        again = "" if outcome.retry_in is None else f"; tried again in {outcome.retry_in:.0f} s"
        what = f"{outcome.message.splitlines()[0]}{again}"
        extra = {**about, "event": "job failed"}
        logger.error("%s %s failed in %.2f s: %s", name, outcome.key, outcome.seconds, what, extra=extra)
