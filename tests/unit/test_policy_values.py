"""What a table may say about its jobs, what cannot be meant, and what follows for a job that has failed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import djjobs
from djjobs import DjJobsError
from djjobs.queue.claim import Job
from djjobs.queue.policy import Policy


def policy(**members: Any) -> Policy:
    """The policy of a table that says this, and else nothing."""
    return Policy.of(type("Table", (djjobs.JobsMixin,), members), "Table Square")


def job(attempt: int = 0) -> Job:
    """A job that has used up so many attempts."""
    return Job("hash", {"n": 1}, attempt, 5, "worker", 1)


BAD = {
    "max_attempts": [0, -1, 1.5, "3", True],
    "timeout": [0, -1, "10", True, float("nan")],
    "retry_on": ["x", "ValueError", 3, None, int, (ValueError, "x"), [ValueError]],
    "backoff": ["x", -1, None, True, float("inf"), float("nan")],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_cannot_be_meant_is_refused_in_one_line_that_names_the_table(name: str, value: Any) -> None:
    with pytest.raises(DjJobsError) as raised:
        policy(**{name: value})
    message = str(raised.value)
    assert name in message and "Square" in message and repr(value) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", None),
        ("max_attempts", 7),
        ("timeout", None),
        ("timeout", 600.5),
        ("retry_on", ConnectionError),
        ("retry_on", (ConnectionError, (OSError, ValueError))),
        ("retry_on", ()),
    ],
)
def test_what_can_be_meant_is_taken_as_it_is(name: str, value: Any) -> None:
    assert getattr(policy(**{name: value}), name) == value


def test_a_number_of_seconds_is_the_wait_after_every_attempt() -> None:
    backoff = policy(backoff=2.5).backoff
    assert [backoff(attempt) for attempt in (1, 2, 30)] == [2.5, 2.5, 2.5]


def test_an_error_stays_after_the_last_attempt() -> None:
    waits = [policy(max_attempts=3, backoff=4).wait_after_error(ValueError(), job(used)) for used in range(4)]
    assert waits == [4, 4, None, None]
    assert policy(backoff=4).wait_after_error(ValueError(), job()) is None, "one attempt, if nothing is said"


def test_only_the_errors_that_are_named_are_tried_again() -> None:
    named = policy(max_attempts=3, backoff=0, retry_on=(OSError, (KeyError,)))
    assert named.wait_after_error(ConnectionError(), job()) == 0
    assert named.wait_after_error(KeyError(), job()) == 0
    assert named.wait_after_error(ValueError(), job()) is None
    assert policy(max_attempts=3, retry_on=()).wait_after_error(ValueError(), job()) is None


def test_a_function_decides_by_the_error_and_the_job() -> None:
    seen = []

    def again(error: BaseException, job: Job) -> bool:
        seen.append((str(error), job.key, job.attempt))
        return job.attempt == 0

    asked = policy(max_attempts=5, backoff=1, retry_on=staticmethod(again))
    assert [asked.wait_after_error(ValueError("noise"), job(used)) for used in (0, 1)] == [1, None]
    assert seen == [("noise", {"n": 1}, 0), ("noise", {"n": 1}, 1)]


@pytest.mark.parametrize(("backoff", "wait"), [(-5, 0), (float("inf"), 315_360_000), ("7", 7)])
def test_a_wait_that_a_function_gives_is_kept_within_bounds(backoff: Any, wait: float) -> None:
    lenient = policy(max_attempts=2, backoff=staticmethod(lambda attempt: backoff))
    assert lenient.wait_after_error(ValueError(), job()) == wait


@pytest.mark.parametrize(
    "members",
    [
        {"backoff": staticmethod(lambda attempt: float("nan"))},
        {"backoff": staticmethod(lambda attempt: "soon")},
        {"retry_on": staticmethod(lambda error, job: 1 / 0)},
    ],
)
def test_a_function_that_fails_leaves_the_error_and_is_told_of(
    members: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "djjobs"):
        assert policy(max_attempts=2, **members).wait_after_error(ValueError(), job()) is None
    assert "The retry policy failed" in caplog.text


def test_a_lost_job_comes_back_as_often_as_its_table_says_or_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "max_crashes", 2)
    assert [policy().comes_back(attempt=9, crashes=crashes) for crashes in (1, 2, 3)] == [True, False, False]
    said = policy(max_attempts=3)
    assert [said.comes_back(attempt=used, crashes=9) for used in (2, 3, 4)] == [True, False, False]
