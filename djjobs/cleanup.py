"""Clean-up: jobs go when what they were about is gone. A reserved job is its worker's and stays while that lives."""

from __future__ import annotations

from typing import Any

from .finishing import Finisher
from .keys import Keys
from .leases import recover
from .queue import Queue

__all__ = ["cleanup"]

#: How many jobs one statement removes.
_PORTION = 5000


def cleanup(queue: Queue, finisher: Finisher, restrictions: tuple[Any, ...] = ()) -> dict[str, int]:
    """Remove orphaned jobs and put back those of dead workers; return how many of each kind."""
    keys, join = finisher.keys, ""
    if restrictions:
        jobs = queue.jobs & {"table_name": finisher.table_name}
        join = queue.sql(queue.engine.join_chosen, chosen=keys.held_sql(jobs, restrictions))
    return {
        "orphaned_success": _remove(queue, keys, ("success",), keys.made_sql, join),
        "orphaned_incomplete": _remove(
            queue, keys, ("scheduled", "error", "ignore", "cancelled"), keys.chosen_sql, join
        ),
        "recovered": recover(queue, {finisher.table_name: finisher}, join_chosen=join),
        "expired": 0,
    }


def _remove(queue: Queue, keys: Keys, statuses: tuple[str, ...], living: str, join: str) -> int:
    """Remove the jobs of these statuses whose key is not among the living; found by one statement."""
    engine, table_name = queue.engine, keys.table.table_name
    among = "(" + ", ".join(f"'{status}'" for status in statuses) + ")"
    find = queue.sql(engine.find_orphans, living=living, join_chosen=join, statuses=among)
    rows = queue.db.retry(lambda: queue.db.execute(find, table=table_name).fetchall())
    delete = queue.sql(engine.delete_orphans, statuses=among)
    removed = 0
    for first in range(0, len(rows), _PORTION):
        portion = rows[first : first + _PORTION]
        hashes = tuple(key_hash for key_hash, _ in portion)
        removed += queue.db.change(delete, table=table_name, hashes=hashes, seen=portion[0][1])
    return removed
