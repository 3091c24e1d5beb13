"""What a table says about its jobs: how long to wait for the next try, and what cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pipelines import job_counts
from workloads.squares import Standing

import djjobs

# -- exponential ------------------------------------------------------------------------------------------------


# -- policies that cannot be meant ------------------------------------------------------------------------------


# unit/test_policy_values.py has all the others
@pytest.mark.parametrize(
    ("name", "value"), [("max_attempts", 0), ("timeout", "10"), ("retry_on", [ValueError]), ("backoff", -1)]
)
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
