"""Numbers and their squares: as many jobs as a test likes, each over in no time."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datajoint as dj
from pipelines import BIGINT, INT, computed, keys_of, manual, rows_of

import djjobs
from djjobs.queue.tables import JobControl


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


class Standing:
    """A schema for the tests of a whole module; to declare the queue for each would take most of the time."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._last: Any = None

    def start_over(self, count: int = 0, make: Callable[..., None] = insert_square, **members: Any) -> Any:
        """Square as if its tables were new, with another make() and another policy."""
        if self._last is not None:
            if not self.schema.connection.is_connected:
                self.schema.connection.connect()
            control = JobControl(self.schema.connection, self.schema.database)
            queue = djjobs.jobs(self.schema), djjobs.runs(self.schema), control
            for table in (self._last(), *queue, self._last.Number()):
                table.delete_quick()
        self._last = squares(self.schema, count, make, **members)
        return self._last


@contextmanager
def standing_schema() -> Iterator[Standing]:
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    yield Standing(schema)
    if not schema.connection.is_connected:
        schema.connection.connect()
    schema.drop()


def made(table: Any) -> list[int]:
    """The numbers that are in the target."""
    return sorted(key["n"] for key in keys_of(table))


def rows_by_number(table: Any) -> dict[int, dict[str, Any]]:
    """The whole rows of a table's jobs."""
    return {row["key"]["n"]: row for row in rows_of(table.jobs)}


def statuses(table: Any) -> dict[int, str]:
    """The status of each number that has a job."""
    return {n: row["status"] for n, row in rows_by_number(table).items()}


def change_jobs(table: Any, numbers: Iterable[int], changes: str) -> None:
    """Change the rows of these numbers' jobs behind the queue's back."""
    rows = rows_by_number(table)
    hashes = ", ".join(f"'{rows[n]['key_hash']}'" for n in numbers)
    where = f"table_name = '{table.table_name}' AND key_hash IN ({hashes})"
    table.jobs.connection.query(f"UPDATE {table.jobs.full_table_name} SET {changes} WHERE {where}")


def another_connection() -> Any:
    """A second connection to the server of this run."""
    host, user, password = (dj.config[f"database.{name}"] for name in ("host", "user", "password"))
    port, use_tls = dj.config["database.port"], dj.config["database.use_tls"]
    return dj.Connection(host, user, password, port=port, use_tls=use_tls)


class Bystander:
    """Somebody else, with a connection of their own, who looks at jobs and changes them meanwhile."""

    def __init__(self, table: Any) -> None:
        self.connection = another_connection()
        self._jobs, self._table_name = table.jobs.full_table_name, table.table_name

    def row(self, n: int) -> tuple[Any, ...] | None:
        """The whole row of a number's job."""
        return self.connection.query(f"SELECT * FROM {self._jobs} {self._where(n)}").fetchone()

    def change(self, n: int, changes: str) -> None:
        self.connection.query(f"UPDATE {self._jobs} SET {changes} {self._where(n)}")

    def remove(self, n: int) -> None:
        self.connection.query(f"DELETE FROM {self._jobs} {self._where(n)}")

    def _where(self, n: int) -> str:
        mine = f"WHERE table_name = '{self._table_name}'"
        key = "`key`" if "`" in self._jobs else '"key"'
        rows = self.connection.query(f"SELECT key_hash, {key} FROM {self._jobs} {mine}").fetchall()
        keys = {h: json.loads(document) if isinstance(document, str) else document for h, document in rows}
        return f"{mine} AND key_hash = '{next((h for h in keys if keys[h] == {'n': n}), '')}'"

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *_: Any) -> None:
        self.connection.close()


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

    def numbers(self) -> list[int]:
        """The first word of each line."""
        return [int(words[0]) for words in self.lines()]


def recording(log: CallLog, make: Callable[..., None] = insert_square) -> Callable[..., None]:
    """A make() that first records its number and its process."""

    def recording_make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"], os.getpid())
        make(self, key)

    return recording_make
