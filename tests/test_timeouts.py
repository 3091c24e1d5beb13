"""Time-outs: make() gets so many seconds. JobTimeout is raised in it; code that does not yield is killed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import datajoint as dj
import pytest
from pipelines import job_counts, rows_of
from workloads.lives import is_postgresql, job_of, kinds, status_of, stuck_in_c
from workloads.squares import (
    CallLog,
    Standing,
    another_connection,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

import djjobs

#: A job that is stopped ends long before this; one that is not would take twice as long.
LONG = 40


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "grace", 1.0)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 1.0)


def sleep_in_sql(connection: Any, seconds: float) -> None:
    connection.query(f"SELECT pg_sleep({seconds})" if is_postgresql(connection) else f"SELECT SLEEP({seconds})")


def sleep_in_python(self: Any) -> None:
    time.sleep(2 * LONG)


def compute_in_python(self: Any) -> None:
    deadline = time.monotonic() + 2 * LONG
    while time.monotonic() < deadline:
        sum(range(1000))


def wait_for_the_server(self: Any) -> None:
    sleep_in_sql(self.connection, 2 * LONG)


STALLS = pytest.mark.parametrize("stall", [sleep_in_python, compute_in_python, wait_for_the_server])


def stalling(stall: Callable[[Any], None], numbers: set[int], log: CallLog | None = None) -> Callable[..., None]:
    """A make() that takes far too long with these numbers, having inserted their rows."""

    def make(self: Any, key: dict[str, Any]) -> None:
        if log is not None:
            log.record(key["n"], os.getpid())
        insert_square(self, key)
        if key["n"] in numbers:
            stall(self)

    return make


@pytest.fixture
def in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LONG


# -- JobTimeout in make() ---------------------------------------------------------------------------------------


@STALLS
@pytest.mark.parametrize("processes", [1, 2])
def test_a_make_that_takes_too_long_is_interrupted_and_rolled_back(
    start: Any, stall: Any, processes: int, in_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "grace", 2 * LONG)  # it is to yield, however busy the machine is
    Square = start(4, stalling(stall, {2}), timeout=1.5)
    result = Square.populate(reserve_jobs=True, suppress_errors=True, processes=processes)
    ((key, message),) = result["error_list"]
    assert key == {"n": 2}
    assert message == "JobTimeout: make() of Square took longer than 1.5 s."
    assert result["success_count"] == 3
    assert made(Square()) == [1, 3, 4]
    row = job_of(Square, 2)
    assert (row["status"], row["attempt"], kinds(row), row["error_message"]) == ("error", 1, ["timeout"], message)
    assert "in make" in row["attempts"][0]["stack"]
    assert 1.5 <= row["run_duration"] < LONG
    assert Square.Number.connection.query("SELECT 41 + 1").fetchone()[0] == 42


@pytest.mark.parametrize("processes", [1, 2])
def test_a_time_out_is_raised_to_the_caller(start: Any, processes: int, in_time: None) -> None:
    Square = start(1, stalling(sleep_in_python, {1}), timeout=0.5)
    with pytest.raises(djjobs.JobTimeout, match=r"Square took longer than 0.5 s"):
        Square.populate(reserve_jobs=True, processes=processes)


def test_make_sees_a_job_timeout_and_can_clean_up(start: Any, in_time: None) -> None:
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        try:
            time.sleep(2 * LONG)
        except djjobs.JobTimeout as error:
            seen.append(error)
            raise
        finally:
            seen.append("cleaned up")

    Square = start(1, make, timeout=0.5)
    with pytest.raises(djjobs.JobTimeout):
        Square.populate(reserve_jobs=True)
    assert [type(one) for one in seen] == [djjobs.JobTimeout, str]


def test_a_statement_that_waits_for_a_lock_is_interrupted(start: Any, in_time: None) -> None:
    rival = another_connection()
    Square = start(1, insert_square)

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)  # somebody else is inserting the same

    Square = start(1, make, timeout=1)
    Square.schedule_jobs()
    rival.query("BEGIN")
    rival.query(f"INSERT INTO {Square().full_table_name} (n, square) VALUES (1, -1)")
    try:
        with pytest.raises(djjobs.JobTimeout):
            Square.populate(reserve_jobs=True)
        assert status_of(Square, 1) == "error"
    finally:
        rival.query("ROLLBACK")
        rival.close()
    Square.retry_jobs()
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


def test_the_compute_part_of_a_three_part_make_is_interrupted(start: Any, in_time: None) -> None:
    def make_compute(self: Any, key: dict[str, Any], n: int) -> tuple[int]:
        time.sleep(2 * LONG)
        return (n**2,)

    parts = {
        "make_fetch": lambda self, key: (key["n"],),
        "make_compute": make_compute,
        "make_insert": lambda self, key, square: self.insert1({**key, "square": square}),
    }
    Square = start(1, dj.Computed.make, timeout=0.5, **parts)
    with pytest.raises(djjobs.JobTimeout):
        Square.populate(reserve_jobs=True)
    assert (status_of(Square, 1), made(Square())) == ("error", [])


def test_outside_the_main_thread_a_make_is_interrupted_at_its_next_line(
    start: Any, standing: Standing, in_time: None
) -> None:
    """Python has no signals there."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        deadline = time.monotonic() + 2 * LONG
        while key["n"] == 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    Square = start(3, make, timeout=1.5)
    results: list[Any] = []
    work = threading.Thread(
        target=lambda: results.append(Square.populate(reserve_jobs=True, suppress_errors=True)), daemon=True
    )
    work.start()
    work.join(LONG)
    ((key, message),) = results[0]["error_list"]
    assert (key, message) == ({"n": 1}, "JobTimeout: make() of Square took longer than 1.5 s.")
    assert made(Square()) == [2, 3]


