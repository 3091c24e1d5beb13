"""What djjobs changes in DataJoint's classes, and when.

`import djjobs` changes two methods, so that events hear of inserts and deletes, and adds the setting
`dj.config["min_scheduling_interval"]`. The rest waits until somebody needs it: until the first table with the mixin
appears, or the queue of a schema is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from datajoint import user_tables
from datajoint.connection import Connection
from datajoint.table import Table

from .compat import datajoint_api
from .connection import tell_of_rollback
from .routing import routed

__all__ = ["apply_patches", "instantiate_for", "patch_when_needed", "tell_of_changes", "tell_of_transactions"]

_waiting: list[Callable[[], None]] = []


def patch_when_needed(*patches: Callable[[], None]) -> None:
    """Change something in DataJoint later, when djjobs is first needed."""
    _waiting.extend(patches)


def apply_patches() -> None:
    """djjobs is needed: change all that has waited for it."""
    while _waiting:
        _waiting.pop(0)()


def instantiate_for(*names: str) -> None:
    """Let these methods be called on a table's class as on an instance, as `populate` can be."""
    patch_when_needed(lambda: user_tables.supported_class_attrs.update(names))


def tell_of_changes(inserted: Callable[[Any, Any], None], deleted: Callable[[Any], None]) -> None:
    """Have DataJoint tell of every insert and delete of this process.

    Parameters
    ----------
    inserted : callable
        Called with the table and the rows after an insert; with None for the rows if an insert failed in the middle.
    deleted : callable
        Called with the table after rows were deleted.
    """

    def insert(original: Any, table: Any, rows: Any, *arguments: Any, **options: Any) -> None:
        if _waiting and datajoint_api.is_legacy_job_table(table):
            # Tables without the mixin share the queue of a schema under DataJoint 0.14.
            apply_patches()
            return table.insert(rows, *arguments, **options)
        try:
            original(table, rows, *arguments, **options)
        except BaseException:
            if options.get("chunk_size"):
                # Some chunks may have been inserted.
                inserted(table, None)
            raise
        inserted(table, rows)

    def delete_quick(original: Any, table: Any, *arguments: Any, **options: Any) -> Any:
        count = original(table, *arguments, **options)
        if count != 0:
            deleted(table)
        return count

    _wrap(Table, "insert", insert)
    _wrap(Table, "delete_quick", delete_quick)


def tell_of_transactions(committed: Callable[[Any], None]) -> None:
    """Have DataJoint tell of every commit and roll-back, and send what a thread asks over that thread's connection.

    Parameters
    ----------
    committed : callable
        Called with the connection after a commit.
    """

    def start(original: Any, connection: Any) -> None:
        connection = routed(connection)
        original(connection)
        # What was left of a transaction that ended without a word was never committed.
        tell_of_rollback(connection)

    def commit(original: Any, connection: Any) -> None:
        connection = routed(connection)
        original(connection)
        committed(connection)

    def cancel(original: Any, connection: Any) -> None:
        connection = routed(connection)
        tell_of_rollback(connection)
        original(connection)

    def query(original: Any, connection: Any, *arguments: Any, **options: Any) -> Any:
        return original(routed(connection), *arguments, **options)

    _wrap(Connection, "start_transaction", start)
    _wrap(Connection, "commit_transaction", commit)
    _wrap(Connection, "cancel_transaction", cancel)
    _wrap(Connection, "query", query)
    in_transaction = Connection.in_transaction.fget
    Connection.in_transaction = property(lambda self: in_transaction(routed(self)))


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Let a method of DataJoint be called by one of ours, which gets it as its first argument."""
    original = getattr(owner, name)
    if hasattr(original, "_djjobs"):
        return

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return around(original, self, *arguments, **options)

    method._djjobs = True  # type: ignore[attr-defined]
    setattr(owner, name, method)
