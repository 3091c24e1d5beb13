"""What a lab knows from DataJoint's own populate: what make() raises, workers of both kinds, schemas made anew."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datajoint as dj
import pytest
from helpers import wait_for
from pipelines import forked, job_counts
from workloads.squares import another_connection, insert_square, made, rows_by_number, squares, statuses

import djjobs
from djjobs.queue.queue import Queue
from djjobs.queue.tables import QueueTable
from djjobs.worker import WorkerOptions, run_worker

TESTS = Path(__file__).resolve().parent
QUEUE_TABLES = {"~jobs", "~runs", "~jobs_control", "~workers", "~sightings"}


# -- make() raises what ends a process --------------------------------------------------------------------------

ENDS = pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit("no license"), "SystemExit: no license"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError("gone"), "CancelledError: gone"),
        (GeneratorExit(), "GeneratorExit"),
    ],
    ids=["sys.exit(text)", "sys.exit(number)", "KeyboardInterrupt", "CancelledError", "GeneratorExit"],
)


def raising_at(n: int, error: BaseException) -> Callable[..., None]:
    """A make() that raises this for one number, with its row inserted."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == n:
            raise error

    return make


def assert_recorded(Square: Any, n: int, message: str) -> None:
    """The job of this number is an error, as DataJoint would record it."""
    row = rows_by_number(Square)[n]
    assert (row["status"], row["error_message"], row["attempt"]) == ("error", message, 1)
    assert "raise error" in str(row["error_stack"])


@ENDS
def test_a_make_that_ends_the_process_is_recorded_and_ends_the_caller(start: Any, error: Any, message: str) -> None:
    Square = start(3, raising_at(2, error))
    with pytest.raises(BaseException) as caught:
        Square.populate(reserve_jobs=True)
    assert caught.value is error
    assert made(Square()) == [1]
    assert statuses(Square) == {2: "error", 3: "scheduled"}
    assert_recorded(Square, 2, message)
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


def test_sys_exit_is_raised_even_if_errors_are_suppressed(start: Any) -> None:
    error = SystemExit("no license")
    Square = start(3, raising_at(2, error))
    with pytest.raises(SystemExit) as caught:
        Square.populate(reserve_jobs=True, suppress_errors=True)
    assert caught.value is error
    assert statuses(Square) == {2: "error", 3: "scheduled"}


@pytest.mark.parametrize("as_objects", [False, True], ids=["as text", "as objects"])
def test_a_keyboard_interrupt_of_makes_own_is_suppressed_as_errors_are(start: Any, as_objects: bool) -> None:
    error = KeyboardInterrupt()
    Square = start(3, raising_at(2, error))
    result = Square.populate(reserve_jobs=True, suppress_errors=True, return_exception_objects=as_objects)
    assert result == {"success_count": 2, "error_list": [({"n": 2}, error if as_objects else "KeyboardInterrupt")]}
    assert_recorded(Square, 2, "KeyboardInterrupt")


@pytest.mark.parametrize("suppress_errors", [False, True], ids=["raise errors", "suppress errors"])
@ENDS
def test_what_ends_a_process_of_several_ends_the_caller(
    start: Any, error: Any, message: str, suppress_errors: bool
) -> None:
    Square = start(6, raising_at(2, error))
    if suppress_errors and isinstance(error, KeyboardInterrupt):
        result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
        assert result == {"success_count": 5, "error_list": [({"n": 2}, message)]}
    else:
        with pytest.raises(type(error)) as caught:
            Square.populate(reserve_jobs=True, processes=2, suppress_errors=suppress_errors)
        assert caught.value.args == error.args
    assert_recorded(Square, 2, message)
    assert job_counts(Square).keys() <= {"error", "scheduled"}


def test_an_exit_that_cannot_be_pickled_is_an_exit_still(start: Any) -> None:
    class Quit(SystemExit):
        pass

    Square = start(2, raising_at(1, Quit("no license")))
    with pytest.raises(SystemExit, match=r"^Quit: no license$"):
        Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    assert statuses(Square)[1] == "error"


@ENDS
def test_a_worker_goes_on_after_a_make_that_wants_to_end_it(start: Any, error: Any, message: str) -> None:
    Square = start(4, raising_at(2, error))
    with forked(Square.Number, 1, lambda _: run_worker((Square,), WorkerOptions(drain=True))) as (child,):
        assert child.result() == 1
    assert made(Square()) == [1, 3, 4]
    assert_recorded(Square, 2, message)
    assert job_counts(Square) == {"error": 1}


