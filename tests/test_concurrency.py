"""Many workers, each a process with a connection of its own: every job is made once, by one of them."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pipelines import forked, job_counts
from workloads.squares import CallLog, another_connection, made, recording, rows_by_number, squares

import djjobs

WORKERS = 16
JOBS = 1000


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen who find nothing would look again and again."""
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0.5)


def side_by_side(schema: Any, count: int, work: Callable[[int], Any]) -> list[Any]:
    """What the workers return, however long it takes on a busy machine."""
    with forked(schema, count, work) as workers:
        return [worker.result(timeout=240) for worker in workers]


def all_made_once(Square: Any, log: CallLog, count: int) -> None:
    numbers = list(range(1, count + 1))
    assert {n: times for n, times in Counter(log.numbers()).items() if times > 1} == {}
    assert sorted(log.numbers()) == numbers
    assert made(Square()) == numbers
    assert job_counts(Square) == {}


@pytest.mark.parametrize("order", ["original", "random"])
def test_sixteen_workers_make_a_thousand_jobs_once_each(schema: Any, log: CallLog, order: str) -> None:
    """They all start before there is even a queue: one declares it, one schedules, none goes home early."""
    Square = squares(schema, JOBS, recording(log))
    results = side_by_side(schema, WORKERS, lambda _: Square.populate(reserve_jobs=True, order=order))
    assert [result["error_list"] for result in results] == [[]] * WORKERS
    assert sum(result["success_count"] for result in results) == JOBS
    assert min(result["success_count"] for result in results) > 0
    assert len({pid for _, pid in log.lines()}) == WORKERS
    all_made_once(Square, log, JOBS)


def test_two_teams_with_a_half_each_keep_to_their_half(schema: Any, log: CallLog) -> None:
    jobs = JOBS // 2
    Square = squares(schema, jobs, recording(log))
    halves = f"n <= {jobs // 2}", f"n > {jobs // 2}"
    results = side_by_side(schema, WORKERS, lambda worker: Square.populate(halves[worker % 2], reserve_jobs=True))
    for team in (0, 1):
        assert sum(result["success_count"] for result in results[team::2]) == jobs // 2
    teams: dict[str, set[bool]] = {}
    for n, pid in log.lines():
        teams.setdefault(pid, set()).add(int(n) <= jobs // 2)
    assert all(len(halves) == 1 for halves in teams.values())
    all_made_once(Square, log, jobs)


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
@pytest.mark.parametrize("word", ["max_calls", "limit"])
@pytest.mark.parametrize("order", ["original", "random"])
def test_each_worker_gets_the_number_it_asked_for(
    schema: Any, log: CallLog, word: str, order: str, restrictions: tuple[str, ...]
) -> None:
    """Five workers ask for 15 jobs each, and there are just as many."""
    Square = squares(schema, 75, recording(log))
    Square.schedule_jobs()
    results = side_by_side(
        schema, 5, lambda _: Square.populate(*restrictions, reserve_jobs=True, order=order, **{word: 15})
    )
    assert [result["success_count"] for result in results] == [15] * 5
    all_made_once(Square, log, 75)


def test_a_worker_that_is_not_quite_the_first_ever_still_gets_its_jobs(schema: Any) -> None:
    """Another one adds the row for scheduling this table just before it, but has not begun to schedule."""
    Square = squares(schema, 3)
    jobs = Square.jobs.full_table_name
    control = jobs.replace("~jobs", "~jobs_control")
    connection, other = schema.connection, another_connection()
    query = connection.query
    overtaken = []

    def query_overtaken(sql: str, *arguments: Any, **options: Any) -> Any:
        if re.match(rf"\s*INSERT INTO {re.escape(control)}", sql) and not overtaken:
            overtaken.append(sql)
            other.query(f"INSERT INTO {control} (table_name, scope) VALUES ('{Square.table_name}', '')")
        return query(sql, *arguments, **options)

    connection.query = query_overtaken
    try:
        result = Square.populate(reserve_jobs=True)
    finally:
        del connection.query
        other.close()
    assert overtaken
    assert result["success_count"] == 3


def test_errors_are_recorded_once_each(schema: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] % 3 == 0:
            raise ValueError("a multiple of three")
        self.insert1({**key, "square": 0})

    Square = squares(schema, 150, recording(log, make))
    results = side_by_side(schema, 6, lambda _: Square.populate(reserve_jobs=True, suppress_errors=True))
    failed = [key["n"] for result in results for key, _ in result["error_list"]]
    assert sorted(failed) == list(range(3, 151, 3))
    assert sorted(log.numbers()) == list(range(1, 151))
    assert job_counts(Square) == {"error": 50}


def test_workers_that_stop_at_an_error_leave_the_rest_to_the_others(schema: Any, log: CallLog) -> None:
    """Each worker goes on with a new populate after an error, until there is nothing left."""

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] % 10 == 0:
            raise ValueError("a multiple of ten")
        self.insert1({**key, "square": 0})

    Square = squares(schema, 200, recording(log, make))

    def work(_: int) -> int:
        errors = 0
        while True:
            try:
                Square.populate(reserve_jobs=True)
                return errors
            except ValueError:
                errors += 1

    assert sum(side_by_side(schema, 6, work)) == 20
    assert sorted(log.numbers()) == list(range(1, 201))
    assert job_counts(Square) == {"error": 20}


def test_a_worker_that_dies_costs_nobody_a_job(schema: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 1 and log.numbers().count(1) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.insert1({**key, "square": 0})

    Square = squares(schema, 100, recording(log, make), keep_completed=True)
    Square.schedule_jobs()

    def work(_: int) -> int:
        """Until everything is made: the dead worker's job comes back when its monitor has seen it die."""
        done = 0
        while len(Square()) < 100:
            done += Square.populate(reserve_jobs=True)["success_count"]
        return done

    with forked(schema, 4, work) as workers:
        for worker in workers:
            worker.process.join(240)
        killed = [worker for worker in workers if worker.process.exitcode == -signal.SIGKILL]
        counts = [worker.result() for worker in workers if worker not in killed]
    assert len(killed) == 1
    assert made(Square()) == list(range(1, 101))
    assert len(log.numbers()) == 101
    assert sum(counts) <= 100
    assert job_counts(Square) == {"success": 100}
    rows = rows_by_number(Square)
    assert {n: row["attempt"] for n, row in rows.items() if row["attempt"]} == {1: 1}
