"""How many jobs a populate may still run, and how many it claims at once."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

from djjobs.work import budget
from djjobs.work.budget import Budget, Pace


@pytest.mark.parametrize(("max_calls", "limit"), [(5, None), (None, 5), (5, 9), (9, 5)])
def test_no_more_is_granted_than_the_smaller_of_the_limits(max_calls: int | None, limit: int | None) -> None:
    left = Budget(max_calls, limit)
    assert [left.take(3), left.take(3), left.take(3)] == [3, 2, 0]
    assert left.is_spent and not left.ended


def test_without_limits_all_is_granted() -> None:
    left = Budget()
    assert left.take(10**9) == 10**9
    assert not left.is_spent and left.most(7) == 7


@pytest.mark.parametrize("limits", [(0, None), (None, 0), (-1, None)])
def test_a_limit_of_nothing_grants_nothing(limits: tuple[int | None, int | None]) -> None:
    assert Budget(*limits).take(1) == 0


def test_what_no_job_was_found_for_can_be_taken_again() -> None:
    left = Budget(max_calls=4, limit=4)
    assert left.take(4) == 4
    left.put_back(3)
    assert left.most(10) == left.take(10) == 3


def test_a_key_that_was_made_already_costs_a_look_and_no_call() -> None:
    left = Budget(max_calls=2, limit=3)
    assert left.take(2) == 2
    left.refund_call()
    assert left.take(2) == 1
    left.refund_call()
    assert left.take(1) == 0, "three were looked at"


def test_once_it_is_over_nothing_is_granted_whatever_is_put_back() -> None:
    left = Budget(max_calls=4)
    left.spend_all()
    left.put_back(4)
    assert left.ended and left.is_spent and left.take(1) == 0


def test_processes_spend_it_together() -> None:
    context = multiprocessing.get_context("fork")
    left, granted = Budget(max_calls=100, context=context), context.Queue()

    def spend() -> None:
        mine = 0
        while left.take(1):
            mine += 1
        granted.put(mine)

    processes = [context.Process(target=spend) for _ in range(4)]
    for process in processes:
        process.start()
    assert sum(granted.get(timeout=60) for _ in processes) == 100
    for process in processes:
        process.join()


def test_a_process_that_is_killed_in_the_middle_takes_nothing_with_it() -> None:
    context = multiprocessing.get_context("fork")
    left = Budget(max_calls=100, context=context)
    is_inside = context.Event()

    def die_inside() -> None:
        with left._lock:
            is_inside.set()
            time.sleep(60)

    victim = context.Process(target=die_inside)
    victim.start()
    assert is_inside.wait(30)
    heir = context.Process(target=lambda: left.take(60))
    heir.start()
    victim.kill()
    heir.join(10)
    heir.kill()
    assert heir.exitcode == 0
    assert left.take(60) == 40


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that goes on when it is told to."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


def test_short_jobs_are_claimed_many_at_a_time_and_long_ones_one_by_one(clock: Any) -> None:
    pace = Pace()
    assert pace.batch == 1, "nobody knows yet"

    def takes(seconds: float) -> int:
        with pace.timing():
            clock.now += seconds
        return pace.batch

    assert takes(0.1) == 10
    assert takes(0.00001) == 14
    for _ in range(30):
        takes(0.00001)
    assert pace.batch == 32, "there is a most"
    assert takes(60) == 1, "and one long job is enough to be careful"
