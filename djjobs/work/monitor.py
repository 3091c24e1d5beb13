"""The monitor: shows that a worker is alive, passes on requests to its running jobs, and settles jobs of dead slots.

It talks to the server on a connection of its own, because the transaction of a running make() hides its own
writes. It runs outside the process that runs make(), because make() may hold the interpreter for minutes.
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
from ..queue.finish import Failure, release_slot
from ..queue.identity import Claimant, claims_of
from ..queue.judge import Judge
from ..queue.leases import Registration, recover
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..settings import settings
from ..telemetry import emit
from .messages import Request
from .outcome import Outcome, tell_of
from .shared_memory import SharedMemory, Started

__all__ = ["LOOK_INTERVAL", "LostJob", "Monitor", "Watched"]

logger = logging.getLogger("djjobs")

#: How often requests are looked for and progress is written, while a job runs that has taken so long already.
LOOK_INTERVAL = 1.0
#: How long a worker that ends tries to put back what its dead slots had.
_PATIENCE = 2.0


class Watched(Protocol):
    """A slot as its monitor sees it."""

    memory: SharedMemory
    number: int

    def ask(self, request: Request) -> None:
        """Pass on a request about a job."""

    def kill(self) -> None:
        """End the slot at once, if the monitor may do that."""

    def measure(self) -> None:
        """Remember how much memory it takes, in case it is killed for that."""


@dataclass(frozen=True)
class LostJob:
    """What became of the job of a slot that died, if it had one, and how many others went back."""

    table: Any = None
    job: Job | None = None
    status: str = ""
    failure: Failure = field(default_factory=lambda: Failure("", ""))
    released: int = 0

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


@dataclass
class _Asked:
    """A request that was passed on."""

    what: str
    when: float
    killed: bool = False

    def is_overdue(self, now: float) -> bool:
        """Whether the slot should have ended its job by now; not if it was only asked."""
        return self.what != "cancel" and not self.killed and now - self.when > settings.grace


class Monitor:
    """Looks after a worker and its slots. Call `tick` often; it does what is due.

    Parameters
    ----------
    claimant
        In whose name the slots claim.
    tables : sequence of TableQueue
        The tables that the slots work on, in the order of their numbers.
    slots : int
        How many there are.
    db : Database, optional
        The connection to use. Defaults to a new one.
    """

    def __init__(
        self, claimant: Claimant, tables: Sequence[TableQueue], slots: int, db: Database | None = None
    ) -> None:
        settings.insist_on_lease()
        self._claimant = claimant
        # Without a server each thing is tried once: there is more to do meanwhile, and it will be due again.
        self.db = db or Database(
            datajoint_api.another_connection(tables[0].queue.db.connection), tries_to_connect=1, hurried=True
        )
        self._tables = [jobs.on(self.db) for jobs in tables]
        self._queues: dict[str, Queue] = {jobs.queue.database: jobs.queue for jobs in self._tables}
        self._registrations = {
            database: Registration(queue, claimant.worker_id, self._tables_of(database), slots)
            for database, queue in self._queues.items()
        }
        self._judges = {database: Judge(queue, self._tables_of(database)) for database, queue in self._queues.items()}
        self._next_beat = self._next_look = 0.0
        self._asked: dict[tuple[str, int], _Asked] = {}
        self._progress: dict[int, tuple[Started, str]] = {}
        #: Slots that are gone and still have jobs, and how they died; without a story they were told to end.
        self._unsettled: list[tuple[Watched, str | None]] = []
        #: Slots whose jobs are settled, and until when to see whether the server was just claiming one for them.
        self._settled: list[tuple[Watched, float]] = []

    def _tables_of(self, database: str) -> list[str]:
        return [jobs.table_name for jobs in self._tables if jobs.queue.database == database]

    # -- the worker begins and ends ----------------------------------------------------------------------

    def register(self) -> None:
        """Let others know of the worker."""
        self._beat()

    def tell_of_stop(self) -> None:
        """Let others see that this worker takes no new jobs."""
        for registration in self._registrations.values():
            registration.state = "stopping"
        self._next_beat = 0.0

    def sign_off(self) -> None:
        """The worker ends. If a dead slot still has a job, its lease has to run out. Never raises."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._settle_the_rest()
                if not self._unsettled:
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

        Never raises: a monitor that fails would take its worker's claims with it.
        """
        slots = list(slots)
        running = [(slot, started) for slot in slots if (started := slot.memory.read())]
        now, recovered = time.monotonic(), 0
        self._watch_the_time(running, now)
        try:
            if now >= self._next_beat:
                for slot, _ in running:
                    slot.measure()
                self._beat()
                self._look_after_settled()
                recovered = self.recover()
            lasting = any(now - started.since >= LOOK_INTERVAL for _, started in running)
            if now >= self._next_look and (lasting or self._unsettled):
                self._next_look = now + LOOK_INTERVAL
                self._settle_the_rest()
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
        for database, registration in self._registrations.items():
            registration.beat()
            self._judges[database].heard()
        self._next_beat = time.monotonic() + self.interval()
        emit("worker heard", worker=self._claimant.worker_id)

    def recover(self) -> int:
        """Put the jobs of dead workers back; return how many."""

        def beat_if_due() -> None:
            if time.monotonic() >= self._next_beat:
                self._beat()

        recovered = 0
        for database, queue in self._queues.items():
            finishers = {jobs.table_name: jobs.finisher for jobs in self._tables if jobs.queue.database == database}
            recovered += recover(queue, finishers, self._judges[database].find_dead(), beat_if_due)
        self._next_beat = min(self._next_beat, *(judge.due() for judge in self._judges.values()))
        return recovered

    def _watch_the_time(self, running: list[tuple[Watched, Started]], now: float) -> None:
        """Interrupt jobs that take too long, and kill slots that do not end them."""
        for slot, started in running:
            token = started.key_hash, started.claim
            asked = self._asked.get(token)
            if asked is None:
                timeout = self._tables[started.table].policy.timeout
                if timeout is not None and now - started.since > timeout:
                    self._ask(slot, Request("timeout", *token))
            elif asked.is_overdue(now) and not slot.memory.has_yielded:
                asked.killed = True
                slot.kill()
        current = {(started.key_hash, started.claim) for _, started in running}
        self._asked = {token: asked for token, asked in self._asked.items() if token in current}

    def _ask(self, slot: Watched, request: Request) -> None:
        asked = self._asked.get(request.token)
        if asked is None or (asked.what == "cancel" and request.what != "cancel"):
            self._asked[request.token] = _Asked(request.what, time.monotonic())
            slot.ask(request)

    def _pass_on_requests(self, slots: list[Watched]) -> None:
        """Tell the slots which of their jobs were cancelled, those that they have not begun included."""
        for registration in self._registrations.values():
            if not registration.is_called():
                continue
            for key_hash, claim, what in registration.requests():
                for slot in slots:
                    first, last = claims_of(slot.number)
                    if first <= claim <= last:
                        self._ask(slot, Request(what, key_hash, claim))

    def _publish_progress(self, running: list[tuple[Watched, Started]]) -> None:
        for slot, started in running:
            text = slot.memory.read_progress()
            if text is not None and self._progress.get(slot.number) != (started, text):
                self._progress[slot.number] = started, text
                jobs = self._tables[started.table]
                registration = self._registrations[jobs.queue.database]
                registration.save_progress(jobs.table_name, started.key_hash, started.claim, text)

    # -- slots that are gone -------------------------------------------------------------------------------------

    def slot_died(self, slot: Watched, story: str) -> LostJob:
        """A slot has died: end the attempt of the job it was working on, give back what it had not begun.

        If the server is away, or has not noticed yet that the slot is gone and keeps its job locked, this is made
        good later.
        """
        try:
            started = slot.memory.read()
            released = self._release(slot, started.key_hash if started else "")
            lost = self._end_attempt(started, story) if started else LostJob()
        except Exception as error:
            if not self.db.is_transient(error):
                raise
            logger.warning("A slot died while the server is away; its job is seen to later: %s", error)
            self._mend_connection(error)
            released, lost = 0, None
        if lost is None:
            self._unsettled.append((slot, story))
        else:
            self._settled.append((slot, time.monotonic() + settings.lease))
            self._tell_of(lost, story)
        return replace(lost or LostJob(), released=released)

    @staticmethod
    def _tell_of(lost: LostJob, story: str) -> None:
        if lost.job is not None and lost.outcome is not None:
            tell_of(type(lost.table).__name__, lost.job, lost.outcome, story=story)
        else:
            emit("slot died", story=f"A slot died: {story}")

    def _settle_the_rest(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        for slot, story in unsettled:
            if story is None:
                self.slot_ended(slot)
            else:
                self.slot_died(slot, story)

    def _look_after_settled(self) -> None:
        """A claim that a slot had sent when it died may have got through after its jobs were settled."""
        self._settled = [(slot, until) for slot, until in self._settled if time.monotonic() < until]
        for slot, _ in self._settled:
            self._release(slot)

    def _end_attempt(self, started: Started, story: str) -> LostJob | None:
        """What became of the job of a dead slot; None if that cannot be said yet."""
        jobs = self._tables[started.table]
        finisher = jobs.finisher
        job = finisher.claimed(self._claimant.worker_id, started.key_hash, started.claim)
        if job is None:
            return LostJob()
        asked = self._asked.get((started.key_hash, started.claim))
        seconds = time.monotonic() - started.since
        if asked is not None and asked.what == "timeout":
            too_long = f"make() of {jobs.name} took longer than {jobs.policy.timeout:g} s"
            message = f"JobTimeout: {too_long} and did not yield within another {settings.grace:g} s; {story}"
            failure = Failure("timeout", message, duration=seconds)
            status = finisher.killed(job, failure)
        else:
            failure = Failure("crash", f"WorkerDied: {story}", duration=seconds)
            status = finisher.crashed(job, failure)
        return None if status is None else LostJob(jobs.table, job, status, failure)

    def slot_ended(self, slot: Watched) -> None:
        """A slot was told to end and is gone: all that it had goes back unharmed, later if the server is away."""
        try:
            self._release(slot)
        except Exception as error:
            if not self.db.is_transient(error):
                raise
            self._mend_connection(error)
            self._unsettled.append((slot, None))

    def _release(self, slot: Watched, but: str = "") -> int:
        """Everything that a slot has goes back unharmed, but for the job with this hash; return how many."""
        worker_id = self._claimant.worker_id
        return sum(
            release_slot(queue, self._tables_of(database), worker_id, slot.number, but)
            for database, queue in self._queues.items()
        )
