"""PostgreSQL 14 and newer.

All functions, types and tables of the server are named with their schema, `pg_catalog`. Without it, the search_path of
the session decides what a name means, and somebody may have put a function of the same name there. (What looks like a
function and has no schema here is grammar: CAST, COALESCE, EXTRACT, GREATEST.)
"""

from __future__ import annotations

import decimal
import re
from typing import Any

from .connection import (
    CROWDED,
    DISK_FULL,
    LOCKED,
    NO_SERVER,
    READ_ONLY,
    STATEMENT_TIMEOUT,
    ConnectionStatements,
    Errors,
)
from .dialect import Dialect
from .engine import Engine
from .enqueue import EnqueueStatements
from .jobs import JobStatements
from .tables import TableStatements
from .workers import WorkerStatements

_TRANSIENT = {"40001", "40P01"}
_REASONS = {
    "25006": READ_ONLY,
    "53100": DISK_FULL,
    "57014": STATEMENT_TIMEOUT,
    "55P03": LOCKED,
    "53300": CROWDED,
}
#: The error of a connection that was refused has no code.
_CROWDED = re.compile("too many (clients|connections)|connection slots")
_LOST = {"57P01", "57P02", "57P03", "53300", "08000", "08003", "08006"}
_CREDENTIALS = {"28P01", "28000"}
#: The kinds of key attributes whose values psycopg2 does not have to read.
_PYTHON = {"int": int, "text": str, "float": float, "decimal": decimal.Decimal}
#: How PostgreSQL prints the values of a kind.
_PRINTED = {
    "int": "^-?[0-9]+$",
    "decimal": "^-?([0-9.]+|NaN|Infinity)$",
    "float": "^-?([0-9.]+(e[-+]?[0-9]+)?|NaN|Infinity)$",
    "bool": "^(true|false)$",
    "uuid": "^[0-9a-f-]{36}$",
    "date": "^[0-9]{4,}-[0-9]{2}-[0-9]{2}( BC)?$",
    "datetime": "^[0-9]{4,}-[0-9]{2}-[0-9]{2} [0-9:.]+( BC)?$",
    "time": "^[0-9:.]+$",
}
_RANGES = {
    "pg_catalog.int2": "-32768 AND 32767",
    "pg_catalog.int4": "-2147483648 AND 2147483647",
    "pg_catalog.int8": "-9223372036854775808 AND 9223372036854775807",
}
#: The types whose names are grammar: they can only be the server's own.
_STANDARD = re.compile(
    r"(small|big)?int\b|integer|real|float\b|double precision|decimal|numeric|boolean"
    r"|char\b|character\b|varchar|timestamp\b|time\b|interval"
)


def _with_schema(type_: str) -> str:
    """A type of a heading, named with its schema."""
    return type_ if _STANDARD.match(type_) or "." in type_ else f"pg_catalog.{type_}"


