"""How long to wait for the next try."""

from __future__ import annotations

import statistics

import pytest

import djjobs


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
