"""Old jobs go with cleanup_jobs, but never one that keeps a key from being made again."""

from __future__ import annotations

from typing import Any

import pytest
from workloads.lives import ago
from workloads.squares import change_jobs, rows_by_number, statuses

import djjobs

DAY = 86400.0


def finished(start: Any, **members: Any) -> Any:
    """Six numbers: 1 to 4 are made and kept, of 5 and 6 nothing is there yet."""
    Square = start(6, keep_completed=True, **members)
    Square.populate("n < 5", reserve_jobs=True)
    Square.schedule_jobs(min_scheduling_interval=0)
    return Square


def age(Square: Any, numbers: list[int], days: float, status: str | None = None) -> None:
    change = f"timestamp={ago(Square.Number.connection, days * DAY)}"
    change_jobs(Square, numbers, change + (f", status='{status}'" if status else ""))


def test_finished_jobs_go_after_thirty_days(start: Any) -> None:
    Square = finished(start)
    age(Square, [1, 2], 31)
    age(Square, [3], 29)
    assert Square.cleanup_jobs()["expired"] == 2
    assert sorted(statuses(Square)) == [3, 4, 5, 6]
    assert len(Square()) == 4, "the results stay"
    assert int(Square.schedule_jobs(min_scheduling_interval=0)) == 0, "and nothing comes back"


def test_a_job_that_keeps_its_key_from_being_made_again_stays(start: Any) -> None:
    Square = finished(start)
    for number, status in ((5, "error"), (6, "cancelled")):
        age(Square, [number], 400, status)
    assert Square.cleanup_jobs()["expired"] == 0
    assert statuses(Square) == {1: "success", 2: "success", 3: "success", 4: "success", 5: "error", 6: "cancelled"}


def test_an_old_error_goes_once_the_result_is_there(start: Any) -> None:
    Square = finished(start)
    age(Square, [1], 31, "error")
    age(Square, [2], 31, "cancelled")
    age(Square, [3], 31, "ignore")
    assert Square.cleanup_jobs()["expired"] == 2
    assert statuses(Square) == {3: "ignore", 4: "success", 5: "scheduled", 6: "scheduled"}


def test_the_setting_and_the_restriction_are_heeded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Square = finished(start)
    age(Square, [1, 2], 3)
    monkeypatch.setattr(djjobs.settings, "retention", 2 * DAY)
    assert Square.cleanup_jobs("n = 1")["expired"] == 1
    assert 2 in statuses(Square)


def test_the_tables_hook_sees_each_job_first_and_may_object(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []

    def before_delete(self: Any, job: dict[str, Any]) -> None:
        seen.append(job)
        if job["key"] == {"n": 2}:
            raise OSError("its files are in use")

    Square = finished(start, before_delete=before_delete)
    age(Square, [1, 2], 31)
    (Square.Number & "n = 5").delete_quick()
    cleaned = Square.cleanup_jobs()
    assert (cleaned["expired"], cleaned["orphaned_incomplete"]) == (1, 1)
    assert sorted((job["key"]["n"], job["status"]) for job in seen) == [
        (1, "success"),
        (2, "success"),
        (5, "scheduled"),
    ]
    assert sorted(rows_by_number(Square)) == [2, 3, 4, 6]
    assert "its files are in use" in caplog.text