class _Dialect(Dialect):
    # The columns are without time zone, and sessions may differ in theirs.
    catalog = "pg_catalog."
    now = "(pg_catalog.statement_timestamp() AT TIME ZONE 'UTC')"
    clock = "(pg_catalog.clock_timestamp() AT TIME ZONE 'UTC')"
    key = '"key"'
    user = '"user"'
    hints = {
        **Dialect.hints,
        "computed_once": "OFFSET 0",
        # PostgreSQL does not know that "turn IS NULL" is constant. By due_time alone it would sort, or read all rows.
        "due_first": "table_name, status, turn, due_time",
    }

    def or_skip(self, column: str) -> str:
        return "ON CONFLICT DO NOTHING"

    def seconds(self, parameter: str) -> str:
        return f"{parameter} * INTERVAL '1 second'"

    def microseconds(self, count: str) -> str:
        return f"{count} * INTERVAL '1 microsecond'"

    def seconds_since(self, column: str) -> str:
        return f"GREATEST(EXTRACT(epoch FROM {self.now} - {column}), 0)::pg_catalog.float8"

    def moment(self, parameter: str) -> str:
        return f"CAST({parameter} AS timestamp)"

    def json_text(self, columns: dict[str, tuple[str, str]]) -> str:
        # This takes half the time of json_build_object. The names are in the order that jsonb gives them.
        names = sorted(columns, key=lambda name: (len(name), name))
        parts = [f"\"{name}\": ' || {self._to_json(*columns[name])} || '" for name in names]
        return f"('{{{', '.join(parts)}}}')"

    def json(self, text: str) -> str:
        return f"{text}::pg_catalog.jsonb"

    def json_as_text(self, column: str) -> str:
        return f"{column}::pg_catalog.text"

    @staticmethod
    def _to_json(column: str, kind: str) -> str:
        if kind == "text":
            # A cast of char(n) to text would drop the padding that the driver returns.
            return f"pg_catalog.to_json({column})::pg_catalog.text"
        text = f"{column}::pg_catalog.text"
        return text if kind in ("int", "bool") else f"'\"' || {text} || '\"'"

    def in_type(self, column: str, kind: str, type_: str) -> str:
        # An enum is text to JSON, whatever its type is called.
        return column if type_.startswith("enum") else f"{column}::{_with_schema(type_)}"

    def hash(self, json: str) -> str:
        # As char, like the column. A comparison with text would not use the index.
        digest = f"pg_catalog.sha256(pg_catalog.convert_to({json}, 'UTF8'))"
        return f"pg_catalog.encode(pg_catalog.substr({digest}, 1, 16), 'hex')::pg_catalog.bpchar"

    def key_column(self, json: str, name: str, kind: str, type_: str, declared: tuple[Any, ...]) -> str:
        # Without the length of the type: jobs of an older table of the same name might be cut to fit.
        text, (wanted,) = self.json_member(json, name), declared
        # A job of an older table of the same name may not fit. It must not hide the other jobs.
        fits = f"{text} ~ '{_PRINTED[kind]}'" if kind in _PRINTED else "TRUE"
        if type_.startswith("enum"):
            fits = f"{text} = ANY (pg_catalog.enum_range(NULL::{wanted})::pg_catalog.text[])"
        if kind == "int":
            fits = f"CASE WHEN {fits} THEN ({text})::numeric BETWEEN {_RANGES[wanted]} END"
        return f"CASE WHEN {fits} THEN ({text})::{wanted} END"

    def local_time(self, utc: str) -> str:
        return f"CAST(({utc}) AT TIME ZONE 'UTC' AS timestamp)"

    def utc_time(self, local: str) -> str:
        return f"(CAST({local} AS pg_catalog.timestamptz) AT TIME ZONE 'UTC')"

    def json_member(self, json: str, name: str) -> str:
        return f"{json} ->> '{name}'"

    def to_driver(self, kind: str, value: Any) -> Any:
        from psycopg2 import extensions

        if kind == "bool":
            return value
        if kind in _PYTHON:
            return _PYTHON[kind](value)
        casters = {"date": extensions.PYDATE, "datetime": extensions.PYDATETIME, "time": extensions.PYTIME}
        return casters[kind](value, None)


class _Connection(ConnectionStatements):
    begin = ("BEGIN ISOLATION LEVEL READ COMMITTED",)
    own_connection_id = "SELECT pg_catalog.pg_backend_pid()"
    own_user = "SELECT current_user"
    wait_little = "SET lock_timeout = '1s'"
    takes_changes = "SELECT NOT pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool"
    defers_signals = True

    _number = "pg_catalog.hashtextextended(%(name)s, 0)"
    take_lock = f"SELECT pg_catalog.pg_try_advisory_lock({_number})"
    give_back_lock = f"SELECT pg_catalog.pg_advisory_unlock({_number})"
    holder_of_lock = f"""
        SELECT 'process ' || pid || COALESCE(' of ' || usename, '') || COALESCE('@' || pg_catalog.host(client_addr), '')
        FROM pg_catalog.pg_locks JOIN pg_catalog.pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND granted AND objsubid = 1
          AND (classid::pg_catalog.int8 << 32) | objid::pg_catalog.int8 = {_number}"""


