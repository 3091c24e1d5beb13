"""Retries: which errors are tried again, when, how often, and what a job tells of its attempts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datajoint as dj
import pytest
from helpers import wait_for
from pipelines import job_counts, rows_of
from workloads.lives import (
    Gate,
    ago,
    cut,
    is_postgresql,
    job_of,
    kinds,
    lose,
    own_number,
    seconds_until_due,
    status_of,
)
from workloads.squares import (
    CallLog,
    another_connection,
    change_jobs,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

import djjobs


class Flaky:
    """A make() that raises these errors one after the other, and then succeeds."""

    def __init__(self, *errors: BaseException, numbers: set[int] | None = None) -> None:
        self.errors, self.numbers, self.calls = list(errors), numbers, []

    def make(self) -> Callable[..., None]:
        def make(table: Any, key: dict[str, Any]) -> None:
            self.calls.append(key["n"])
            if self.errors and (self.numbers is None or key["n"] in self.numbers):
                raise self.errors.pop(0)
            insert_square(table, key)

        return make


def populate(Square: Any, **words: Any) -> dict[str, Any]:
    return Square.populate(reserve_jobs=True, **words)


def make_due(Square: Any, n: int) -> None:
    """As if the wait were over."""
    change_jobs(Square, [n], f"due_time={ago(Square.Number.connection, 1)}")


# -- by default ---------------------------------------------------------------------------------------------------


def test_an_error_of_the_code_stays_an_error_by_default(start: Any) -> None:
    flaky = Flaky(ValueError("no square"))
    Square = start(1, flaky.make())
    with pytest.raises(ValueError, match="no square"):
        populate(Square)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["error_message"]) == ("error", 1, "ValueError: no square")
    assert populate(Square) == {"success_count": 0, "error_list": []}
    assert flaky.calls == [1]


def test_one_attempt_is_the_same(start: Any) -> None:
    Square = start(1, Flaky(ConnectionError("away")).make(), max_attempts=1, retry_on=ConnectionError, backoff=0)
    with pytest.raises(ConnectionError):
        populate(Square)
    assert statuses(Square) == {1: "error"}


# -- max_attempts and backoff ------------------------------------------------------------------------------------


def test_an_error_is_tried_again_until_max_attempts(start: Any) -> None:
    flaky = Flaky(*(ValueError(f"no square {attempt}") for attempt in range(1, 9)))
    Square = start(1, flaky.make(), max_attempts=3, backoff=0)
    with pytest.raises(ValueError, match="no square 3"):
        populate(Square)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], len(flaky.calls)) == ("error", 3, 3)
    assert [attempt["attempt"] for attempt in row["attempts"]] == [1, 2, 3]
    assert row["error_message"] == "ValueError: no square 3"


def test_an_error_that_will_be_tried_again_is_neither_raised_nor_returned(start: Any) -> None:
    for suppress in (False, True):
        Square = start(2, Flaky(ValueError("no square"), numbers={1}).make(), max_attempts=2, backoff=3600)
        assert populate(Square, suppress_errors=suppress) == {"success_count": 1, "error_list": []}
        assert statuses(Square) == {1: "scheduled"}


def test_the_last_error_is_returned_once(start: Any) -> None:
    Square = start(1, Flaky(*(ValueError(str(n)) for n in range(3))).make(), max_attempts=3, backoff=0)
    result = populate(Square, suppress_errors=True)
    assert result == {"success_count": 0, "error_list": [({"n": 1}, "ValueError: 2")]}


def test_in_several_processes_errors_are_tried_again_too(start: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        if log.numbers().count(key["n"]) < 3:
            raise ValueError("not yet")
        insert_square(self, key)

    Square = start(4, make, max_attempts=3, backoff=0)
    assert populate(Square, processes=2) == {"success_count": 4, "error_list": []}
    assert sorted(log.numbers()) == sorted([1, 2, 3, 4] * 3)


def test_a_waiting_retry_is_scheduled_with_a_due_time_and_not_claimed_before(start: Any) -> None:
    flaky = Flaky(ValueError("no square"))
    Square = start(1, flaky.make(), max_attempts=2, backoff=100, priority=3)
    populate(Square)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["priority"], row["turn"]) == ("scheduled", 1, 3, None)
    assert 60 < seconds_until_due(Square, 1) <= 100
    for words in ({}, {"processes": 2}, {"order": "random"}, {"order": "reverse"}, {"priority": 3}):
        assert populate(Square, **words)["success_count"] == 0
    assert Square.populate({"n": 1}, reserve_jobs=True)["success_count"] == 0
    assert Square.populate(keys=[{"n": 1}], reserve_jobs=True)["success_count"] == 0
    assert flaky.calls == [1]
    make_due(Square, 1)
    assert populate(Square)["success_count"] == 1


@pytest.mark.parametrize("words", [{}, {"order": "reverse"}, {"order": "random"}, {"priority": 9}], ids=str)
def test_due_retries_go_before_new_work_even_if_that_is_more_urgent(start: Any, words: dict[str, Any]) -> None:
    flaky = Flaky(ValueError("no square"), numbers={5})
    Square = start(9, flaky.make(), max_attempts=2, backoff=3600, priority=9)
    Square.populate({"n": 5}, reserve_jobs=True)
    Square.schedule_jobs(min_scheduling_interval=0, priority=1)
    assert populate(Square, max_calls=1, **words)["success_count"] == 1
    make_due(Square, 5)
    flaky.calls.clear()
    populate(Square, **words)
    assert flaky.calls[0] == 5
    assert len(flaky.calls) == 8


def test_a_wait_that_is_over_by_itself(start: Any) -> None:
    flaky, times = Flaky(ValueError("no square")), []
    square = flaky.make()

    def make(self: Any, key: dict[str, Any]) -> None:
        times.append(time.monotonic())
        square(self, key)

    Square = start(1, make, max_attempts=2, backoff=1.5)
    wait_for(lambda: populate(Square)["success_count"] == 1)
    failed, again = times
    assert again - failed >= 1.5


def test_backoff_is_a_function_of_the_attempt(start: Any) -> None:
    asked = []

    def backoff(attempt: int) -> float:
        asked.append(attempt)
        return 1000.0 * attempt

    flaky = Flaky(*(ValueError("no square") for _ in range(3)))
    Square = start(1, flaky.make(), max_attempts=4, backoff=staticmethod(backoff))
    for attempt in (1, 2, 3):
        populate(Square)
        assert 1000 * attempt - 60 < seconds_until_due(Square, 1) <= 1000 * attempt
        make_due(Square, 1)
    assert asked == [1, 2, 3]


def test_the_default_backoff_doubles(start: Any) -> None:
    # The first wait of a second may be over before a populate is: it tries again then.
    Square = start(1, Flaky(*(ValueError("no square") for _ in range(30))).make(), max_attempts=50)
    for _ in range(9):
        populate(Square)
        make_due(Square, 1)
    populate(Square, max_calls=0)
    change_jobs(Square, [1], "attempt=9")
    flaky = Flaky(ValueError("no square"))
    Square.make = flaky.make()
    populate(Square)
    # 2 ** 9, a tenth more or less
    assert 512 * 0.9 - 60 < seconds_until_due(Square, 1) < 512 * 1.1


def test_a_method_of_the_table_can_be_the_policy(start: Any) -> None:
    """Written as methods, as a table's other functions are."""

    def retry_on(self: Any, error: BaseException, job: Any) -> bool:
        return "maybe" in str(error) and type(self).__name__ == "Square"

    def backoff(self: Any, attempt: int) -> float:
        return 1000.0 * attempt

    Square = start(1, Flaky(ValueError("maybe")).make(), max_attempts=2, retry_on=retry_on, backoff=backoff)
    populate(Square)
    assert 900 < seconds_until_due(Square, 1) <= 1000


