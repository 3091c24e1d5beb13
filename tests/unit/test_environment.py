"""Settings come from the environment of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import djjobs


def test_settings_come_from_the_environment() -> None:
    code = "import datajoint as dj, djjobs; print(djjobs.settings, dj.config['min_scheduling_interval'])"
    values = {"DJJOBS_MIN_SCHEDULING_INTERVAL": "7.5", "DJJOBS_SCHEDULING_TIMEOUT": "3"}
    root = str(Path(djjobs.__file__).parents[1])
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": root, **values},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "min_scheduling_interval=7.5" in child.stdout
    assert "scheduling_timeout=3.0" in child.stdout
    assert child.stdout.split()[-1] == "7.5"
    without = {name: value for name, value in os.environ.items() if not name.startswith("DJJOBS_")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    child = subprocess.run(command, env={**without, "PYTHONPATH": root}, capture_output=True, text=True, check=True)
    assert child.stdout.split()[-1] == "5.0"
