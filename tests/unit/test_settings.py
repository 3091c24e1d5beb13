"""The settings: where their values come from, which values they take, and which names there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datajoint as dj
import pytest
from sources import ROOT

import djjobs
from djjobs import DjJobsError
from djjobs.settings import Settings

#: Names that are refused on purpose, where the documentation tells of it.
TYPING_ERRORS = {"KEEP_COMPLETE"}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The settings are the same for all tests of a process."""
    before = {name: getattr(djjobs.settings, name) for name in Settings._names()}
    yield
    for name, value in before.items():
        setattr(djjobs.settings, name, value)


def in_new_process(code: str, **variables: str) -> str:
    """What a new interpreter prints that has only these of our variables."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("DJJOBS_")}
    environment = {**without, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def complaint(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """What the first use would say if these variables were set; empty if nothing."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        Settings().insist_on_environment()
    except DjJobsError as error:
        return str(error)
    return ""


# -- values ----------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_environment() -> None:
    code = "import datajoint as dj, djjobs; print(djjobs.settings, dj.config['min_scheduling_interval'])"
    said = in_new_process(code, DJJOBS_MIN_SCHEDULING_INTERVAL="7.5", DJJOBS_SCHEDULING_TIMEOUT="3")
    assert "min_scheduling_interval=7.5" in said
    assert "scheduling_timeout=3.0" in said
    assert said.split()[-1] == "7.5"
    assert in_new_process(code).split()[-1] == "5.0"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("min_scheduling_interval", -5, "zero or more, not -5"),
        ("scheduling_timeout", "for ever", "zero or more, not 'for ever'"),
        ("grace", float("inf"), "zero or more, not inf"),
        ("retention", None, "zero or more, not None"),
        ("lease", 0, "more than zero"),
        ("heartbeat_interval", -1, "zero or more, not -1"),
        ("max_crashes", 0, "one or more, not 0"),
        ("max_crashes", "many", "one or more, not 'many'"),
        ("events", "perhaps", "true or false, not 'perhaps'"),
        ("keep_completed", 2, "true or false, not 2"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(name: str, value: Any, says: str) -> None:
    before = getattr(djjobs.settings, name)
    with pytest.raises(DjJobsError, match=f"{name} must be.*{re.escape(says)}"):
        setattr(djjobs.settings, name, value)
    assert getattr(djjobs.settings, name) == before


def test_a_value_of_the_environment_that_makes_no_sense_is_refused_at_the_first_use() -> None:
    use = """
import types, djjobs
try:
    djjobs.jobs(types.SimpleNamespace(connection=None, database="lab"))
except djjobs.DjJobsError as error:
    print(error)
"""
    assert in_new_process(use, DJJOBS_LEASE="long").strip() == (
        "DJJOBS_LEASE: lease must be a number of seconds, zero or more, not 'long'."
    )
    assert in_new_process(use, DJJOBS_KEEP_COMPLETE="1").strip() == (
        "DJJOBS_KEEP_COMPLETE: there is no setting keep_complete. Did you mean DJJOBS_KEEP_COMPLETED?"
    )


def test_the_interval_is_the_same_value_in_dj_config() -> None:
    djjobs.settings.min_scheduling_interval = 17
    assert dj.config["min_scheduling_interval"] == 17
    dj.config["min_scheduling_interval"] = 18
    assert djjobs.settings.min_scheduling_interval == 18


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("keep_complete", "keep_completed"),
        ("leases", "lease"),
        ("event", "events"),
        ("heartbeat", "heartbeat_interval"),
        ("grace_period", "grace"),
        ("min_schedule_interval", "min_scheduling_interval"),
        ("maxcrashes", "max_crashes"),
        ("Lease", "lease"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DjJobsError, match=rf"there is no setting {name}\. Did you mean {meant}\?"):
        setattr(djjobs.settings, name, True)
    assert not hasattr(djjobs.settings, name)
    if name == name.lower():
        variable = f"DJJOBS_{name.upper()}"
        said = complaint(monkeypatch, **{variable: "1"})
        assert said == f"{variable}: there is no setting {name}. Did you mean DJJOBS_{meant.upper()}?"


def test_a_name_like_no_setting_is_refused_with_all_of_them() -> None:
    with pytest.raises(DjJobsError, match=r"no setting banana\. The settings are min_scheduling_interval, .*events"):
        djjobs.settings.banana = 1


def test_the_environment_may_hold_what_is_not_meant_for_djjobs(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "DJJOBS_SERVICE_HOST": "10.0.0.1",
        "DJJOBS_EVENTS_SERVICE_PORT": "80",
        "DJJOBS_EVENTS_PORT": "tcp://10.0.0.1:80",
        "DJJOBS_LEASE_PORT_80_TCP_ADDR": "10.0.0.1",
        "DJJOBS_TEST_LEASES": "1",
        "DJJOBS_BANANA": "1",
        "MY_DJJOBS_LEASES": "1",
    }
    assert complaint(monkeypatch, **others) == ""


def names_in_the_project() -> set[str]:
    """Every variable with our prefix that some file of the project names."""
    kinds = {".py", ".md", ".toml", ".cfg", ".yml", ".yaml", ".ipynb", ".sh", ""}
    files = [
        path
        for folder in ("djjobs", "docs", "examples", "notebooks", "tests", ".")
        for path in ((ROOT / folder).rglob("*") if folder != "." else ROOT.glob("*"))
        if path.is_file() and path.suffix in kinds and path != Path(__file__).resolve()
    ]
    texts = [path.read_text(errors="replace") for path in files]
    return {name for text in texts for name in re.findall(r"(?<![A-Z_])DJJOBS_([A-Z][A-Z_]*)", text)} - TYPING_ERRORS


def test_no_variable_of_the_project_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {name.upper() for name in Settings._names()}
    others = {name for name in names_in_the_project() if name.rstrip("_") not in settings}
    assert {"VENV", "TEST_HOST", "EXAMPLE_SCHEMA"} <= others
    assert complaint(monkeypatch, **{f"DJJOBS_{name}": "1" for name in others}) == ""
