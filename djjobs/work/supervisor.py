"""The supervisor: starts slots, hears what they say, replaces those that die, and ends all of them well."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..interrupt import Stop
from ..queue.identity import Claimant
from ..queue.table_queue import TableQueue
from ..settings import settings
from ..telemetry import emit
from .budget import Budget
from .execute import clean_up_after
from .loop import databases_of
from .messages import Idle, JobOver, Message, OutOfTime, SlotDied, SlotEnded, SlotFailed, Working
from .monitor import Monitor
from .outcome import Outcome, describe
from .pool import Pool, Slot, SlotChannel

__all__ = ["Supervisor"]

logger = logging.getLogger("djjobs")


class Supervisor:
    """Supervises the slots of one worker.

    Parameters
    ----------
    tables : sequence of TableQueue
        What the slots work on. Their connections are closed while slots run.
    slots : int
        How many slots to start.
    claimant : Claimant
        In whose name the slots claim.
    budget : Budget
        What the slots spend together.
    work : callable
        What a slot does, given its channel and its number. It calls `prepare_slot` first.
    report : callable
        Called with the outcome of every job.
    """

    #: Whether slots die at once with this process, even if they are deep in C code.
    bound = False
    #: Whether a slot that has ended by itself is replaced.
    replaces_ended = False
    #: How many slots in a row may fail before the supervisor gives up.
    most_failures = 0

    def __init__(
        self,
        tables: Sequence[TableQueue],
        slots: int,
        claimant: Claimant,
        budget: Budget,
        work: Callable[[SlotChannel, int], None],
        report: Callable[[Outcome], None],
    ) -> None:
        self._tables, self._count, self._claimant, self._budget = list(tables), slots, claimant, budget
        self._report = report
        self.pool = Pool(mp.get_context("fork"), work, self.bound, self.pass_on)
        self.monitor = Monitor(claimant, tables, slots)
        self._is_retiring = False
        self._failures = 0
        #: Cancelled jobs whose slot was killed, for the next slot to clean up after: table and key.
        self._to_clean: list[tuple[Any, dict[str, Any]]] = []

    def register(self) -> None:
        """Let others know of the worker, before it begins."""
        self.monitor.register()

    def run(self, stop: Stop) -> None:
        """Start the slots and return when all of them are gone. A signal ends them; it is the caller's to act on."""
        # Slots must not inherit an open connection: two processes would read each other's answers.
        for db in databases_of(self._tables):
            db.connection.close()
        try:
            self._tell_of_start()
            for _ in range(self._count):
                self.pool.start_slot()
            while self.pool.slots and stop.requested is None and not self.is_over():
                self._look_after_slots(self.look_interval)
                self.each_round()
            self.wind_down(stop)
        finally:
            self._budget.spend_all()
            self.pool.end(self.patience, self.monitor.slot_ended, self._hear_last)
            self.monitor.sign_off()
            with contextlib.suppress(Exception):  # it may be closed already, if the server is away
                self.monitor.db.connection.close()

    def clean_up(self) -> None:
        """Clean up after cancelled jobs whose slot was killed."""
        for table, key in self._to_clean:
            clean_up_after(table, key)

    def _tell_of_start(self) -> None:
        names = ", ".join(jobs.name for jobs in self._tables)
        emit("worker started", worker=self._claimant.worker_id, tables=names)

    def prepare_slot(self) -> None:
        """Called in a slot: it gets connections of its own, and cleans up after jobs of killed slots."""
        for db in databases_of(self._tables):
            db.reconnect()
        self.clean_up()

    # -- for workers that live longer ----------------------------------------------------------------------

    def pass_on(self, line: str) -> None:
        """Something that a job has printed."""
        print(line)

    @property
    def patience(self) -> float:
        """How long a slot has to give back its job when it is told to end."""
        return settings.grace

    @property
    def look_interval(self) -> float:
        """How long to listen: short enough to see a signal or a time-out coming."""
        return min(0.2, max(0.01, settings.heartbeat_interval / 4))

    @property
    def sources(self) -> list[Any]:
        """What else to wake up for."""
        return []

    def is_over(self) -> bool:
        """Whether there is nothing left to do although slots are there."""
        return False

    def each_round(self) -> None:
        """Called after each look at the slots."""

    def wind_down(self, stop: Stop) -> None:
        """Called before the slots are told to end."""

    def hear_idle(self, slot: Slot, idle: Idle) -> None:
        """A slot has found no jobs."""

    def hear_working(self, slot: Slot) -> None:
        """A slot has found jobs."""

    def recovered(self, count: int) -> None:
        """So many jobs of dead workers went back into the queue."""

    # -- what slots say ------------------------------------------------------------------------------------

    def _look_after_slots(self, seconds: float) -> None:
        count = self.monitor.tick(self.pool.slots)
        if count:
            self.recovered(count)
        for slot, message in self.pool.listen(seconds, self.sources):
            self._hear(slot, message)

    def _hear(self, slot: Slot, message: Message) -> None:
        if isinstance(message, JobOver):
            self._failures = 0
            self._report(message.outcome)
        elif isinstance(message, Idle):
            slot.busy = False
            self.hear_idle(slot, message)
        elif isinstance(message, Working):
            slot.busy = True
            self.hear_working(slot)
        elif isinstance(message, OutOfTime):
            self._is_retiring = True
        elif isinstance(message, SlotFailed):
            self._excuse(message.error)
        elif isinstance(message, SlotDied):
            self._settle(slot, message.story)
            self._replace()
        elif isinstance(message, SlotEnded) and self.replaces_ended:
            self._replace()

    def _hear_last(self, slot: Slot, message: Message) -> None:
        """What a slot says that is to end: only what became of its job matters."""
        if isinstance(message, JobOver):
            self._report(message.outcome)

    def _settle(self, slot: Slot, story: str) -> None:
        """A slot died: see to the job that it had."""
        lost = self.monitor.slot_died(slot, story)
        self._budget.put_back(lost.released)
        if lost.job is not None and lost.status == "cancelled":
            # That is user code, which a supervisor does not run.
            self._to_clean.append((lost.table, lost.job.key))
        if lost.outcome is not None and lost.outcome.stays_an_error:
            self._report(lost.outcome)

    def _excuse(self, error: BaseException) -> None:
        """A slot could not go on, through no fault of a job. Another may; but not for ever."""
        self._failures += 1
        if self._failures > self.most_failures:
            raise error
        logger.error("A slot could not go on: %s", describe(error), extra={"event": "slot failed"})
        time.sleep(min(0.1 * 2**self._failures, 2.0))

    def _replace(self) -> None:
        if not self._is_retiring and not self._budget.ended and self._budget.most(1):
            self.pool.start_slot()
            self._to_clean.clear()

    # -- the end ---------------------------------------------------------------------------------------------

    def let_jobs_end(self, stop: Stop, grace: float) -> None:
        """After a signal: running jobs may go on for so many seconds, or until the next signal. No new ones begin."""
        number = stop.take()
        if number is None:
            return
        self._is_retiring = self.pool.is_stopping = True
        self._budget.spend_all()
        why = f"{signal.Signals(number).name}: running jobs have {grace:g} s to end."
        emit("worker stopping", worker=self._claimant.worker_id, why=why)
        self.monitor.tell_of_stop()
        deadline = time.monotonic() + grace
        for slot in self.pool.slots:
            if not slot.busy:
                slot.terminate()
        while any(slot.memory.read() for slot in self.pool.slots) and time.monotonic() < deadline:
            if stop.take() is not None:
                why = "A second signal: jobs are given back at once."
                emit("worker stopping", worker=self._claimant.worker_id, why=why)
                return
            self._look_after_slots(0.1)
