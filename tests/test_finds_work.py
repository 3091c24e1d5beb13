"""A populate finds what there is, whatever the rate limit; and what somebody asks for goes before what events did."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datajoint as dj
import pytest
from helpers import wait_for
from pipelines import INT, evaluations, in_processes, job_counts, keys_of, rows_of, statements_of
from workloads.squares import Bystander, Standing, insert_square, made, squares

import djjobs
from djjobs.events.thread import event_thread
from djjobs.queue.table_queue import TableQueue
from djjobs.queue.tables import JobControl
from djjobs.worker import WorkerOptions, run_worker

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets `min_scheduling_interval`; an hour at first, which nobody waits out."""
    before = djjobs.settings.min_scheduling_interval

    def change(seconds: float) -> None:
        djjobs.settings.min_scheduling_interval = seconds

    change(3600)
    yield change
    change(before)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns events on."""
    gc.collect()  # classes of other tests would hear of changes, too
    monkeypatch.setattr(djjobs.settings, "events", True)
    yield
    monkeypatch.setattr(djjobs.settings, "events", False)
    djjobs.flush_events()


@pytest.fixture
def soon(events: None, interval: Callable[[float], None]) -> None:
    """Events that are not put off for long."""
    interval(0.3)


def insert(Square: Any, *numbers: int) -> None:
    Square.Number.insert([{"n": n} for n in numbers])


def insert_by_sql(Square: Any, *numbers: int) -> None:
    """As another program would, that nobody hears of."""
    values = ", ".join(f"({n})" for n in numbers)
    Square.connection.query(f"INSERT INTO {Square.Number.full_table_name} (n) VALUES {values}")


def populate(Square: Any, **options: Any) -> int:
    return Square.populate(reserve_jobs=True, suppress_errors=True, **options)["success_count"]


# -- what this process has changed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("with_events", [False, True], ids=["without events", "with events"])
def test_inserting_and_populating_again_at_once_makes_the_new_rows(
    start: Any, interval: Any, request: Any, with_events: bool
) -> None:
    if with_events:
        request.getfixturevalue("events")
    Square = start(3)
    assert populate(Square) == 3
    insert(Square, 4, 5)
    assert populate(Square) == 2
    insert(Square, 6)
    assert populate(Square, processes=2) == 1
    assert made(Square) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("with_events", "keep"),
    # Without events its success row goes with cleanup_jobs or refresh.
    [(False, False), (True, False), (True, True)],
    ids=["without events", "with events", "with events and keep_completed"],
)
def test_a_deleted_result_is_made_again_at_once(
    start: Any, interval: Any, request: Any, with_events: bool, keep: bool
) -> None:
    if with_events:
        request.getfixturevalue("events")
    Square = start(3, keep_completed=keep)
    assert populate(Square) == 3
    (Square & {"n": 2}).delete()
    assert populate(Square) == 1
    assert made(Square) == [1, 2, 3]


def test_errors_that_were_deleted_are_tried_again_at_once(start: Any, interval: Any) -> None:
    def fail(self: Any, key: dict[str, Any]) -> None:
        raise ValueError("no signal")

    Square = start(2, make=fail)
    assert populate(Square) == 0
    Square.make = insert_square
    Square.jobs.errors.delete()
    assert populate(Square) == 2


LATE = """
import datajoint as dj
import djjobs
from workloads.squares import squares

schema = dj.Schema({database!r})

@schema
class Number(dj.Manual):
    definition = "n : {INT}"

