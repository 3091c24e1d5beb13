"""What a user types, and what the screen says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines import sessions


def djjobs(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "djjobs.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_every_command_has_help_with_an_example() -> None:
    for command in ([], ["migrate"], ["status"], ["demo"]):
        done = djjobs(*command, "--help")
        assert done.returncode == 0
        assert "Example" in done.stdout


def test_status_shows_a_table_or_json(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    shown = djjobs("status", schema.database)
    assert shown.returncode == 0, shown.stderr
    assert "scheduled" in shown.stdout and "12" in shown.stdout
    told = json.loads(djjobs("status", schema.database, "--json").stdout)
    assert told["__spectrum"]["scheduled"] == 12


def test_a_module_that_does_not_import_is_told_in_one_line(server: Any, tmp_path: Path) -> None:
    (tmp_path / "broken_pipeline.py").write_text("1 / 0\n")
    broken = djjobs("status", "broken_pipeline", PYTHONPATH=os.pathsep.join([str(tmp_path), os.getcwd()]))
    assert (broken.returncode, broken.stdout) == (2, "")
    complaint = broken.stderr.strip().splitlines()[-1]
    assert complaint.startswith("djjobs: The module broken_pipeline does not import: ZeroDivisionError")


def test_mistakes_get_one_line_and_exit_code_2(schema: Any) -> None:
    for arguments in (("status", "no_such_thing"), ("migrate", "no_such_schema")):
        done = djjobs(*arguments)
        assert done.returncode == 2
        complaint = done.stderr.strip().splitlines()[-1]
        assert complaint.startswith("djjobs: ") and arguments[1] in complaint


def test_a_wrong_password_is_said_to_be_one(server: Any) -> None:
    done = djjobs("status", "anything", DJ_PASS="not the password")
    assert done.returncode == 2
    complaint = done.stderr.strip().splitlines()[-1]
    assert complaint.startswith("djjobs: Cannot connect: ") and "refused the password" in complaint
