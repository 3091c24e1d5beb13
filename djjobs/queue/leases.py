"""Leases: a claim lives as long as its worker is heard of. What dead workers held goes back into the queue."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

from ..settings import settings
from ..telemetry import emit
from .claim import Job
from .finish import Failure, Finisher
from .identity import cluster_job
from .queue import Queue

__all__ = ["Registration", "is_looked_after", "recover", "recover_once"]

logger = logging.getLogger("djjobs")

#: Workers that died are remembered for a day.
_REMEMBERED = 86400


class Registration:
    """A worker's row in the `~workers` of one schema.

    Parameters
    ----------
    worker_id : str
        The id in whose name jobs are claimed.
    tables : sequence of str
        The names of the tables whose jobs it runs.
    slots : int
        How many jobs it can run side by side.
    """

    def __init__(self, queue: Queue, worker_id: str, tables: Sequence[str], slots: int) -> None:
        self._queue, self._worker_id, self._tables, self._slots = queue, worker_id, tuple(tables), slots
        self.state = "working"
        self._calls = -1  # somebody may have called before there was a row to call in

    def beat(self) -> None:
        """Show that the worker is alive; enter it if it is not there, or no longer."""
        queue, engine = self._queue, self._queue.engine
        parameters = {"worker": self._worker_id, "lease": settings.lease, "state": self.state}
        if queue.execute(engine.workers.beat, **parameters).rowcount:
            return
        queue.execute(engine.workers.forget_workers, interval=_REMEMBERED)
        who = {name: value for name, value in queue.signature().items() if name != "connection_id"}
        about = {"slots": self._slots, "tables": json.dumps(self._tables), "cluster_job": cluster_job()}
        queue.execute(engine.workers.enter_worker, **parameters, **who, **about)

    def leave(self) -> None:
        """The worker has given back everything and goes."""
        self._queue.execute(self._queue.engine.workers.leave, worker=self._worker_id)

    def is_called(self) -> bool:
        """Whether somebody has left a request for this worker since it was asked last."""
        row = self._queue.execute(self._queue.engine.workers.calls_for, worker=self._worker_id).fetchone()
        calls = row[0] if row else 0
        called, self._calls = calls != self._calls, calls
        return called

    def requests(self) -> list[tuple[str, int, str]]:
        """The running jobs that somebody called off: hash, claim, and how."""
        statement = self._queue.engine.workers.cancel_requests
        return list(self._queue.execute(statement, tables=self._tables, worker=self._worker_id).fetchall())

    def save_progress(self, table_name: str, key_hash: str, claim: int, progress: str) -> None:
        """Let everybody see how far a running job is."""
        token = {"table": table_name, "key_hash": key_hash, "worker": self._worker_id, "claim": claim}
        self._queue.change(self._queue.engine.attempts.save_progress, progress=progress, **token)


def recover(
    queue: Queue,
    finishers: Mapping[str, Finisher],
    between: Callable[[], None] = lambda: None,
    join_chosen: str = "",
    uptime: float | None = None,
) -> int:
    """Put the jobs of dead workers back into the queue; return how many.

    A job that has lost its worker too often becomes an error instead; one whose result is there is done. For who has
    been heard itself for as long as the lease: others had the time to be heard, too.

    Parameters
    ----------
    finishers
        The tables whose jobs are to be looked at, by name.
    between : callable
        Called between two jobs. Defaults to nothing.
    join_chosen : str
        SQL that keeps to some of the jobs. Defaults to all.
    uptime : float
        For how many seconds the server has been there, if that matters: who could not be heard before then has the
        time of a lease from when it was missed. Defaults to None.
    """
    workers = queue.engine.workers
    surely = "" if uptime is None else queue.sql(workers.was_surely_missed)
    find = queue.sql(workers.find_dead_claims, surely=surely, join_chosen=join_chosen)
    rows = queue.db.execute(find, tables=tuple(finishers), lease=settings.lease, uptime=uptime).fetchall()
    recovered = 0
    for table_name, key_hash, key, attempt, priority, worker_id, claim, host, pid in rows:

        def dead(worker_id: str = worker_id) -> bool:
            row = queue.execute(workers.is_dead, worker=worker_id).fetchone()
            return row is None or bool(row[0])

        finisher = finishers[table_name]
        job = Job(key_hash, finisher.keys.decode(key), attempt, priority, worker_id, claim)
        story = f"WorkerDied: the worker on {host} (process {pid}) was not heard of for longer than its lease."
        outcome = finisher.crashed(job, Failure("crash", story, host=host, pid=pid), dead)
        if outcome is not None:
            recovered += 1
            emit("job recovered", finisher.name, job.key, attempt=attempt + 1, message=story, status=outcome)
        between()
    queue.execute(workers.mark_dead)
    return recovered


def recover_once(queue: Queue, finishers: Mapping[str, Finisher], join_chosen: str = "") -> int:
    """The same for who comes by once, and does not know whether the server was there all the time.

    Where it was not, a worker that could not be heard has the time of a lease from when somebody misses it.
    """
    engine = queue.engine
    # MySQL says it in whole seconds, which may be one too many.
    uptime = float(queue.execute(engine.workers.uptime).fetchone()[1]) - 1
    queue.execute(engine.workers.miss_workers, uptime=uptime)
    return recover(queue, finishers, join_chosen=join_chosen, uptime=uptime)


def is_looked_after(queue: Queue, table_name: str) -> bool:
    """Whether a worker is alive that recovers the jobs of this table."""
    lists = [tables or [] for (tables,) in queue.execute(queue.engine.workers.tables_of_the_living).fetchall()]
    return any(table_name in (json.loads(tables) if isinstance(tables, str) else tables) for tables in lists)
