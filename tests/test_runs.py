"""Runs: what one schedule_jobs asked for, its state, its progress, waiting for it, calling it off, and its end."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from helpers import wait_for
from pipelines import in_processes, rows_of, statements_of
from plans import Reading, plan
from workloads.lives import Gate, ago, populating
from workloads.squares import (
    Bystander,
    Standing,
    another_connection,
    change_jobs,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

import djjobs
from djjobs.queue import database
from djjobs.queue.queue import Queue
from djjobs.queue.tables import JobControl
from djjobs.run.run import Run
from djjobs.run.state import Progress

DAY = 86400.0


@pytest.fixture
def start(standing: Standing) -> Callable[..., Any]:
    return standing.start_over


def run_rows(Square: Any) -> list[dict[str, Any]]:
    return rows_of(djjobs.runs(Square.Number))


def change_run(Square: Any, run: Run, changes: str) -> None:
    table = djjobs.runs(Square.Number).full_table_name
    Square.Number.connection.query(f"UPDATE {table} SET {changes} WHERE run_id = {run.run_id}")


# -- states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "state", "expected"),
    [
        ({}, "pending", Progress(4, scheduled=4)),
        ({1: "status='reserved'"}, "running", Progress(4, scheduled=3, reserved=1)),
        ({1: "status='success'"}, "running", Progress(4, scheduled=3, done=1)),
        ({1: "status='scheduled', attempt=1"}, "running", Progress(4, scheduled=4)),
        ({1: "status='error'", 2: "status='cancelled'", 3: "status='ignore'", 4: "status='success'"}, "done", None),
    ],
)
def test_a_run_looks_at_its_own_jobs(
    start: Any, changes: dict[int, str], state: str, expected: Progress | None
) -> None:
    Square = start(7)
    run = Square.schedule_jobs("n < 5", min_scheduling_interval=0)
    other = Square.schedule_jobs(min_scheduling_interval=0)
    for n, change in changes.items():
        change_jobs(Square, [n], change)
    assert run.state == state
    assert run.progress() == (expected or Progress(4, done=1, error=1, cancelled=1, ignore=1))
    assert (other.state, other.progress()) == ("pending", Progress(3, scheduled=3))


@pytest.mark.parametrize("keep", [True, False])
def test_done_jobs_count_whether_or_not_their_rows_are_kept(start: Any, keep: bool) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 3:
            raise ValueError(key)
        insert_square(self, key)

    Square = start(4, make, keep_completed=keep)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    Square.populate("n = 1", reserve_jobs=True)
    assert (run.state, run.progress()) == ("running", Progress(4, scheduled=3, done=1))
    assert run.progress().fraction == 0.25
    Square.populate(reserve_jobs=True, suppress_errors=True)
    assert (run.state, run.progress()) == ("done", Progress(4, done=3, error=1))
    assert run.progress().fraction == 1.0
    assert run.ended is not None


def test_a_retry_makes_a_run_go_on(start: Any) -> None:
    Square = start(1)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    change_jobs(Square, [1], "status='error'")
    Square.populate(reserve_jobs=True, schedule_jobs=False)
    Square.cleanup_jobs()
    assert run.state == "done" and run.ended is not None
    assert Square.retry_jobs() == 1
    assert run.state == "running" and run.ended is None
    Square.populate(reserve_jobs=True)
    assert run.state == "done" and run.ended is not None


# -- scheduling -------------------------------------------------------------------------------------------------


def test_a_run_knows_who_asked_for_what_and_when(start: Any) -> None:
    Square = start(5)
    due = datetime.datetime(2035, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    run = Square.schedule_jobs("n < 4", due_time=due, name="rerun m1, Übung ✓ a\u200cb")
    assert (int(run), run.scheduled, run.rate_limited) == (3, 3, False)
    assert (run.name, run.table_name, run.restriction) == (
        "rerun m1, Übung ✓ a\u200cb",
        Square.table_name,
        "n < 4",
    )
    assert run.due_time == due
    assert run.user == Square.Number.connection.get_user()
    assert run.created is not None and run.created.tzinfo is not None and run.ended is None
    assert {row["run_id"] for row in rows_of(Square.jobs)} == {run.run_id}
    assert len(run.jobs) == 3 and len(run.jobs.scheduled) == 3
    (row,) = run_rows(Square)
    assert (row["run_id"], row["total"], row["details"], row["results"]) == (run.run_id, 3, None, None)
    assert str(run.run_id) in repr(run) and "rerun m1" in run._repr_html_()


def test_only_a_name_keeps_a_run_that_found_nothing(start: Any) -> None:
    Square = start(2)
    Square.populate(reserve_jobs=True)
    (first,) = run_rows(Square)
    nothing = Square.schedule_jobs(min_scheduling_interval=0)
    assert (nothing.run_id, int(nothing), nothing.state, nothing.progress()) == (None, 0, "done", Progress())
    assert (nothing.wait(), nothing.cancel(), nothing.results, len(nothing.jobs)) == (nothing, 0, None, 0)
    assert run_rows(Square) == [first]
    empty = Square.schedule_jobs(name="again")
    assert (int(empty), empty.state, empty.progress(), empty.wait()) == (0, "done", Progress(), empty)
    assert empty.ended is not None and empty.progress().fraction == 1.0
    assert {row["name"] for row in run_rows(Square)} == {"", "again"}


def test_a_named_run_is_not_swallowed_by_the_rate_limit(start: Any) -> None:
    Square = start(3)
    Square.schedule_jobs("n = 1", min_scheduling_interval=0)
    Square.schedule_jobs("n = 2", min_scheduling_interval=0)
    assert Square.schedule_jobs("n = 2", min_scheduling_interval=600).rate_limited
    run = Square.schedule_jobs("n > 1", name="the rest")
    assert (int(run), run.rate_limited) == (1, False)
    limited = Square.schedule_jobs("n > 1", name="the rest", min_scheduling_interval=600)
    assert limited.rate_limited and limited.run_id is None


def test_forced_jobs_move_into_the_new_run(start: Any) -> None:
    Square = start(6)
    old = Square.schedule_jobs("n < 6", min_scheduling_interval=0)
    for n, status in ((1, "error"), (2, "ignore"), (3, "cancelled")):
        change_jobs(Square, [n], f"status='{status}'")
    new = Square.schedule_jobs(force=True, name="again")
    assert int(new) == 4
    assert {n: row["run_id"] for n, row in rows_by_number(Square).items()} == {
        **dict.fromkeys((1, 2, 3, 6), new.run_id),
        **dict.fromkeys((4, 5), old.run_id),
    }
    assert (new.state, new.progress()) == ("pending", Progress(4, scheduled=4))
    assert (old.state, old.progress()) == ("pending", Progress(2, scheduled=2))


@pytest.mark.parametrize("force", [False, True])
def test_a_run_and_its_jobs_appear_together_or_not_at_all(start: Any, force: bool) -> None:
    Square = start(3)
    first = Square.schedule_jobs("n = 1", min_scheduling_interval=0)
    change_jobs(Square, [1], "status='error'")
    before = rows_of(Square.jobs)
    connection, runs = Square.Number.connection, djjobs.runs(Square.Number).full_table_name
    connection.query(f"ALTER TABLE {runs} RENAME COLUMN restriction TO limits")
    try:
        with pytest.raises(djjobs.DjJobsError):
            Square.schedule_jobs(min_scheduling_interval=0, force=force)
        assert rows_of(Square.jobs) == before
    finally:
        connection.query(f"ALTER TABLE {runs} RENAME COLUMN limits TO restriction")
    assert [row["total"] for row in run_rows(Square)] == [1] and first.progress().total == 1
    assert int(Square.schedule_jobs(min_scheduling_interval=0)) == 2


def test_a_commit_whose_answer_is_lost_is_not_done_twice(start: Any) -> None:
    Square = start(3)
    Square.jobs
    connection, lose = Square.Number.connection, [True]
    query = connection.query

    def losing(sql: str, *arguments: Any, **options: Any) -> Any:
        answer = query(sql, *arguments, **options)
        if sql == "COMMIT" and lose and any(row["name"] == "m1" for row in others_view(Square)):
            lose.clear()
            raise djjobs.dj.compat.LostConnectionError("the answer got lost")
        return answer

    connection.query = losing
    try:
        run = Square.schedule_jobs(name="m1")
    finally:
        del connection.query
    assert not lose and int(run) == 3
    assert [(row["run_id"], row["total"]) for row in run_rows(Square)] == [(run.run_id, 3)]
    assert {row["run_id"] for row in rows_of(Square.jobs)} == {run.run_id}


def others_view(Square: Any) -> list[dict[str, Any]]:
    connection = another_connection()
    try:
        rows = connection.query(f"SELECT name FROM {djjobs.runs(Square.Number).full_table_name}").fetchall()
        return [{"name": name} for (name,) in rows]
    finally:
        connection.close()


def test_scheduling_takes_as_many_statements_for_many_keys_as_for_few(start: Any) -> None:
    counts = []
    for size in (1, 500):
        Square = start(size)
        Square.schedule_jobs("n = 0", min_scheduling_interval=0)
        with statements_of(Square.Number.connection) as statements:
            assert int(Square.schedule_jobs(min_scheduling_interval=0)) == size
        counts.append(len(statements))
    assert counts[0] == counts[1]


def test_many_schedulers_at_once_put_each_job_into_one_run(start: Any) -> None:
    Square = start(200)
    Square.jobs

    def schedule(_: int) -> tuple[int | None, int]:
        run = Square.schedule_jobs(min_scheduling_interval=0)
        return run.run_id, int(run)

    results = in_processes(Square.Number, 6, schedule)
    totals = {row["run_id"]: row["total"] for row in run_rows(Square)}
    assert totals == {run_id: count for run_id, count in results if count}
    jobs = [row["run_id"] for row in rows_of(Square.jobs)]
    assert len(jobs) == 200 and {run_id: jobs.count(run_id) for run_id in totals} == totals


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"due_time": datetime.datetime(2035, 1, 1)}, "time zone"),
        ({"due_time": "tomorrow"}, "time zone"),
        ({"name": "x" * 256}, "255 characters"),
        ({"name": 7}, "line of text"),
        ({"name": ""}, "line of text"),
        ({"name": "two\nlines"}, "line of text"),
        ({"name": "nul\0"}, "line of text"),
        ({"name": "half \ud800"}, "line of text"),
    ],
)
def test_what_cannot_be_meant_is_one_error_and_changes_nothing(start: Any, options: Any, words: str) -> None:
    Square = start(3)
    Square.schedule_jobs("n = 1", min_scheduling_interval=0)
    change_jobs(Square, [1], "status='error'")
    control = JobControl(Square.Number.connection, Square.database)
    before = [rows_of(table) for table in (Square.jobs, djjobs.runs(Square.Number), control)]
    with pytest.raises(djjobs.DjJobsError, match=words) as caught:
        Square.schedule_jobs(force=True, min_scheduling_interval=0, **options)
    assert "Square" in str(caught.value) and "\n" not in str(caught.value)
    assert [rows_of(table) for table in (Square.jobs, djjobs.runs(Square.Number), control)] == before


@pytest.mark.parametrize(
    ("run_id", "words"), [(4711, "4711"), ("4711", "whole number"), (True, "whole"), (None, "whole")]
)
def test_a_run_that_does_not_exist_is_one_error(start: Any, run_id: Any, words: str) -> None:
    Square = start(1)
    with pytest.raises(djjobs.DjJobsError, match=words) as caught:
        djjobs.Run.of(Square.Number, run_id)
    assert Square.database in str(caught.value)


# -- looking ----------------------------------------------------------------------------------------------------


def test_a_run_is_picked_up_from_another_process(start: Any) -> None:
    Square = start(3)
    run = Square.schedule_jobs("n < 3", name="m1")
    change_jobs(Square, [1], "status='error'")

    def look(_: int) -> tuple[Any, ...]:
        found = djjobs.Run.of(Square.Number, run.run_id)
        return found.name, found.state, found.progress(), found.due_time, found.cancel()

    seen = "m1", "running", Progress(2, scheduled=1, error=1), run.due_time, 1
    assert in_processes(Square.Number, 1, look) == [seen]
    assert statuses(Square) == {1: "error", 2: "cancelled"}
    assert run.state == "cancelled"


def test_the_runs_of_a_schema_are_a_query_and_a_table(start: Any) -> None:
    Square = start(5)
    first = Square.schedule_jobs("n < 3", name="first")
    second = Square.schedule_jobs(name="second")
    Square.populate("n < 3", reserve_jobs=True)
    change_jobs(Square, [4], "status='error'")
    runs = djjobs.runs(Square.Number)
    assert len(runs & {"name": "first"}) == 1
    frame = runs.status()
    assert list(frame.index) == [second.run_id, first.run_id]
    assert list(frame["state"]) == ["running", "done"]
    assert frame.loc[second.run_id, ["total", "scheduled", "error", "done"]].tolist() == [3, 2, 1, 0]
    assert list((runs & {"name": "first"}).status().index) == [first.run_id]
    assert len((runs & "name LIKE 'nobody%'").status()) == 0


# -- waiting ------------------------------------------------------------------------------------------------------


def test_waiting_for_others_to_do_it(start: Any, gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 4:
            gate.wait()
        if key["n"] == 2:
            raise ValueError("no such file")
        insert_square(self, key)

    Square = start(4, make)
    run = Square.schedule_jobs(name="overnight", min_scheduling_interval=0)
    with pytest.raises(djjobs.RunTimeout, match=r"overnight.* pending after 0\.3 s: 0 of 4"):
        run.wait(timeout=0.3)
    assert (made(Square()), run.state) == ([], "pending"), "whoever waits does not work"
    with populating(Square, suppress_errors=True) as children:
        wait_for(lambda: run.progress().over == 3)
        assert run.state == "running"
        with pytest.raises(djjobs.RunTimeout, match="running"):
            run.wait(timeout=0)
        gate.open()
        assert run.wait(display_progress=True, timeout=60) is run
        assert children[0].result()["success_count"] == 3
    assert (run.state, run.progress()) == ("done", Progress(4, done=3, error=1))
    shown = capsys.readouterr().err
    assert "overnight" in shown and "4/4" in shown and "errors=1" in shown


def test_a_cancelled_run_is_waited_for_no_longer(start: Any) -> None:
    Square = start(2)
    run = Square.schedule_jobs(due_time=datetime.timedelta(days=1), min_scheduling_interval=0)
    assert run.cancel() == 2
    assert run.wait(timeout=60).state == "cancelled"


@pytest.mark.parametrize("act", ["wait", "cancel"])
def test_not_inside_a_transaction(start: Any, act: str) -> None:
    Square = start(1)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    with Square.Number.connection.transaction, pytest.raises(djjobs.DjJobsError, match="inside a transaction"):
        getattr(run, act)()
    assert run.state == "pending"


# -- cancelling -----------------------------------------------------------------------------------------------------


def test_a_run_is_called_off_and_no_other(start: Any) -> None:
    Square = start(6)
    one = Square.schedule_jobs("n < 4", min_scheduling_interval=0)
    two = Square.schedule_jobs(min_scheduling_interval=0)
    change_jobs(Square, [1], "status='error'")
    assert one.cancel() == 2
    assert (one.state, one.progress()) == ("cancelled", Progress(3, error=1, cancelled=2))
    assert (two.state, two.progress()) == ("pending", Progress(3, scheduled=3))
    assert one.cancel() == 0, "a second time there is nothing to do"
    assert Square.populate(reserve_jobs=True)["success_count"] == 3
    with pytest.raises(djjobs.JobNotCancellable, match="3 of 3"):
        two.cancel()
    assert two.state == "done"


@pytest.mark.parametrize("force", [False, True])
def test_a_run_is_cancelling_until_its_running_jobs_have_stopped(start: Any, gate: Gate, force: bool) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        gate.wait()

    Square = start(3, make)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    with populating(Square) as children:
        wait_for(lambda: run.progress().reserved == 1)
        assert run.cancel() == 3
        assert (run.state, run.progress()) == ("cancelling", Progress(3, reserved=1, cancelled=2))
        if force:
            assert run.cancel(force=True) == 1
        else:
            gate.open()
        run.wait(timeout=60)
        assert children[0].result()["success_count"] == 0
    assert (run.state, run.progress()) == ("cancelled", Progress(3, cancelled=3))
    assert made(Square()) == []


def test_no_job_escapes_that_is_claimed_while_its_run_is_called_off(start: Any, gate: Gate) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] > 250:
            gate.wait()  # else all might be over by then
        insert_square(self, key)

    Square = start(300, make)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    with populating(Square, 4) as children:
        wait_for(lambda: run.progress().over > 10)
        run.cancel()
        gate.open()
        run.wait(timeout=60)
        done = sum(child.result()["success_count"] for child in children)
    assert run.state == "cancelled"
    assert run.progress() == Progress(300, done=done, cancelled=300 - done)
    assert done == len(Square()) < 300


def test_a_cancelled_run_goes_on_when_its_jobs_are_retried(start: Any) -> None:
    Square = start(3)
    run = Square.schedule_jobs(min_scheduling_interval=0)
    run.cancel()
    assert Square.retry_jobs("n < 3") == 2
    assert (run.state, run.progress()) == ("running", Progress(3, scheduled=2, cancelled=1))
    Square.populate(reserve_jobs=True)
    assert (run.state, run.progress()) == ("done", Progress(3, done=2, cancelled=1))


def test_a_long_run_is_called_off_in_portions(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Square = start(10)
    run = Square.schedule_jobs("n <= 7", min_scheduling_interval=0)
    rest = Square.schedule_jobs(min_scheduling_interval=0)
    monkeypatch.setattr(database, "_PORTION", 3)
    assert run.cancel() == 7
    assert (run.progress(), rest.progress()) == (Progress(7, cancelled=7), Progress(3, scheduled=3))


def test_calling_a_run_off_does_not_wait_for_jobs_of_others(start: Any, engine: str) -> None:
    Square = start(6)
    run = Square.schedule_jobs("n <= 3", min_scheduling_interval=0)
    Square.schedule_jobs(min_scheduling_interval=0)
    short = "SET lock_timeout = '2s'" if engine == "postgresql" else "SET innodb_lock_wait_timeout = 2"
    with Bystander(Square) as bystander:
        Square.Number.connection.query(short)
        bystander.connection.start_transaction()
        bystander.change(5, "priority = 6")  # locked until they are done
        assert run.cancel() == 3
        bystander.connection.cancel_transaction()
    Square.Number.connection.connect()
    assert run.state == "cancelled"


# -- in make() --------------------------------------------------------------------------------------------------------


def test_make_knows_its_run(start: Any) -> None:
    seen: dict[int, Any] = {}

    def make(self: Any, key: dict[str, Any]) -> None:
        run = djjobs.current_job().run
        seen[key["n"]] = run and (run.run_id, run.name, run.details)
        insert_square(self, key)

    Square = start(3, make)
    run = Square.schedule_jobs(name="m1")
    change_jobs(Square, [2], "run_id = NULL")
    change_jobs(Square, [3], "run_id = 4711")  # somebody has removed its row
    Square.populate(reserve_jobs=True)
    assert seen == {1: (run.run_id, "m1", None), 2: None, 3: None}


# -- cleaning up -------------------------------------------------------------------------------------------------------


def test_finished_runs_go_after_thirty_days(start: Any) -> None:
    Square = start(6, keep_completed=True)
    runs = {n: Square.schedule_jobs(f"n = {n}", name=f"run {n}") for n in (1, 2, 3, 4, 5)}
    Square.populate("n < 4", reserve_jobs=True)
    connection = Square.Number.connection
    change_jobs(Square, [1, 2, 3], f"timestamp = {ago(connection, 31 * DAY)}")
    change_jobs(Square, [4], f"status = 'error', timestamp = {ago(connection, 400 * DAY)}")
    for n in (1, 3, 4, 5):
        change_run(Square, runs[n], f"created = {ago(connection, 400 * DAY)}")
    for n in (1, 4):
        change_run(Square, runs[n], f"ended_time = {ago(connection, 31 * DAY)}")
    change_run(Square, runs[2], f"ended_time = {ago(connection, 29 * DAY)}")
    change_run(Square, runs[3], "ended_time = NULL")  # nobody has seen it end
    assert Square.cleanup_jobs("n = 1")["runs"] == 0, "a restriction is about jobs"
    cleaned = Square.cleanup_jobs()
    assert (cleaned["expired"], cleaned["runs"]) == (2, 1)
    assert {row["name"] for row in run_rows(Square)} == {"run 2", "run 3", "run 4", "run 5"}
    assert runs[3].ended is not None and runs[5].ended is None
    with pytest.raises(djjobs.DjJobsError, match="no run"):
        runs[1].progress()


def test_a_run_stays_as_long_as_a_job_of_it_is_there(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Square = start(2, keep_completed=True)
    run = Square.schedule_jobs(name="m1")
    Square.populate(reserve_jobs=True)
    monkeypatch.setattr(djjobs.settings, "retention", 0)
    change_jobs(Square, [2], "status = 'ignore'")
    cleaned = Square.cleanup_jobs()
    assert (cleaned["expired"], cleaned["runs"]) == (1, 0)
    assert run.progress() == Progress(2, done=1, ignore=1)
    change_jobs(Square, [2], "status = 'success'")
    assert Square.cleanup_jobs()["runs"] == 1
    assert run_rows(Square) == []


# -- the server's work -------------------------------------------------------------------------------------------


class RunStatements:
    """What is asked about runs, and what the server reads for it."""

    def __init__(self, Square: Any, engine: str) -> None:
        self.connection, self._engine = Square.Number.connection, engine
        self._queue, self._table = Queue.of(self.connection, Square.database), Square.table_name
        analyze = "ANALYZE" if engine == "postgresql" else "ANALYZE TABLE"
        for table in (self._queue.jobs, self._queue.runs):
            self.connection.query(f"{analyze} {table.full_table_name}")

    def sql(self, name: str) -> str:
        engine = self._queue.engine
        parts = {"in_tables": engine.runs.in_table, "which": engine.runs.this_run}
        leases = {"own_lease": engine.dialect.seconds("worker.lease"), "lease": engine.dialect.seconds("%(lease)s")}
        return self._queue.sql(getattr(engine.hooks, name, None) or getattr(engine.runs, name), **parts, **leases)

    def parameters(self, run: Run) -> dict[str, Any]:
        return {"run": run.run_id, "runs": (run.run_id,), "table": self._table, "lease": 60}

    def plan(self, name: str, run: Run) -> list[dict[str, Any]]:
        return plan(self.connection, self._engine, self.sql(name), self.parameters(run))

    def rows_read(self, name: str, run: Run) -> float:
        with Reading(self.connection, self._engine).measured() as read:
            self.connection.query(self.sql(name), args=self.parameters(run)).fetchall()
        return read.rows


@pytest.mark.only(engines=("mysql", "mariadb"))  # PostgreSQL does not tell what a look at an index passes over
def test_a_run_that_is_worked_on_is_found_at_the_head_of_the_line(start: Any, engine: str) -> None:
    Square = start(3000)
    head = Square.schedule_jobs("n <= 20", min_scheduling_interval=0)
    rest = Square.schedule_jobs(min_scheduling_interval=0)
    asked = RunStatements(Square, engine)
    assert asked.rows_read("find_over", head) < 20
    change_jobs(Square, range(1, 21), "status = 'reserved'")
    assert asked.rows_read("find_over", rest) < 20
    assert asked.rows_read("find_over", head) > 2000, "or the measure sees nothing"


def test_the_runs_of_a_table_are_seen_to_end_by_one_look_at_its_jobs(start: Any, engine: str) -> None:
    Square = start(3000)
    runs = [Square.schedule_jobs(f"n <= {150 * number}", min_scheduling_interval=0) for number in range(1, 21)]
    assert [int(run) for run in runs] == [150] * 20
    assert 3000 <= RunStatements(Square, engine).rows_read("find_over_in_table", runs[0]) < 4000


@pytest.mark.only(engines=("mysql", "mariadb"))
@pytest.mark.parametrize("name", ["count_in_runs", "find_open_jobs", "find_over_in_table"])
def test_the_jobs_of_a_run_are_found_without_reading_their_rows(start: Any, engine: str, name: str) -> None:
    Square = start(3000)
    run = Square.schedule_jobs("n <= 20", min_scheduling_interval=0)
    Square.schedule_jobs(min_scheduling_interval=0)
    steps = [step for step in RunStatements(Square, engine).plan(name, run) if step["table"] in ("~jobs", "job")]
    assert [step["key"] for step in steps] == ["claim_in_order"]
    assert all("Using index" in step["Extra"].split("; ") for step in steps)
