"""What commands take: targets, conditions, durations, and `name=value`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import click

__all__ = ["Condition", "Duration", "Moment", "NameValue", "explaining_targets"]

_TARGETS = (
    "TARGET is a module: all tables with the djjobs mixin that the module itself defines, or a package collects from"
    " its own modules. Or it is `module:Table`: this table, also one of another schema that the module imports. Or it"
    " is `module:name`: a module that is imported there under this name."
)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Condition(click.ParamType):
    """An SQL condition. An empty one, as from an unset variable, would mean all jobs."""

    name = "sql"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("an empty condition would mean all jobs. Write one, or leave it out.", param, ctx)
        return str(value)


class Duration(click.ParamType):
    """Seconds, `90m`, `2h`, `1h30m`, `HH:MM:SS` or, as Slurm writes it, `D-HH:MM:SS`."""

    name = "duration"

    def __init__(self, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(value) if isinstance(value, (int, float)) else parse_duration(str(value))
        if seconds is None or (self._positive and not seconds):
            self.fail(
                f"{value!r} is not a duration. Write seconds, or as in 90m, 2h, 12:00:00, 1-12:00:00.", param, ctx
            )
        return seconds


class Moment(click.ParamType):
    """A date and time with a time zone, as ISO 8601 writes it."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime.datetime:
        if isinstance(value, datetime.datetime):
            return value
        try:
            moment = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", str(value).strip()))
        except ValueError:
            self.fail(f"{value!r} is no date and time. Write it as in 2030-01-31T18:00+01:00.", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone. Write it as in 2030-01-31T18:00+01:00, or with a Z.", param, ctx)
        return moment


def parse_duration(text: str) -> float | None:
    """A duration in seconds; None if it is none."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        return float(text)
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if parts and "".join(number + unit for number, unit in parts) == text.replace(" ", ""):
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    return None


def explaining_targets(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say in a command's help what a TARGET is, where the docstring has `{targets}`."""
    function.__doc__ = (function.__doc__ or "").replace("{targets}", _TARGETS)
    return function


class NameValue(click.ParamType):
    """`name=value`."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.strip().isidentifier():
            self.fail(f"{value!r} must be an attribute of the key and its value, as in subject=m1.", param, ctx)
        return name.strip(), text
