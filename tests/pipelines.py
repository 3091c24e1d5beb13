"""The small pipelines that the tests run, and processes to run them in.

A factory declares its tables in the schema it is given.
"""

from __future__ import annotations

import multiprocessing
import re
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datajoint as dj

import djjobs
from djjobs.queue.tables import JobControl

MODERN = int(dj.__version__.split(".")[0]) >= 2
# DataJoint 2 has types of its own and warns about native ones, which are all that 0.14 knows.
INT, BIGINT, FLOAT, BLOB = (
    ("int32", "int64", "float64", "<blob>") if MODERN else ("int", "bigint", "double", "longblob")
)


def manual(schema: Any, definition: str, name: str = "Source") -> Any:
    """A Manual table of this definition."""
    return schema(type(name, (dj.Manual,), {"definition": definition}))


def computed(schema: Any, definition: str, parents: dict[str, Any], name: str = "Result", **members: Any) -> Any:
    """A Computed table with the mixin; `parents` are the classes that its definition names.

    Without a `make` among the members, make() inserts the key and nothing else.
    """
    members.setdefault("make", lambda self, key: self.insert1(key))
    table = type(name, (djjobs.JobsMixin, dj.Computed), {"definition": definition, **members})
    return schema(table, context=parents)


def redeclared(schema: Any, before: str, rows: list[tuple[Any, ...]], after: str) -> tuple[Any, Any]:
    """A source and a Computed table that had other keys once, and jobs of these rows that were left in the queue."""

    def declare(definition: str) -> tuple[Any, Any]:
        source = manual(schema, definition, "Changed")
        return source, computed(schema, "-> Changed", {"Changed": source}, "OfChanged")

    source, result = declare(before)
    source.insert(rows)
    assert int(result.schedule_jobs()) == len(rows)
    result().drop_quick()
    source().drop_quick()
    return declare(after)


class Lab:
    """Subject and Session, filled, and the Computed table Spectrum with the mixin.

    Subjects are "m0", "m1", ...; each has sessions 0, 1, ... make() stores twice the session's number
    as `power`.
    """

    def __init__(self, schema: Any, **members: Any) -> None:
        self.schema = schema
        self.Subject = manual(schema, "subject : varchar(16)", "Subject")
        self.Session = schema(type("Session", (dj.Manual,), {"definition": SESSION}), context={"Subject": self.Subject})

        def make(table: Any, key: dict[str, Any]) -> None:
            table.insert1({**key, "power": 2 * key["session"]})

        definition = f"""
        -> Session
        ---
        power : {FLOAT}
        """
        members.setdefault("make", make)
        self.Spectrum = computed(schema, definition, {"Session": self.Session}, "Spectrum", **members)

    def fill(self, subjects: int, each: int) -> Lab:
        rows = [(f"m{subject}", session) for subject in range(subjects) for session in range(each)]
        self.Subject.insert([{"subject": f"m{subject}"} for subject in range(subjects)])
        self.Session.insert(
            [
                {"subject": name, "session": session, "session_date": f"2024-05-{session % 28 + 1:02}"}
                for name, session in rows
            ]
        )
        return self

    def start_over(self, subjects: int = 3, each: int = 4) -> Lab:
        """As if the tables were new; declaring them again would take a hundred times as long."""
        if self.schema.connection.in_transaction:
            self.schema.connection.cancel_transaction()
        for table in (self.Spectrum(), djjobs.jobs(self.schema), self.control, self.Session(), self.Subject()):
            table.delete_quick()
        return self.fill(subjects, each)

    def set_status(self, status: str, **values: Any) -> None:
        """Give jobs a status by hand, as if a worker had: those whose keys have these values."""
        jobs = djjobs.jobs(self.schema)
        for row in rows_of(self.Spectrum.jobs):
            if values.items() <= row["key"].items():
                jobs.update1({**{name: row[name] for name in jobs.primary_key}, "status": status})

    @property
    def control(self) -> Any:
        """`~jobs_control`."""
        return JobControl(self.schema.connection, self.schema.database)


