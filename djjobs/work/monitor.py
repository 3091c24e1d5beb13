"""The keeper: shows that a worker is alive, passes on requests to its running jobs, and looks after the dead.

It talks to the server on a connection of its own, because the transaction of a running make() hides its own
writes, and from outside the process that runs make() wherever it can, because make() may hold the interpreter
for minutes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..dj.compat import datajoint_api
from ..errors import DjJobsError, JobTimeout
from ..queue.claim import Job
from ..queue.database import Database
from ..queue.finish import Failure, Finisher, release_slot
from ..queue.identity import Claimant, claims_of
from ..queue.leases import Registration, recover
from ..queue.queue import Queue
from ..settings import settings
from .current_job import Page, Started

__all__ = ["LOOK_INTERVAL", "Keeper", "Watched"]

logger = logging.getLogger("djjobs")

#: How often requests are looked for and progress is written, while a job runs that has taken so long already.
LOOK_INTERVAL = 1.0
#: How long a worker that leaves tries to put back what its dead slots had.
_PATIENCE = 2.0


class Watched(Protocol):
    """A slot as its keeper sees it."""

    page: Page
    number: int

    def tell(self, what: str, key_hash: str, claim: int) -> None:
        """Pass on an order about a job: "cancel", "force" or "timeout"."""

    def kill(self) -> None:
        """End the slot at once, if that is the keeper's to do."""

    def measure(self) -> None:
        """Remember how much memory it takes, in case it is killed for that."""


@dataclass(frozen=True)
class Burial:
    """What became of the job of a slot that died, if it had one, and how many others it gave back."""

    table: Any = None
    job: Job | None = None
    status: str = ""
    failure: Failure = field(default_factory=lambda: Failure("", ""))
    released: int = 0

    @property
    def error(self) -> DjJobsError:
        """What the death is to whoever wanted the job done."""
        kind = JobTimeout if self.failure.kind == "timeout" else DjJobsError
        return kind(self.failure.message.removeprefix("JobTimeout: "))


@dataclass
class _Told:
    """An order that was passed on."""

    what: str
    when: float
    killed: bool = False

    def is_overdue(self, now: float) -> bool:
        """Whether the slot was to yield by now; not if it was only asked."""
        return self.what != "cancel" and not self.killed and now - self.when > settings.grace


