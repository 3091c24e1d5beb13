"""`schema.jobs` of DataJoint 0.14: what is said there of a table with the mixin reaches the table's own jobs.

DataJoint 0.14 knows a job by a hash of its own, so that its row would stand beside ours and nobody would heed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import server_of
from ..dj.tables import declared_database
from ..events.upstream import registry
from ..queue.table_queue import TableQueue
from .table_jobs import TableJobs

__all__ = ["heed_legacy_calls"]


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
        server, name = server_of(connection), table_name.split(".")[-1].strip("`")
        tables: list[Any] = [one for one in registry.tables_at(server) if declared_database(one) == database]
        found = next((table for table in tables if table.table_name == name), None)
        return found and _Calls(found.jobs)

    datajoint_api.let_legacy_calls_reach(calls_for)
