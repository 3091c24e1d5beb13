"""DataJoint's own job queues: how tables of ours share them, and what `schema.jobs` shows.

`ClassicJobTables` is about 0.14's one table `~jobs`, `ModernJobTables` about 2.x's tables `~~name`. They have the same
methods, which belong to `datajoint_api`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from datajoint.table import Table

from .blobs import key_json

__all__ = ["ClassicJobTables", "ModernJobTables"]

#: The columns of an upgraded `~jobs` that hold JSON and that 0.14 shows.
_JSON = ("key", "run_metadata")


class ClassicJobTables:
    """0.14: `~jobs` of a schema, a `JobTable`, for all of its tables."""

    def mark_json(self, table: Any, names: tuple[str, ...]) -> None:
        """MariaDB reports json columns as longtext, and 0.14 has nothing else to go by."""
        attributes = table.heading.attributes
        for name in names:
            if name in attributes and not attributes[name].json:
                table.heading._attributes[name] = attributes[name]._replace(json=True, is_blob=False)

    def is_legacy_job_table(self, table: Any) -> bool:
        """Whether this is the table in which DataJoint itself reserves jobs, and in which a queue of ours may be."""
        from datajoint.jobs import JobTable

        return isinstance(table, JobTable)

    def let_legacy_tables_share(self, upgraded: Callable[[Any], bool], declare: Callable[[Any, str], None]) -> None:
        """Let tables without the mixin reserve and report errors in an upgraded `~jobs`.

        0.14's own JobTable packs the key into a blob; in an upgraded table the column holds JSON.
        """
        from datajoint.jobs import JobTable

        if hasattr(JobTable, "_djjobs"):
            return
        original_init = JobTable.__init__

        def __init__(table: Any, connection: Any, database: str) -> None:
            declare(connection, database)
            original_init(table, connection, database)
            if upgraded(table):
                self.mark_json(table, _JSON)

        def insert(table: Any, rows: Any, *arguments: Any, **options: Any) -> None:
            if upgraded(table):
                # Again, for a table that was made before this method was here.
                self.mark_json(table, _JSON)
                rows = [_with_json_key(row) for row in rows]
            Table.insert(table, rows, *arguments, **options)

        JobTable.__init__, JobTable.insert, JobTable._djjobs = __init__, insert, True

    def let_legacy_calls_reach(self, calls_for: Callable[[Any, str, str], Any]) -> None:
        """Let what is said to `schema.jobs` of a table reach what `calls_for` gives for it, if anything."""
        from datajoint.jobs import JobTable

        def redirect(name: str) -> None:
            original = getattr(JobTable, name)

            @functools.wraps(original)
            def method(self: Any, table_name: str, key: dict[str, Any], *arguments: Any, **options: Any) -> Any:
                calls = calls_for(self.connection, self.database, table_name)
                if calls is None:
                    return original(self, table_name, key, *arguments, **options)
                return getattr(calls, name)(key, *arguments, **options)

            setattr(JobTable, name, method)

        for name in ("reserve", "ignore", "complete", "error"):
            redirect(name)

    def hide_from_legacy(self, upgraded: Callable[[Any], bool]) -> None:
        """Let ``schema.jobs`` show what 0.14 itself would have there: no job that waits, and none that is done."""
        from datajoint.jobs import JobTable
        from datajoint.schemas import Schema

        native = Schema.jobs.fget

        def jobs(schema: Any) -> Any:
            table = native(schema)
            if not upgraded(table):
                # DataJoint keeps it for good, but the queue may have been upgraded since.
                table = schema._jobs = JobTable(schema.connection, schema.database)
            return table & "status IN ('reserved', 'error', 'ignore')" if upgraded(table) else table

        Schema.jobs = property(jobs, doc=Schema.jobs.__doc__)

    def list_jobs_of_schema(self, ours: Callable[[Any], list[Any]]) -> None:
        """0.14's ``schema.jobs`` is the one table of all."""

    # -- the queues that DataJoint 2 itself keeps ---------------------------------------------------------

    def natively_queued(self, connection: Any, database: str) -> list[str]:
        """The names of the tables of a schema that have a queue of DataJoint's own beside `~jobs`."""
        return []

    def native_queue(self, connection: Any, database: str, table_name: str) -> tuple[Table, Table] | None:
        """A table and that queue; None if there is none."""
        return None


def _with_json_key(row: Any) -> Any:
    if isinstance(row, dict) and isinstance(row.get("key"), dict):
        return {**row, "key": json.loads(key_json(row["key"]))}
    return row


class ModernJobTables(ClassicJobTables):
    """2.x: a table `~~name` for each table, in a list."""

    def mark_json(self, table: Any, names: tuple[str, ...]) -> None:
        """2.x knows JSON columns by their comment, on MariaDB too."""

    def is_legacy_job_table(self, table: Any) -> bool:
        return False

    def let_legacy_tables_share(self, upgraded: Callable[[Any], bool], declare: Callable[[Any, str], None]) -> None:
        """2.x keeps the queues of tables without the mixin in tables of their own."""

    def let_legacy_calls_reach(self, calls_for: Callable[[Any, str, str], Any]) -> None:
        """2.x's ``schema.jobs`` is a list."""

    def hide_from_legacy(self, upgraded: Callable[[Any], bool]) -> None:
        """2.x's ``schema.jobs`` is a list."""

    def list_jobs_of_schema(self, ours: Callable[[Any], list[Any]]) -> None:
        """Let ``schema.jobs`` list what `ours` gives, in place of DataJoint's own queues of the same tables."""
        from datajoint.schemas import _Schema

        native = _Schema.jobs.fget

        def jobs(schema: Any) -> list[Any]:
            found = native(schema)
            views = ours(schema)
            known = {view.target.full_table_name for view in views}
            return [job for job in found if job.target.full_table_name not in known] + views

        _Schema.jobs = property(jobs, doc=_Schema.jobs.__doc__)

    def natively_queued(self, connection: Any, database: str) -> list[str]:
        names = {name for (name,) in connection.query(connection.adapter.list_tables_sql(database))}
        return sorted(name for name in names if name.startswith("_") and _native_name(name) in names)

    def native_queue(self, connection: Any, database: str, table_name: str) -> tuple[Table, Table] | None:
        from datajoint.table import FreeTable

        def table(name: str) -> Table:
            return FreeTable(connection, connection.adapter.make_full_table_name(database, name))

        native = table(_native_name(table_name))
        return (table(table_name), native) if native.is_declared else None


def _native_name(table_name: str) -> str:
    return f"~~{table_name.lstrip('_')}"