# -- retry_on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry_on", "error", "again"),
    [
        (ConnectionError, ConnectionResetError("away"), True),
        (ConnectionError, ValueError("no square"), False),
        ((KeyError, ConnectionError), ConnectionError("away"), True),
        ((KeyError, ConnectionError), ValueError("no square"), False),
        ((), ValueError("no square"), False),
        (staticmethod(lambda error, job: "maybe" in str(error)), ValueError("maybe"), True),
        (staticmethod(lambda error, job: "maybe" in str(error)), ValueError("never"), False),
    ],
    ids=["class", "other class", "classes", "other classes", "no class", "function", "function says no"],
)
def test_only_the_errors_of_the_policy_are_tried_again(
    start: Any, retry_on: Any, error: Exception, again: bool
) -> None:
    Square = start(1, Flaky(error).make(), max_attempts=2, retry_on=retry_on, backoff=3600)
    populate(Square, suppress_errors=True)
    assert statuses(Square) == {1: "scheduled" if again else "error"}
    assert job_of(Square, 1)["attempt"] == 1


def test_the_function_sees_the_error_itself_and_the_job(start: Any) -> None:
    seen = []

    def retry_on(error: BaseException, job: Any) -> bool:
        seen.append((error, job.key, job.attempt))
        return True

    errors = ValueError("one"), KeyError("two")
    Square = start(1, Flaky(*errors).make(), max_attempts=5, retry_on=staticmethod(retry_on), backoff=0)
    assert populate(Square)["success_count"] == 1
    assert [error for error, _, _ in seen] == list(errors)
    assert [(key, attempt) for _, key, attempt in seen] == [({"n": 1}, 0), ({"n": 1}, 1)]


