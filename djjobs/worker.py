"""`djjobs worker`: a supervisor with slots in child processes, which work off the tables of a pipeline."""

from __future__ import annotations

import logging
import multiprocessing as mp
import signal
import time
from collections.abc import Sequence
from typing import Any

from . import telemetry
from .errors import DjJobsError
from .interrupt import Stop
from .queue.database import Database, explained
from .queue.identity import Claimant
from .queue.keys import table_label
from .queue.notifier import Notifier
from .queue.table_queue import TableQueue
from .recurring.scheduler import SchedulerBeside
from .settings import settings
from .telemetry import emit
from .work.budget import Budget
from .work.current_job import SlotState
from .work.empty import UntilTold, patience_with_limit
from .work.idle import FIRST_WAIT, IdleSlots
from .work.loop import Limits, Loop, Source
from .work.messages import Idle, Working
from .work.options import WorkerOptions
from .work.outcome import Outcome
from .work.pool import Slot, SlotChannel
from .work.supervisor import Supervisor
from .work.walltime import deadline

__all__ = ["WorkerOptions", "run_worker"]

logger = logging.getLogger("djjobs")

#: How long a slot has to give back its job when it is told to end.
_PATIENCE = 3.0


def run_worker(tables: Sequence[type], options: WorkerOptions | None = None) -> int:
    """Work off the jobs of these tables, upstream first, and return an exit code.

    Parameters
    ----------
    tables
        Classes with the mixin.
    options : WorkerOptions, optional
        Defaults to one process that works for ever.

    Returns
    -------
    int
        0, or 1 if jobs have failed.
    """
    options = options or WorkerOptions()
    options.check()
    settings.insist_on_lease()
    if not tables:
        raise DjJobsError("There is nothing to work on: no table was given.")
    if "fork" not in mp.get_all_start_methods():
        raise DjJobsError("A worker needs a system that can fork. Call populate(reserve_jobs=True) instead.")
    with Stop(connection=Database(tables[0]().connection)) as stop:
        queues = [_queue_of(table(), options, stop) for table in tables]
        labels = ", ".join(jobs.label for jobs in queues)
        with explained(queues[0].table.connection, labels, "work on"):
            worker = _Worker(queues, options)
            worker.register(stop, patience=float("inf"))
        try:
            return worker.work(stop)
        finally:
            stop.take()


def _queue_of(table: Any, options: WorkerOptions, stop: Stop) -> TableQueue:
    db = Database(table.connection)

    def find() -> TableQueue:
        jobs = TableQueue.of(table, options.restrictions)
        # A bad restriction or order is to be found out here, not by every slot.
        jobs.insist_on_source()
        jobs.claims(options.order)
        return jobs

    # The server may be read-only for a while.
    patient = db.patient(float("inf"), unless=lambda: stop.requested is not None)
    with explained(table.connection, table_label(table), "work on"), patient:
        return db.retry(find)


class _Worker(Supervisor):
    """The supervisor of `djjobs worker`: its slots wait for more jobs when there are none."""

    bound = True
    replaces_ended = True
    most_failures = 5

    def __init__(self, tables: list[TableQueue], options: WorkerOptions) -> None:
        self._options = options
        context = mp.get_context("fork")
        budget = Budget(1 if options.once else options.max_jobs, None, context)
        super().__init__(tables, options.processes, Claimant(), budget, self._work_in_slot, self._count_outcome)
        longest = context.Array("d", len(tables), lock=False)
        self._limits = Limits(options.max_jobs_per_process, deadline(options.walltime), longest)
        self._idle = IdleSlots(hurries=options.idle_timeout is not None)
        self._done = self._failed = 0
        self._last_job = time.monotonic()
        self._patience_with_limit: float | None = None
        self._notifier = Notifier(tables[0].queue.db.connection)
        self._scheduler = SchedulerBeside([type(jobs.table) for jobs in tables]) if options.with_scheduler else None

    def work(self, stop: Stop) -> int:
        try:
            self.run(stop)
        finally:
            if self._scheduler is not None:
                self._scheduler.close()
        emit("worker ended", worker=self._claimant.worker_id, done=self._done, failed=self._failed)
        telemetry.flush()
        return 1 if self._failed else 0

    # -- in a slot -----------------------------------------------------------------------------------------

    def _work_in_slot(self, channel: SlotChannel, number: int) -> None:
        # Ctrl-C in a terminal reaches the whole group; the supervisor decides what becomes of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        claimant, options = self._claimant.for_slot(number), self._options
        with Stop(self._tables[0].queue.db.interrupt, signals=(signal.SIGTERM,)) as stop:
            state = SlotState(channel.memory, stop)
            channel.listen(state)
            Loop(
                [
                    Source(jobs, jobs.claims(options.order, None, claimant), state, number=position)
                    for position, jobs in enumerate(self._tables)
                ],
                claimant,
                budget=self._budget,
                stop=stop,
                limits=self._limits,
                when_empty=UntilTold(channel, at_once=options.drain or options.once, drains=options.drain),
                begin=lambda: channel.send(Working()),
                report=channel.report,
                patience=float("inf"),
                prepare=self.prepare_slot,
            ).run()

    # -- in the supervisor ---------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        return _PATIENCE

    def pass_on(self, line: str) -> None:
        logger.info("%s", line, extra={"event": "output"})

    @property
    def sources(self) -> list[Any]:
        return self._notifier.sources

    def _count_outcome(self, outcome: Outcome) -> None:
        self._last_job = time.monotonic()
        self._done += outcome.made
        self._failed += outcome.stays_an_error

    def hear_idle(self, slot: Slot, idle: Idle) -> None:
        self._idle.hear(idle)

    def hear_working(self, slot: Slot) -> None:
        self._idle.working()

    def recovered(self, count: int) -> None:
        self._idle.announced()

    def each_round(self) -> None:
        if self._notifier.has_news():
            self._idle.announced()
        self._idle.wake_one(self.pool.slots)
        if self._scheduler is not None:
            self._scheduler.tick()

    def is_over(self) -> bool:
        """Whether all slots are idle, and the worker is not to wait any longer."""
        connected, until = self.connected, self._limits.deadline
        if self._starts or self._unsettled or any(slot.busy for slot in connected):
            return False
        late = until is not None and time.monotonic() > until
        if not connected:
            # Nobody can look whether there are jobs.
            return late
        drained = self._options.drain and not self._idle.last.retries_wait
        if late or drained or self._is_retiring or self._options.once:
            return True
        timeout = self._options.idle_timeout
        return timeout is not None and time.monotonic() - self._last_job > timeout + self._extra_patience()

    def _extra_patience(self) -> float:
        """A worker that was not allowed to schedule does not end before it was, or somebody else has done so."""
        if not self._idle.last.limited:
            return 0.0
        if self._patience_with_limit is None:
            names = ", ".join(jobs.label for jobs in self._tables)
            self._patience_with_limit = patience_with_limit(names) + FIRST_WAIT
        return self._patience_with_limit

    def wind_down(self, stop: Stop) -> None:
        grace = settings.grace if self._options.grace is None else self._options.grace
        self.let_jobs_end(stop, grace)
