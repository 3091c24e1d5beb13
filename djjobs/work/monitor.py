"""The monitor: shows that a worker is alive, finds requests to its running jobs, and settles jobs of dead slots.

It talks to the server on a connection of its own, because the transaction of a running make() hides its own
writes. It runs outside the process that runs make(), because make() may hold the interpreter for minutes; and in a
thread (`monitor_thread`), because the server may not answer.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..dj.compat import datajoint_api
from ..queue.database import Database
from ..queue.identity import Claimant, claims_of
from ..queue.judge import Judge
from ..queue.leases import Registration, recover
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..queue.waiting import Trouble
from ..settings import settings
from ..telemetry import emit
from .messages import Request
from .settle import LostJob, Settler
from .shared_memory import Started
from .watch import Watched

__all__ = ["LOOK_INTERVAL", "Monitor"]

logger = logging.getLogger("djjobs")

#: How often requests are looked for and progress is written, while a job runs that has taken so long already.
LOOK_INTERVAL = 1.0
#: How long a worker that ends tries to put back what its dead slots had.
_PATIENCE = 2.0


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
    pass_on : callable
        Called with a slot and a request about one of its jobs. Defaults to asking the slot.
    settled : callable
        Called with what became of the jobs of slots that are gone. Defaults to nothing.
    """

    def __init__(
        self,
        claimant: Claimant,
        tables: Sequence[TableQueue],
        slots: int,
        db: Database | None = None,
        pass_on: Callable[[Watched, Request], None] = lambda slot, request: slot.ask(request),
        settled: Callable[[LostJob], None] = lambda lost: None,
    ) -> None:
        settings.insist_on_lease()
        self._claimant, self._pass_on = claimant, pass_on
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
        self._progress: dict[int, tuple[Started, str]] = {}
        self._trouble = Trouble()
        #: Settles the jobs of slots that are gone.
        self.settler = Settler(self.db, claimant, self._tables, settled)

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

    def sign_off(self, everything: bool = True, patience: float = _PATIENCE) -> None:
        """The worker ends. If it still has a job then, its lease has to run out. Never raises.

        Parameters
        ----------
        everything : bool
            See also whether the table knows of claims that no slot has told of. Defaults to True.
        patience : float
            For how many seconds to try. Defaults to 2.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                self.settler.settle_the_rest()
                if self.settler.is_done:
                    if everything:
                        self.settler.reconcile([], at_end=True)
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
        try:
            if now >= self._next_beat:
                for slot, _ in running:
                    slot.measure()
                self._beat()
                self._trouble.is_over()
                self.settler.reconcile(slots)
                recovered = self.recover()
            lasting = any(now - started.since >= LOOK_INTERVAL for _, started in running)
            if now >= self._next_look and (lasting or not self.settler.is_done):
                self._next_look = now + LOOK_INTERVAL
                self.settler.settle_the_rest()
                self._pass_on_requests(slots)
                self._publish_progress(running)
        except Exception as error:
            self._trouble.tell(self.db.reason_to_wait(error), error)
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

    def _pass_on_requests(self, slots: list[Watched]) -> None:
        """Tell the slots which of their jobs were cancelled, those that they have not begun included."""
        for registration in self._registrations.values():
            if not registration.is_called():
                continue
            for key_hash, claim, what in registration.requests():
                for slot in slots:
                    first, last = claims_of(slot.number)
                    if first <= claim <= last:
                        self._pass_on(slot, Request(what, key_hash, claim))

    def _publish_progress(self, running: list[tuple[Watched, Started]]) -> None:
        for slot, started in running:
            text = slot.memory.read_progress()
            if text is not None and self._progress.get(slot.number) != (started, text):
                self._progress[slot.number] = started, text
                jobs = self._tables[started.table]
                registration = self._registrations[jobs.queue.database]
                registration.save_progress(jobs.table_name, started.key_hash, started.claim, text)