@pytest.mark.parametrize("name", ["retry_on", "backoff"])
def test_a_policy_function_that_fails_does_not_hide_the_error_of_make_nor_lose_the_job(start: Any, name: str) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the policy is broken")

    Square = start(1, Flaky(ValueError("no square")).make(), max_attempts=3, **{name: staticmethod(broken)})
    result = populate(Square, suppress_errors=True)
    assert result["error_list"] == [({"n": 1}, "ValueError: no square")]
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["error_message"]) == ("error", 1, "ValueError: no square")


@pytest.mark.parametrize("wait", [None, "soon", float("inf"), 1e300], ids=str)
def test_a_wait_that_is_no_number_of_seconds_does_not_lose_the_job(start: Any, wait: Any) -> None:
    Square = start(1, Flaky(ValueError("no square")).make(), max_attempts=3, backoff=staticmethod(lambda _: wait))
    populate(Square, suppress_errors=True)
    row = job_of(Square, 1)
    assert row["status"] in ("error", "scheduled")
    assert (row["attempt"], row["error_message"]) == (1, "ValueError: no square")


def test_make_knows_which_attempt_it_is(start: Any) -> None:
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        job = djjobs.current_job()
        seen.append((job.attempt, job.key, job.priority))
        if job.attempt < 3:
            raise ValueError("not yet")
        insert_square(self, key)

    Square = start(1, make, max_attempts=3, backoff=0, priority=2)
    assert populate(Square)["success_count"] == 1
    assert seen == [(attempt, {"n": 1}, 2) for attempt in (1, 2, 3)]


# -- the history ---------------------------------------------------------------------------------------------------


def test_the_errors_of_every_attempt_stay_readable_after_success(start: Any) -> None:
    Square = start(1, Flaky(ValueError("one"), KeyError("two")).make(), max_attempts=3, backoff=0, keep_completed=True)
    assert populate(Square)["success_count"] == 1
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["error_message"], row["error_stack"]) == ("success", 2, "", None)
    first, second = row["attempts"]
    assert [first["message"], second["message"]] == ["ValueError: one", "KeyError: 'two'"]
    assert (first["attempt"], second["attempt"], kinds(row)) == (1, 2, ["error", "error"])
    for attempt in (first, second):
        assert (attempt["pid"], attempt["host"]) == (os.getpid(), row["host"])
        assert "in make" in attempt["stack"] and "Traceback" in attempt["stack"]
        assert abs((datetime.fromisoformat(attempt["time"]) - row["timestamp"]).total_seconds()) < 60


def test_the_errors_of_every_attempt_stay_readable_while_a_later_one_runs(start: Any) -> None:
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        if djjobs.current_job().attempt == 1:
            raise ValueError("one")
        other = another_connection()
        jobs = Square.jobs.full_table_name
        seen.append(other.query(f"SELECT status, attempts, error_message FROM {jobs}").fetchone())
        other.close()
        insert_square(self, key)

    Square = start(1, make, max_attempts=3, backoff=0)
    assert populate(Square)["success_count"] == 1
    ((status, attempts, message),) = seen
    assert (status, message) == ("reserved", "ValueError: one")
    assert "ValueError: one" in str(attempts)


