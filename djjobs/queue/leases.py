"""Leases: a claim is valid as long as its worker sends heartbeats. The jobs of dead workers go back into the queue."""

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
        self._calls = -1  # so that the first look is made in any case

    def beat(self) -> None:
        """Send a heartbeat. If the worker has no row, enter it."""
        queue, engine = self._queue, self._queue.engine
        parameters = {"worker": self._worker_id, "lease": settings.lease, "state": self.state}
        if queue.execute(engine.workers.heartbeat, **parameters).rowcount:
            return
        queue.execute(engine.workers.forget_workers, interval=_REMEMBERED)
        who = {name: value for name, value in queue.signature().items() if name != "connection_id"}
        about = {"slots": self._slots, "tables": json.dumps(self._tables), "cluster_job": cluster_job()}
        queue.execute(engine.workers.enter_worker, **parameters, **who, **about)

    def leave(self) -> None:
        """Remove the row of a worker that has given back everything."""
        self._queue.execute(self._queue.engine.workers.leave, worker=self._worker_id)

    def is_called(self) -> bool:
        """Whether somebody has asked this worker to look for requests since the last call."""
        row = self._queue.execute(self._queue.engine.workers.calls_for, worker=self._worker_id).fetchone()
        calls = row[0] if row else 0
        called, self._calls = calls != self._calls, calls
        return called

    def requests(self) -> list[tuple[str, int, str]]:
        """The running jobs that somebody has cancelled: hash, claim, and how."""
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

    A job that has lost its worker too often becomes an error. A job whose result is there is done. Without `uptime`,
    this is only for a caller that has sent heartbeats itself for a whole lease. Then others could send theirs, too.

    Parameters
    ----------
    finishers
        The tables whose jobs are to be looked at, by name.
    between : callable
        Called between two jobs. Defaults to nothing.
    join_chosen : str
        SQL that chooses some of the jobs. Defaults to all jobs.
    uptime : float
        For how many seconds the server has been running. Workers that sent no heartbeat because the server was away
        get a lease more, from the time that somebody noted them as missing. Defaults to None: it was there.
    """
    workers = queue.engine.workers
    surely = "" if uptime is None else queue.sql(workers.surely_missing)
    find = queue.sql(workers.find_dead_claims, surely=surely, join_chosen=join_chosen)
    rows = queue.db.execute(find, tables=tuple(finishers), lease=settings.lease, uptime=uptime).fetchall()
    recovered, told = 0, set()
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
            if worker_id not in told:
                told.add(worker_id)
                emit("worker died", worker=worker_id, story=story)
            emit("job recovered", finisher.name, job.key, attempt=attempt + 1, message=story, status=outcome)
        between()
    queue.execute(workers.mark_dead)
    return recovered


def recover_once(queue: Queue, finishers: Mapping[str, Finisher], join_chosen: str = "") -> int:
    """The same for a caller that looks only once, and does not know whether the server was there all the time."""
    engine = queue.engine
    # MySQL gives whole seconds, which may be one too many.
    uptime = float(queue.execute(engine.workers.uptime).fetchone()[1]) - 1
    queue.execute(engine.workers.note_missing, uptime=uptime)
    return recover(queue, finishers, join_chosen=join_chosen, uptime=uptime)


def is_looked_after(queue: Queue, table_name: str) -> bool:
    """Whether there is a living worker that recovers the jobs of this table."""
    lists = [tables or [] for (tables,) in queue.execute(queue.engine.workers.tables_of_living).fetchall()]
    return any(table_name in (json.loads(tables) if isinstance(tables, str) else tables) for tables in lists)
