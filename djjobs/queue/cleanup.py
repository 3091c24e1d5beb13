"""Clean-up: jobs go when what they were about is gone, and runs some time after their jobs.

A reserved job is its worker's and stays while that lives.
"""

from __future__ import annotations

import logging
from typing import Any

from ..dj.compat import datajoint_api
from ..settings import settings
from ..sql.queries import among
from ..telemetry import emit
from .database import portions
from .finish import Finisher
from .leases import recover_once
from .policy import has_hook
from .queue import Queue

__all__ = ["cleanup"]

logger = logging.getLogger("djjobs")


def cleanup(queue: Queue, finisher: Finisher, chosen: str = "") -> dict[str, int]:
    """Remove orphaned jobs and put back those of dead workers; return how many of each kind.

    Parameters
    ----------
    chosen : str
        SQL of the hashes of the jobs to look at. Defaults to all.
    """
    keys, join = finisher.keys, queue.sql(queue.engine.jobs.join_chosen, chosen=chosen) if chosen else ""
    # First: the job of a dead worker may be an orphan, too.
    recovered = recover_dead(queue, finisher, join)
    orphans = _Removal(queue, finisher, join, queue.engine.jobs.find_orphans)
    expired = _Removal(queue, finisher, join, queue.engine.jobs.find_expired)
    counts = {
        "orphaned_success": orphans.run(("success",), living=keys.sql.made),
        "orphaned_incomplete": orphans.run(("scheduled", "error", "ignore", "cancelled"), living=keys.sql.chosen),
        "recovered": recovered,
        "expired": expired.run(("success", "error", "cancelled"), made=keys.sql.made),
        # A restriction is about jobs.
        "runs": 0 if chosen else _remove_runs(queue, finisher),
    }
    emit("table cleaned up", finisher.name, counts=counts)
    return counts


def recover_dead(queue: Queue, finisher: Finisher, join_chosen: str = "") -> int:
    """Put back the jobs of dead workers; return how many."""
    return recover_once(queue, {finisher.table_name: finisher}, join_chosen=join_chosen)


def remove_stale(queue: Queue, finisher: Finisher, seconds: float) -> int:
    """Remove jobs older than this whose key has left key_source, but for ignored and running ones; return how many."""
    jobs = queue.engine.jobs
    stale = _Removal(queue, finisher, "", jobs.find_orphans, also=queue.sql(jobs.created_before), age=seconds)
    return stale.run(("scheduled", "error", "cancelled", "success"), living=finisher.keys.sql.chosen)


def _remove_runs(queue: Queue, finisher: Finisher) -> int:
    """Remove the finished runs that are old and that no job needs any more; return how many."""
    engine, table = queue.engine, finisher.table_name
    # Runs that nobody has seen end; one that waits for a finish_run that the table no longer has would wait for ever.
    queue.change(engine.runs.end_runs, table=table, finish=int(not has_hook(finisher.keys.table, "finish_run")))
    rows = queue.execute(engine.runs.find_expired_runs, table=table, retention=settings.retention).fetchall()
    runs = [run_id for (run_id,) in rows]
    return sum(queue.change(engine.runs.delete_runs, runs=portion) for portion in portions(runs))


class _Removal:
    """Finds jobs by one statement and removes them by key, after the table's `before_delete`."""

    def __init__(
        self, queue: Queue, finisher: Finisher, join: str, find: str, also: str = "", **parameters: Any
    ) -> None:
        self._queue, self._finisher, self._join, self._find, self._also = queue, finisher, join, find, also
        self._parameters = {"table": finisher.table_name, "retention": settings.retention, **parameters}

    def run(self, statuses: tuple[str, ...], **parts: str) -> int:
        """Remove the jobs of these statuses that the statement finds; return how many."""
        queue, which = self._queue, {**self._parameters, "statuses": statuses}
        find = queue.sql(self._find, join_chosen=self._join, also=self._also, **parts)
        rows = queue.db.execute(find, **which).fetchall()
        removed = 0
        for portion in portions(rows):
            hashes = self._agreed([key_hash for key_hash, _ in portion])
            if hashes:
                removed += queue.change(queue.engine.jobs.delete_orphans, **which, hashes=hashes, seen=portion[0][1])
        return removed

    def _agreed(self, hashes: list[str]) -> tuple[str, ...]:
        """Those of the jobs that the table's own hook has seen and does not object to."""
        table = self._finisher.keys.table
        if not has_hook(table, "before_delete"):
            return tuple(hashes)
        jobs = self._queue.jobs & {"table_name": self._finisher.table_name}
        agreed = []
        for job in datajoint_api.dicts(jobs & among("key_hash", hashes)):
            try:
                table.before_delete({**job, "key": self._finisher.keys.decode(job["key"])})
                agreed.append(job["key_hash"])
            except Exception:
                logger.exception("before_delete of %s failed; the job %s stays", self._finisher.name, job["key"])
        return tuple(agreed)
