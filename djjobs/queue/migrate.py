"""Migration: what DataJoint recorded in queues of its own comes into ours, in place where these were `~jobs`."""

from __future__ import annotations

import logging
from typing import Any

import datajoint as dj

from ..dj.blobs import key_json, unpack
from ..dj.compat import datajoint_api
from ..dj.tables import declared_database
from ..errors import DjJobsError
from .database import explained
from .keys import Keys
from .native import in_words, take_over
from .queue import Queue, version_of
from .tables import VERSION_MARK, Jobs, job_columns

__all__ = ["migrate"]

logger = logging.getLogger("djjobs")


def migrate(schema: Any) -> int:
    """Bring along what DataJoint's own queues of a schema hold.

    A `~jobs` that DataJoint 0.14 made is upgraded in place. Every row is kept, with its key as JSON. Nothing happens
    if the queue is up to date, so it can be run any number of times. Workers of tables without the mixin may go on
    meanwhile.

    Of the queues `~~name` that DataJoint 2 keeps, jobs are copied whose key is not in the queue: those that are to be
    ignored, have failed or are pending, and those that succeeded and whose result is there. Reserved jobs are left to
    their workers, and so are pending and failed ones whose result is there by now. If classes of this schema are
    imported, only those with the mixin count; if none is, as on the command line, every table that has such a queue.
    (The first use of a table's queue does the same for that table. Jobs that were removed from the queue since come
    back only if this is run again.)

    Parameters
    ----------
    schema : dj.Schema or str
        The schema, or its name.

    Returns
    -------
    int
        How many rows were converted or copied.
    """
    connection = getattr(schema, "connection", None) or dj.conn()
    database = getattr(schema, "database", schema)
    if not isinstance(database, str):
        raise DjJobsError(f"{schema!r} is neither a schema nor the name of one.")
    with explained(connection, f"`{database}`.`~jobs`", "migrate"):
        queue = Queue(connection, database)
        with queue.db.locked(f"djjobs {database}"):
            converted = _upgrade(queue) if queue.jobs.is_declared else 0
        return converted + _bring_native_jobs(Queue.of(connection, database))


def _bring_native_jobs(queue: Queue) -> int:
    brought = 0
    for table_name, cls in _natively_queued(queue).items():
        keys = Keys(cls(), (), queue.engine) if cls else None
        with queue.db.locked(f"djjobs {queue.database}"):
            counts = take_over(queue, table_name, keys)
        if counts:
            logger.info("`%s`.`%s`: %s were copied", queue.database, table_name, in_words(counts))
        brought += sum(counts.values())
    return brought


def _natively_queued(queue: Queue) -> dict[str, Any]:
    """The tables that have a queue of DataJoint's own and get ours, with their classes where these are known."""
    from ..table.adopt import classes_of
    from ..table.mixin import JobsMixin

    connection = queue.db.connection
    names = datajoint_api.natively_queued(connection, queue.database)
    known = {cls.table_name: cls for cls in classes_of(connection, queue.database)}
    if not known:
        return dict.fromkeys(names)
    return {name: known[name] for name in names if name in known and issubclass(known[name], JobsMixin)}


def _upgrade(queue: Queue) -> int:
    """Convert the rows and then, in one ALTER that either happens or not, the table.

    The table is locked meanwhile: a row that a legacy worker adds after the conversion would lose
    its key.
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
        queue.db.execute(
            queue.sql(engine.legacy.replace_legacy_columns, columns=_columns(queue, columns), comment=VERSION_MARK)
        )
    finally:
        queue.execute(engine.legacy.unlock_jobs)
    logger.info("%s: %d rows converted", queue.jobs.full_table_name, len(rows))
    return len(rows)


def _add_columns(queue: Queue) -> int:
    """Give a queue of an earlier version the columns that it lacks; return how many jobs it has."""
    present, columns = queue.jobs.heading.names, job_columns(queue.db.connection, queue.engine)
    count = len(queue.jobs)
    for name, column in columns.items():
        if name not in present:
            queue.db.execute(queue.sql(queue.engine.tables.add_column, column=column))
    # At last: the comment says that all is there.
    queue.db.execute(queue.sql(queue.engine.tables.set_comment, comment=VERSION_MARK))
    return count


def _as_json(packed: bytes | None) -> str | None:
    """A legacy key as JSON; one that cannot be unpacked is kept as it is, in hexadecimal."""
    if packed is None:
        return None
    try:
        return key_json(dict(unpack(packed)))
    except Exception:
        return key_json({"legacy_blob": bytes(packed).hex()})


def _columns(queue: Queue, present: set[str]) -> str:
    """What makes each column as `~jobs` defines it: MODIFY those that are there, ADD the others."""
    changes = []
    for name, column in job_columns(queue.db.connection, queue.engine).items():
        if name == "key":
            changes.append(f"CHANGE key_json {column} AFTER status")
        else:
            changes.append(f"{'MODIFY' if name in present else 'ADD'} {column}")
    return ", ".join(changes)


def share_with_legacy_tables() -> None:
    """Let tables without the mixin use a queue of ours in the same schema, under DataJoint 0.14."""
    from ..table.adopt import subclasses
    from ..table.mixin import JobsMixin

    def is_upgraded(jobs: Any) -> bool:
        return "created_time" in jobs.heading.names

    def declare(connection: Any, database: str) -> None:
        # Where a table has the mixin, DataJoint must not declare its own `~jobs` first.
        has_mixin = any(declared_database(table) == database for table in subclasses(JobsMixin))
        if has_mixin and not Jobs(connection, database).is_declared:
            Queue.of(connection, database)

    datajoint_api.let_legacy_tables_share(is_upgraded, declare)
    datajoint_api.hide_from_legacy(is_upgraded)