def test_an_exit_is_tried_again_where_the_table_says_so(start: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        if len(calls) == 1:
            raise SystemExit("no license")
        insert_square(self, key)

    policy = {"max_attempts": 2, "retry_on": SystemExit, "backoff": 0}
    assert start(1, make, **policy).populate(reserve_jobs=True) == {"success_count": 1, "error_list": []}
    calls.clear()
    Square = start(1, make, **{**policy, "retry_on": Exception})
    with pytest.raises(SystemExit):
        Square.populate(reserve_jobs=True)
    assert statuses(Square) == {1: "error"}


# -- workers with and without djjobs on one table ---------------------------------------------------------------


@pytest.fixture
def colleague(server: Any) -> Iterator[Any]:
    """Somebody else's connection."""
    connection = another_connection()
    yield connection
    connection.close()


def overtaken_at(n: int, colleague: Any, error: BaseException | None = None) -> Callable[..., None]:
    """A make() during which somebody else commits the same result; it fails over that, or with this error."""

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == n:
            colleague.query(f"INSERT INTO {self.full_table_name} (n, square) VALUES ({n}, {n * n})")
            if error is not None:
                raise error
        insert_square(self, key)

    return make


@pytest.mark.parametrize("kept", [False, True], ids=["", "keep_completed"])
@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["duplicate", "other error"])
def test_a_key_that_somebody_else_made_meanwhile_is_no_error(
    start: Any, colleague: Any, caplog: pytest.LogCaptureFixture, error: Any, kept: bool
) -> None:
    Square = start(3, overtaken_at(2, colleague, error), keep_completed=kept)
    with caplog.at_level(logging.INFO, "djjobs"):
        assert Square.populate(reserve_jobs=True) == {"success_count": 2, "error_list": []}
    assert made(Square()) == [1, 2, 3]
    assert statuses(Square) == ({1: "success", 2: "success", 3: "success"} if kept else {})
    told = [record for record in caplog.records if "somebody else made it meanwhile" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.INFO]


def test_a_key_that_somebody_else_made_meanwhile_is_not_tried_again(start: Any, colleague: Any) -> None:
    Square = start(2, overtaken_at(1, colleague), max_attempts=3, backoff=3600)
    assert Square.populate(reserve_jobs=True) == {"success_count": 1, "error_list": []}
    assert statuses(Square) == {}


def test_an_exit_after_somebody_else_made_the_key_leaves_no_error_and_is_raised(start: Any, colleague: Any) -> None:
    Square = start(2, overtaken_at(1, colleague, SystemExit("no license")))
    with pytest.raises(SystemExit, match="no license"):
        Square.populate(reserve_jobs=True)
    assert made(Square()) == [1]
    assert statuses(Square) == {2: "scheduled"}


def test_a_job_that_was_cancelled_stays_so_though_somebody_else_made_its_key(start: Any, colleague: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        jobs = self.full_table_name.replace(self.table_name, "~jobs")
        colleague.query(f"UPDATE {jobs} SET cancel_request = 'ask' WHERE status = 'reserved'")
        overtaken_at(1, colleague)(self, key)

    Square = start(1, make)
    assert Square.populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}
    assert statuses(Square) == {1: "cancelled"}


def test_an_error_is_recorded_where_the_target_cannot_be_looked_at(schema: Any, colleague: Any) -> None:
    """Somebody dropped the table under our feet."""

    def make(self: Any, key: dict[str, Any]) -> None:
        self.connection.cancel_transaction()
        colleague.query(f"DROP TABLE {self.full_table_name}")
        insert_square(self, key)

    Square = squares(schema, 1, make)
    jobs = Square.jobs.connection, Square.jobs.full_table_name
    with pytest.raises(dj.errors.DataJointError):
        Square.populate(reserve_jobs=True)
    assert list(jobs[0].query(f"SELECT status FROM {jobs[1]}").fetchall()) == [("error",)]


def test_a_worker_of_datajoints_own_beside_ours_leaves_no_error(
    start: Any, engine: str, datajoint_generation: int
) -> None:
    """Both have the first key at the same moment, and the other one is faster."""
    native = []
    # To DataJoint 0.14 the keys in our queue are JSON, but on MariaDB a text, into which it puts none.
    reserve = "" if datajoint_generation == 0 and engine == "mariadb" else "reserve"

    def make(self: Any, key: dict[str, Any]) -> None:
        if not native:
            command = [sys.executable, "-m", "workloads.native", self.database, reserve]
            native.append(subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False))
        insert_square(self, key)

    Square = start(4, make)
    assert Square.populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}
    assert native[0].returncode == 0, native[0].stderr
    assert made(Square()) == [1, 2, 3, 4]
    assert job_counts(Square) == {}