def test_no_time_out_by_default(start: Any) -> None:
    Square = start(1, lambda self, key: (time.sleep(1.5), insert_square(self, key)))
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


# -- the policy ---------------------------------------------------------------------------------------------------


def test_a_time_out_is_retried_under_the_policy(start: Any, in_time: None) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if djjobs.current_job().attempt < 3:
            time.sleep(2 * LONG)
        insert_square(self, key)

    words = {"timeout": 1, "max_attempts": 3, "backoff": 0, "retry_on": djjobs.JobTimeout, "keep_completed": True}
    Square = start(1, make, **words)
    assert Square.populate(reserve_jobs=True) == {"success_count": 1, "error_list": []}
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("success", 2, ["timeout", "timeout"])


def test_a_time_out_that_the_policy_does_not_name_is_not_retried(start: Any, in_time: None) -> None:
    words = {"timeout": 0.5, "max_attempts": 3, "backoff": 0, "retry_on": ValueError}
    Square = start(1, stalling(sleep_in_python, {1}), **words)
    Square.populate(reserve_jobs=True, suppress_errors=True)
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("error", 1)


# -- just in time --------------------------------------------------------------------------------------------------


def test_each_job_has_a_time_of_its_own(start: Any) -> None:
    Square = start(4, lambda self, key: (time.sleep(0.5), insert_square(self, key)), timeout=1.9)
    assert Square.populate(reserve_jobs=True) == {"success_count": 4, "error_list": []}


@pytest.mark.parametrize("processes", [1, 2])
def test_around_the_last_moment_a_job_is_either_done_or_timed_out_and_the_next_is_not_hit(
    start: Any, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.1)  # the monitor looks more often
    timeout = 0.3

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] % 2:
            time.sleep(timeout + random.Random(key["n"]).uniform(-0.01, 0.05))

    Square = start(16, make, timeout=timeout, keep_completed=True)
    result = Square.populate(reserve_jobs=True, suppress_errors=True, processes=processes)
    assert {message for _, message in result["error_list"]} <= {
        f"JobTimeout: make() of Square took longer than {timeout} s."
    }
    late = {key["n"] for key, _ in result["error_list"]}
    # one that was hit by what was meant for the one before it has just begun
    assert all(rows_by_number(Square)[n]["run_duration"] > timeout for n in late)
    assert set(made(Square())) == set(range(1, 17)) - late
    assert statuses(Square) == {n: "error" if n in late else "success" for n in range(1, 17)}
    assert {row["attempt"] for n, row in rows_by_number(Square).items() if n not in late} == {0}


