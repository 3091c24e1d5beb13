"""What people do to single jobs by hand: reserve, complete, fail, put back and delete, as on DataJoint 2's job tables.

A job that is reserved by hand has no worker, so nobody expects a heartbeat for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..dj.blobs import pack
from ..errors import DjJobsError
from .database import portions
from .finish import cut, storable, truncated
from .identity import version_metadata
from .table_queue import TableQueue
from .tables import tell_of_running

__all__ = ["complete", "delete", "fail", "release_older", "reserve"]


def delete(jobs: TableQueue, hashes: Mapping[str, Sequence[str]]) -> int:
    """Delete jobs that still have the status under which they are listed; return how many."""
    counts, engine = {}, jobs.queue.engine
    for status, found in hashes.items():
        which = [{"status": status, "hashes": portion} for portion in portions(found)]
        counts[status] = sum(_change(jobs, engine.by_hand.delete_by_hand, **these) for these in which)
    if any(counts.values()):
        # Let their keys be scheduled again at once.
        _change(jobs, engine.control.forget_scheduling)
    if counts.get("reserved"):
        tell_of_running(counts["reserved"], jobs.label)
    return sum(counts.values())


def _change(jobs: TableQueue, statement: str, **parameters: Any) -> int:
    """Change jobs. Inside a transaction of the user it becomes part of that, because our own would commit it."""
    queue, parameters = jobs.queue, {"table": jobs.table_name, **parameters}
    if queue.db.connection.in_transaction:
        return queue.execute(statement, **parameters).rowcount
    return queue.change(statement, **parameters)


def reserve(jobs: TableQueue, key_hash: str | None) -> bool:
    """Reserve a job that is due, without a worker; whether that was possible."""
    which = {"key_hash": key_hash, "metadata": json.dumps(version_metadata(jobs.table))}
    statement, who = jobs.queue.engine.by_hand.reserve_by_hand, jobs.queue.signature()
    return key_hash is not None and _change(jobs, statement, **which, **who) == 1


def complete(jobs: TableQueue, key: Mapping[str, Any], key_hash: str | None, duration: float | None = None) -> None:
    """End a job with success."""
    engine = jobs.queue.engine
    if not jobs.keeps_completed:
        if key_hash is not None and not _change(jobs, engine.by_hand.complete_by_hand, key_hash=key_hash):
            raise _is_running(jobs, key)
        return
    _insist_on_job(jobs, key, key_hash)
    if not _change(jobs, engine.by_hand.keep_by_hand, key_hash=key_hash, duration=duration):
        raise _is_running(jobs, key)


def fail(jobs: TableQueue, key: Mapping[str, Any], key_hash: str | None, message: str, stack: str | None) -> None:
    """End a job with an error."""
    _insist_on_job(jobs, key, key_hash)
    told = {"message": truncated(message), "stack": None if stack is None else pack(storable(cut(stack)))}
    if not _change(jobs, jobs.queue.engine.by_hand.fail_by_hand, key_hash=key_hash, **told):
        raise _is_running(jobs, key)


def release_older(jobs: TableQueue, seconds: float, priority: int | None) -> int:
    """Put jobs back that have been reserved for longer than this, also those of living workers; return how many."""
    statement = jobs.queue.engine.by_hand.release_older
    return jobs.queue.change(statement, table=jobs.table_name, age=seconds, priority=priority)


def _insist_on_job(jobs: TableQueue, key: Mapping[str, Any], key_hash: str | None) -> None:
    if key_hash is None:
        raise DjJobsError(
            f"{jobs.label} has no job {dict(key)}. "
            f"{jobs.name}.schedule_jobs() or {jobs.name}.jobs.refresh() puts the keys into the queue."
        )


def _is_running(jobs: TableQueue, key: Mapping[str, Any]) -> DjJobsError:
    return DjJobsError(
        f"The job {dict(key)} of {jobs.label} is running: its worker will end it. "
        f"{jobs.name}.cancel_jobs(...) asks it to stop."
    )