# -- a schema that is dropped and made anew ---------------------------------------------------------------------


@pytest.fixture
def name(server: Any) -> Iterator[str]:
    """A name for schemas that the test makes and drops itself."""
    name = f"djjobs_test_{secrets.token_hex(4)}"
    yield name
    dj.Schema(name).drop()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(djjobs.settings, "events", True)
    yield
    monkeypatch.setattr(djjobs.settings, "events", False)
    djjobs.flush_events()


def tables_of_queue(connection: Any, name: str) -> set[str]:
    """Which tables of its queue a schema has."""
    sql = f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{name}'"
    return {table for (table,) in connection.query(sql).fetchall()} & QUEUE_TABLES


def test_a_schema_is_dropped_and_made_anew_again_and_again(name: str, colleague: Any, events: None) -> None:
    """In each round the events' thread is just declaring the queue when the populate begins."""
    for _ in range(4):
        schema = dj.Schema(name)
        Square = squares(schema, 3)
        wait_for(lambda: tables_of_queue(colleague, name), every=0.002)
        Square.populate(reserve_jobs=True)
        assert made(Square()) == [1, 2, 3]
        assert job_counts(Square) == {}
        schema.drop()


def test_a_queue_that_somebody_is_just_declaring_is_waited_for(
    name: str, colleague: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Square = squares(dj.Schema(name), 1)
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
    Square.connection.schemas[name].drop()
    Square = squares(dj.Schema(name), 3)
    declare, may_go_on, pauses = QueueTable.declare, threading.Event(), []

    def declare_slowly(table: QueueTable, *arguments: Any, **options: Any) -> None:
        declare(table, *arguments, **options)
        if threading.current_thread() is declaring:
            pauses.append(table.table_name)
            may_go_on.wait(0.3)

    monkeypatch.setattr(QueueTable, "declare", declare_slowly)
    declaring = threading.Thread(target=lambda: Queue.of(colleague, name))
    declaring.start()
    try:
        wait_for(lambda: "~jobs" in tables_of_queue(Square.connection, name), every=0.01)
        assert Square.populate(reserve_jobs=True)["success_count"] == 3
    finally:
        may_go_on.set()
        declaring.join()
    assert set(pauses) == QUEUE_TABLES and len(pauses) == len(QUEUE_TABLES)


def test_a_table_of_the_queue_that_was_dropped_is_declared_again(schema: Any) -> None:
    Square = squares(schema, 2)
    assert Square.populate(reserve_jobs=True)["success_count"] == 2
    for table in sorted(QUEUE_TABLES - {"~jobs"}):
        Square.connection.query(f"DROP TABLE {Square.jobs.full_table_name.replace('~jobs', table)}")
        Square.Number.insert([{"n": len(Square.Number()) + 1}])
        assert int(Square.schedule_jobs(min_scheduling_interval=0)) == 1
        assert Square.populate(reserve_jobs=True)["success_count"] == 1


# -- what is said of errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_suppressed_errors_are_logged(start: Any, caplog: pytest.LogCaptureFixture, processes: int) -> None:
    def fail(self: Any, key: dict[str, Any]) -> None:
        raise ValueError(f"no signal in {key['n']}")

    Square = start(2, make=fail)
    with caplog.at_level(logging.INFO, "djjobs"):
        Square.populate(reserve_jobs=True, suppress_errors=True, processes=processes)
    said = sorted(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert said == [f"Square {{'n': {n}}}: ValueError: no signal in {n}" for n in (1, 2)]


@pytest.mark.only(datajoint=0)
def test_an_error_of_a_native_worker_that_was_overtaken_goes_with_the_next_scheduling(start: Any) -> None:
    from datajoint.hash import key_hash

    Square = start(3)
    Square.populate("n = 1", reserve_jobs=True)
    jobs = Square.jobs.full_table_name
    for n in (1, 2):
        values = f"'{Square.table_name}', '{key_hash({'n': n})}', 'error', '{{\"n\": {n}}}', 'DuplicateError'"
        Square.connection.query(
            f"INSERT INTO {jobs} (table_name, key_hash, status, `key`, error_message) VALUES ({values})"
        )
    Square.schedule_jobs(min_scheduling_interval=0)
    # The error of 2 may be a real one: it is heeded.
    assert statuses(Square) == {2: "error", 3: "scheduled"}
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