def test_the_history_is_bounded_in_number_and_size(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        attempt = djjobs.current_job().attempt
        if attempt <= 25:
            deep(300, f"attempt {attempt} " + "\U0001f600x" * 50_000)
        insert_square(self, key)

    def deep(levels: int, message: str) -> None:
        if not levels:
            raise ValueError(message)
        deep(levels - 1, message)

    Square = start(1, make, max_attempts=30, backoff=0, keep_completed=True)
    assert populate(Square)["success_count"] == 1
    row = job_of(Square, 1)
    assert row["attempt"] == 25
    history = row["attempts"]
    assert [attempt["attempt"] for attempt in history] == list(range(26 - len(history), 26))  # the latest ones
    assert 5 <= len(history) <= 20
    assert sum(len(str(attempt)) for attempt in history) < 100_000
    for attempt in history:
        assert attempt["message"].startswith(f"ValueError: attempt {attempt['attempt']} ")
        assert "in make" in attempt["stack"] or "raise ValueError" in attempt["stack"]


@pytest.mark.parametrize(
    "text",
    ["NUL \0 inside", "half a character \ud800", "\u4e2d\u6587 \U0001f9e0", "quotes '\" and \\ and %s %(x)s {y}", ""],
    ids=["nul", "surrogate", "scripts", "quotes", "empty"],
)
def test_any_text_of_an_error_is_kept(start: Any, text: str) -> None:
    Square = start(1, Flaky(ValueError(text), ValueError(text)).make(), max_attempts=3, backoff=0, keep_completed=True)
    assert populate(Square)["success_count"] == 1
    messages = [attempt["message"] for attempt in job_of(Square, 1)["attempts"]]
    expected = text.replace("\0", "\\0").replace("\ud800", "\\ud800")
    assert messages == [f"ValueError: {expected}" if text else "ValueError"] * 2


@pytest.mark.parametrize(
    "put_back",
    [
        lambda table: table.retry_jobs(),
        lambda table: int(table.schedule_jobs(force=True, min_scheduling_interval=0)),
    ],
    ids=["retry_jobs", "force"],
)
def test_a_retry_by_hand_keeps_the_history_and_counts_anew(start: Any, put_back: Callable[[Any], int]) -> None:
    flaky = Flaky(*(ValueError(str(number)) for number in range(1, 6)))
    Square = start(1, flaky.make(), max_attempts=2, backoff=0, keep_completed=True, priority=4)
    populate(Square, suppress_errors=True)
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("error", 2)
    assert put_back(Square) == 1
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["priority"]) == ("scheduled", 0, 4)
    assert [attempt["message"] for attempt in row["attempts"]] == ["ValueError: 1", "ValueError: 2"]
    populate(Square, suppress_errors=True)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"]) == ("error", 2)
    assert [attempt["message"] for attempt in row["attempts"]] == [f"ValueError: {number}" for number in range(1, 5)]
    put_back(Square)
    assert populate(Square)["success_count"] == 1
    assert len(job_of(Square, 1)["attempts"]) == 5


def test_a_retry_by_hand_of_some_leaves_the_others(start: Any) -> None:
    Square = start(3, Flaky(*(ValueError("no square") for _ in range(3))).make())
    populate(Square, suppress_errors=True)
    assert Square.retry_jobs({"n": 2}) == 1
    assert statuses(Square) == {1: "error", 2: "scheduled", 3: "error"}


def test_a_waiting_retry_is_not_put_back_by_a_scheduling(start: Any) -> None:
    Square = start(1, Flaky(ValueError("no square")).make(), max_attempts=2, backoff=3600)
    populate(Square)
    assert int(Square.schedule_jobs(min_scheduling_interval=0)) == 0
    assert int(Square.schedule_jobs(force=True, min_scheduling_interval=0)) == 0
    assert Square.retry_jobs() == 0
    assert (job_of(Square, 1)["attempt"], seconds_until_due(Square, 1) > 3000) == (1, True)