class _Errors(Errors):
    def reason_to_wait(self, error: BaseException) -> str | None:
        code = getattr(error, "pgcode", None)
        if code in _REASONS:
            return _REASONS[code]
        if not self.is_lost(error):
            return None
        return CROWDED if _CROWDED.search(str(error)) else NO_SERVER

    def is_transient(self, error: BaseException) -> bool:
        return getattr(error, "pgcode", None) in _TRANSIENT or self.reason_to_wait(error) is not None

    def is_lost(self, error: BaseException) -> bool:
        import psycopg2

        # The error of a broken connection has no code.
        without_code = isinstance(error, (psycopg2.OperationalError, psycopg2.InterfaceError)) and not error.pgcode
        return without_code or getattr(error, "pgcode", None) in _LOST

    def diagnose(self, error: BaseException) -> str | None:
        import psycopg2

        if not isinstance(error, psycopg2.Error):
            return None
        if error.pgcode == "42501":
            return "access"
        if error.pgcode in _CREDENTIALS or "authentication failed" in str(error):
            return "credentials"
        if (error.pgcode or "")[:2] in ("21", "22", "42"):
            return "query"
        return "unreachable" if self.is_lost(error) else None


class _Tables(TableStatements):
    find_tables = """
        SELECT relname, pg_catalog.obj_description(class.oid, 'pg_class')
        FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS space ON space.oid = relnamespace
        WHERE nspname = %(schema)s AND relname IN %(names)s"""
    column_types = """
        SELECT attname, pg_catalog.quote_ident(nspname) || '.' || pg_catalog.quote_ident(typname)
        FROM pg_catalog.pg_attribute JOIN pg_catalog.pg_type AS type ON type.oid = atttypid
             JOIN pg_catalog.pg_namespace AS space ON space.oid = typnamespace
        WHERE attrelid = pg_catalog.to_regclass(%(full_name)s) AND attnum > 0 AND NOT attisdropped"""
    set_comment = after_declare = "COMMENT ON TABLE {jobs} IS '{comment}'"
    may_write = """
        SELECT pg_catalog.has_table_privilege(%(jobs)s, 'INSERT') AND pg_catalog.has_table_privilege(%(jobs)s, 'UPDATE')
        """


class _Enqueue(EnqueueStatements):
    due_offset = "pg_catalog.ROW_NUMBER() OVER (ORDER BY {order}) * INTERVAL '1 microsecond'"
    # PostgreSQL may take a queue for short that has just become long, and then would read all of it.
    one_by_one = "OFFSET 0"
    # Until autovacuum has looked at the queue, the server would read all jobs of a table to find a few by their hashes.
    # If the user does not own the queue, the server only warns, and autovacuum has to do it.
    underestimates = """
        SELECT reltuples < %(count)s FROM pg_catalog.pg_class WHERE oid = CAST(%(jobs)s AS pg_catalog.regclass)"""
    look_at_queue = "ANALYZE (SKIP_LOCKED) {jobs} (table_name, key_hash, status, turn)"


class _Jobs(JobStatements):
    change_chosen = """
        UPDATE {jobs} AS job SET {changes} FROM ({chosen}) AS chosen
        WHERE chosen.key_hash = job.key_hash AND job.table_name = %(table)s
          AND job.status::pg_catalog.text IN %(statuses)s {also}"""


class _Workers(WorkerStatements):
    # The new row is made before its lock is waited for. So the row is locked first.
    heartbeat = """
        UPDATE {workers} AS worker SET last_heartbeat = {clock}, beats = beats + 1, lease = %(lease)s,
               state = %(state)s
        FROM (SELECT worker_id FROM {workers} WHERE worker_id = %(worker)s FOR UPDATE) AS locked
        WHERE worker.worker_id = locked.worker_id"""
    notify = "SELECT pg_catalog.pg_notify('djjobs', %(schema)s)"
    listen = "LISTEN djjobs"


class PostgreSQL(Engine):
    dialect = _Dialect()
    connection = _Connection()
    errors = _Errors()
    tables = _Tables()
    enqueue = _Enqueue()
    jobs = _Jobs()
    workers = _Workers()
