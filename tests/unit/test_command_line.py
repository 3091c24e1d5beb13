"""What a user types, as far as no server is asked: help, wrong words, durations, and what logs look like."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from djjobs.cli import logs, main
from djjobs.cli.options import parse_duration

LOOKING = ["worker", "status", "jobs", "runs", "workers"]
CHANGING = ["schedule", "scheduler", "schedule-jobs", "retry", "ignore", "cancel", "cleanup"]
COMMANDS = [*LOOKING, *CHANGING, "check", "migrate", "demo"]


def test_every_command_has_help_with_an_example() -> None:
    for command in ([], *([name] for name in COMMANDS)):
        shown = CliRunner().invoke(main, [*command, "--help"])
        assert shown.exit_code == 0
        assert "Example" in shown.output
    assert sorted(main.commands) == sorted(COMMANDS)


def test_the_module_and_the_script_are_the_same_command() -> None:
    """Each in an interpreter of its own, as a user starts it."""
    module = subprocess.run([sys.executable, "-m", "djjobs.cli"], capture_output=True, text=True)
    assert module.returncode == 0 and "Commands:" in module.stdout, module.stderr
    script = Path(sys.executable).with_name("djjobs")
    told = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert told.returncode == 0 and "version" in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["worker", "lab", "--processes", "0"], "--processes"),
        (["worker", "lab", "--order", "sorted"], "original"),
        (["worker", "lab", "--walltime", "soon"], "'soon' is not a duration"),
        (["worker", "lab", "--walltime", "0"], "not a duration"),
        (["worker", "lab", "--grace", "-1"], "not a duration"),
        (["worker", "lab", "--max-jobs", "0"], "--max-jobs"),
        (["worker", "lab", "--restrict", " "], "would mean all jobs"),
        (["worker"], "TARGET"),
        (["retry", "lab", "--key", "subject"], "as in subject=m1"),
        (["retry", "lab", "--where", ""], "would mean all jobs"),
        (["jobs", "lab", "--status", "broken"], "cancelled"),
        (["jobs", "lab", "--limit", "-1"], "--limit"),
        (["sing"], "No such command 'sing'"),
        (["status", "--loud"], "--loud"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_get_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    runner = CliRunner()
    done = runner.invoke(main, arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("djjobs: ") and says in line and "--help" in line
    assert done.stdout == ""


def test_an_interrupt_is_not_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["djjobs.cli.status"], "module_or_schema", interrupted)
    done = CliRunner().invoke(main, ["status", "lab"])
    assert done.exit_code == 130 and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("0", 0),
        ("45s", 45),
        ("90m", 5400),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1d 12h", 129600),
        ("12:00:00", 43200),
        ("100:00:30", 360030),
        ("2-01:00:00", 176400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "1:30", "12:60:00", "1-12", "h", "1h x", "nan", "inf", "1e3", "5 s 5"]
)
def test_what_is_no_duration(text: str) -> None:
    assert parse_duration(text) is None


@pytest.fixture
def log_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[[], str]]]:
    """Set the logs up; gives what was written since."""
    loggers = [logging.getLogger(name) for name in ("djjobs", "datajoint", "py.warnings")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]

    def set_up(**options: bool) -> Callable[[], str]:
        stream = io.StringIO()
        logs.set_up(stream=stream, **options)
        return stream.getvalue

    yield set_up
    logging.captureWarnings(False)
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_logs_are_lines_with_a_time(log_of: Any) -> None:
    written = log_of()
    logger = logging.getLogger("djjobs.worker")
    logger.info("Spectrum %s: done in 2 s", {"session": 1}, extra={"event": "done"})
    logger.warning("late")
    logger.debug("nobody wants to know")
    first, second = written().splitlines()
    assert first[:4].isdigit() and first.endswith(" Spectrum {'session': 1}: done in 2 s")
    assert second.endswith(" WARNING: late")


def test_quiet_logs_are_warnings(log_of: Any) -> None:
    written = log_of(quiet=True)
    logging.getLogger("djjobs").info("done")
    logging.getLogger("djjobs").error("failed")
    assert len(written().splitlines()) == 1


def test_logs_for_programs_are_json(log_of: Any) -> None:
    written = log_of(as_json=True)
    details = {"table": "Spectrum", "key": {"session": 1}, "event": "error", "seconds": 0.5, "worker": "w1"}
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("djjobs").exception("failed", extra=details)
    logging.getLogger("datajoint").error("reconnecting")
    first, second = (json.loads(line) for line in written().splitlines())
    assert details.items() <= first.items()
    assert (first["level"], first["message"]) == ("error", "failed")
    assert "ValueError: two" in first["exception"] and first["time"].endswith("+00:00")
    assert set(second) == {"time", "level", "message"}
