"""Migration: jobs of DataJoint's native queues come into ours. A `~jobs` of DataJoint 0.14 becomes our queue."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..dj.blobs import key_json, unpack
from .keys import Keys
from .native import in_words, take_over
from .queue import Queue, version_of
from .tables import VERSION_MARK, QueueTable, columns_of, job_columns

__all__ = ["copy_native_jobs", "upgrade_queue"]

logger = logging.getLogger("djjobs")


def upgrade_queue(connection: Any, database: str) -> int:
    """Bring a `~jobs` that DataJoint 0.14 or an earlier djjobs made up to date; return how many rows were converted."""
    queue = Queue(connection, database)
    with queue.db.locked(f"djjobs {database}"):
        return _upgrade(queue) if queue.jobs.is_declared else 0


def copy_native_jobs(queue: Queue, tables: Mapping[str, Any]) -> int:
    """Copy the jobs that DataJoint 2 keeps in queues of its own; return how many.

    Parameters
    ----------
    tables : mapping
        The names of the tables, each with its class or, if that is not known, None.
    """
    brought = 0
    for table_name, cls in tables.items():
        keys = Keys(cls(), (), queue.engine) if cls else None
        with queue.db.locked(f"djjobs {queue.database}"):
            counts = take_over(queue, table_name, keys)
        if counts:
            logger.info("`%s`.`%s`: %s were copied", queue.database, table_name, in_words(counts))
        brought += sum(counts.values())
    return brought


def _upgrade(queue: Queue) -> int:
    """Convert the rows, and then the table, with one ALTER that either happens as a whole or not at all.

    The table is locked meanwhile. Otherwise a row that DataJoint 0.14 adds after the conversion would lose its key.
    """
    if version_of(queue.jobs) == "earlier":
        return _add_columns(queue)
    if version_of(queue.jobs) != "legacy":
        return 0
    engine = queue.engine
    columns = set(queue.jobs.heading.names)
    queue.execute(engine.legacy.lock_jobs)
    try:
        if "key_json" not in columns:
            queue.execute(engine.legacy.add_json_key)
        rows = queue.execute(engine.legacy.legacy_keys).fetchall()
        for table_name, key_hash, packed in rows:
            queue.execute(engine.legacy.store_json_key, table=table_name, key_hash=key_hash, json=_as_json(packed))
        changes = engine.legacy.columns(job_columns(queue.db.connection, engine), present=columns)
        queue.db.execute(queue.sql(engine.legacy.replace_legacy_columns, columns=changes, comment=VERSION_MARK))
    finally:
        queue.execute(engine.legacy.unlock_jobs)
    logger.info("%s: %d rows converted", queue.jobs.full_table_name, len(rows))
    return len(rows)


def _add_columns(queue: Queue) -> int:
    """Give the tables of an earlier version the columns that they lack; return how many jobs there are."""
    connection, tables = queue.db.connection, queue.engine.tables
    count = len(queue.jobs)
    _complete(queue, queue.jobs, job_columns(connection, queue.engine))
    if queue.workers.is_declared:
        _complete(queue, queue.workers, columns_of(queue.workers, queue.engine), queue.workers.dropped_columns)
    # This comes last: the comment says that all columns are there. Tables that are missing are declared at first use.
    queue.db.execute(queue.sql(tables.set_comment, comment=VERSION_MARK))
    return count


def _complete(queue: Queue, table: QueueTable, columns: Mapping[str, str], dropped: Sequence[str] = ()) -> None:
    present, tables, name = table.heading.names, queue.engine.tables, table.full_table_name
    for column, declaration in columns.items():
        if column not in present:
            queue.db.execute(queue.sql(tables.add_column, table=name, column=declaration))
    for column in dropped:
        if column in present:
            queue.db.execute(queue.sql(tables.drop_column, table=name, column=column))


def _as_json(packed: bytes | None) -> str | None:
    """A key of DataJoint 0.14 as JSON. If it cannot be unpacked, its bytes are kept in hexadecimal."""
    if packed is None:
        return None
    try:
        return key_json(dict(unpack(packed)))
    except Exception:
        return key_json({"legacy_blob": bytes(packed).hex()})
