"""What a worker says while it works: lines to read, or one JSON object a line."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from typing import Any, TextIO

import click

from ..printable import as_json as in_json
from ..printable import in_log

__all__ = ["set_up"]

#: What a record may tell besides its message.
_DETAILS = ("table", "key", "attempt", "run_id", "event", "seconds", "waited", "worker", "schedule")
_LEVEL_COLOURS = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


def set_up(*, quiet: bool = False, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send the logs of djjobs and DataJoint, and Python's warnings, to one stream in one form.

    Parameters
    ----------
    quiet : bool
        Only warnings and errors. Defaults to False.
    as_json : bool
        One JSON object a line: time, level, message and what else the record tells. Defaults to False.
    stream : file
        Where to. Defaults to stderr.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if as_json else _LineFormatter(_shows_colours(stream)))
    handler.setLevel(logging.WARNING if quiet else logging.NOTSET)
    logging.captureWarnings(True)
    for name in ("djjobs", "datajoint", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("djjobs").setLevel(logging.WARNING if quiet else logging.INFO)


def _shows_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


class _LineFormatter(logging.Formatter):
    """`2024-05-01 12:00:00 message`, with the level where it is more than information.

    Further lines of a message, and a traceback, stand a little to the right.
    """

    def __init__(self, coloured: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        parts = [f"{level}{record.getMessage()}", _traceback(self, record)]
        time, message = self.formatTime(record, self.datefmt), in_log("\n".join(filter(None, parts)))
        if self._coloured:
            time = click.style(time, dim=True)
        if self._coloured and record.levelno in _LEVEL_COLOURS:
            message = click.style(message, fg=_LEVEL_COLOURS[record.levelno])
        return f"{time} {message}"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback of a record. One that comes from another process has only its text."""
    return record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update({name: getattr(record, name) for name in _DETAILS if getattr(record, name, None) is not None})
        if exception := _traceback(self, record):
            line["exception"] = exception
        return in_json(line)
