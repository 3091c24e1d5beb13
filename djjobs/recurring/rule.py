"""When a schedule is due: every so many seconds, or by a cron line in a time zone. All times here are UTC."""

from __future__ import annotations

import datetime
import difflib
import functools
import re
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import DjJobsError

__all__ = ["Rule", "in_zone"]

_FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_SHORTEST, _LONGEST = 1.0, 10 * 366 * 86400.0
_HOURS_OF_A_DAY = 24
#: How far back to look for the latest due time: nearly always the first is enough.
_LOOKS_BACK = tuple(datetime.timedelta(days=days) for days in (1 / 24, 1, 32, 366, 10 * 366))
_MINUTE = datetime.timedelta(minutes=1)
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


@dataclass(frozen=True)
class Rule:
    """When a schedule is due. Get one with `Rule.of`, which says what is wrong with it.

    Attributes
    ----------
    every : float or None
        Seconds from one due time to the next.
    cron : str
        Or a cron line of five fields.
    timezone : str
        The zone that the cron line is about, and in which times are shown.
    """

    every: float | None
    cron: str
    timezone: str

    @classmethod
    def of(cls, every: Any = None, cron: str | None = None, timezone: str = "UTC") -> Rule:
        """A rule that can be kept, or one clear error."""
        _check_one_is_given(every, cron)
        _check_zone(timezone)
        if cron is None:
            return cls(_checked_seconds(every), "", timezone)
        cron = " ".join(str(cron).split())
        _check_cron(cron)
        return cls(None, cron, timezone)

    @classmethod
    @functools.lru_cache(maxsize=1000)
    def stored(cls, every: float | None, cron: str, timezone: str) -> tuple[Rule, str]:
        """A rule as it stands in a row, and what is wrong with it; empty if nothing is.

        Whoever may write into the table may have written anything there.
        """
        rule = cls(every, cron, timezone)
        try:
            _check_one_is_given(every, cron or None)
            if cron:
                _check_cron(cron)
            else:
                _checked_seconds(every)
            _zone(timezone)
        except DjJobsError as error:
            return rule, str(error)
        except Exception as error:
            return rule, f"It cannot be read when the schedule is due: {type(error).__name__}: {error}."
        return rule, ""

    def first(self, now: datetime.datetime) -> datetime.datetime:
        """The first due time of a schedule that begins now."""
        return self.following(now, now)

    def following(self, due: datetime.datetime, now: datetime.datetime) -> datetime.datetime:
        """The first due time after now, of those that a due time is one of."""
        if self.every is None:
            return next(self._due_after(now))
        return due + ((now - due) // self._step + 1) * self._step

    def latest(self, due: datetime.datetime, now: datetime.datetime) -> datetime.datetime:
        """The last due time up to now, from a due time in the past on."""
        if self.every is not None:
            return due + (now - due) // self._step * self._step
        for back in _LOOKS_BACK:
            latest = None
            for moment in self._due_after(max(due, now - back)):
                if moment > now:
                    break
                latest = moment
            if latest is not None or now - back <= due:
                return latest or due
        return due

    @property
    def _step(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.every or 0)

    def _due_after(self, moment: datetime.datetime) -> Iterator[datetime.datetime]:
        """The due times after this one, by the cron line."""
        zone = _zone(self.timezone)
        minute, _, *days = self.cron.split()
        line = _parsed(self.cron)
        local = in_zone(moment, self.timezone)
        if len(line.hours) == _HOURS_OF_A_DAY:
            # As time passes: an hour that the clock skips is not there, and one that it shows twice is two.
            times = _parsed(" ".join((minute, "*", *days)), local)
        else:
            # By the clock on the wall: what it shows twice is meant the first time, what it skips when it does.
            times = (_when(wall, zone) for wall in _parsed(self.cron, local.replace(tzinfo=None)))
        last = moment
        for time in times:
            time = time.astimezone(datetime.timezone.utc).replace(tzinfo=None)
            if time > last:
                last = time
                yield time
        raise DjJobsError(f"The cron line {self.cron!r} is never due.")

    def __str__(self) -> str:
        if self.every is None:
            return f"{self.cron} ({self.timezone})"
        if not _SHORTEST <= self.every <= _LONGEST:
            return f"every {self.every:g}s"
        words, left = "", self.every
        for unit, seconds in _UNITS:
            if left >= seconds:
                words += f"{int(left // seconds)}{unit}"
                left %= seconds
        return f"every {words}{left:g}s" if left or not words else f"every {words}"


def in_zone(moment: datetime.datetime, timezone: str) -> datetime.datetime:
    """A UTC time of the server as the clocks of a zone show it."""
    return moment.replace(tzinfo=datetime.timezone.utc).astimezone(_zone(timezone))


def _when(wall: datetime.datetime, zone: datetime.tzinfo) -> datetime.datetime:
    """The moment that a clock on the wall shows this time first, or goes past it."""
    moment = wall.replace(tzinfo=zone)
    while moment.astimezone(datetime.timezone.utc).astimezone(zone).replace(tzinfo=None) != wall:
        wall += _MINUTE
        moment = wall.replace(tzinfo=zone)
    return moment


def _parsed(line: str, start: datetime.datetime = datetime.datetime.min) -> Any:
    """The library's view of a cron line: an iterator over the times after `start`."""
    return _cronsim().CronSim(line, start)


def _cronsim() -> Any:
    try:
        import cronsim
    except ImportError:
        raise DjJobsError("Cron lines need the package cronsim: pip install 'djjobs[cli]'") from None
    return cronsim


# -- checks ------------------------------------------------------------------------------------------------


def _check_one_is_given(every: Any, cron: str | None) -> None:
    if (every is None) == (cron is None):
        raise DjJobsError(
            "A schedule is due either every so often or by a cron line: give one of `every` and `cron`, not both."
        )


def _checked_seconds(every: Any) -> float:
    seconds = every.total_seconds() if isinstance(every, datetime.timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not _SHORTEST <= seconds <= _LONGEST:
        raise DjJobsError(
            f"The interval of a schedule must be seconds or a timedelta, one second to ten years, not {every!r}."
        )
    return float(seconds)


def _check_zone(timezone: str) -> None:
    names = zoneinfo.available_timezones()
    if timezone in names:
        return
    alike = difflib.get_close_matches(str(timezone), names, n=1) or ["Europe/Berlin"]
    raise DjJobsError(f"There is no time zone {timezone!r}. Write it as the IANA does, for example {alike[0]}, or UTC.")


def _zone(timezone: str) -> datetime.tzinfo:
    try:
        return zoneinfo.ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise DjJobsError(f"This machine does not know the time zone {timezone!r}: pip install -U tzdata") from None


def _check_cron(line: str) -> None:
    """Raise, with the place of the fault, if the library does not take the line."""
    fields = line.split()
    if len(fields) != len(_FIELDS):
        fault = f"field 6, {fields[5]!r}, is too much" if len(fields) > len(_FIELDS) else "there are too few"
        raise DjJobsError(f"The cron line {line!r} must have five fields ({', '.join(_FIELDS)}): {fault}.")
    cronsim = _cronsim()
    starts = [match.start() for match in re.finditer(r"\S+", line)]
    for number, field in enumerate(fields):
        alone = ["*"] * len(_FIELDS)
        alone[number] = field
        try:
            _parsed(" ".join(alone))
        except (cronsim.CronSimError, AssertionError):
            raise DjJobsError(
                f"The cron line {line!r} is wrong at character {starts[number] + 1}, "
                f"field {number + 1} ({_FIELDS[number]}): {field!r}."
            ) from None
    try:
        _parsed(line)
        next(_parsed(line, datetime.datetime(2000, 1, 1)))
    except (cronsim.CronSimError, StopIteration):
        raise DjJobsError(
            f"The cron line {line!r} is never due: no month of field 4 (month, {fields[3]!r}) has the day of "
            f"field 3 (day of month, {fields[2]!r})."
        ) from None