def test_a_crash_counts_as_an_attempt_of_the_policy(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "lease", 1.0)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.2)
    Square = start(1, Flaky(ValueError("no square")).make(), max_attempts=2, backoff=0)
    Square.schedule_jobs()
    lose(Square, [1])
    wait_for(lambda: Square.cleanup_jobs()["recovered"] == 1)
    populate(Square, suppress_errors=True)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("error", 2, ["crash", "error"])


# -- transient faults of the database ------------------------------------------------------------------------------


class Contested:
    """A row of a table of its own, which somebody else holds or wants."""

    def __init__(self, Square: Any) -> None:
        self.connection = Square.Number.connection
        quote = '"' if is_postgresql(self.connection) else "`"
        self.name = f"{quote}{Square.database}{quote}.contested"
        self.connection.query(f"DROP TABLE IF EXISTS {self.name}")
        engine = "" if is_postgresql(self.connection) else " ENGINE=InnoDB"
        self.connection.query(f"CREATE TABLE {self.name} (id int PRIMARY KEY, v int){engine}")
        self.connection.query(f"INSERT INTO {self.name} VALUES (1, 0), (2, 0)")
        self.rival = another_connection()

    def touch(self, connection: Any, number: int) -> None:
        connection.query(f"UPDATE {self.name} SET v = v + 1 WHERE id = {number}")

    def be_impatient(self, connection: Any) -> None:
        """Wait for a lock no longer than a second."""
        what = "lock_timeout = '1s'" if is_postgresql(connection) else "innodb_lock_wait_timeout = 1"
        connection.query(f"SET {what}")

    def is_awaited(self) -> bool:
        """Whether a connection waits for a row of this table."""
        if is_postgresql(self.rival):
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%contested%%'"
        else:
            waiting = "SELECT 1 FROM information_schema.processlist WHERE info LIKE 'UPDATE %%contested%%'"
        watcher = another_connection()
        try:
            return bool(watcher.query(waiting).fetchall())
        finally:
            watcher.close()

    def close(self) -> None:
        self.rival.close()
        self.connection.query(f"DROP TABLE {self.name}")


@pytest.fixture
def contested() -> Iterator[Callable[[Any], Contested]]:
    made: list[Contested] = []

    def contest(Square: Any) -> Contested:
        made.append(Contested(Square))
        return made[-1]

    yield contest
    for one in made:
        one.close()


def test_a_deadlock_inside_make_is_retried_without_using_up_an_attempt(start: Any, contested: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)
        if len(calls) == 1:
            row.rival.query("BEGIN")
            for _ in range(3):
                row.touch(row.rival, 2)  # it has done more, so it is not the victim
            row.touch(self.connection, 1)
            other = threading.Thread(target=rival)
            other.start()
            threads.append(other)
            wait_for(row.is_awaited)
            row.touch(self.connection, 2)

    def rival() -> None:
        try:
            row.touch(row.rival, 1)
            outcome.append("won")
        except Exception as error:
            outcome.append(error)
        row.rival.query("ROLLBACK")

    threads: list[threading.Thread] = []
    outcome: list[Any] = []
    Square = start(1, make, keep_completed=True)
    row = contested(Square)
    if is_postgresql(row.rival):
        # the one that looks first is the victim
        row.rival.query("SET deadlock_timeout = '60s'")
    else:
        big = ", ".join(f"({number}, 0)" for number in range(100, 400))
        row.connection.query(f"INSERT INTO {row.name} VALUES {big}")
        rest = f"UPDATE {row.name} SET v = v + 1 WHERE id >= 100"
        touch = row.touch

        def touch_more(connection: Any, number: int) -> None:
            if connection is row.rival and number == 2:
                connection.query(rest)
            touch(connection, number)

        row.touch = touch_more
    assert populate(Square)["success_count"] == 1
    for thread in threads:
        thread.join()
    assert (outcome, calls) == (["won"], [1, 1])
    record = job_of(Square, 1)
    assert (record["status"], record["attempt"], record["attempts"]) == ("success", 0, None)


