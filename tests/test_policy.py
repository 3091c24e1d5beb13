"""What a table says about its jobs: how long to wait for the next try, and what cannot be meant."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from pipelines import job_counts
from workloads.squares import Standing

import djjobs

# -- exponential ------------------------------------------------------------------------------------------------


def test_the_wait_doubles_with_every_attempt() -> None:
    wait = djjobs.exponential(jitter=0)
    assert [wait(attempt) for attempt in range(1, 7)] == [1, 2, 4, 8, 16, 32]


def test_first_and_base_are_as_asked() -> None:
    wait = djjobs.exponential(base=3, first=0.5, jitter=0)
    assert [wait(attempt) for attempt in range(1, 5)] == [0.5, 1.5, 4.5, 13.5]


@pytest.mark.parametrize("attempt", [1, 2, 5, 8, 12])
def test_waits_differ_at_random_around_the_one_asked_for(attempt: int) -> None:
    waits = [djjobs.exponential(jitter=0.25)(attempt) for _ in range(2000)]
    expected = 2 ** (attempt - 1)
    assert len(set(waits)) > 1900
    assert 0.75 * expected <= min(waits) < 0.8 * expected
    if expected * 1.25 <= 3600:
        assert 1.2 * expected < max(waits) <= 1.25 * expected
        assert abs(statistics.mean(waits) / expected - 1) < 0.05


@pytest.mark.parametrize("attempt", [4, 5, 10, 100, 5000, 10**6])
def test_the_wait_never_grows_beyond_the_cap(attempt: int) -> None:
    waits = [djjobs.exponential(most=8)(attempt) for _ in range(500)]
    assert max(waits) <= 8
    assert min(waits) > 8 * 0.75
    assert len(set(waits)) > 1  # capped waits too do not end together


def test_waits_are_at_most_an_hour_by_default() -> None:
    assert max(djjobs.exponential()(attempt) for attempt in range(1, 200)) <= 3600


def test_the_default_of_a_table_is_exponential() -> None:
    assert djjobs.JobsMixin.backoff == djjobs.exponential()
    assert (djjobs.JobsMixin.max_attempts, djjobs.JobsMixin.timeout) == (None, None)


# -- policies that cannot be meant ------------------------------------------------------------------------------


BAD = {
    "max_attempts": [0, -1, 1.5, "3", True],
    "timeout": [0, -1, "10", True, float("nan")],
    "retry_on": ["x", "ValueError", 3, None, int, (ValueError, "x"), [ValueError]],
    "backoff": ["x", -1, None, True, float("inf"), float("nan")],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_policy_that_cannot_be_meant_is_refused_in_one_line_that_names_the_table(
    standing: Standing, name: str, value: Any
) -> None:
    Square = standing.start_over(2, **{name: value})
    for use in USES:
        with pytest.raises(djjobs.DjJobsError) as raised:
            use(Square)
        message = str(raised.value)
        assert name in message and "Square" in message and repr(value) in message
        assert "\n" not in message
    assert set(job_counts(Square)) <= {"scheduled"}


USES: list[Callable[[Any], Any]] = [
    lambda table: table.populate(reserve_jobs=True),
    lambda table: table.populate(reserve_jobs=True, processes=2),
    lambda table: table.cleanup_jobs(),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", 7),
        ("timeout", 600.5),
        ("timeout", 3600),
        ("retry_on", ConnectionError),
        ("retry_on", (ConnectionError, (OSError, ValueError))),
        ("retry_on", ()),
        ("retry_on", staticmethod(lambda error, job: True)),
        ("backoff", 0),
        ("backoff", 2.5),
        ("backoff", staticmethod(lambda attempt: attempt)),
        ("backoff", djjobs.exponential(first=0.1)),
    ],
)
def test_a_policy_that_can_be_meant_is_taken(standing: Standing, name: str, value: Any) -> None:
    Square = standing.start_over(1, **{name: value})
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
