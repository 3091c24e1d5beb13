"""What differs between DataJoint 0.14 and 2.x. No other module asks which one it is.

The classes `_Classic` (0.14) and `_Modern` (2.x) have the same members; the one that fits
the installed DataJoint is this module's `datajoint_api`.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import datajoint as dj
from datajoint import blob, user_tables
from datajoint.errors import AccessError, LostConnectionError
from datajoint.table import Table

from ..errors import DjJobsError

__all__ = ["AccessError", "LostConnectionError", "config_value", "datajoint_api", "instantiate_for"]


class _ClassicConfig:
    """0.14: `dj.config` is an open dictionary."""

    def install(self, name: str, default: Any, check: Callable[[str, Any], Any]) -> None:
        try:
            dj.config[name]
        except KeyError:
            dj.config[name] = default

    def get(self, name: str) -> Any:
        return dj.config[name]

    def set(self, name: str, value: Any) -> None:
        dj.config[name] = value


class _ModernConfig:
    """2.x: `dj.config` is a closed pydantic model; a property on its class opens it for one name."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def install(self, name: str, default: Any, check: Callable[[str, Any], Any]) -> None:
        self._values.setdefault(name, default)

        def write(_config: Any, value: Any) -> None:
            self._values[name] = check(name, value)

        from datajoint.settings import Config

        setattr(Config, name, property(lambda _config: self._values[name], write))

    def get(self, name: str) -> Any:
        return self._values[name]

    def set(self, name: str, value: Any) -> None:
        self._values[name] = value


class _Classic:
    """DataJoint 0.14."""

    config = _ClassicConfig()
    #: Types of the queue's columns, as a definition spells them.
    types = {
        "small": "smallint",
        "whole": "int",
        "big": "bigint",
        "real": "double",
        "blob": "mediumblob",
        "json": "json",
    }

    def backend(self, connection: Any) -> str:
        return "mysql"

    def configured_backend(self) -> str:
        return "mysql"

    def quote(self, connection: Any, name: str) -> str:
        return f"`{name}`"

    def keys(self, expression: Any, **options: Any) -> list[dict[str, Any]]:
        return expression.fetch("KEY", **options)

    def dicts(self, expression: Any, **options: Any) -> list[dict[str, Any]]:
        return expression.fetch(as_dict=True, **options)

    def decode(self, attribute: Any, value: Any, connection: Any) -> Any:
        from datajoint.fetch import _get

        return _get(connection, attribute, value, squeeze=False, download_path=".")

    def reconnect(self, connection: Any) -> None:
        from datajoint.connection import connect_host_hook

        connect_host_hook(connection)

    def another_connection(self, connection: Any) -> Any:
        """A second connection to the same server as the same user."""
        other = copy.copy(connection)
        # Methods that somebody has put on the object belong to it alone, and so do its queues.
        own = {name for name, value in other.__dict__.items() if callable(value)} | {"_djjobs_queues", "_djjobs_outbox"}
        for name in own & set(other.__dict__):
            del other.__dict__[name]
        other._in_transaction = False
        other.schemas = dict(connection.schemas)
        other.dependencies = type(connection.dependencies)(other)
        self.reconnect(other)
        return other

    def put_on(self, table: Table, connection: Any) -> None:
        """Let an instance of a table use another connection than its class."""
        # The class's own comes from something that gives way to an entry of the instance.
        table.__dict__["connection"] = connection
        table._connection = connection

    def master_of(self, full_table_name: str) -> str | None:
        """The full name of a part table's master; None for other tables."""
        from datajoint.utils import get_master

        return get_master(full_table_name) or None

    def column_sql(self, definition: str, connection: Any) -> list[str]:
        from datajoint.declare import prepare_declare

        return prepare_declare(definition, None)[2]

    def default_priority(self, connection: Any) -> int:
        return 5

    def refresh_by_default(self, connection: Any) -> bool:
        return True

    def keeps_completed(self, connection: Any) -> bool:
        return False

    def stale_timeout(self, connection: Any) -> float:
        """How old a job is before `jobs.refresh()` looks whether its key is still there."""
        return 3600.0

    def version_method(self, connection: Any) -> str:
        """How DataJoint tells the version of the code; empty if it does not."""
        return ""

    def job_version(self) -> str:
        return ""

    def declared_type(self, attribute: Any) -> str:
        """The type of an attribute as a definition spells it."""
        return "uuid" if attribute.uuid else attribute.type

    def whole(self, attribute: Any) -> Any:
        """An attribute with all that is known of it."""
        return attribute

    def list_jobs_of_schema(self, ours: Callable[[Any], list[Any]]) -> None:
        """0.14's ``schema.jobs`` is the one table of all."""

    def tables(self, schema: Any) -> list[str]:
        return schema.list_tables()

    def mark_json(self, table: Table, names: tuple[str, ...]) -> None:
        """MariaDB reports json columns as longtext, and 0.14 has nothing else to go by."""
        attributes = table.heading.attributes
        for name in names:
            if name in attributes and not attributes[name].json:
                table.heading._attributes[name] = attributes[name]._replace(json=True, is_blob=False)

    def let_legacy_tables_share(self, upgraded: Callable[[Any], bool], declare: Callable[[Any, str], None]) -> None:
        """Let tables without the mixin reserve and report errors in an upgraded `~jobs`.

        0.14's own JobTable packs the key into a blob; in an upgraded table the column holds JSON.
        """
        from datajoint.jobs import JobTable

        if hasattr(JobTable, "_djjobs"):
            return
        original_init, original_insert1 = JobTable.__init__, Table.insert1

        def __init__(self: Any, connection: Any, database: str) -> None:
            declare(connection, database)
            original_init(self, connection, database)
            if upgraded(self):
                datajoint_api.mark_json(self, ("key", "run_metadata"))

        def insert1(self: Any, row: dict[str, Any], **options: Any) -> None:
            if isinstance(row.get("key"), dict) and upgraded(self):
                row = {**row, "key": json.loads(key_json(row["key"]))}
            original_insert1(self, row, **options)

        JobTable.__init__, JobTable.insert1, JobTable._djjobs = __init__, insert1, True

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

    # -- the queues that DataJoint 2 itself keeps ---------------------------------------------------------

    def natively_queued(self, connection: Any, database: str) -> list[str]:
        """The names of the tables of a schema that have a queue of DataJoint's own beside `~jobs`."""
        return []

    def native_queue(self, connection: Any, database: str, table_name: str) -> tuple[Table, Table] | None:
        """A table and that queue; None if there is none."""
        return None


