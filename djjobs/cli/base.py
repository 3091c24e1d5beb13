"""What all commands have in common: how they connect, and how they fail."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click
import datajoint as dj
from datajoint.errors import DataJointError

from ..errors import DjJobsError
from ..printable import one_line
from ..queue.database import connect, explained

__all__ = ["Group", "connect"]


class Group(click.Group):
    """Turns every mistake that a user can mend into one line on stderr and exit code 2."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **options: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **options)
        _keep_the_output_clean()
        try:
            code = super().main(args, standalone_mode=False, **options)
        except click.UsageError as error:
            _fail(_with_help(error))
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort as abort:
            _fail("Interrupted.", 130 if isinstance(abort.__cause__, KeyboardInterrupt) else 1)
        except Exception as error:
            message = _message(error)
            if message is None:
                raise
            _fail(message)
        sys.exit(code if isinstance(code, int) else 0)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        if os.environ.get("NO_COLOR"):
            options.setdefault("color", False)
        return super().make_context(*arguments, **options)


def _keep_the_output_clean() -> None:
    """Standard output is for results: DataJoint 2 would greet there, in the middle of somebody's JSON."""
    logger = logging.getLogger("datajoint")
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    if "DJ_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="MariaDB is not officially supported")


def _with_help(error: click.UsageError) -> str:
    message = error.format_message().strip().replace("\n", " ")
    message = message if message.endswith((".", "?", ")")) else f"{message}."
    return f"{message} For help: {error.ctx.command_path} --help" if error.ctx else message


def _message(error: Exception) -> str | None:
    """What to tell the user of an error; None if it is a bug, which is worth its traceback."""
    if isinstance(error, DjJobsError):
        return str(error)
    if hasattr(dj.conn, "connection"):
        try:
            with explained(dj.conn(), "command", "run the"):
                raise error
        except DjJobsError as explanation:
            return str(explanation)
        except Exception:
            pass
    return str(error) if isinstance(error, DataJointError) else None


def _fail(message: str, code: int = 2) -> NoReturn:
    click.echo(one_line(f"djjobs: {' '.join(message.splitlines())}"), err=True)
    sys.exit(code)
