"""MySQL 8 and MariaDB 10.6, and newer."""

from __future__ import annotations

import decimal
import re
from typing import Any

import pymysql
from pymysql import converters

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
from .tables import LegacyStatements, TableStatements
from .workers import WorkerStatements

_DEADLOCK, _LOCK_TIMEOUT = 1213, 1205
_CROWDED = {1040, 1203, 1226}
_UNREACHABLE = {2002, 2003, 2005} | _CROWDED
#: The server is gone or shuts down; somebody killed the connection, or it was idle for too long.
_LOST = {0, 1053, 1927, 2006, 2013, 2014, 2055, 3169, 4031} | _UNREACHABLE
_REASONS = {
    **dict.fromkeys((1290, 1792, 1836), READ_ONLY),
    **dict.fromkeys((1021, 1114), DISK_FULL),
    **dict.fromkeys((1969, 3024), STATEMENT_TIMEOUT),
    _LOCK_TIMEOUT: LOCKED,
    **dict.fromkeys(_LOST, NO_SERVER),
    **dict.fromkeys(_CROWDED, CROWDED),
}
_ACCESS = {1044, 1142, 1143, 1227, 1370, 1410}
_CREDENTIALS = {1045, 1698}
#: Wrong values, unknown functions, several rows or columns instead of one, ambiguous names, collations that cannot be
#: compared, numbers that are too large.
_QUERY = {1046, 1052, 1111, 1210, 1222, 1241, 1242, 1267, 1292, 1305, 1366, 1411, 1525, 1582, 1630, 1690}
#: Invalid JSON and invalid regular expressions.
_QUERY |= {1139, 3141, 3143, *range(3685, 3700)}