class Keeper:
    """Looks after a worker and its slots. Call `tick` often; it does what is due.

    Parameters
    ----------
    claimant
        In whose name the slots claim.
    finishers : sequence of Finisher
        Of the tables that the slots work on, in the order of their numbers on the desks.
    slots : int
        How many there are.
    db : Database, optional
        The connection to use. Defaults to a new one.
    """

    def __init__(
        self, claimant: Claimant, finishers: Sequence[Finisher], slots: int, db: Database | None = None
    ) -> None:
        settings.insist_on_lease()
        self._claimant = claimant
        queues: dict[str, Queue] = {finisher.queue.database: finisher.queue for finisher in finishers}
        first = next(iter(queues.values()))
        # Without a server each thing is tried once: there is more to do meanwhile, and it will be due again.
        self.db = db or Database(
            datajoint_api.another_connection(first.db.connection), tries_to_connect=1, hurried=True
        )
        self._queues = {database: queue.on(self.db) for database, queue in queues.items()}
        self._finishers = [finisher.on(self._queues[finisher.queue.database]) for finisher in finishers]
        self._registrations = {
            database: Registration(queue, claimant.worker_id, self._tables_of(database), slots)
            for database, queue in self._queues.items()
        }
        self._next_beat = self._next_look = 0.0
        self._last_beat = self._steady_since = time.monotonic()
        self._told: dict[tuple[str, int], _Told] = {}
        self._progress: dict[int, tuple[Started, str]] = {}
        #: Slots that are gone, and how they went; without a story they were told to go.
        self._unburied: list[tuple[Watched, str | None]] = []
        #: Slots that were buried, and until when to see whether a claim has turned up that the server was just at.
        self._buried: list[tuple[Watched, float]] = []

    def _tables_of(self, database: str) -> list[str]:
        return [f.table_name for f in self._finishers if f.queue.database == database]

    # -- coming and going --------------------------------------------------------------------------------

    def enter(self) -> None:
        """Register the worker."""
        self._last_beat = self._steady_since = time.monotonic()
        self._beat()

    def stopping(self) -> None:
        """Let others see that this worker takes no new jobs."""
        for registration in self._registrations.values():
            registration.state = "stopping"
        self._next_beat = 0.0

    def leave(self) -> None:
        """Sign off, unless a dead slot still has a job: then the lease has to run out. Never raises."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._bury_the_rest()
                if not self._unburied:
                    for registration in self._registrations.values():
                        registration.leave()
                    return
                problem: Any = "a dead slot's job could not be put back"
            except Exception as error:
                problem = error
                self._mend_connection(error)
            if time.monotonic() > deadline:
                logger.warning("The worker could not sign off; its lease will end: %s", problem)
                return
            time.sleep(0.05)

    @staticmethod
    def interval() -> float:
        """How long until the next heartbeat: not the same for workers that have started together."""
        return settings.heartbeat_interval * random.uniform(0.8, 1.0)

    # -- every now and then --------------------------------------------------------------------------------

    def tick(self, slots: Iterable[Watched]) -> int:
        """Do what is due; return how many jobs of dead workers were put back.

        Never raises: a keeper that fails would take its worker's claims with it.
        """
        slots = list(slots)
        running = [(slot, started) for slot in slots if (started := slot.page.read())]
        now, recovered = time.monotonic(), 0
        self._watch_the_time(running, now)
        try:
            if now >= self._next_beat:
                for slot, _ in running:
                    slot.measure()
                self._beat()
                self._see_to_the_buried()
                if time.monotonic() - self._steady_since >= settings.lease:
                    recovered = self.recover()
            lasting = any(now - started.since >= LOOK_INTERVAL for _, started in running)
            if now >= self._next_look and (lasting or self._unburied):
                self._next_look = now + LOOK_INTERVAL
                self._bury_the_rest()
                self._pass_on_requests(slots)
                self._publish_progress(running)
        except Exception as error:
            logger.warning("The worker cannot be kept alive at the moment: %s", error)
            self._next_beat = now + min(1.0, settings.heartbeat_interval / 4) * random.uniform(0.5, 1.0)
            self._mend_connection(error)
        return recovered

    def _mend_connection(self, error: Exception) -> None:
        """After a lost connection open another, if there is a server."""
        if not self.db.is_lost(error):
            return
        try:
            self.db.start_afresh()
        except Exception as failure:
            logger.debug("no connection yet: %s", failure)
        else:
            self._next_beat = 0.0

    def _beat(self) -> None:
        for registration in self._registrations.values():
            registration.beat()
        now = time.monotonic()
        # After a gap others may not have been heard either: nobody is dead before all had the time to be heard again.
        if now - self._last_beat > max(2 * settings.heartbeat_interval, settings.lease / 2):
            self._steady_since = now
        self._last_beat, self._next_beat = now, now + self.interval()

    def recover(self) -> int:
        """Put the jobs of dead workers back; return how many."""

        def beat_if_due() -> None:
            if time.monotonic() >= self._next_beat:
                self._beat()

        recovered = 0
        for database, queue in self._queues.items():
            finishers = {f.table_name: f for f in self._finishers if f.queue.database == database}
            recovered += recover(queue, finishers, beat_if_due)
        return recovered

    def _watch_the_time(self, running: list[tuple[Any, Started]], now: float) -> None:
        """Interrupt jobs that take too long, and kill slots that do not yield."""
        for slot, started in running:
            token = started.key_hash, started.claim
            told = self._told.get(token)
            if told is None:
                timeout = self._finishers[started.table].policy.timeout
                if timeout is not None and now - started.since > timeout:
                    self._tell(slot, "timeout", token)
            elif told.is_overdue(now) and not slot.page.has_yielded:
                told.killed = True
                slot.kill()
        current = {(started.key_hash, started.claim) for _, started in running}
        self._told = {token: told for token, told in self._told.items() if token in current}

    def _tell(self, slot: Watched, what: str, token: tuple[str, int]) -> None:
        told = self._told.get(token)
        if told is None or (told.what == "cancel" and what != "cancel"):
            self._told[token] = _Told(what, time.monotonic())
            slot.tell(what, *token)

    def _pass_on_requests(self, slots: list[Watched]) -> None:
        """Tell the slots which of their jobs were called off, those that they have not begun included."""
        for registration in self._registrations.values():
            if not registration.is_called():
                continue
            for key_hash, claim, what in registration.requests():
                for slot in slots:
                    first, last = claims_of(slot.number)
                    if first <= claim <= last:
                        self._tell(slot, what, (key_hash, claim))

    def _publish_progress(self, running: list[tuple[Any, Started]]) -> None:
        for slot, started in running:
            text = slot.page.read_progress()
            if text is not None and self._progress.get(slot.number) != (started, text):
                self._progress[slot.number] = started, text
                finisher = self._finishers[started.table]
                registration = self._registrations[finisher.queue.database]
                registration.save_progress(finisher.table_name, started.key_hash, started.claim, text)

    # -- the dead ----------------------------------------------------------------------------------------------

    def bury(self, slot: Watched, story: str) -> Burial:
        """A slot is gone: end the attempt of the job it was working on, give back what it had not begun.

        If the server is away, or has not noticed yet that the slot is gone and keeps its job locked, this is made
        good later.
        """
        try:
            started = slot.page.read()
            released = self._release(slot, started.key_hash if started else "")
            burial = self._end_attempt_of_the_dead(started, story) if started else Burial()
        except Exception as error:
            if not self.db.is_transient(error):
                raise
            logger.warning("A slot died while the server is away; its job is seen to later: %s", error)
            self._mend_connection(error)
            released, burial = 0, None
        if burial is None:
            self._unburied.append((slot, story))
        else:
            self._buried.append((slot, time.monotonic() + settings.lease))
        return replace(burial or Burial(), released=released)

    def _bury_the_rest(self) -> None:
        unburied, self._unburied = self._unburied, []
        for slot, story in unburied:
            if story is None:
                self.give_back(slot)
                continue
            burial = self.bury(slot, story)
            if burial.job is not None:
                logger.warning("%s %s: %s", type(burial.table).__name__, burial.job.key, burial.failure.message)

    def _see_to_the_buried(self) -> None:
        """A commit that a slot had sent when it died may have got through after its burial."""
        self._buried = [(slot, until) for slot, until in self._buried if time.monotonic() < until]
        for slot, _ in self._buried:
            self._release(slot)

    def _end_attempt_of_the_dead(self, started: Started, story: str) -> Burial | None:
        """What became of the job; None if that cannot be said yet."""
        finisher = self._finishers[started.table]
        job = finisher.claimed(self._claimant.worker_id, started.key_hash, started.claim)
        if job is None:
            return Burial()
        told = self._told.get((started.key_hash, started.claim))
        seconds = time.monotonic() - started.since
        if told is not None and told.what == "timeout":
            too_long = f"make() of {finisher.name} took longer than {finisher.policy.timeout:g} s"
            message = f"JobTimeout: {too_long} and did not yield within another {settings.grace:g} s; {story}"
            failure = Failure("timeout", message, duration=seconds)
            status = finisher.killed(job, failure)
        else:
            failure = Failure("crash", f"WorkerDied: {story}", duration=seconds)
            status = finisher.crashed(job, failure)
        return None if status is None else Burial(finisher.keys.table, job, status, failure)

    def give_back(self, slot: Watched) -> None:
        """A slot was told to go and is gone: all that it had goes back unharmed, later if the server is away."""
        try:
            self._release(slot)
        except Exception as error:
            if not self.db.is_transient(error):
                raise
            self._mend_connection(error)
            self._unburied.append((slot, None))

    def _release(self, slot: Watched, but: str = "") -> int:
        """Everything that a slot has goes back unharmed, but for the job with this hash; return how many."""
        worker_id = self._claimant.worker_id
        return sum(
            release_slot(queue, self._tables_of(database), worker_id, slot.number, but)
            for database, queue in self._queues.items()
        )
