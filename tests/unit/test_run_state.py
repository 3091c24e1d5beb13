"""The state of a run follows from its jobs."""

from __future__ import annotations

import pytest

from djjobs.run.state import STATES, Progress, state_of


@pytest.mark.parametrize(
    ("counts", "facts", "state"),
    [
        ({"scheduled": 5}, {}, "pending"),
        ({"scheduled": 4, "reserved": 1}, {}, "running"),
        ({"scheduled": 4, "success": 1}, {}, "running"),
        ({"scheduled": 4}, {}, "running"),  # one is done and its row gone
        ({"scheduled": 4, "error": 1}, {}, "running"),
        ({"scheduled": 5}, {"begun": True}, "running"),
        ({"reserved": 1}, {}, "running"),
        ({}, {}, "done"),
        ({"success": 5}, {}, "done"),
        ({"error": 5}, {}, "done"),
        ({"error": 1, "cancelled": 1, "ignore": 1, "success": 1}, {}, "done"),
        ({}, {"unfinished": True}, "running"),
        ({"error": 1}, {"unfinished": True}, "running"),
        ({"scheduled": 5}, {"cancelled": True}, "cancelling"),
        ({"reserved": 1, "cancelled": 4}, {"cancelled": True}, "cancelling"),
        ({"cancelled": 5}, {"cancelled": True}, "cancelled"),
        ({"cancelled": 2, "error": 1}, {"cancelled": True, "unfinished": True}, "cancelled"),
    ],
)
def test_the_state_follows_from_the_jobs(counts: dict[str, int], facts: dict[str, bool], state: str) -> None:
    facts = {"cancelled": False, "begun": False, "unfinished": False, **facts}
    assert state_of(Progress.of(5, counts), **facts) == state
    assert state in STATES
