"""When a schedule is due: cron lines and intervals, over the days on which clocks change."""

from __future__ import annotations

import datetime
import itertools
from zoneinfo import ZoneInfo

import pytest

from djjobs.recurring.rule import Rule

UTC = datetime.timezone.utc
MINUTE, HOUR, DAY = (datetime.timedelta(**{unit: 1}) for unit in ("minutes", "hours", "days"))


def due_times(cron: str, zone: str, start: datetime.datetime, days: int) -> list[datetime.datetime]:
    """The due times of some days, each found from the one before it, as a scheduler does, in UTC."""
    rule, now, times = Rule.of(cron=cron, timezone=zone), start, []
    while (now := rule.following(now, now)) < start + days * DAY:
        times.append(now)
    return times


def walls(times: list[datetime.datetime], zone: str) -> list[str]:
    return [f"{time.replace(tzinfo=UTC).astimezone(ZoneInfo(zone)):%d. %H:%M%z}" for time in times]


def test_when_the_clock_skips_an_hour_a_daily_schedule_fires_once() -> None:
    """In Berlin, on 2025-03-30, two o'clock is followed by three."""
    start = datetime.datetime(2025, 3, 29, 12)
    times = walls(due_times("30 2 * * *", "Europe/Berlin", start, 3), "Europe/Berlin")
    assert times == ["30. 03:00+0200", "31. 02:30+0200", "01. 02:30+0200"]
    times = walls(due_times("*/20 2 * * *", "Europe/Berlin", start, 2), "Europe/Berlin")
    assert times == ["30. 03:00+0200", "31. 02:00+0200", "31. 02:20+0200", "31. 02:40+0200"]


def test_when_the_clock_shows_an_hour_twice_a_daily_schedule_fires_once() -> None:
    """In Berlin, on 2025-10-26, three o'clock is followed by two."""
    start = datetime.datetime(2025, 10, 25, 12)
    times = walls(due_times("30 2 * * *", "Europe/Berlin", start, 3), "Europe/Berlin")
    assert times == ["26. 02:30+0200", "27. 02:30+0100", "28. 02:30+0100"]
    times = walls(due_times("0 */2 * * *", "Europe/Berlin", start + 12 * HOUR, 1), "Europe/Berlin")
    assert times[:3] == ["26. 04:00+0100", "26. 06:00+0100", "26. 08:00+0100"]
    times = walls(due_times("0 */2 * * *", "Europe/Berlin", start, 1), "Europe/Berlin")
    assert times[4:8] == ["26. 00:00+0200", "26. 02:00+0200", "26. 04:00+0100", "26. 06:00+0100"]


def test_one_who_looks_in_the_second_of_two_equal_hours_does_not_fire_again() -> None:
    rule = Rule.of(cron="30 2 * * *", timezone="Europe/Berlin")
    first = datetime.datetime(2025, 10, 26, 0, 30)
    for minutes in (0, 1, 30, 59, 60, 61, 90):
        now = first + minutes * MINUTE
        assert rule.following(first, now) == datetime.datetime(2025, 10, 27, 1, 30)
        assert rule.latest(first - DAY, now) == first


def test_an_hourly_schedule_goes_on_every_hour_through_both_changes() -> None:
    for day in (datetime.datetime(2025, 3, 29), datetime.datetime(2025, 10, 25)):
        for cron in ("15 * * * *", "15 0-23 * * *", "15 */1 * * *"):
            times = due_times(cron, "Europe/Berlin", day, 3)
            assert {after - before for before, after in itertools.pairwise(times)} == {HOUR}


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana", "UTC"])
@pytest.mark.parametrize("cron", ["0 3 * * *", "30 2 * * *", "0 0 * * *", "15 1,2,3 * * *", "10,40 2 * * *"])
def test_a_year_of_daily_times_has_every_one_of_them_once(zone: str, cron: str) -> None:
    """Each time on the wall is fired on each day, no day is left out, and none has one too many."""
    minutes, hours = cron.split()[:2]
    a_day = len(minutes.split(",")) * len(hours.split(","))
    times = due_times(cron, zone, datetime.datetime(2024, 12, 31, 12), 367)
    local = [time.replace(tzinfo=UTC).astimezone(ZoneInfo(zone)) for time in times]
    by_day: dict[datetime.date, list[datetime.datetime]] = {}
    for time in local:
        by_day.setdefault(time.date(), []).append(time)
    year = [datetime.date(2025, 1, 1) + number * DAY for number in range(365)]
    # What falls into a gap is fired when the clock skips it, together with what else is due then.
    assert all(1 <= len(by_day[day]) <= a_day for day in year)
    assert sum(len(by_day[day]) == a_day for day in year) >= 364
    shown = [(time.date(), time.hour, time.minute) for time in local]
    assert len(set(shown)) == len(shown)


def test_the_same_line_means_another_moment_in_another_zone() -> None:
    now = datetime.datetime(2025, 1, 10)
    times = {
        zone: Rule.of(cron="0 3 * * *", timezone=zone).first(now) for zone in ("UTC", "Europe/Berlin", "Asia/Tokyo")
    }
    assert times == {
        "UTC": datetime.datetime(2025, 1, 10, 3),
        "Europe/Berlin": datetime.datetime(2025, 1, 10, 2),
        "Asia/Tokyo": datetime.datetime(2025, 1, 10, 18),
    }


def test_an_interval_keeps_its_rate_however_late_it_is_fired() -> None:
    rule, start = Rule.of(every=90), datetime.datetime(2025, 1, 1)
    assert rule.first(start) == start + 90 * MINUTE / 60
    for late in (0, 1, 89.9, 90, 1000, 86400):
        now = start + datetime.timedelta(seconds=late)
        latest, following = rule.latest(start, now), rule.following(start, now)
        assert latest <= now < following and following - latest == 1.5 * MINUTE
        assert (latest - start) % (1.5 * MINUTE) == datetime.timedelta()


@pytest.mark.parametrize("cron", ["*/5 * * * *", "0 3 * * *", "0 3 * * MON", "0 0 1 * *", "0 0 29 2 *", "* * 1-15 * *"])
def test_the_latest_of_all_that_was_missed_is_found_however_long_that_was(cron: str) -> None:
    rule = Rule.of(cron=cron, timezone="Europe/Berlin")
    due = rule.first(datetime.datetime(2011, 1, 1))
    for now in (due, due + 13 * HOUR, datetime.datetime(2012, 7, 17, 5, 3), datetime.datetime(2025, 7, 17, 5, 3)):
        latest = rule.latest(due, now)
        assert due <= latest <= now < rule.following(due, now)
        # Nothing lies between.
        assert rule.following(latest, latest) == rule.following(due, now)
