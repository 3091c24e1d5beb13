"""Leases: a claim is valid as long as its worker sends heartbeats. The jobs of dead workers go back into the queue."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..settings import settings
from ..telemetry import emit
from .claim import Job
from .finish import Failure, Finisher
from .identity import all_claims, cluster_job
from .judge import Sign, find_dead_at_once, is_still_silent
from .queue import Queue

__all__ = ["Registration", "recover", "recover_once"]

logger = logging.getLogger("djjobs")

#: Workers that died are remembered for a day, and what was seen from a machine for a month.
_DEAD_REMEMBERED, _SIGHTINGS_REMEMBERED = 86400, 30 * 86400
#: The jobs of dead workers that could not be put back, and of which this process has told.
_stuck: set[tuple[Any, ...]] = set()


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
        queue.execute(engine.workers.forget_workers, interval=_DEAD_REMEMBERED)
        queue.execute(engine.workers.forget_sightings, interval=_SIGHTINGS_REMEMBERED)
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
    dead: Mapping[str, Sign],
    between: Callable[[], None] = lambda: None,
    join_chosen: str = "",
) -> int:
    """Put the jobs of dead workers back into the queue; return how many.

    A job that has lost its worker too often becomes an error. A job whose result is there is done.

    Parameters
    ----------
    finishers
        The tables whose jobs are to be looked at, by name.
    dead : mapping
        The last sign of life of each worker that was found to be dead. Who has been heard since keeps its jobs.
    between : callable
        Called between two jobs. Defaults to nothing.
    join_chosen : str
        SQL that chooses some of the jobs. Defaults to all jobs.
    """
    if not dead:
        return 0
    find = queue.sql(queue.engine.workers.find_claims, join_chosen=join_chosen)
    recovered: list[str] = []
    for claim in queue.db.execute(find, tables=tuple(finishers), workers=tuple(dead)).fetchall():
        table_name, worker_id = claim[0], claim[5]
        if _recover_one(queue, finishers[table_name], claim, dead[worker_id], is_first=worker_id not in recovered):
            recovered.append(worker_id)
        between()
    for worker_id, sign in dead.items():
        _mark_dead(queue, tuple(finishers), worker_id, sign)
    return len(recovered)


def _recover_one(queue: Queue, finisher: Finisher, claim: Any, sign: Sign, is_first: bool) -> bool:
    """Put one job of a dead worker back. If that fails, the others must not have to wait for it."""
    table_name, key_hash, key, attempt, priority, worker_id, number, host, pid = claim
    story = f"WorkerDied: the worker on {host} (process {pid}) was not heard of for longer than its lease."
    try:
        job = Job(key_hash, finisher.keys.decode(key), attempt, priority, worker_id, number)
        failure = Failure("crash", story, host=host, pid=pid)
        outcome = finisher.crashed(job, failure, lambda: is_still_silent(queue, worker_id, sign))
    except Exception as error:
        if queue.db.is_lost(error):
            raise
        _tell_of_stuck(queue, finisher, key, (table_name, key_hash, number), error)
        return False
    if outcome is None:
        return False
    if is_first:
        emit("worker died", worker=worker_id, story=story)
    emit("job recovered", finisher.name, job.key, attempt=attempt + 1, message=story, status=outcome)
    return True


def _tell_of_stuck(queue: Queue, finisher: Finisher, key: Any, claim: tuple[Any, ...], error: Exception) -> None:
    """Say once that a job of a dead worker cannot be put back. Somebody tries again with every heartbeat."""
    if queue.db.is_transient(error) or claim in _stuck:
        return
    _stuck.add(claim)
    logger.warning(
        "The job %s of %s has lost its worker and cannot be put back (%s: %s). Others are not affected. Correct that, "
        "or remove the job: (djjobs.jobs(schema) & {'key_hash': '%s'}).delete()",
        key,
        finisher.keys.label,
        type(error).__name__,
        error,
        claim[1],
    )


def _mark_dead(queue: Queue, tables: tuple[str, ...], worker_id: str, sign: Sign) -> None:
    """Let everybody know that a worker is dead. Runs that it was finishing are for others to finish."""
    hooks, (first, last) = queue.engine.hooks, all_claims()
    whose = {"worker": worker_id, "first": first, "last": last}

    def release() -> None:
        with queue.db.transaction():
            runs = queue.execute(hooks.find_finishing, tables=tables, **whose).fetchall()
            if runs and is_still_silent(queue, worker_id, sign):
                queue.execute(hooks.release_finishing, runs=tuple(run_id for (run_id,) in runs), **whose)

    try:
        queue.db.retry(release)
        queue.execute(queue.engine.workers.mark_dead, worker=worker_id, beats=sign.beats)
    except Exception as error:
        if not queue.db.is_transient(error) or queue.db.is_lost(error):
            raise
        logger.debug("what a dead worker held is locked at the moment: %s", error)


def recover_once(
    queue: Queue,
    finishers: Mapping[str, Finisher],
    join_chosen: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The same for a caller that looks only once, and does not know whether others could send heartbeats.

    Parameters
    ----------
    sleep : callable
        Used to wait for a moment before anybody is judged. Defaults to `time.sleep`.
    """
    dead = find_dead_at_once(queue, tuple(finishers), sleep)
    return recover(queue, finishers, dead, join_chosen=join_chosen)
