"""Rows of `~schedules` that anybody may have written: nothing that they name is imported, and none starves others."""

from __future__ import annotations

import datetime
import math
import os
import secrets
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from helpers import wait_for
from schedule_labs import LONG_AGO, MODULE, PLOT, RESULT, SHORT_EXPIRY, Lab, running
from workloads.squares import another_connection

import djjobs
from djjobs.cli import main


def write(lab: Lab, name: str, target: str = RESULT, **columns: Any) -> None:
    """Write a row as anybody can who may insert: it is due since an hour."""
    due = lab.timetable.now() - LONG_AGO
    values = {"what": "jobs", "every": 3600.0, "next_time": due, "created": due}
    lab.timetable.schedules.insert1({"name": name, "target": target, **values, **columns})


# -- what a row names ------------------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that can be imported by every process, and leaves a mark when it is."""
    name, mark = f"trap_{secrets.token_hex(4)}", tmp_path / "sprung"
    (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('import')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield name, mark


def test_what_a_row_names_is_not_imported_and_is_left_as_it_is(lab: Lab, trap: Any) -> None:
    name, mark = trap
    strange = [name, f"{name}:Table", f"{MODULE}:os.system", f"{MODULE}:Gone", "os:system", "no.such.module", "", ":"]
    for number, target in enumerate(strange):
        write(lab, f"a{number}", target)
    before = {f"a{number}": lab.schedule(f"a{number}").next_time for number in range(len(strange))}
    ours = lab.add(RESULT, due=True)
    with running(lab, "scheduler", MODULE, "--once") as scheduler:
        assert scheduler.end() == 0
    assert not mark.exists()
    assert [(firing.name, firing.state) for firing in lab.firings()] == [(ours, "done")]
    for row, next_time in before.items():
        assert (lab.schedule(row).next_time, lab.schedule(row).last_time) == (next_time, None)
        assert scheduler.log.count(f"The schedule {row} is not for this scheduler") == 1
        assert lab.schedule(row).last_state == "waiting"
        assert "No scheduler runs for its tables" in lab.schedule(row).last_outcome


def test_a_worker_with_a_scheduler_imports_nothing_either(lab: Lab, trap: Any) -> None:
    name, mark = trap
    write(lab, "a", name)
    ours = lab.add(RESULT, every=1, due=True)
    with running(lab, "worker", RESULT, "--with-scheduler", **SHORT_EXPIRY) as worker:
        wait_for(lambda: lab.states(ours).count("done") >= 2)
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert not mark.exists() and lab.states("a") == []
    assert worker.log.count("The schedule a is not for this scheduler") == 1


def test_run_now_imports_what_the_user_names_and_not_what_the_row_names(lab: Lab, trap: Any) -> None:
    name, mark = trap
    write(lab, "a", name)
    for pipeline in (lab.schema.database, MODULE):
        with running(lab, "schedule", "run-now", pipeline, "a") as command:
            assert command.end() == 2
        assert "names no tables with the mixin in this schema that are imported here" in command.log
    with pytest.raises(djjobs.DjJobsError, match="Nothing was run"):
        djjobs.run_schedule_now(lab.schema, "a")
    assert not mark.exists() and lab.firings() == []


def test_a_schedule_of_more_tables_than_the_scheduler_has_is_not_for_it(lab: Lab) -> None:
    whole = lab.add(MODULE, due=True)
    assert lab.fire(lab.Result) == 0
    assert lab.firings() == [] and lab.schedule(whole).last_state == "waiting"
    assert lab.fire(lab.Result, lab.Plot) == 0
    assert lab.states(whole) == ["done"] and lab.schedule(whole).last_state == "done"


def test_two_schedulers_of_one_schema_with_different_tables_fire_each_its_own(lab: Lab) -> None:
    """Neither keeps the other waiting, and who has the tables of both stands by for both."""
    names = {target: lab.add(target, every=1) for target in (RESULT, PLOT)}
    with ExitStack() as stack:
        ours = {t: stack.enter_context(running(lab, "scheduler", t, **SHORT_EXPIRY)) for t in names}
        wait_for(lambda: all(lab.states(name).count("done") >= 2 for name in names.values()))
        for target, name in names.items():
            assert {firing.pid for firing in lab.firings(name)} == {ours[target].pid}
        listed = CliRunner().invoke(main, ["schedule", "list", lab.schema.database])
        assert all(f"(process {scheduler.pid})" in listed.stdout for scheduler in ours.values())
        both = stack.enter_context(running(lab, "scheduler", MODULE, **SHORT_EXPIRY))
        wait_for(lambda: both.log.count("stands by") == 2)
        ours[PLOT].kill()
        wait_for(lambda: both.pid in {firing.pid for firing in lab.firings(names[PLOT])})
    assert both.pid not in {firing.pid for firing in lab.firings(names[RESULT])}


def test_the_list_says_which_schedules_nobody_fires(lab: Lab) -> None:
    lab.add(RESULT, name="ours")
    write(lab, "theirs", "their.module; rm -rf ~")
    lab.timetable.lead("1" * 36, RESULT)
    shown = CliRunner().invoke(main, ["schedule", "list", lab.schema.database])
    ours, theirs = shown.stdout.splitlines()[1:]
    assert "(process " in ours and theirs.endswith(" none")
    assert shown.stderr.strip() == "No scheduler runs: djjobs scheduler 'their.module; rm -rf ~'"


# -- rows that mean nothing --------------------------------------------------------------------------------------------


def bad_rows(engine: str) -> dict[str, dict[str, Any]]:
    """Columns that nobody can act on, by a name for the row."""
    rows: dict[str, dict[str, Any]] = {
        "zero": {"every": 0.0},
        "null": {"every": None},
        "negative": {"every": -5.0},
        "tiny": {"every": 1e-9},
        "a microsecond": {"every": 1e-6},
        "huge": {"every": 1e300},
        "both": {"cron": "* * * * *"},
        "cron": {"every": None, "cron": "every monday"},
        "never": {"every": None, "cron": "0 0 30 2 *"},
        "zone": {"every": None, "cron": "* * * * *", "timezone": "../../etc/passwd"},
        "what": {"what": "rm -rf"},
    }
    if engine == "postgresql":
        rows |= {"nan": {"every": math.nan}, "infinite": {"every": math.inf}}
    return rows


def test_rows_that_mean_nothing_are_told_once_and_keep_nobody_waiting(lab: Lab, engine: str) -> None:
    bad = bad_rows(engine)
    for name, columns in bad.items():
        write(lab, name, **columns)
    good = lab.add(RESULT, every=1, due=True, name="the last of all")
    with running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        wait_for(lambda: lab.states(good).count("done") >= 3)
        listed = CliRunner().invoke(main, ["schedule", "list", lab.schema.database])
        scheduler.send(signal.SIGTERM)
        scheduler.end()
    assert {firing.name for firing in lab.firings()} == {good}
    for name in bad:
        assert scheduler.log.count(f"The schedule {name} cannot be fired: ") == 1
        assert f"djjobs schedule remove {lab.schema.database} {shlex.quote(name)}" in scheduler.log
        assert lab.schedule(name).last_state == "failed"
        assert lab.schedule(name).last_outcome.startswith("It cannot be fired: ")
    assert (listed.exit_code, listed.stdout.count("\n")) == (0, len(bad) + 2)
    with pytest.raises(djjobs.DjJobsError, match="Remove it and add it again"):
        djjobs.run_schedule_now(lab.schema, "zero")
    assert djjobs.remove_schedule(lab.schema, "zero") == [lab.schema.database]


@pytest.mark.only(engines="postgresql")
@pytest.mark.parametrize("moment", ["20000-01-01", "infinity", "-infinity", "0044-03-15 BC"])
def test_a_time_that_no_driver_can_read_hides_no_other_schedule(lab: Lab, moment: str) -> None:
    good = lab.add(RESULT, due=True)
    write(lab, "far", PLOT)
    table = lab.timetable.schedules.full_table_name
    lab.schema.connection.query(f"UPDATE {table} SET next_time = '{moment}' WHERE name = 'far'")
    assert [(one.name, one.fault) for one in lab.timetable.everything()] == [
        ("far", "Its next time is no time."),
        (good, ""),
    ]
    listed = CliRunner().invoke(main, ["schedule", "list", lab.schema.database])
    assert listed.exit_code == 0 and "Its next time is no time." in listed.stdout and good in listed.stdout


def test_a_scheduler_with_bad_rows_only_is_idle(lab: Lab, engine: str) -> None:
    """For three seconds. One that loops takes all of a processor, or starts processes without end."""
    for name, columns in bad_rows(engine).items():
        write(lab, name, **columns)
    with running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        wait_for(lambda: scheduler.log.count("cannot be fired") == len(bad_rows(engine)))
        process, began = psutil.Process(scheduler.pid), lab.timetable.now()
        used = sum(process.cpu_times()[:4])
        wait_for(lambda: lab.timetable.now() - began > datetime.timedelta(seconds=3))
        assert sum(process.cpu_times()[:4]) - used < 1.5
    assert lab.firings() == []


def test_a_schedule_whose_row_somebody_keeps_locked_keeps_no_other_waiting(lab: Lab) -> None:
    write(lab, "a")
    other = lab.add(PLOT, due=True, name="b")
    schedules = lab.timetable.schedules.full_table_name
    with closing(another_connection()) as stranger, running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        with stranger.transaction:
            stranger.query(f"SELECT * FROM {schedules} WHERE name = 'a' FOR UPDATE").fetchall()
            wait_for(lambda: lab.states(other) == ["done"], timeout=30)
            assert lab.schedule("a").last_time is None
        wait_for(lambda: lab.states("a") == ["done"])
        assert "Traceback" not in scheduler.log


def test_a_lost_firing_whose_row_somebody_keeps_locked_keeps_no_other_waiting(lab: Lab) -> None:
    lab.add(RESULT, name="a")
    firing, _ = lab.timetable.fire_by_hand("a")
    long_ago = lab.timetable.now() - LONG_AGO
    lab.timetable.firings.update1({"name": "a", "fire_time": firing.fire_time, "expires": long_ago})
    other = lab.add(PLOT, due=True, name="b")
    firings = lab.timetable.firings.full_table_name
    with closing(another_connection()) as stranger, running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        with stranger.transaction:
            # By its whole key: MySQL would also lock the gap after it, into which the other firing is to come.
            row = f"name = 'a' AND fire_time = '{firing.fire_time}'"
            assert stranger.query(f"SELECT * FROM {firings} WHERE {row} FOR UPDATE").fetchall()
            wait_for(lambda: "done" in lab.states(other), timeout=30)
            assert lab.firings("a")[0].attempt == 1
        wait_for(lambda: lab.states("a") == ["done"])
        assert lab.firings("a")[0].attempt == 2 and "Traceback" not in scheduler.log
