"""What people do to single jobs by hand: reserve, complete, fail, put back and delete, as on DataJoint 2's job tables.

A job that is reserved so has no worker, so that nobody misses a heartbeat of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..dj.blobs import pack
from ..errors import DjJobsError
from .database import portions
from .finish import storable, truncated
from .identity import version_metadata
from .keys import table_label
from .queue import Queue
from .tables import tell_of_running

__all__ = ["complete", "delete", "fail", "release_older", "reserve"]


def delete(queue: Queue, table: Any, hashes: Mapping[str, Sequence[str]]) -> int:
    """Delete jobs that still have the status under which they are listed; return how many."""
    counts = {}
    for status, found in hashes.items():
        which = [{"table": table.table_name, "status": status, "hashes": portion} for portion in portions(found)]
        counts[status] = sum(_change(queue, queue.engine.delete_by_hand, **these) for these in which)
    if any(counts.values()):
        # Their keys may be scheduled again at once.
        _change(queue, queue.engine.forget_scheduling, table=table.table_name)
    if counts.get("reserved"):
        tell_of_running(counts["reserved"], table_label(table))
    return sum(counts.values())


def _change(queue: Queue, statement: str, **parameters: Any) -> int:
    """Change jobs; inside the user's own transaction as part of it, since another would commit it."""
    if queue.db.connection.in_transaction:
        return queue.execute(statement, **parameters).rowcount
    return queue.change(statement, **parameters)


def reserve(queue: Queue, table: Any, key_hash: str | None) -> bool:
    """Reserve a job that is due, in nobody's name."""
    which = {"table": table.table_name, "key_hash": key_hash, "metadata": json.dumps(version_metadata(table))}
    return key_hash is not None and _change(queue, queue.engine.reserve_by_hand, **which, **queue.signature()) == 1


def complete(
    queue: Queue, table: Any, key: Mapping[str, Any], key_hash: str | None, duration: float | None = None
) -> None:
    """End a job well."""
    which = {"table": table.table_name, "key_hash": key_hash}
    if not table._keeps_completed():
        if key_hash is not None and not _change(queue, queue.engine.complete_by_hand, **which):
            raise _is_running(table, key)
        return
    _insist_on_job(table, key, key_hash)
    if not _change(queue, queue.engine.keep_by_hand, **which, duration=duration):
        raise _is_running(table, key)


def fail(
    queue: Queue, table: Any, key: Mapping[str, Any], key_hash: str | None, message: str, stack: str | None
) -> None:
    """End a job with an error."""
    _insist_on_job(table, key, key_hash)
    told = {"message": truncated(storable(message)), "stack": None if stack is None else pack(stack)}
    if not _change(queue, queue.engine.fail_by_hand, table=table.table_name, key_hash=key_hash, **told):
        raise _is_running(table, key)


def release_older(queue: Queue, table: Any, seconds: float, priority: int | None) -> int:
    """Put jobs back that have been reserved for longer than this, whoever has them; return how many."""
    engine = queue.engine
    sql = queue.sql(engine.release_older, interval=engine.seconds("%(seconds)s"))
    return queue.db.change(sql, table=table.table_name, seconds=seconds, priority=priority)


def _insist_on_job(table: Any, key: Mapping[str, Any], key_hash: str | None) -> None:
    if key_hash is None:
        name = type(table).__name__
        raise DjJobsError(
            f"{table_label(table)} has no job {dict(key)}. "
            f"{name}.schedule_jobs() or {name}.jobs.refresh() puts the keys into the queue."
        )


def _is_running(table: Any, key: Mapping[str, Any]) -> DjJobsError:
    return DjJobsError(
        f"The job {dict(key)} of {table_label(table)} is running: its worker will end it. "
        f"{type(table).__name__}.cancel_jobs(...) asks it to stop."
    )