class _Modern(_Classic):
    """DataJoint 2.x."""

    config = _ModernConfig()  # type: ignore[assignment]
    types = {
        "small": "int16",
        "whole": "int32",
        "big": "int64",
        "real": "float64",
        "blob": "<blob>",
        "json": "json",
    }

    def backend(self, connection: Any) -> str:
        return connection.adapter.backend

    def configured_backend(self) -> str:
        return dj.config["database.backend"]

    def quote(self, connection: Any, name: str) -> str:
        return connection.adapter.quote_identifier(name)

    def keys(self, expression: Any, **options: Any) -> list[dict[str, Any]]:
        return expression.keys(**options)

    def dicts(self, expression: Any, **options: Any) -> list[dict[str, Any]]:
        return expression.to_dicts(**options)

    def decode(self, attribute: Any, value: Any, connection: Any) -> Any:
        from datajoint.codecs import decode_attribute

        return decode_attribute(attribute, value, connection=connection)

    def reconnect(self, connection: Any) -> None:
        connection.connect()

    def put_on(self, table: Table, connection: Any) -> None:
        table._connection = connection

    def master_of(self, full_table_name: str) -> str | None:
        from datajoint.dependencies import extract_master

        return extract_master(full_table_name)

    def column_sql(self, definition: str, connection: Any) -> list[str]:
        from datajoint.declare import prepare_declare

        return prepare_declare(definition, {}, connection.adapter)[2]

    def default_priority(self, connection: Any) -> int:
        return connection._config.jobs.default_priority

    def refresh_by_default(self, connection: Any) -> bool:
        return connection._config.jobs.auto_refresh

    def keeps_completed(self, connection: Any) -> bool:
        return connection._config.jobs.keep_completed

    def stale_timeout(self, connection: Any) -> float:
        return float(connection._config.jobs.stale_timeout)

    def version_method(self, connection: Any) -> str:
        method = connection._config.jobs.version_method
        return "" if method in (None, "none") else method

    def job_version(self) -> str:
        from datajoint.jobs import _get_job_version

        return _get_job_version()

    def declared_type(self, attribute: Any) -> str:
        return attribute.original_type or attribute.type

    def whole(self, attribute: Any) -> Any:
        # On PostgreSQL only the table that declares a uuid knows it to be one.
        is_uuid = attribute.type == "uuid" and not attribute.original_type
        return attribute._replace(original_type="uuid") if is_uuid else attribute

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

    def mark_json(self, table: Table, names: tuple[str, ...]) -> None:
        """2.x knows JSON columns by their comment, on MariaDB too."""

    def let_legacy_tables_share(self, upgraded: Callable[[Any], bool], declare: Callable[[Any, str], None]) -> None:
        """2.x keeps the queues of tables without the mixin in tables of their own."""

    def let_legacy_calls_reach(self, calls_for: Callable[[Any, str, str], Any]) -> None:
        """2.x's ``schema.jobs`` is a list."""

    def hide_from_legacy(self, upgraded: Callable[[Any], bool]) -> None:
        """2.x's ``schema.jobs`` is a list."""

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


def _generation() -> _Classic:
    version = dj.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers >= (2, 3):
        return _Modern()
    if (0, 14) <= numbers < (0, 15):
        return _Classic()
    raise DjJobsError(f"djjobs works with DataJoint 0.14 and with 2.3 or newer, not with {version}.")


datajoint_api = _generation()
config_value = datajoint_api.config


def instantiate_for(*names: str) -> None:
    """Let these methods be called on a table's class as on an instance, as `populate` can be."""
    user_tables.supported_class_attrs.update(names)


def key_json(key: dict[str, Any]) -> str:
    """A legacy key as JSON: numbers and texts as they are, all else as DataJoint prints it."""

    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else str(value)

    # In the order of the names that the server's JSON of a key has.
    ordered = {name: key[name] for name in sorted(key, key=lambda name: (len(name), name))}
    return json.dumps(ordered, default=plain, ensure_ascii=False)


class _AnyBlob(blob.Blob):
    """0.14 refuses texts where ``dj.config["enable_python_native_blobs"]`` is off, but in its own `~jobs` has them.

    It turns the setting on for the moment; that would reach other threads, too.
    """

    def set_dj0(self) -> None:
        self.protocol = b"dj0\0"


def pack(value: Any) -> bytes:
    """What DataJoint would store in a blob column of `~jobs`."""
    return _AnyBlob().pack(value, compress=True)


def unpack(value: bytes) -> Any:
    """What DataJoint would give back of a blob column."""
    return blob.unpack(value)
