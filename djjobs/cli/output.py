"""What commands print: a table to read, or JSON to parse."""

from __future__ import annotations

import datetime
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..printable import as_json as in_json
from ..printable import one_line

__all__ = ["as_json_option", "confirm", "counted", "print_json", "print_table", "say", "utc"]

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

_COLOURS = {
    "error": "red",
    "problem": "red",
    "dead": "red",
    "warning": "yellow",
    "stopping": "yellow",
    "cancelled": "yellow",
    "reserved": "cyan",
    "running": "cyan",
    "cancelling": "yellow",
    "done": "green",
    "working": "green",
    "success": "green",
    "ok": "green",
}


def say(text: str, err: bool = False) -> None:
    """Print one line. Names and messages in it may be anybody's, so control characters are made visible."""
    click.echo(one_line(text), err=err)


def confirm(question: str) -> bool:
    """Ask the user, on stderr."""
    return click.confirm(one_line(question), err=True)


def print_json(data: Any) -> None:
    click.echo(in_json(data, indent=2))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], coloured: str | None = None) -> None:
    """Print rows under their columns; the cells of the `coloured` column say by colour what they mean.

    On a terminal lines are cut at its width. Elsewhere they are whole, for `grep`.
    """
    cells = [list(columns), *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for number, line in enumerate(cells):
        line = _cut(line, widths)
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded[-1] = line[-1]
        for index, column in enumerate(columns):
            if number == 0:
                padded[index] = click.style(padded[index], bold=True)
            elif column == coloured and line[index] in _COLOURS:
                padded[index] = click.style(padded[index], fg=_COLOURS[line[index]])
        click.echo("  ".join(padded).rstrip())


def utc(moment: datetime.datetime | None) -> str:
    """A time as the server gives it, for a table."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def counted(count: int, thing: str) -> str:
    """`1 job`, `2 jobs`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _cut(line: list[str], widths: list[int]) -> list[str]:
    if not sys.stdout.isatty():
        return line
    room = shutil.get_terminal_size().columns - sum(width + 2 for width in widths[:-1])
    return [*line[:-1], line[-1] if len(line[-1]) <= max(room, 10) else line[-1][: max(room, 10) - 1] + "…"]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return one_line(" ".join(f"{name}={item}" for name, item in value.items()))
    return "" if value is None else one_line(" ".join(str(value).split()))
