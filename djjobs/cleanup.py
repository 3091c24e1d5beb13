"""Clean-up: jobs go when what they were about is gone. A reserved job is its worker's and stays."""

from __future__ import annotations

from typing import Any

from .keys import Keys
from .queue import Queue

__all__ = ["cleanup"]


def cleanup(queue: Queue, keys: Keys, restrictions: tuple[Any, ...]) -> dict[str, int]:
    """Remove orphaned jobs, each kind in one statement; return how many of each."""
    join = ""
    if restrictions:
        jobs = queue.jobs & {"table_name": keys.table.table_name}
        join = queue.sql(queue.engine.join_chosen, chosen=keys.held_sql(jobs, restrictions))

    def delete(statuses: tuple[str, ...], living: str) -> int:
        sql = queue.sql(queue.engine.delete_orphans, living=living, join_chosen=join)
        return queue.db.change(sql, table=keys.table.table_name, statuses=statuses)

    return {
        "orphaned_success": delete(("success",), keys.made_sql),
        "orphaned_incomplete": delete(("scheduled", "error", "ignore", "cancelled"), keys.chosen_sql),
        "recovered": 0,
        "expired": 0,
    }