class _Dialect(Dialect):
    now = "UTC_TIMESTAMP(6)"
    # SYSDATE() is the time at which it is called, in the time zone of the session. The others are the statement's.
    clock = "(UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND)"
    key = "`key`"
    user = "`user`"
    hints = {
        **Dialect.hints,
        # Other indexes fit the WHERE clause, too. The server must not take one of them and sort.
        "use_order_index": "FORCE INDEX (claim_in_order)",
        "use_primary": "FORCE INDEX (PRIMARY)",
        # Memory for the hash table of the queue. The keys are compared with it.
        "join_memory": "/*+ SET_VAR(join_buffer_size=33554432) */ ",
    }

    def or_skip(self, column: str) -> str:
        return f"ON DUPLICATE KEY UPDATE {column} = VALUES({column})"

    def seconds(self, parameter: str) -> str:
        return f"INTERVAL {parameter} * 1000000 MICROSECOND"

    def microseconds(self, count: str) -> str:
        return f"INTERVAL {count} MICROSECOND"

    def seconds_since(self, column: str) -> str:
        # Divided by a float: the driver would make a Decimal of anything else.
        return f"GREATEST(TIMESTAMPDIFF(MICROSECOND, {column}, {self.now}), 0) / 1e6"

    def moment(self, parameter: str) -> str:
        return f"CAST({parameter} AS DATETIME(6))"

    def json_text(self, columns: dict[str, tuple[str, str]]) -> str:
        # This takes a third of the time of JSON_OBJECT. The names are in the order that MySQL gives them.
        names = sorted(columns, key=lambda name: (len(name), name))
        parts = [f"\"{name}\": ', {self._to_json(*columns[name])}, '" for name in names]
        return f"CONCAT('{{{', '.join(parts)}}}')"

    def json(self, text: str) -> str:
        return text

    def json_as_text(self, column: str) -> str:
        return column

    @staticmethod
    def _to_json(column: str, kind: str) -> str:
        if kind == "int":
            return column
        if kind == "text":
            return f"JSON_QUOTE(CONVERT({column} USING utf8mb4))"
        text = f"CAST({column} AS CHAR(80))"  # MySQL takes a double to be shorter than it can be
        if kind == "uuid":
            text = f"LOWER(HEX({column}))"
            for position in (9, 14, 19, 24):
                text = f"INSERT({text}, {position}, 0, '-')"
        return f"'\"', {text}, '\"'"

    def in_type(self, column: str, kind: str, type_: str) -> str:
        precision = re.search(r"\(.*\)", type_)
        casts = {
            "int": "DECIMAL(65, 0)",  # prints as an integer does, also above 2**63
            "decimal": f"DECIMAL{precision.group() if precision else '(10, 0)'}",
            "datetime": f"DATETIME{precision.group() if precision else ''}",
            "time": f"TIME{precision.group() if precision else ''}",
            "date": "DATE",
            "float": "DOUBLE",
        }
        return f"CAST({column} AS {casts[kind]})" if kind in casts else column

    def hash(self, json: str) -> str:
        # As ascii, like the column: compared in another character set it would find no index.
        return f"CONVERT(LEFT(SHA2({json}, 256), 32) USING ascii)"

    def key_column(self, json: str, name: str, kind: str, type_: str, declared: tuple[Any, ...]) -> str:
        text = self.json_member(json, name)
        if kind == "text":
            character_set, collation = declared
            return f"CONVERT({text} USING {character_set}) COLLATE {collation}" if collation else text
        if kind == "int":
            return f"CAST({text} AS {'UNSIGNED' if 'unsigned' in type_ else 'SIGNED'})"
        if kind == "float":
            return f"({text} + 0e0)"
        if kind == "uuid":
            return f"UNHEX(REPLACE({text}, '-', ''))"
        return self.in_type(text, kind, type_)

    def local_time(self, utc: str) -> str:
        return f"CONVERT_TZ({utc}, '+00:00', @@session.time_zone)"

    def utc_time(self, local: str) -> str:
        return f"CONVERT_TZ({local}, @@session.time_zone, '+00:00')"

    def json_member(self, json: str, name: str) -> str:
        return f"JSON_UNQUOTE(JSON_EXTRACT({json}, '$.{name}'))"

    def to_driver(self, kind: str, value: Any) -> Any:
        return _DRIVER.get(kind, str)(value)

    def quoted(self, kind: str, text: str) -> str:
        return f"X'{text.replace('-', '')}'" if kind == "uuid" else super().quoted(kind, text)


class _Connection(ConnectionStatements):
    # Under REPEATABLE READ a locking read locks the gaps too and keeps others from inserting.
    begin = ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION")
    own_connection_id = "SELECT CONNECTION_ID()"
    own_user = "SELECT USER()"
    # The second one is for the locks of LOCK TABLES and ALTER TABLE, which are kept outside InnoDB.
    wait_little = "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1"
    # MySQL has a number there, MariaDB a word.
    takes_changes = "SELECT @@global.read_only IN ('0', 'OFF')"

    take_lock = "SELECT COALESCE(GET_LOCK(%(name)s, 1), 0)"
    give_back_lock = "SELECT RELEASE_LOCK(%(name)s)"
    holder_of_lock = """
        SELECT CONCAT('connection ', IS_USED_LOCK(%(name)s), COALESCE(
            (SELECT CONCAT(' of ', user, '@', host) FROM information_schema.processlist
             WHERE id = IS_USED_LOCK(%(name)s)), ''))"""
    longest_lock = 64


class _Errors(Errors):
    def reason_to_wait(self, error: BaseException) -> str | None:
        if not isinstance(error, pymysql.MySQLError):
            return None
        # 1290 names any option of the server that forbids a statement.
        is_other = _code(error) == 1290 and "read" not in str(error)
        return None if is_other else _REASONS.get(_code(error))

    def is_transient(self, error: BaseException) -> bool:
        return _is_deadlock(error) or self.reason_to_wait(error) is not None

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, pymysql.MySQLError) and _code(error) in _LOST

    def diagnose(self, error: BaseException) -> str | None:
        if not isinstance(error, pymysql.MySQLError):
            return None
        code = _code(error)
        if code in _ACCESS:
            return "access"
        if code in _CREDENTIALS:
            return "credentials"
        if code in _QUERY:
            return "query"
        return "unreachable" if code in _LOST else None