def test_a_time_out_that_comes_during_the_commit_does_not_call_a_finished_job_failed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk or a replica that has to confirm: the server has committed, the answer takes its time."""
    commit = dj.Connection.commit_transaction

    def commit_slowly(connection: Any) -> None:
        commit(connection)
        time.sleep(2.5)

    for keep in (False, True):
        Square = start(1, timeout=1.5, keep_completed=keep)
        with monkeypatch.context() as patch:
            patch.setattr(dj.Connection, "commit_transaction", commit_slowly)
            result = Square.populate(reserve_jobs=True, suppress_errors=True)
        assert result == {"success_count": 1, "error_list": []}
        assert (made(Square()), job_counts(Square)) == ([1], {"success": 1} if keep else {})


# -- code that does not yield --------------------------------------------------------------------------------------


def stick(self: Any) -> None:
    stuck_in_c(2 * LONG)


def swallow(self: Any) -> None:
    """The lab's own code catches everything and goes on."""
    for _ in range(2 * LONG):
        try:
            time.sleep(1)
        except Exception:
            time.sleep(1)


@pytest.mark.parametrize("stall", [stick, swallow])
def test_a_slot_that_does_not_yield_is_killed_after_the_grace_period(
    start: Any, stall: Any, log: CallLog, in_time: None
) -> None:
    Square = start(6, stalling(stall, {2}, log), timeout=1.5)
    result = Square.populate(reserve_jobs=True, suppress_errors=True, processes=2)
    assert result["success_count"] == 5
    ((key, message),) = result["error_list"]
    assert key == {"n": 2}
    assert message.startswith("JobTimeout: ") and "Square" in message and "SIGKILL" in message
    assert made(Square()) == [1, 3, 4, 5, 6]
    row = job_of(Square, 2)
    assert (row["status"], row["attempt"], kinds(row)) == ("error", 1, ["timeout"])
    # the time-out and the grace period
    assert row["run_duration"] > 2.5
    assert sorted(log.numbers()) == [1, 2, 3, 4, 5, 6]


def test_a_killed_time_out_is_raised_as_one(start: Any, in_time: None) -> None:
    Square = start(1, stalling(stick, {1}), timeout=0.5)
    with pytest.raises(djjobs.JobTimeout, match="Square"):
        Square.populate(reserve_jobs=True, processes=2)


def test_a_killed_time_out_is_retried_under_the_policy(start: Any, in_time: None) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if djjobs.current_job().attempt == 1:
            stick(self)
        insert_square(self, key)

    words = {"timeout": 1, "max_attempts": 2, "backoff": 0, "keep_completed": True}
    Square = start(1, make, **words)
    assert Square.populate(reserve_jobs=True, processes=2) == {"success_count": 1, "error_list": []}
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("success", 1, ["timeout"])


def test_a_killed_time_out_that_the_policy_does_not_name_is_not_retried(start: Any, in_time: None) -> None:
    words = {"timeout": 0.5, "max_attempts": 3, "backoff": 0, "retry_on": ValueError}
    Square = start(1, stalling(stick, {1}), **words)
    Square.populate(reserve_jobs=True, suppress_errors=True, processes=2)
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("error", 1)


def test_this_process_is_never_killed_and_a_late_result_is_rolled_back(start: Any, in_time: None) -> None:
    """A notebook's own process holds more than the job; it waits for the C code and then ends the attempt."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 1:
            stuck_in_c(3)
            time.sleep(2 * LONG)

    Square = start(2, make, timeout=1.5)
    result = Square.populate(reserve_jobs=True, suppress_errors=True)
    assert result["error_list"] == [({"n": 1}, "JobTimeout: make() of Square took longer than 1.5 s.")]
    assert (made(Square()), status_of(Square, 1)) == ([2], "error")
    assert [row["square"] for row in rows_of(Square())] == [4]
