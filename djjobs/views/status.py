"""How far a pipeline is: one row a table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pandas as pd

from ..queue.queue import Queue
from ..queue.tables import STATUSES
from ..table.adopt import auto_populated

__all__ = ["status"]


def status(schema_or_module: Any) -> pd.DataFrame:
    """The queue of a pipeline, one row a table.

    Parameters
    ----------
    schema_or_module : dj.Schema or module
        A schema, or the module that defines a pipeline.

    Returns
    -------
    pandas.DataFrame
        Indexed by the table's class name; how many jobs have each status, and how many rows are in
        the table itself (`done`).
    """
    # A notebook's cell that was run again has left two classes of one table.
    instances: list[Any] = [table() for table in auto_populated(schema_or_module)]
    tables = {table.full_table_name: table for table in instances}
    queues = {table.database: Queue.of(table.connection, table.database) for table in tables.values()}
    counts = {database: _counts(queue) for database, queue in queues.items()}
    rows: dict[str, dict[str, int | None]] = {}
    for table in tables.values():
        rows[type(table).__name__] = {**counts[table.database].pop(table.table_name, {}), "done": len(table)}
    if not isinstance(schema_or_module, ModuleType):
        # Tables of the schema that have jobs, but no class in this process.
        queue = Queue.of(schema_or_module.connection, schema_or_module.database)
        for name, by_status in counts.get(queue.database, _counts(queue)).items():
            rows[name] = {**by_status, "done": None}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*STATUSES, "done"]).astype("Int64")
    frame[list(STATUSES)] = frame[list(STATUSES)].fillna(0)
    frame.index.name = "table"
    return frame


def _counts(queue: Queue) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for table_name, state, count in queue.execute(queue.engine.jobs.count_by_status).fetchall():
        counts.setdefault(table_name, {})[state] = count
    return counts
