"""Numbers and their squares: as many jobs as a test likes, each over in no time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datajoint as dj
from pipelines import BIGINT, INT, computed, keys_of, manual, rows_of

import djjobs


def insert_square(self: Any, key: dict[str, Any]) -> None:
    """The usual make()."""
    self.insert1({**key, "square": key["n"] ** 2})


def squares(schema: Any, count: int = 0, make: Callable[..., None] = insert_square, **members: Any) -> Any:
    """The Computed table Square over the numbers 1 to `count`."""
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert([{"n": n} for n in range(1, count + 1)])
    definition = f"""
    -> Number
    ---
    square : {BIGINT}
    """
    return computed(schema, definition, {"Number": Number}, "Square", make=make, Number=Number, **members)


def made(table: Any) -> list[int]:
    """The numbers that are in the target."""
    return sorted(key["n"] for key in keys_of(table))


def rows_by_number(table: Any) -> dict[int, dict[str, Any]]:
    """The whole rows of a table's jobs."""
    return {row["key"]["n"]: row for row in rows_of(table.jobs)}


def statuses(table: Any) -> dict[int, str]:
    """The status of each number that has a job."""
    return {n: row["status"] for n, row in rows_by_number(table).items()}


def change_jobs(table: Any, numbers: Any, changes: str, connection: Any = None) -> None:
    """Change the rows of these numbers' jobs behind the queue's back."""
    rows = rows_by_number(table)
    hashes = ", ".join(f"'{rows[n]['key_hash']}'" for n in numbers)
    jobs = table.jobs.full_table_name
    where = f"table_name = '{table.table_name}' AND key_hash IN ({hashes})"
    (connection or dj.conn()).query(f"UPDATE {jobs} SET {changes} WHERE {where}")


def another_connection() -> Any:
    """A second connection to the server of this run."""
    host, user, password = (dj.config[f"database.{name}"] for name in ("host", "user", "password"))
    port, use_tls = dj.config["database.port"], dj.config["database.use_tls"]
    return dj.Connection(host, user, password, port=port, use_tls=use_tls)


class Thief:
    """Another worker, with a connection of its own, that takes jobs away from whoever runs them."""

    def __init__(self, table: Any) -> None:
        self._jobs, self._table_name = table.jobs.full_table_name, table.table_name
        self._connection = another_connection()

    def take(self, changes: str = "claim = claim + 1") -> None:
        """Take all jobs that are running now."""
        reserved = f"table_name = '{self._table_name}' AND status = 'reserved'"
        self._connection.query(f"UPDATE {self._jobs} SET {changes} WHERE {reserved}")

    def remove(self) -> None:
        """Remove the rows of all jobs that are running now."""
        reserved = f"table_name = '{self._table_name}' AND status = 'reserved'"
        self._connection.query(f"DELETE FROM {self._jobs} WHERE {reserved}")

    def __enter__(self) -> Thief:
        return self

    def __exit__(self, *_: Any) -> None:
        self._connection.close()


class CallLog:
    """Who called what, in a file. One write appends one line, so no process loses or splits another's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def record(self, *words: Any) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, (" ".join(map(str, words)) + "\n").encode())
        finally:
            os.close(file)

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()]


def logging_make(log: CallLog) -> Callable[..., None]:
    """A make() that first records its number and process."""

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"], os.getpid())
        insert_square(self, key)

    return make


__all__ = [
    "CallLog",
    "Thief",
    "another_connection",
    "change_jobs",
    "djjobs",
    "insert_square",
    "logging_make",
    "made",
    "rows_by_number",
    "squares",
    "statuses",
]