def no_signal_in_session_3(self: Any, key: dict[str, Any]) -> None:
    """A make() of Spectrum that fails for each subject's session 3."""
    if key["session"] == 3:
        raise ValueError("no signal")
    self.insert1({**key, "power": key["session"]})


SESSION = f"""
-> Subject
session : {INT}
---
session_date = null : date
"""


def sessions(schema: Any, subjects: int = 3, each: int = 4, **members: Any) -> Lab:
    """A Lab in this schema. `members` go into Spectrum's class: `make`, `key_source`, ..."""
    return Lab(schema, **members).fill(subjects, each)


@contextmanager
def standing_lab(**members: Any) -> Iterator[Lab]:
    """A Lab in a schema of its own, for the tests of a whole module: each calls `start_over` first."""
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    yield Lab(schema, **members)
    if not schema.connection.is_connected:
        schema.connection.connect()
    if schema.connection.in_transaction:
        schema.connection.cancel_transaction()
    schema.drop()


def keys_of(query: Any) -> list[dict[str, Any]]:
    """The keys of a query as DataJoint gives them."""
    return query.keys() if MODERN else query.fetch("KEY")


def rows_of(query: Any) -> list[dict[str, Any]]:
    """The rows of a query as DataJoint gives them, in the order of the primary key."""
    rows = query.to_dicts() if MODERN else query.fetch(as_dict=True)
    return sorted(rows, key=lambda row: [str(row[name]).zfill(10) for name in query.primary_key])


def job_counts(table: Any) -> dict[str, int]:
    """How many jobs a table has of each status that occurs."""
    counts: dict[str, int] = {}
    for row in rows_of(table.jobs):
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return counts


@contextmanager
def statements_of(connection: Any) -> Iterator[list[str]]:
    """Record the statements that go over a connection meanwhile."""
    recorded: list[str] = []
    query = connection.query

    def record(sql: str, *arguments: Any, **options: Any) -> Any:
        recorded.append(sql)
        return query(sql, *arguments, **options)

    connection.query = record
    try:
        yield recorded
    finally:
        del connection.query


def evaluations(statements: list[str]) -> list[str]:
    """The statements that evaluate key_source for the queue."""
    return [sql for sql in statements if re.match(r"\s*INSERT\b.*~jobs\W.*SELECT", sql, re.DOTALL)]


def in_processes(schema: Any, count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call work(0), work(1), ... at the same moment, each in a process with a connection of its own.

    Returns what they returned, in this order; an exception in one of them is an error here.
    """
    with forked(schema, count, work) as children:
        results = [child.result() for child in children]
    return results


class Child:
    """A forked process; `result` waits for what its work returns."""

    def __init__(self, context: Any, schema: Any, barrier: Any, work: Callable[[int], Any], number: int) -> None:
        self._answer, send = context.Pipe(duplex=False)
        self.process = context.Process(target=self._run, args=(send, schema, barrier, work, number))
        self.process.start()
        send.close()

    @staticmethod
    def _run(send: Any, schema: Any, barrier: Any, work: Callable[[int], Any], number: int) -> None:
        try:
            schema.connection.connect()
            barrier.wait(60)
            send.send((True, work(number)))
        except BaseException:
            send.send((False, traceback.format_exc()))

    def result(self, timeout: float = 60) -> Any:
        if not self._answer.poll(timeout):
            raise AssertionError(f"a process was still at work after {timeout} s")
        fine, answer = self._answer.recv()
        if not fine:
            raise AssertionError(f"in a process:\n{answer}")
        return answer


@contextmanager
def forked(schema: Any, count: int, work: Callable[[int], Any]) -> Iterator[list[Child]]:
    """Processes at work, for those who want to look on meanwhile; afterwards they are gone."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)
    # two processes on one connection would read each other's answers
    schema.connection.close()
    children = [Child(context, schema, barrier, work, number) for number in range(count)]
    try:
        schema.connection.connect()
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.join()
