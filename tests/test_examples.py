"""The examples, the notebook and the demo do what they promise, as somebody who tries them would see it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import numpy as np
import psutil
import pytest
from conftest import ENGINE, GENERATION
from helpers import command_of, wait_for
from nbclient import NotebookClient

from djjobs.demo import show as demo

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def pipeline(schema: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example pipeline in a schema of its own, without the waiting."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("DJJOBS_EXAMPLE_SCHEMA", schema.database)
    pipeline = importlib.import_module("ephys")
    monkeypatch.setattr(pipeline, "READ_SECONDS", 0)
    monkeypatch.setattr(pipeline, "SORT_SECONDS", 0)
    yield pipeline
    del sys.modules["ephys"]


def test_the_example_pipeline_computes_the_good_sessions_and_reports_the_bad_ones(pipeline: ModuleType) -> None:
    pipeline.insert_sessions(n_subjects=2, n_sessions=20)
    for table in pipeline.TABLES:
        table.populate(reserve_jobs=True, order="random", suppress_errors=True)

    assert len(pipeline.Recording()) == 18
    assert len(pipeline.SpikeDetection()) == 17
    assert len(pipeline.SpikeDetection.Channel()) == 17 * pipeline.N_CHANNELS
    assert len(pipeline.PopulationSummary()) == len(pipeline.SpikeDetection & "n_active >= 2") > 10
    errors = [job["error_message"] for table in pipeline.TABLES for job in table.jobs.errors]
    assert len(errors) == 3
    for expected in ("amplifier saturated", "No such file", "channel 0 is flat"):
        assert any(expected in message for message in errors), errors


def test_finished_jobs_stay_only_where_the_example_says_so(pipeline: ModuleType) -> None:
    pipeline.insert_sessions(n_subjects=1, n_sessions=1)
    for table in pipeline.TABLES:
        table.populate(reserve_jobs=True)
    kept = [len(table.jobs.completed) for table in pipeline.TABLES]
    assert kept == [0, 1, 0]


def test_sessions_added_later_are_picked_up(pipeline: ModuleType) -> None:
    pipeline.insert_sessions(n_subjects=1, n_sessions=1)
    pipeline.Recording.populate(reserve_jobs=True)
    pipeline.insert_sessions(n_subjects=1, n_sessions=3)
    run = pipeline.Recording.schedule_jobs(min_scheduling_interval=0)
    assert run.scheduled == 2


def test_spikes_are_found_where_they_were_put(pipeline: ModuleType) -> None:
    trace = np.random.default_rng(0).normal(size=5_000)
    trace[[1_000, 3_000]] = -50
    noise, spikes = pipeline.detect_spikes(trace)
    assert noise == pytest.approx(1, rel=0.05)
    assert {1_000, 3_000} <= set(spikes.tolist())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, schema: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJJOBS_NOTEBOOK_SCHEMA", schema.database)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert not schema.exists, "the notebook cleans up after itself"


def test_the_demo_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert demo.run() == 1
    assert "pip install" in capsys.readouterr().err


# The demo brings its own server, and that is PostgreSQL: once in all the cells is enough.
if (GENERATION, ENGINE) == (2, "postgresql"):

    def start_demo(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "djjobs.demo.show", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            # a shell that runs the tests in the background has told them to ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def seen_at_work(process: subprocess.Popen[str], progress: str) -> list[psutil.Process]:
        """The demo's server and workers, once it has printed a line like that."""
        assert process.stdout
        next(line for line in process.stdout if re.match(progress, line))
        return psutil.Process(process.pid).children(recursive=True)

    def test_the_demo_ends_with_a_status_table_and_the_errors_it_provoked() -> None:
        with start_demo("--sessions=8", "--workers=2") as process:
            family = seen_at_work(process, "Recording: ")
            assert process.stdout
            output = process.stdout.read()
            assert process.wait(30) == 0, output
        for table, done in {"Recording": 6, "SpikeDetection": 5, "PopulationSummary": 5}.items():
            assert re.search(rf"^{table}( +\d+)+ +{done}$", output, re.MULTILINE), output
        for expected in ("amplifier saturated", "No such file", "channel 0 is flat", "Next: "):
            assert expected in output
        assert "\x1b" not in output, "no colours or cursor movements outside a terminal"
        assert not psutil.wait_procs(family, timeout=30)[1]

    @pytest.mark.parametrize(
        ("stop", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["interrupted", "killed"]
    )
    def test_the_demo_leaves_nothing_behind(stop: signal.Signals, code: int) -> None:
        with start_demo("--sessions=60", "--workers=2") as process:
            family = seen_at_work(process, "Recording: [1-9]")
            commands = [command_of(member) for member in family]
            assert sum("--slots" in command for command in commands) == 3, "a supervisor and two slots"
            (folder,) = {path for command in commands for path in re.findall(r"-D (\S+)/data", command)}

            process.send_signal(stop)
            assert process.wait(30) == code
            assert not psutil.wait_procs(family, timeout=30)[1]
            wait_for(lambda: not Path(folder).exists())
            assert process.stdout
            assert "Traceback" not in process.stdout.read()
