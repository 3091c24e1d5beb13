"""Settling: what a slot had when it ended goes back, or gets its attempt counted, whatever way it ended.

A slot that died is settled at once, and again while the server is away or keeps its job locked. Besides, at every
heartbeat the claims that the table says this worker has are compared with what its slots hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DjJobsError, JobTimeout
from ..queue.claim import Job
from ..queue.database import Database
from ..queue.finish import Failure, release_slot
from ..queue.identity import Claimant, slot_of
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..settings import settings
from ..telemetry import emit
from .outcome import Outcome, tell_of
from .shared_memory import Started
from .watch import Watched

__all__ = ["LostJob", "Settler"]

logger = logging.getLogger("djjobs")


@dataclass(frozen=True)
class LostJob:
    """What became of the job of a slot that died, if it had one, and how many others went back."""

    table: Any = None
    job: Job | None = None
    status: str = ""
    failure: Failure = field(default_factory=lambda: Failure("", ""))
    released: int = 0
    #: The number of the slot; None if it is about what was found in the table.
    slot: int | None = None
    #: Whether the job could not be settled yet.
    later: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """What came of the job of the dead slot; None if it had no job."""
        if self.job is None:
            return None
        seconds = self.failure.duration or 0.0
        if self.status == "cancelled":
            return Outcome(self.job.key, made=False, cancelled=True, seconds=seconds)
        if self.status == "success":
            return Outcome(self.job.key, made=False, seconds=seconds)
        kind = JobTimeout if self.failure.kind == "timeout" else DjJobsError
        error = kind(self.failure.message.removeprefix("JobTimeout: "))
        retry_in = 0.0 if self.status == "scheduled" else None
        return Outcome(self.job.key, False, error, self.failure.message, retry_in, seconds=seconds)


@dataclass(frozen=True)
class _Gone:
    """A slot that is gone: how it died, or None if it was told to end; and whether its job's time was over."""

    slot: Watched
    story: str | None
    late: bool = False