Number.insert1({{"n": 3}})
assert not djjobs.JobsMixin.__subclasses__()[2:], "no table with the mixin yet"
print(squares(schema).populate(reserve_jobs=True)["success_count"])
"""


def test_what_was_inserted_before_the_first_table_with_the_mixin_is_made_at_once(start: Any, interval: Any) -> None:
    """A script that inserts with one module, and only then imports the one with the computed tables."""
    Square = start(2)
    assert populate(Square) == 2
    script = LATE.format(database=Square.database, INT=INT)
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment = {**os.environ, "DJJOBS_MIN_SCHEDULING_INTERVAL": "3600"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_deleting_jobs_lets_others_schedule_at_once(start: Any, interval: Any, standing: Standing) -> None:
    Square = start(2)
    Square.schedule_jobs()
    control = JobControl(standing.schema.connection, standing.schema.database)
    assert rows_of(control)[0]["last_scheduled"] is not None
    assert Square.schedule_jobs().rate_limited
    (Square.jobs & {"n": 1}).delete()
    assert rows_of(control)[0]["last_scheduled"] is None
    assert int(Square.schedule_jobs()) == 1
    djjobs.jobs(standing.schema).delete()
    assert int(Square.schedule_jobs()) == 2


def test_scheduling_by_hand_keeps_its_rate_limit_and_says_so(start: Any, interval: Any) -> None:
    Square = start(2)
    assert int(Square.schedule_jobs()) == 2
    insert(Square, 3)
    run = Square.schedule_jobs()
    assert run.rate_limited and int(run) == 0
    assert Square.jobs.refresh()["added"] == 1


# -- what others have changed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"processes": 2}, {"order": "random"}], ids=str)
def test_what_came_by_plain_sql_is_found_when_the_interval_is_over(start: Any, interval: Any, options: Any) -> None:
    Square = start(2)
    interval(1)
    assert populate(Square) == 2
    insert_by_sql(Square, 3, 4)
    assert populate(Square, **options) == 2
    assert made(Square) == [1, 2, 3, 4]


def test_a_restricted_populate_waits_as_well(start: Any, interval: Any) -> None:
    Square = start(2)
    interval(1)
    assert populate(Square) == 2
    insert_by_sql(Square, 3, 4)
    assert Square.populate("n = 4", reserve_jobs=True)["success_count"] == 1
    assert made(Square) == [1, 2, 4]


def test_an_interval_that_is_too_long_to_wait_for_is_named(
    start: Any, interval: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Square = start(2)
    assert populate(Square) == 2
    insert_by_sql(Square, 3)
    with caplog.at_level(logging.WARNING, "djjobs"):
        assert populate(Square) == 0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "Square" in said[0] and "min_scheduling_interval = 3600 s" in said[0]
    assert "\n" not in said[0]


def test_who_found_something_does_not_wait(start: Any, interval: Any, caplog: pytest.LogCaptureFixture) -> None:
    Square = start(2)
    Square.schedule_jobs()
    insert_by_sql(Square, 3)
    caplog.set_level(logging.WARNING, "djjobs")
    assert in_a_child(Square, lambda: (populate(Square), len(caplog.records))) == (2, 0)
    assert made(Square) == [1, 2]


def in_a_child(Square: Any, action: Callable[[], Any]) -> Any:
    """The result of an action in a process that has changed nothing."""
    return in_processes(Square, 1, lambda _: action())[0]


def test_a_crowd_that_waits_causes_one_evaluation_an_interval(start: Any, interval: Any) -> None:
    Square = start(2)
    interval(2)
    assert populate(Square) == 2
    insert_by_sql(Square, 3)

    def worker(number: int) -> tuple[int, int]:
        with statements_of(Square.connection) as statements:
            count = populate(Square)
        return count, len(evaluations(statements))

    results = in_processes(Square, 8, worker)
    assert sum(count for count, _ in results) == 1
    # They wait for the end of the interval once, and a slow one may see the end of the next.
    assert 1 <= sum(evaluations for _, evaluations in results) <= 2


def test_a_worker_does_not_end_before_it_could_schedule(start: Any, interval: Any, standing: Standing) -> None:
    Square = start(2)
    interval(2)
    Square.schedule_jobs()
    insert_by_sql(Square, 3)
    assert in_a_child(Square, lambda: run_worker([Square], WorkerOptions(idle_timeout=0.1))) == 0
    assert made(Square) == [1, 2, 3]


# -- what events put there, and what people ask for ----------------------------------------------------------------


def test_a_deleted_result_is_scheduled_again_by_its_event(start: Any, soon: None) -> None:
    Square = start(3)
    assert populate(Square) == 3
    (Square & {"n": 2}).delete()
    assert djjobs.flush_events()
    assert keys_of(Square.jobs.scheduled) == [{"n": 2}]


def test_a_result_that_went_with_its_source_is_not_scheduled_again(start: Any, soon: None) -> None:
    Square = start(3)
    assert populate(Square) == 3
    (Square.Number & {"n": 2}).delete()
    assert djjobs.flush_events()
    assert len(Square.jobs) == 0 and made(Square) == [1, 3]


def scheduled_by_events(start: Any, count: int, **members: Any) -> Any:
    Square = start(0, **members)
    insert(Square, *range(1, count + 1))
    assert djjobs.flush_events()
    assert {row["automatic"] for row in rows_of(Square.jobs)} == {1}
    return Square


def test_a_refresh_with_a_delay_delays_what_an_event_has_scheduled(start: Any, soon: None) -> None:
    Square = scheduled_by_events(start, 3)
    assert Square.jobs.refresh(delay=3600)["added"] == 3
    rows = rows_of(Square.jobs)
    assert all(row["due_time"] - row["created_time"] > datetime.timedelta(minutes=59) for row in rows)
    assert populate(Square) == 0 and len(Square.jobs.pending) == 3


def test_scheduling_takes_along_what_events_have_scheduled(start: Any, soon: None) -> None:
    Square = scheduled_by_events(start, 3)
    run = Square.schedule_jobs(priority=1, name="rerun")
    assert int(run) == 3 and run.progress().total == 3
    assert {(row["priority"], row["turn"], row["run_id"], row["automatic"]) for row in rows_of(Square.jobs)} == {
        (1, 1, run.run_id, 0)
    }
    assert populate(Square) == 3
    assert run.state == "done"


def test_a_restricted_scheduling_takes_along_no_others(start: Any, soon: None) -> None:
    Square = scheduled_by_events(start, 4)
    assert int(Square.schedule_jobs("n < 3", priority=2, min_scheduling_interval=0)) == 2
    assert {row["n"]: row["priority"] for row in rows_of(Square.jobs)} == {1: 2, 2: 2, 3: 5, 4: 5}


def test_a_job_that_was_begun_is_not_taken_along(start: Any, soon: None) -> None:
    def fail(self: Any, key: dict[str, Any]) -> None:
        raise ConnectionError

    Square = scheduled_by_events(start, 2, make=fail, max_attempts=3, backoff=3600)
    Square.populate("n = 1", reserve_jobs=True, schedule_jobs=False)
    before = (Square.jobs & "n = 1").fetch1("due_time")
    assert int(Square.schedule_jobs(due_time=datetime.timedelta(seconds=60), min_scheduling_interval=0)) == 1
    assert (Square.jobs & "n = 1").fetch1("due_time") == before


def test_a_run_of_events_that_was_taken_along_is_over(start: Any, soon: None) -> None:
    finished = []
    Square = scheduled_by_events(start, 3, finish_run=lambda self, run: finished.append(run.name))
    run = Square.schedule_jobs(name="all of them")
    assert int(run) == 3
    assert populate(Square) == 3
    assert finished == ["all of them"]


def test_a_job_that_somebody_is_claiming_stays_in_its_run(start: Any, soon: None) -> None:
    Square = scheduled_by_events(start, 3, finish_run=lambda self, run: None)
    (before,) = {row["run_id"] for row in rows_of(Square.jobs)}
    with Bystander(Square) as other:
        key_hash = (Square.jobs & "n = 2").fetch1("key_hash")
        other.connection.start_transaction()
        where = f"WHERE table_name = '{Square.table_name}' AND key_hash = '{key_hash}'"
        other.connection.query(f"SELECT key_hash FROM {Square.jobs.full_table_name} {where} FOR UPDATE")
        run = Square.schedule_jobs(name="the others")
        other.connection.cancel_transaction()
    assert int(run) == 2
    assert {row["n"]: row["run_id"] for row in rows_of(Square.jobs)} == {1: run.run_id, 2: before, 3: run.run_id}
    assert [total_of(Square, run_id) for run_id in (before, run.run_id)] == [1, 2]


def test_a_job_that_was_begun_stays_in_its_run(start: Any, soon: None) -> None:
    def fail(self: Any, key: dict[str, Any]) -> None:
        raise ConnectionError

    members = {"finish_run": lambda self, run: None, "max_attempts": 3, "backoff": 0}
    Square = scheduled_by_events(start, 3, make=fail, **members)
    (before,) = {row["run_id"] for row in rows_of(Square.jobs)}
    Square.populate("n = 1", reserve_jobs=True, schedule_jobs=False, max_calls=1)
    assert (Square.jobs & "n = 1").fetch1("attempt") == 1
    run = Square.schedule_jobs(name="the others")
    assert [total_of(Square, run_id) for run_id in (before, run.run_id)] == [1, 2]


def total_of(Square: Any, run_id: int) -> int:
    return (djjobs.runs(dj.Schema(Square.database)) & {"run_id": run_id}).fetch1("total")


@pytest.mark.parametrize("options", [{}, {"order": "random"}, {"processes": 2}], ids=str)
def test_without_refresh_a_populate_runs_what_was_asked_for_alone(start: Any, soon: None, options: Any) -> None:
    Square = scheduled_by_events(start, 5)
    assert populate(Square, refresh=False, **options) == 0
    assert Square.jobs.refresh("n <= 2")["added"] == 2
    assert populate(Square, refresh=False, **options) == 2
    assert made(Square) == [1, 2]
    # Who leaves the scheduling to others runs theirs.
    assert populate(Square, schedule_jobs=False, **options) == 3


@pytest.mark.only(datajoint=2)
def test_without_auto_refresh_there_are_no_automatic_jobs(start: Any, soon: None) -> None:
    Square = start(0)
    with dj.config.override(jobs__auto_refresh=False):
        insert(Square, 1, 2)
        assert djjobs.flush_events()
        assert len(Square.jobs) == 0
        assert populate(Square) == 0
        assert in_a_child(Square, lambda: run_worker([Square], WorkerOptions(drain=True))) == 0
        assert made(Square) == []
        Square.jobs.refresh("n = 1")
        assert populate(Square) == 1
        (Square & "n = 1").delete()
        assert djjobs.flush_events()
        assert len(Square.jobs) == 0


def test_a_populate_does_not_hide_what_has_failed(start: Any, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Square = start(0)
    populate(Square)
    with monkeypatch.context() as patch:
        patch.setattr(TableQueue, "priority", lambda self: 1 / 0)
        insert(Square, 1)
        wait_for(lambda: not event_thread._is_done)
        wait_for(lambda: event_thread._is_done)
    assert populate(Square) == 1
    assert not djjobs.flush_events() and djjobs.flush_events()


# -- DataJoint 0.14's own job table --------------------------------------------------------------------------------


@pytest.mark.only(datajoint=0)
def test_what_is_said_to_the_job_table_of_0_14_is_heeded(start: Any, standing: Standing, soon: None) -> None:
    Square = scheduled_by_events(start, 5)
    jobs, name = standing.schema.jobs, Square.table_name
    assert jobs.ignore(name, {"n": 1})
    jobs.error(name, {"n": 2}, "broken", "a stack")
    assert jobs.reserve(name, {"n": 3}) and not jobs.reserve(name, {"n": 3})
    assert populate(Square) == 2
    assert made(Square) == [4, 5]
    assert job_counts(Square) == {"ignore": 1, "error": 1, "reserved": 1}
    assert (Square.jobs & {"n": 2}).fetch1("error_message", "error_stack") == ("broken", "a stack")
    jobs.complete(name, {"n": 3})
    assert job_counts(Square) == {"ignore": 1, "error": 1}
    insert_by_sql(Square, 6)
    assert jobs.ignore(name, {"n": 6})  # which has no job yet
    assert [row["n"] for row in rows_of(Square.jobs.ignored)] == [1, 6]


# -- a schema that is dropped --------------------------------------------------------------------------------------


def test_dropping_a_schema_leaves_nothing_to_be_warned_of(
    server: Any, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "djjobs"):
        for _ in range(3):
            schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
            Square = squares(schema, 3)
            populate(Square)
            insert(Square, 4)
            (Square & "n = 1").delete()
            schema.drop()
            assert djjobs.flush_events()
            del Square
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