def _is_deadlock(error: BaseException) -> bool:
    return isinstance(error, pymysql.MySQLError) and _code(error) == _DEADLOCK


def _code(error: BaseException) -> Any:
    return error.args[0] if error.args else None


_DRIVER = {
    "int": int,
    "float": float,
    "decimal": decimal.Decimal,
    "date": converters.convert_date,
    "datetime": converters.convert_datetime,
    "time": converters.convert_timedelta,
}


class _Tables(TableStatements):
    find_tables = """
        SELECT table_name, table_comment FROM information_schema.tables
        WHERE table_schema = %(schema)s AND table_name IN %(names)s"""
    # The schema's default may be latin1, and a comparison across character sets uses no index.
    ascii = "CHARACTER SET ascii COLLATE ascii_bin"
    unicode = "CHARACTER SET utf8mb4"
    after_declare = """
        ALTER TABLE {jobs} DEFAULT CHARACTER SET utf8mb4, {modify_columns},
            RENAME INDEX table_name TO claim_in_order,
            COMMENT = '{comment}'"""
    set_comment = "ALTER TABLE {jobs} COMMENT = '{comment}'"
    any_language = "ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"

    column_types = """
        SELECT column_name, character_set_name, collation_name FROM information_schema.columns
        WHERE table_schema = %(schema)s AND table_name = %(table)s"""


class _Enqueue(EnqueueStatements):
    # If no index fits, MySQL makes a hash table of the queue in memory. MariaDB cannot do that and needs the index.
    queued_at_once = "queued.table_name IN (%(table)s, '') /*M! AND queued.table_name = %(table)s */"
    # If only the new keys were counted, MySQL would first write all of them to a temporary table.
    numbered = ", ROW_NUMBER() OVER (ORDER BY {order}) AS _number"
    due_offset = "INTERVAL todo._number MICROSECOND"


class _Jobs(JobStatements):
    change_chosen = """
        UPDATE {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        SET {changes} WHERE job.table_name = %(table)s AND job.status IN %(statuses)s {also}"""


class _Legacy(LegacyStatements):
    lock_jobs = "LOCK TABLES {jobs} WRITE"
    unlock_jobs = "UNLOCK TABLES"
    add_json_key = "ALTER TABLE {jobs} ADD key_json json DEFAULT NULL"
    legacy_keys = "SELECT table_name, key_hash, {key} FROM {jobs} WHERE key_json IS NULL"
    # A timestamp column that changes by itself must not.
    store_json_key = """
        UPDATE {jobs} SET key_json = %(json)s, timestamp = timestamp
        WHERE table_name = %(table)s AND key_hash = %(key_hash)s"""
    replace_legacy_columns = """
        ALTER TABLE {jobs} DEFAULT CHARACTER SET utf8mb4, DROP {key}, {columns},
            ADD INDEX claim_in_order (table_name, status, turn, due_time, run_id),
            COMMENT = '{comment}'"""
    stored_key = "CAST(`key` AS CHAR CHARACTER SET utf8mb4)"
    rehash_legacy_rows = """
        UPDATE IGNORE {jobs} {use_order_index} SET key_hash = {hash}, created_time = {now}, turn = priority
        WHERE table_name = %(table)s AND status IN ('error', 'ignore') AND turn IS NULL
          AND created_time IS NULL AND {key} IS NOT NULL"""


class MySQL(Engine):
    dialect = _Dialect()
    connection = _Connection()
    errors = _Errors()
    tables = _Tables()
    enqueue = _Enqueue()
    jobs = _Jobs()
    workers = WorkerStatements()
    legacy = _Legacy()
