"""What differs between DataJoint 0.14 and 2.x. No other module asks which one it is.

The classes `_Classic` (0.14) and `_Modern` (2.x) have the same members; the one that fits
the installed DataJoint is this module's `datajoint_api`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import datajoint as dj
from datajoint.errors import AccessError, LostConnectionError
from datajoint.table import Table

from ..errors import DjJobsError
from .connecting import connecting_within
from .connection import KEPT
from .job_tables import ClassicJobTables, ModernJobTables

__all__ = ["CONNECT_LIMIT", "AccessError", "LostConnectionError", "config_value", "datajoint_api"]

#: How long a server may take for a new connection.
CONNECT_LIMIT = 5.0


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


class _Classic(ClassicJobTables):
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

    def reconnect(self, connection: Any, seconds: float = CONNECT_LIMIT) -> None:
        """Open a connection again, within so many seconds. Defaults to 5 s."""
        with connecting_within(seconds):
            self._connect(connection)

    def _connect(self, connection: Any) -> None:
        from datajoint.connection import connect_host_hook

        connect_host_hook(connection)

    def another_connection(self, connection: Any) -> Any:
        """A second connection to the same server as the same user."""
        other = copy.copy(connection)
        # Methods that somebody has put on the object belong to it alone, and so does what is kept with it.
        own = {name for name, value in other.__dict__.items() if callable(value)} | {KEPT}
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


class _Modern(ModernJobTables, _Classic):
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

    def _connect(self, connection: Any) -> None:
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
