"""PostgreSQL 14 and newer."""

from __future__ import annotations

import decimal
from typing import Any

from .engine import Engine

_TRANSIENT = {"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "08000", "08003", "08006"}
_CREDENTIALS = {"28P01", "28000"}


class PostgreSQL(Engine):
    # The columns are without time zone, and sessions may differ in theirs.
    now = "(statement_timestamp() AT TIME ZONE 'UTC')"
    key = '"key"'
    user = '"user"'
    or_skip = "ON CONFLICT DO NOTHING"
    defers_signals = True
    own_connection_id = "SELECT pg_backend_pid()"
    after_declare = "COMMENT ON TABLE {jobs} IS '{comment}'"
    begin = ("BEGIN ISOLATION LEVEL READ COMMITTED",)

    change_chosen = """
        UPDATE {jobs} AS job SET {changes} FROM ({chosen}) AS chosen
        WHERE chosen.key_hash = job.key_hash AND job.table_name = %(table)s AND job.status::text IN %(statuses)s"""

    def seconds(self, parameter: str) -> str:
        return f"{parameter} * INTERVAL '1 second'"

    def microseconds(self, count: str) -> str:
        return f"{count} * INTERVAL '1 microsecond'"

    def place(self, order: str) -> str:
        # Counting them makes PostgreSQL find all keys before it inserts the first. It would otherwise, if it takes
        # the queue to be empty, search the rows that it is just inserting, for every key anew.
        return f"(ROW_NUMBER() OVER (ORDER BY {order}) + 0 * COUNT(*) OVER ())"

    def moment(self, parameter: str) -> str:
        return f"CAST({parameter} AS timestamp)"

    def json_object(self, columns: dict[str, tuple[str, str]]) -> str:
        pairs = [f"'{name}', {self._to_json(*columns[name])}" for name in sorted(columns)]
        # As json it need not be parsed to be hashed.
        return f"json_build_object({', '.join(pairs)})"

    @staticmethod
    def _to_json(column: str, kind: str) -> str:
        # A cast of char(n) to text would drop the padding that the driver returns.
        return column if kind in ("int", "bool", "text") else f"{column}::text"

    def in_type(self, column: str, kind: str, type_: str) -> str:
        # An enum is text to JSON, whatever its type is called.
        return column if type_.startswith("enum") else f"{column}::{type_}"

    def hash(self, json: str) -> str:
        # As char, like the column: compared with text it would find no index.
        return f"left(encode(sha256(convert_to(({json})::text, 'UTF8')), 'hex'), 32)::char(32)"

    def from_json(self, json: str, name: str, kind: str) -> str:
        types = {
            "int": "numeric",
            "decimal": "numeric",
            "float": "double precision",
            "bool": "boolean",
            "uuid": "uuid",
            "date": "date",
            "datetime": "timestamp",
            "time": "time",
        }
        return f"({json} ->> '{name}')::{types.get(kind, 'text')}"

    def to_driver(self, kind: str, value: Any) -> Any:
        from psycopg2 import extensions

        if kind in ("int", "bool", "text"):
            return value
        if kind in ("float", "decimal"):
            return float(value) if kind == "float" else decimal.Decimal(value)
        casters = {"date": extensions.PYDATE, "datetime": extensions.PYDATETIME, "time": extensions.PYTIME}
        return casters[kind](value, None)

    def lock(self, name: str) -> tuple[str, str]:
        number = f"hashtextextended('{name}', 0)"
        return f"SELECT pg_advisory_lock({number})", f"SELECT pg_advisory_unlock({number})"

    def is_transient(self, error: BaseException) -> bool:
        import psycopg2

        if not isinstance(error, psycopg2.Error):
            return False
        return error.pgcode in _TRANSIENT or (error.pgcode is None and self._is_lost(error))

    @staticmethod
    def _is_lost(error: BaseException) -> bool:
        """A connection that broke leaves an error without a code."""
        import psycopg2

        return isinstance(error, (psycopg2.OperationalError, psycopg2.InterfaceError))

    def diagnose(self, error: BaseException) -> str | None:
        import psycopg2

        if not isinstance(error, psycopg2.Error):
            return None
        if error.pgcode == "42501":
            return "access"
        if error.pgcode in _CREDENTIALS or "authentication failed" in str(error):
            return "credentials"
        if (error.pgcode or "")[:2] in ("22", "42"):
            return "query"
        return "unreachable" if error.pgcode is None and self._is_lost(error) else None
