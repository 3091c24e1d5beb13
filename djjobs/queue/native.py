"""What DataJoint itself recorded about a table before it had this queue becomes ours.

DataJoint 2 keeps a queue `~~name` for each table; these are copied and left as they are. DataJoint 0.14 kept the
jobs of all tables in `~jobs`; once that is migrated, they need only another hash.
"""

from __future__ import annotations

import logging
from typing import Any

from ..dj.compat import datajoint_api
from ..sql.keys import KeyAttribute, KeySQL
from .keys import Keys, kind_of
from .queue import Queue

__all__ = ["bring_native_jobs", "bring_native_jobs_once", "in_words", "rehash_legacy_rows", "take_over"]

logger = logging.getLogger("djjobs")

#: DataJoint's statuses and ours. A reserved job is left to the worker that has it.
_STATUSES = {"ignore": "ignore", "error": "error", "pending": "scheduled", "success": "success"}
_WORDS = {"ignore": "ignored", "error": "failed", "scheduled": "scheduled", "success": "finished"}
#: Which of them count only with or without a result. What was made since is neither to be done nor an error.
_ONLY_IF = {"error": "unless_made", "pending": "unless_made", "success": "if_made"}


def bring_native_jobs_once(queue: Queue, table: Any) -> None:
    """At the first use of a table's queue: take over what DataJoint recorded about it, and say so."""
    if table.table_name in queue.taken_over:
        return
    if not queue.ask(queue.engine.native.was_taken_over, table=table.table_name):
        keys = Keys(table, (), queue.engine)
        # Whoever comes second waits for the end: it would else schedule what is to be ignored.
        with queue.db.locked(f"djjobs {queue.database}"):
            was_taken_over = queue.ask(queue.engine.native.was_taken_over, table=table.table_name)
            counts = {} if was_taken_over else take_over(queue, table.table_name, keys)
        if counts:
            logger.warning("%s: %s of DataJoint's own queue were brought along", keys.label, in_words(counts))
    # Only now: what has failed is tried again the next time.
    queue.taken_over.add(table.table_name)


def take_over(queue: Queue, table_name: str, keys: Keys | None = None) -> dict[str, int]:
    """Make what DataJoint recorded about a table ours; return how many jobs of its own queue came, by status."""
    rehash_legacy_rows(queue, table_name, keys)
    counts = bring_native_jobs(queue, table_name, keys)
    # At last, since nobody looks any more once this is there: what a person removes does not come back by itself.
    queue.change(queue.engine.control.add_scope, table=table_name, scope="")
    return counts


def rehash_legacy_rows(queue: Queue, table_name: str, keys: Keys | None = None) -> None:
    """Let the errors and ignored keys that DataJoint 0.14 itself has recorded of a table be heeded.

    A native worker that was overtaken by another has left an error for a key whose result is there; that goes, if the
    keys of the table are known.
    """
    engine = queue.engine
    if not engine.legacy.rehash_legacy_rows:
        return
    rehash = queue.sql(engine.legacy.rehash_legacy_rows, hash=engine.dialect.hash(engine.legacy.stored_key))
    if queue.db.change(rehash, table=table_name) and keys is not None:
        find = queue.sql(engine.jobs.find_overtaken, made=keys.sql.made)
        hashes = tuple(key_hash for (key_hash,) in queue.db.execute(find, table=table_name).fetchall())
        if hashes:
            queue.change(engine.by_hand.delete_by_hand, table=table_name, status="error", hashes=hashes)


def bring_native_jobs(queue: Queue, table_name: str, keys: Keys | None = None) -> dict[str, int]:
    """Copy the jobs of DataJoint 2's own queue of a table whose keys are not in ours yet.

    Parameters
    ----------
    queue : Queue
        The queue of the schema.
    table_name : str
        The table, by its name in the database.
    keys : Keys
        Keys of the table: jobs whose key has other attributes are left. Defaults to None, not known.

    Returns
    -------
    dict
        How many came, by the status they have here.
    """
    found = datajoint_api.native_queue(queue.db.connection, queue.database, table_name)
    if found is None:
        return {}
    source = _Source(queue, *found)
    if not source.fits(keys):
        logger.warning(
            "`%s`.`%s`: the jobs of DataJoint's own queue stay there: its keys (%s) are not those of the table now",
            queue.database,
            table_name,
            ", ".join(source.names),
        )
        return {}
    counts = queue.db.retry(lambda: source.copy(table_name))
    if counts.get("scheduled"):
        queue.announce()
    return counts


def in_words(counts: dict[str, int]) -> str:
    """'2 ignored and 1 failed jobs'."""
    *first, last = [f"{counts[status]} {word}" for status, word in _WORDS.items() if status in counts]
    return f"{', '.join(first)}{' and ' if first else ''}{last} jobs"


class _Source:
    """DataJoint's own queue of a table, seen as SQL."""

    def __init__(self, queue: Queue, target: Any, native: Any) -> None:
        self._queue, self._target, self._native = queue, target, native
        self.names: list[str] = native.primary_key

    def fits(self, keys: Keys | None) -> bool:
        """Whether its keys are those of the table. It may have been declared anew, or have a key_source of its own."""
        ours, theirs = self._target.heading, self._native.heading
        wanted = set(ours.primary_key) & set(self.names) if keys is None else set(keys.attributes)
        return wanted == set(self.names) and all(ours[name].type == theirs[name].type for name in wanted)

    def copy(self, table_name: str) -> dict[str, int]:
        counts = {}
        # One statement for each status: the count of its rows says what came.
        with self._queue.db.transaction():
            for theirs, ours in _STATUSES.items():
                parameters = {"table": table_name, "status": theirs, "ours": ours}
                counts[ours] = self._queue.db.execute(self._statement(theirs), **parameters).rowcount
        return {status: count for status, count in counts.items() if count}

    def _statement(self, status: str) -> str:
        native, keys = self._queue.engine.native, self._keys
        also = getattr(native, _ONLY_IF[status]) if status in _ONLY_IF else ""
        return self._queue.sql(
            native.bring_native,
            native=self._native.full_table_name,
            hash=keys.hash("native"),
            json=keys.stored_json("job"),
            order=keys.order("native"),
            also=also.format(is_made=keys.is_made("native")),
        )

    @property
    def _keys(self) -> KeySQL:
        """The SQL about its keys, as `Keys` would have it."""
        target, dialect = self._target, self._queue.engine.dialect
        attributes = [self._attribute(target.heading[name]) for name in self.names]
        return KeySQL(dialect, attributes, self._native.full_table_name, target.full_table_name)

    def _attribute(self, attribute: Any) -> KeyAttribute:
        quoted = datajoint_api.quote(self._queue.db.connection, attribute.name)
        kind = kind_of(attribute, self._target.full_table_name)
        return KeyAttribute(attribute.name, quoted, kind, attribute.type)
