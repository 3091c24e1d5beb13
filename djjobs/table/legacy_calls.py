"""`schema.jobs` of DataJoint 0.14, for tables with the mixin and without.

What is said there of a table with the mixin reaches the table's own jobs. DataJoint 0.14 knows a job by a hash of its
own, so that its row would stand beside ours and nobody would heed it. Tables without the mixin share our queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import server_of
from ..dj.tables import declared_database
from ..events.upstream import registry
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..queue.tables import Jobs
from .table_jobs import TableJobs

__all__ = ["heed_legacy_calls", "share_with_legacy_tables"]


class _Calls:
    """The methods of 0.14's job table, for one table with the mixin."""

    def __init__(self, jobs: TableJobs) -> None:
        self._jobs, self._table = jobs, jobs.target

    def reserve(self, key: Mapping[str, Any]) -> bool:
        self._insert(key)
        return self._jobs.reserve(key)

    def ignore(self, key: Mapping[str, Any]) -> bool:
        return self._table.ignore_jobs(self._jobs.whole_key(key)) > 0

    def complete(self, key: Mapping[str, Any]) -> None:
        self._jobs.complete(key)

    def error(self, key: Mapping[str, Any], error_message: str, error_stack: str | None = None) -> None:
        self._insert(key)
        self._jobs.error(key, error_message, error_stack)

    def _insert(self, key: Mapping[str, Any]) -> None:
        """0.14 needs no job to be there before."""
        TableQueue.of(self._table, (self._jobs.whole_key(key),)).insert_by_hand()


def heed_legacy_calls() -> None:
    """Let ``schema.jobs.ignore(...)`` and its companions reach the jobs of tables with the mixin."""

    def calls_for(connection: Any, database: str, table_name: str) -> _Calls | None:
        name = table_name.split(".")[-1].strip("`")
        found = next((table for table in _tables_in(connection, database) if table.table_name == name), None)
        return found and _Calls(found.jobs)

    datajoint_api.let_legacy_calls_reach(calls_for)


def share_with_legacy_tables() -> None:
    """Let tables without the mixin use a queue of ours in the same schema, under DataJoint 0.14."""

    def is_upgraded(jobs: Any) -> bool:
        return "created_time" in jobs.heading.names

    def declare(connection: Any, database: str) -> None:
        # Where a table has the mixin, DataJoint must not declare its own `~jobs` first.
        if _tables_in(connection, database) and not Jobs(connection, database).is_declared:
            Queue.of(connection, database)

    datajoint_api.let_legacy_tables_share(is_upgraded, declare)
    datajoint_api.hide_from_legacy(is_upgraded)


def _tables_in(connection: Any, database: str) -> list[Any]:
    """The classes with the mixin that are in this schema."""
    return [table for table in registry.tables_at(server_of(connection)) if declared_database(table) == database]