def test_a_lock_timeout_inside_make_is_retried_without_using_up_an_attempt(start: Any, contested: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)
        if len(calls) == 2:
            row.rival.query("ROLLBACK")
        row.be_impatient(self.connection)
        row.touch(self.connection, 1)

    Square = start(1, make, keep_completed=True)
    row = contested(Square)
    row.rival.query("BEGIN")
    row.touch(row.rival, 1)
    assert populate(Square)["success_count"] == 1
    assert calls == [1, 1]
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("success", 0)
    assert made(Square()) == [1]


def test_a_lock_that_is_never_released_is_an_error_in_the_end(start: Any, contested: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)
        row.be_impatient(self.connection)
        row.touch(self.connection, 1)

    Square = start(1, make)
    row = contested(Square)
    row.rival.query("BEGIN")
    row.touch(row.rival, 1)
    ((_, message),) = populate(Square, suppress_errors=True)["error_list"]
    row.rival.query("ROLLBACK")
    assert 2 <= len(calls) <= 10
    assert "lock" in message.lower()
    record = job_of(Square, 1)
    assert (record["status"], record["attempt"], kinds(record)) == ("error", 1, ["error"])
    assert made(Square()) == []


def test_a_connection_that_is_lost_inside_make_is_replaced_without_using_up_an_attempt(start: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)
        if calls == [1]:
            cut(own_number(self.connection))
            rows_of(self & key)

    Square = start(2, make, keep_completed=True)
    assert populate(Square)["success_count"] == 2
    assert calls == [1, 1, 2]
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("success", 0)}
    assert made(Square()) == [1, 2]


def test_a_connection_that_is_lost_just_before_the_commit_is_replaced(start: Any) -> None:
    """The lab's code knows nothing of it; the completion of the job is what fails."""
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)
        if calls == [1]:
            cut(own_number(self.connection))

    Square = start(2, make, keep_completed=True)
    assert populate(Square)["success_count"] == 2
    assert made(Square()) == [1, 2]
    assert calls == [1, 1, 2]
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("success", 0)}


def test_a_commit_whose_answer_is_lost_is_no_error(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is there and the job is done; only the word of it did not arrive."""
    commit, lost = dj.Connection.commit_transaction, []

    def commit_and_lose(connection: Any) -> None:
        number = None if lost else own_number(connection)
        commit(connection)
        if number is not None:
            lost.append(number)
            cut(number)
            connection.query("SELECT 1", reconnect=False)

    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        insert_square(self, key)

    for keep in (False, True):
        Square = start(2, make, keep_completed=keep)
        calls.clear()
        lost.clear()
        Square.schedule_jobs()
        with monkeypatch.context() as patch:
            patch.setattr(dj.Connection, "commit_transaction", commit_and_lose)
            result = populate(Square, suppress_errors=True)
        assert lost
        assert result["error_list"] == []
        assert calls == [1, 2]
        assert made(Square()) == [1, 2]
        assert job_counts(Square) == ({"success": 2} if keep else {})


def test_a_connection_that_is_lost_every_time_is_an_error_in_the_end(start: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        cut(own_number(self.connection))
        insert_square(self, key)

    Square = start(1, make)
    ((key, _),) = populate(Square, suppress_errors=True)["error_list"]
    assert 2 <= len(calls) <= 10
    record = job_of(Square, 1)
    assert (key, record["status"], record["attempt"]) == ({"n": 1}, "error", 1)


def test_a_transient_fault_that_stays_is_retried_under_the_policy(start: Any) -> None:
    calls = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        cut(own_number(self.connection))
        insert_square(self, key)

    Square = start(1, make, max_attempts=2, backoff=3600)
    assert populate(Square) == {"success_count": 0, "error_list": []}
    record = job_of(Square, 1)
    assert (record["status"], record["attempt"]) == ("scheduled", 1)


def test_what_make_did_before_a_fault_is_rolled_back_before_it_is_called_again(start: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "second")

    def make(self: Any, key: dict[str, Any]) -> None:
        assert not rows_of(self & key)
        self.insert1({**key, "square": -1 if not gate.is_open else 1})
        if not gate.is_open:
            gate.open()
            cut(own_number(self.connection))
            rows_of(self & key)

    Square = start(1, make)
    assert populate(Square)["success_count"] == 1
    assert [row["square"] for row in rows_of(Square())] == [1]
