"""Rows of `~schedules` as anybody may have written them: reading one never fails, and says what is wrong with it."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from djjobs.recurring.rows import Schedule, role_for
from djjobs.recurring.rule import Rule

NOON = datetime.datetime(2025, 6, 1, 12)
GOOD: dict[str, Any] = {
    "name": "hourly",
    "target": "lab.analysis",
    "what": "jobs",
    "every": 3600.0,
    "cron": "",
    "timezone": "UTC",
    "enabled": 1,
    "next_time": NOON,
}


def read(**changes: Any) -> Schedule:
    return Schedule.from_row(tuple({**GOOD, **changes}.values()))


def test_a_row_that_djjobs_wrote_has_no_fault() -> None:
    assert read() == Schedule("hourly", "lab.analysis", "jobs", Rule(3600.0, "", "UTC"), True, NOON)
    assert read(every=None, cron="0 3 * * *", timezone="Europe/Berlin").fault == ""
    assert read(every=1.0).fault == ""


@pytest.mark.parametrize(
    "changes, words",
    [
        *(({"every": every}, "one second to ten years") for every in (0.0, -1.0, 1e-9, 0.5, 1e300, math.inf)),
        ({"every": math.nan}, "one second to ten years"),
        ({"every": None}, "give one of `every` and `cron`"),
        ({"cron": "* * * * *"}, "give one of `every` and `cron`"),
        ({"every": None, "cron": "* * *"}, "must have five fields"),
        ({"every": None, "cron": "99 * * * *"}, "field 1 (minute)"),
        ({"every": None, "cron": "0 0 30 2 *"}, "is never due"),
        ({"every": None, "cron": "\u0661 * * * *\x00"}, "cron line"),
        ({"timezone": "Mars/Olympus_Mons"}, "does not know the time zone"),
        ({"timezone": "../../etc/passwd"}, "does not know the time zone"),
        ({"timezone": "\x00"}, "does not know the time zone"),
        ({"what": "rm"}, "must be jobs, cleanup, both, not 'rm'"),
        ({"next_time": None}, "no time"),
        ({"next_time": "0000-00-00 00:00:00"}, "no time"),
    ],
)
def test_a_row_that_means_nothing_says_why(changes: dict[str, Any], words: str) -> None:
    schedule = read(**changes)
    assert words in schedule.fault
    str(schedule.rule)


def test_each_target_has_a_role_of_its_own_that_fits_the_column() -> None:
    targets = ["lab", "lab.a", "lab:A", "lab:a", "", "x" * 255, "Nächte \N{SNOWMAN}"]
    roles = {role_for(target) for target in targets}
    assert len(roles) == len(targets) and {len(role) for role in roles} == {16}
