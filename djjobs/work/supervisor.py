"""The supervisor: starts slots, hears what they say, replaces those that die, and ends all of them well."""

from __future__ import annotations

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
from ..sql.connection import CROWDED
from ..telemetry import emit
from .budget import Budget
from .execute import clean_up_after
from .loop import databases_of
from .messages import Idle, JobOver, Message, OutOfTime, SlotDied, SlotEnded, SlotFailed, Working
from .monitor import Monitor
from .monitor_thread import MonitorThread, News, Recovered, Requested, Settled
from .outcome import Outcome, describe
from .pool import Pool, Slot, SlotChannel
from .settle import LostJob
from .waiting_lines import WaitingLines
from .watch import Watch

__all__ = ["Supervisor"]

logger = logging.getLogger("djjobs")

#: After so long the number of slots that have found a connection is worth a line.
_STEADY = 1.0


class Supervisor:
    """Supervises the slots of one worker. Meanwhile it asks nothing of the server: its monitor does, in a thread.

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
        self._watch = Watch([jobs.policy.timeout for jobs in tables])
        self._monitor = MonitorThread(
            lambda pass_on, settled: Monitor(claimant, tables, slots, pass_on=pass_on, settled=settled)
        )
        self._waiting_lines = WaitingLines()
        self._is_retiring = self._has_finished = False
        #: How many slots have a connection, of how many; since when; and whether that was said.
        self._few, self._few_since, self._few_said = (0, 0), 0.0, False
        self._failures = 0
        #: The numbers of slots that have died, whose jobs are not settled yet; and whether they have a successor.
        self._unsettled: dict[int, bool] = {}
        #: When slots are to be started in place of others.
        self._starts: list[float] = []
        #: Cancelled jobs whose slot was killed, for the next slot to clean up after: table and key.
        self._to_clean: list[tuple[Any, dict[str, Any]]] = []

    def register(self, stop: Stop, patience: float) -> None:
        """Let others know of the worker, before it begins; wait so long for a server that refuses."""
        db, unless = self._tables[0].queue.db, lambda: stop.requested is not None
        with db.patient(patience, unless):
            monitor = db.retry(self._monitor.monitor)
        with monitor.db.patient(patience, unless):
            monitor.register()

    def run(self, stop: Stop) -> None:
        """Start the slots and return when all of them are gone. A signal ends them; it is the caller's to act on."""
        # Slots must not inherit an open connection: two processes would read each other's answers.
        for db in databases_of(self._tables):
            db.connection.close()
        logger.addFilter(self._waiting_lines)
        try:
            self._tell_of_start()
            self._monitor.start()
            for _ in range(self._count):
                self.pool.start_slot()
            while self._has_slots() and stop.requested is None and not self.is_over():
                self._look_after_slots(self.look_interval)
                self.each_round()
            self.wind_down(stop)
        finally:
            self._tell_of_few(float("inf"))
            self._budget.spend_all()
            self.pool.end(self.patience, self._monitor.slot_ended, self._hear_last)
            self._monitor.close()
            self._hear_news()
            logger.removeFilter(self._waiting_lines)

    def _has_slots(self) -> bool:
        """Whether there are slots, or there will be."""
        return bool(self.pool.slots or self._unsettled or self._starts)

    def clean_up(self) -> None:
        """Clean up after cancelled jobs whose slot was killed."""
        for table, key in self._to_clean:
            clean_up_after(table, key)

    def _tell_of_start(self) -> None:
        names = ", ".join(jobs.name for jobs in self._tables)
        emit("worker started", worker=self._claimant.worker_id, tables=names)

    def prepare_slot(self) -> None:
        """Called in a slot: it gets connections of its own, and cleans up after jobs of killed slots."""
        # The supervisor decides which line is said.
        logger.removeFilter(self._waiting_lines)
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
        # Others have found the queue empty; those that are left have found no connection.
        return self._has_finished and not self._starts and bool(self.pool.slots) and not self.connected

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
        self._watch.look(self.pool.slots)
        self._monitor.watch(self.pool.slots)
        self._hear_news()
        self._start_more()
        for slot, message in self.pool.listen(seconds, [*self.sources, self._monitor]):
            self._hear(slot, message)
        self._tell_of_few(time.monotonic())

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
            self._excuse(slot, message.error)
        elif isinstance(message, SlotDied):
            self._forget(slot)
            self._unsettled[slot.number] = False
            self._monitor.slot_died(slot, message.story, self._watch.was_late(slot))
        elif isinstance(message, SlotEnded):
            self._forget(slot)
            self._has_finished = True
            self._monitor.slot_finished(slot)
            if self.replaces_ended:
                self._replace()

    def _forget(self, slot: Slot) -> None:
        self._waiting_lines.forget(slot.process.pid)

    def _hear_last(self, slot: Slot, message: Message) -> None:
        """What a slot says that is to end: only what became of its job matters."""
        if isinstance(message, JobOver):
            self._report(message.outcome)

    def _excuse(self, slot: Slot, error: BaseException) -> None:
        """A slot could not go on, through no fault of a job. Another may; but not for ever."""
        if self._is_crowded_out(slot) and (self._has_finished or self.connected):
            return
        self._failures += 1
        if self._failures > self.most_failures:
            raise error
        logger.error("A slot could not go on: %s", describe(error), extra={"event": "slot failed"})

    def _replace(self) -> None:
        """Start another slot, after failures not at once."""
        if not self._is_retiring and not self._budget.ended:
            pause = min(0.1 * 2**self._failures, 2.0) if self._failures else 0.0
            self._starts.append(time.monotonic() + pause)
            self._start_more()

    def _start_more(self) -> None:
        now = time.monotonic()
        due, self._starts = [at for at in self._starts if at <= now], [at for at in self._starts if at > now]
        for _ in due:
            if not self._is_retiring and not self._budget.ended and self._budget.most(1):
                self.pool.start_slot()
                self._to_clean.clear()

    # -- slots without a connection --------------------------------------------------------------------------

    def _is_crowded_out(self, slot: Slot) -> bool:
        """Whether a slot has nothing to do and waits for a connection, because others have all of them."""
        return self._waiting_lines.waiting.get(slot.process.pid or 0) == CROWDED and slot.memory.read() is None

    @property
    def connected(self) -> list[Slot]:
        """The slots that do not wait for a connection that others have."""
        return [slot for slot in self.pool.slots if not self._is_crowded_out(slot)]

    def _tell_of_few(self, now: float) -> None:
        """Say how many slots work, when their number does not change any more."""
        count, connected = len(self.pool.slots), len(self.connected)
        if self._few != (connected, count):
            self._few, self._few_since = (connected, count), time.monotonic()
        elif connected == count:
            self._few_said = False
        elif connected and not self._few_said and now - self._few_since >= _STEADY:
            self._few_said = True
            words = "This worker works with %s of its %s slots: %s."
            logger.warning(words, connected, count, CROWDED, extra={"event": "fewer slots"})

    # -- what the monitor says -------------------------------------------------------------------------------

    def _hear_news(self) -> None:
        for news in self._monitor.news():
            self._hear_one(news)

    def _hear_one(self, news: News) -> None:
        if isinstance(news, Recovered):
            self.recovered(news.count)
        elif isinstance(news, Requested):
            self._watch.ask(news.slot, news.request)
        elif isinstance(news, Settled):
            self._hear_settled(news.lost)

    def _hear_settled(self, lost: LostJob) -> None:
        """The monitor has seen to the jobs of a slot that is gone, as far as that can be done now."""
        self._budget.put_back(lost.released)
        if lost.job is not None and lost.status == "cancelled":
            # That is user code, which a supervisor does not run.
            self._to_clean.append((lost.table, lost.job.key))
        if lost.outcome is not None and lost.outcome.stays_an_error:
            self._report(lost.outcome)
        if lost.slot in self._unsettled:
            self._succeed(lost.slot, lost.later)
        elif lost.released or lost.status == "scheduled":
            self.recovered(lost.released)

    def _succeed(self, number: int, later: bool) -> None:
        """A dead slot gets a successor: only now, when what it had is there again, or cannot be settled at once."""
        has_successor = self._unsettled.pop(number)
        if later:
            self._unsettled[number] = True
        if not has_successor:
            self._replace()
        elif not later:
            # The slots may have found nothing and have ended meanwhile.
            self.recovered(1)
            if not self.pool.slots:
                self._replace()

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
        self._monitor.tell_of_stop()
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