class Settler:
    """Settles the claims of one worker.

    Parameters
    ----------
    db : Database
        The connection to use.
    tables : sequence of TableQueue
        The tables that the slots work on, on this connection, in the order of their numbers.
    settled : callable
        Called with what became of the jobs of a slot that died, each time that something was done for it.
    """

    def __init__(
        self, db: Database, claimant: Claimant, tables: Sequence[TableQueue], settled: Callable[[LostJob], None]
    ) -> None:
        self._db, self._claimant, self._tables, self._settled = db, claimant, list(tables), settled
        self._queues: dict[str, Queue] = {jobs.queue.database: jobs.queue for jobs in tables}
        #: Slots that are gone and still have jobs.
        self._unsettled: list[_Gone] = []
        #: The numbers of slots that are gone. What the table says they have was forgotten.
        self._gone: set[int] = set()
        #: Slots that are gone, and until when to see whether the server was just writing something for them.
        self._recent: list[tuple[Watched, float]] = []

    @property
    def is_done(self) -> bool:
        """Whether all slots that are gone are settled."""
        return not self._unsettled

    def names_of(self, database: str) -> list[str]:
        """The tables of a schema."""
        return [jobs.table_name for jobs in self._tables if jobs.queue.database == database]

    # -- a slot that is gone -----------------------------------------------------------------------------------

    def slot_died(self, slot: Watched, story: str, late: bool = False) -> LostJob:
        """A slot has died: end the attempt of the job it was working on, give back what it had not begun.

        If the server is away, or has not noticed yet that the slot is gone and keeps its job locked, this is made
        good later.
        """
        started, released, lost = slot.memory.read(), 0, None
        try:
            released = self._release(slot, started.key_hash if started else "")
            lost = self._end_attempt(started, story, late) if started else LostJob()
        except Exception as error:
            self._put_off(error)
        if lost is None:
            self._unsettled.append(_Gone(slot, story, late))
        else:
            self._note(slot)
            _tell_of(lost, story)
        lost = replace(lost or LostJob(later=True), released=released, slot=slot.number)
        self._settled(lost)
        return lost

    def slot_ended(self, slot: Watched) -> None:
        """A slot was told to end and is gone: all that it had goes back unharmed, later if the server is away."""
        try:
            self._release(slot)
        except Exception as error:
            self._put_off(error)
            self._unsettled.append(_Gone(slot, None))
        else:
            self._note(slot)

    def slot_finished(self, slot: Watched) -> None:
        """A slot has ended by itself. It should have nothing left; the next comparison with the table will tell."""
        self._gone.add(slot.number)

    def _note(self, slot: Watched) -> None:
        self._gone.add(slot.number)
        self._recent.append((slot, time.monotonic() + settings.lease))

    def _put_off(self, error: Exception) -> None:
        if not self._db.is_transient(error):
            logger.error("The jobs of a slot that is gone could not be settled yet: %s", error, exc_info=error)
        if self._db.is_lost(error):
            try:
                self._db.start_afresh()
            except Exception as failure:
                logger.debug("no connection yet: %s", failure)

    def settle_the_rest(self) -> None:
        """Try again what could not be done at once."""
        unsettled, self._unsettled = self._unsettled, []
        for gone in unsettled:
            if gone.story is None:
                self.slot_ended(gone.slot)
            else:
                self.slot_died(gone.slot, gone.story, gone.late)

    def _end_attempt(self, started: Started, story: str, late: bool) -> LostJob | None:
        """What became of the job of a dead slot; None if that cannot be said yet."""
        jobs = self._tables[started.table]
        finisher = jobs.finisher
        job = finisher.claimed(self._claimant.worker_id, started.key_hash, started.claim)
        if job is None:
            return LostJob()
        seconds = time.monotonic() - started.since
        if late:
            too_long = f"make() of {jobs.name} took longer than {jobs.policy.timeout:g} s"
            message = f"JobTimeout: {too_long} and did not yield within another {settings.grace:g} s; {story}"
            failure = Failure("timeout", message, duration=seconds)
            status = finisher.killed(job, failure)
        else:
            failure = Failure("crash", f"WorkerDied: {story}", duration=seconds)
            status = finisher.crashed(job, failure)
        return None if status is None else LostJob(jobs.table, job, status, failure)

    def _release(self, slot: Watched, but: str = "") -> int:
        """Everything that a slot has goes back unharmed, but for the job with this hash; return how many."""
        worker_id = self._claimant.worker_id
        return sum(
            release_slot(queue, self.names_of(database), worker_id, slot.number, but)
            for database, queue in self._queues.items()
        )

    # -- what the table says -----------------------------------------------------------------------------------

    def reconcile(self, slots: Iterable[Watched], at_end: bool = False) -> int:
        """Give back what the table says this worker has, and none of its slots holds; return how many.

        A slot says in advance which claims it is about to make, so a claim that is just being made is not among these.

        Parameters
        ----------
        at_end : bool
            Whether the worker ends, so that no slot holds anything. Defaults to False.
        """
        # Read before the table: what a slot has given up by then, it will not take up again.
        holding = {slot.number: slot.memory.read_holding() for slot in slots}
        self._look_after_recent()
        gone = self._gone - {gone.slot.number for gone in self._unsettled}
        forgotten: dict[tuple[str, str, int], list[str]] = {}
        for database, queue in self._queues.items():
            whose = {"tables": tuple(self.names_of(database)), "worker": self._claimant.worker_id}
            for table_name, key_hash, claim in queue.execute(queue.engine.workers.own_claims, **whose).fetchall():
                number = slot_of(claim)
                if at_end or number in gone or claim < holding.get(number, 0):
                    forgotten.setdefault((database, table_name, claim), []).append(key_hash)
        released = sum(self._give_back(*which, hashes) for which, hashes in forgotten.items())
        if released:
            logger.warning("%s jobs of this worker were given back, which none of its slots had any more.", released)
            self._settled(LostJob(released=released))
        return released

    def _look_after_recent(self) -> None:
        """What a slot had sent when it died, a claim or the end of a run, may get through after it was settled."""
        self._recent = [(slot, until) for slot, until in self._recent if time.monotonic() < until]
        for slot, _ in self._recent:
            self._release(slot)

    def _give_back(self, database: str, table_name: str, claim: int, hashes: list[str]) -> int:
        queue = self._queues[database]
        which = {"table": table_name, "hashes": tuple(hashes), "worker": self._claimant.worker_id, "claim": claim}
        return sum(queue.change(statement, **which) for statement in queue.engine.attempts.release)


def _tell_of(lost: LostJob, story: str) -> None:
    if lost.job is not None and lost.outcome is not None:
        tell_of(type(lost.table).__name__, lost.job, lost.outcome, story=story)
    else:
        emit("slot died", story=f"A slot died: {story}")
