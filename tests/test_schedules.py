"""Schedules: when they are due, how they are added, shown, run by hand and removed, and what is refused."""

from __future__ import annotations

import datetime
import json
import re
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import datajoint as dj
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from helpers import wait_for
from pipelines import INT, job_counts, rows_of
from schedule_labs import MODULE, PLOT, RESULT, Lab, running
from workloads import schedule_lab

import djjobs
from djjobs import DjJobsError
from djjobs.check import check
from djjobs.cli import main
from djjobs.dj.compat import datajoint_api
from djjobs.queue.database import Database
from djjobs.recurring.fire import carry_out
from djjobs.recurring.rows import Timetable, new_token

UTC = datetime.timezone.utc
MINUTE, HOUR, DAY = (datetime.timedelta(**{unit: 1}) for unit in ("minutes", "hours", "days"))


def djjobs_command(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def complaint(*arguments: str) -> str:
    """The one line that a command gives instead of a result."""
    done = djjobs_command(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("djjobs: ")
    return line


# -- when it is due ---------------------------------------------------------------------------------------------


# -- adding, showing, removing ---------------------------------------------------------------------------------------


def test_a_lab_adds_two_schedules_sees_them_and_removes_them(lab: Lab) -> None:
    added = djjobs_command("schedule", "add", MODULE, "--every", "1h30m")
    assert added.exit_code == 0
    assert added.stdout.startswith(f"{MODULE}-jobs in {lab.schema.database}: next ")
    nightly = ["--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--cleanup", "--name", "nightly"]
    assert djjobs_command("schedule", "add", RESULT, *nightly).exit_code == 0
    shown = djjobs_command("schedule", "list", lab.schema.database)
    assert shown.exit_code == 0
    assert f"No scheduler runs: djjobs scheduler {MODULE}" in shown.stderr
    heading, nightly_line, jobs_line = shown.stdout.splitlines()
    assert heading.split() == "schema name target what when next scheduler last state outcome".split()
    assert "03:00:00 Europe/Berlin" in nightly_line and "0 3 * * * (Europe/Berlin)" in nightly_line
    assert "every 1h30m" in jobs_line and " UTC" in jobs_line
    row = lab.schedule(f"{MODULE}-jobs")
    assert (row.target, row.what, row.every, row.timezone, row.enabled) == (MODULE, "jobs", 5400, "UTC", 1)
    assert row.next_time - row.created == pytest.approx(1.5 * HOUR, abs=10 * MINUTE / 60)
    assert djjobs_command("schedule", "remove", lab.schema.database, "nightly", "--yes").exit_code == 0
    assert [row["name"] for row in rows_of(djjobs.schedules(lab.schema))] == [f"{MODULE}-jobs"]


def test_the_list_as_json_tells_times_with_their_offset_and_who_fires(lab: Lab) -> None:
    name = lab.add(PLOT, cron="0 3 * * *", timezone="Asia/Tokyo", due=True)
    (entry,) = json.loads(djjobs_command("schedule", "list", lab.schema.database, "--json").stdout)
    assert entry["scheduler"] is None
    assert lab.fire() == 0
    lab.timetable.lead(new_token(), PLOT)
    (entry,) = json.loads(djjobs_command("schedule", "list", lab.schema.database, "--json").stdout)
    row = lab.schedule(name)
    assert (entry["name"], entry["schema"], entry["enabled"]) == (name, lab.schema.database, True)
    assert datetime.datetime.fromisoformat(entry["next_time"]) == row.next_time.replace(tzinfo=UTC)
    assert entry["next_time"].endswith("T03:00:00+09:00")
    assert (entry["last_state"], entry["last_outcome"]) == ("done", "0 jobs scheduled in Plot")
    assert entry["scheduler"] == f"{lab.leader['host']} (process {lab.leader['pid']})"


def test_without_a_pipeline_all_schemas_are_listed_and_nothing_is_declared_by_looking(lab: Lab, schema: Any) -> None:
    name = lab.add(RESULT)
    shown = djjobs_command("schedule", "list", "--json")
    assert (lab.schema.database, name) in {(entry["schema"], entry["name"]) for entry in json.loads(shown.stdout)}
    assert djjobs_command("schedule", "list", schema.database).stderr.strip() == "No schedules."
    assert not any(table.is_declared for table in Timetable.tables_in(schema.connection, schema.database))


def test_a_class_a_module_and_their_names_are_the_same_target(lab: Lab) -> None:
    assert djjobs.add_schedule(lab.Result, every=60) == f"{RESULT}-jobs"
    assert djjobs.add_schedule(schedule_lab, every=60, cleanup=True) == f"{MODULE}-cleanup"
    assert djjobs.add_schedule(MODULE, every=HOUR, cleanup=True, jobs=True) == f"{MODULE}-both"
    assert lab.schedule(f"{MODULE}-both").every == 3600
    assert djjobs.remove_schedule(schedule_lab, f"{MODULE}-cleanup") == [lab.schema.database]
    assert djjobs.remove_schedule(RESULT, f"{RESULT}-jobs") == [lab.schema.database]
    assert djjobs.remove_schedule(lab.Result, f"{MODULE}-both") == [lab.schema.database]
    assert rows_of(djjobs.schedules(lab.schema)) == []


def test_a_removed_schedule_takes_its_history_along_and_that_of_others_stays(lab: Lab) -> None:
    first, second = lab.add(RESULT, due=True), lab.add(PLOT, due=True)
    assert lab.fire() == 0
    djjobs.remove_schedule(lab.schema, first)
    assert [firing.name for firing in lab.firings()] == [second]


def test_a_pause_and_its_end_from_the_command_line(lab: Lab) -> None:
    name = lab.add(RESULT, due=True)
    assert djjobs_command("schedule", "pause", lab.schema.database, name).stdout == f"{name} is paused\n"
    assert djjobs_command("schedule", "pause", lab.schema.database, name).stdout == f"{name} was paused already\n"
    assert "paused" in djjobs_command("schedule", "list", lab.schema.database).stdout
    assert lab.fire() == 0 and lab.firings() == []
    assert djjobs_command("schedule", "resume", lab.schema.database, name).stdout == f"{name} is resumed\n"
    assert djjobs_command("schedule", "resume", lab.schema.database, name).stdout == f"{name} was not paused\n"
    assert lab.schedule(name).next_time > lab.timetable.now(), "what was due meanwhile is not made up"


def test_names_and_outcomes_may_be_of_any_language_and_differ_by_every_letter(lab: Lab) -> None:
    names = ["Nächtlich \N{SNOWMAN}", "nächtlich \N{SNOWMAN}"]
    for name in names:
        lab.add(RESULT, name=name, due=True)
    (lab.folder / "fail-Result").touch()
    assert lab.fire() == 1
    for name in names:
        assert lab.schedule(name).last_outcome == "ValueError: no luck with Result, \N{SNOWMAN}"


TWO_SCHEMAS = """
import datajoint as dj
import djjobs

first, second = dj.Schema("{first}"), dj.Schema("{second}")

@first
class Task(dj.Manual):
    definition = "n : {INT}"

@first
class Here(djjobs.JobsMixin, dj.Computed):
    definition = "-> Task"

    def make(self, key):
        self.insert1(key)

@second
class There(djjobs.JobsMixin, dj.Computed):
    definition = "-> Task"

    def make(self, key):
        self.insert1(key)
"""


def test_a_target_in_two_schemas_has_a_row_in_each_and_each_firing_sees_to_its_own(
    schema: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    name = f"lab_{secrets.token_hex(4)}"
    try:
        (tmp_path / f"{name}.py").write_text(TWO_SCHEMAS.format(first=schema.database, second=other.database, INT=INT))
        monkeypatch.syspath_prepend(str(tmp_path))
        taken = djjobs.add_schedule(f"{name}:There", every=60, name="often")
        with pytest.raises(DjJobsError, match=f"There is a schedule 'often' in {other.database} already"):
            djjobs.add_schedule(name, every=60, name="often")
        assert rows_of(djjobs.schedules(schema)) == [], "in all schemas or in none"
        djjobs.remove_schedule(other, taken)
        djjobs.add_schedule(name, every=60, name="often")
        sys.modules[name].Task.insert1({"n": 1})
        results = djjobs.run_schedule_now(name, "often")
        assert {(result.database, result.state, result.outcome) for result in results} == {
            (schema.database, "done", "1 job scheduled in Here"),
            (other.database, "done", "1 job scheduled in There"),
        }
        assert sorted(djjobs.remove_schedule(name, "often")) == sorted([schema.database, other.database])
    finally:
        other.drop()


# -- by hand -----------------------------------------------------------------------------------------------------


def test_run_now_is_an_extra_firing_that_needs_no_scheduler(lab: Lab) -> None:
    lab.fill(2)
    name = lab.add(RESULT)
    due = lab.schedule(name).next_time
    done = djjobs_command("schedule", "run-now", MODULE, name)
    assert (done.exit_code, done.stdout) == (
        0,
        f"{name} in {lab.schema.database} done: 2 jobs scheduled in Result\n",
    )
    assert job_counts(lab.Result) == {"scheduled": 2}
    (firing,) = lab.firings()
    assert (firing.state, firing.by_hand, firing.outcome) == ("done", 1, "2 jobs scheduled in Result")
    row = lab.schedule(name)
    assert (row.next_time, row.last_time, row.last_state) == (due, firing.fire_time, "done")


def test_run_now_is_skipped_while_a_firing_runs_and_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    name = lab.add(RESULT, due=True)
    with lab.closed(), running(lab, "scheduler", MODULE, "--once") as scheduler:
        wait_for(lambda: lab.told)
        shown = djjobs_command("schedule", "run-now", lab.schema.database, name, "--json")
        assert shown.exit_code == 1
        (result,) = json.loads(shown.stdout)
        assert result["state"] == "skipped"
        assert f"still ran on {lab.leader['host']} (process {scheduler.pid})" in result["outcome"]
        assert lab.states() == ["running", "skipped"]
        lab.open()
        assert scheduler.end() == 0
    assert lab.states() == ["done", "skipped"]


def test_run_now_that_fails_is_recorded_and_has_exit_code_1(lab: Lab) -> None:
    (lab.folder / "fail-Result").touch()
    name = lab.add(RESULT)
    shown = djjobs_command("schedule", "run-now", lab.schema.database, name)
    assert shown.exit_code == 1 and "no luck with Result" in shown.stdout
    assert lab.states() == ["failed"]


def test_run_now_that_is_interrupted_has_failed_and_the_next_one_can_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = lab.add(RESULT)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab.Result, "schedule_jobs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            djjobs.run_schedule_now(lab.schema, name)
    assert (lab.states(), lab.firings()[0].outcome) == (["failed"], "KeyboardInterrupt")
    (result,) = djjobs.run_schedule_now(lab.schema, name)
    assert result.state == "done"


def test_a_long_run_now_is_kept_alive_and_nobody_takes_it_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "leader_expiry", 3)
    name = lab.add(RESULT)
    connection = datajoint_api.another_connection(lab.schema.connection)
    onlooker = Timetable(lab.timetable.queue.on(Database(connection)))
    lives = []

    def open_after_a_while() -> None:
        began = onlooker.now()
        while onlooker.now() - began < 5 * MINUTE / 60:
            lives.append(onlooker.lost_firings())
        lab.open()

    with lab.closed():
        watcher = threading.Thread(target=open_after_a_while)
        watcher.start()
        (result,) = djjobs.run_schedule_now(lab.schema, name)
        watcher.join()
    connection.close()
    assert result.state == "done"
    assert lives and not any(lives)


# -- who may fire ---------------------------------------------------------------------------------------------------


def test_only_the_leader_can_fire_and_a_firing_cannot_be_doubled(lab: Lab) -> None:
    """Statement by statement: what a scheduler that was asleep would try when it wakes up."""
    name = lab.add(RESULT, due=True)
    timetable, now = lab.timetable, lab.timetable.now()
    schedule = timetable.find(name)
    assert schedule is not None
    me, other = new_token(), new_token()
    assert timetable.lead(me, RESULT) and timetable.lead(me, RESULT) and not timetable.lead(other, RESULT)
    assert timetable.fire(schedule, now, other) == (None, "")
    assert lab.firings() == [] and lab.schedule(name).next_time == schedule.next_time
    firing, skipped = timetable.fire(schedule, now, me)
    assert firing is not None and not skipped
    assert timetable.fire(schedule, now, me) == (None, "")
    assert timetable.end(firing, "done", "")
    stale = timetable.fire(schedule, now + 3 * HOUR, me)
    assert stale == (None, "") and len(lab.firings()) == 1, "it is not due at that time any more"
    timetable.resign(me)
    assert timetable.lead(other, RESULT)
    assert not timetable.lead(me, RESULT)
    by_hand, _ = timetable.fire_by_hand(name)
    assert timetable.take_up(by_hand, other, RESULT) is None, "its process is taken to be alive"


def test_a_leader_that_died_between_two_statements_has_lost_nothing(lab: Lab) -> None:
    """The firing was entered, but the schedule still says that it is due, and nobody has begun."""
    name = lab.add(RESULT, due=True)
    schedule = lab.timetable.find(name)
    dead, heir = new_token(), new_token()
    assert schedule is not None and lab.timetable.lead(dead, RESULT)
    firing, _ = lab.timetable.fire(schedule, lab.timetable.now(), dead)
    assert firing is not None
    lab.timetable.schedules.update1({"name": name, "next_time": schedule.next_time})
    lab.timetable.resign(dead)
    assert lab.timetable.lead(heir, RESULT)
    much_later = lab.timetable.now() + 5 * HOUR
    assert lab.timetable.fire(schedule, much_later, heir) == (None, ""), "what was due since then comes next"
    assert lab.schedule(name).next_time == firing.fire_time + HOUR
    assert len(lab.firings()) == 1
    lab.timetable.resign(heir)
    expired = lab.timetable.now()
    lab.timetable.firings.update1({"name": name, "fire_time": firing.fire_time, "expires": expired})
    assert lab.fire() == 0
    (row,) = lab.firings()
    assert (row.state, row.attempt) == ("done", 2)


def test_one_whose_firing_was_given_to_another_does_nothing_and_records_nothing(lab: Lab) -> None:
    name = lab.add(RESULT)
    firing, _ = lab.timetable.fire_by_hand(name)
    lab.timetable.firings.update1({"name": name, "fire_time": firing.fire_time, "runner": new_token()})
    schedule = lab.timetable.find(name)
    assert schedule is not None
    assert carry_out(lab.timetable, schedule, firing, [lab.Result])[0] == "lost"
    assert lab.told == []
    assert not lab.timetable.end(firing, "done", "")
    assert lab.states() == ["running"] and lab.schedule(name).last_state == ""


def test_history_older_than_the_retention_goes_but_not_what_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = lab.add(RESULT, name="old"), lab.add(PLOT, name="new")
    for name in (old, new):
        djjobs.run_schedule_now(lab.schema, name)
    long_ago = lab.timetable.now() - 40 * DAY
    row = rows_of(djjobs.firings(lab.schema) & {"name": old})[0]
    lab.timetable.firings.delete_quick()
    for name, time, state in (
        (old, long_ago, "done"),
        (old, long_ago + HOUR, "running"),
        (new, lab.timetable.now(), "done"),
    ):
        running_now = 1 if state == "running" else None
        lab.timetable.firings.insert1({**row, "name": name, "fire_time": time, "state": state, "running": running_now})
    cleaning = lab.add(RESULT, cleanup=True)
    djjobs.run_schedule_now(lab.schema, cleaning)
    assert [(firing.name, firing.state) for firing in lab.firings()] == [
        ("old", "running"),
        ("new", "done"),
        (cleaning, "done"),
    ]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((MODULE, "--cron", "0 0 3 * * *"), "must have five fields .*: field 6, '\\*', is too much"),
        ((MODULE, "--cron", "0 3 * *"), "must have five fields .*: there are too few"),
        ((MODULE, "--cron", "@daily"), "must have five fields .*: there are too few"),
        ((MODULE, "--cron", "0 99 * * *"), "wrong at character 3, field 2 \\(hour\\): '99'"),
        ((MODULE, "--cron", "0 3 * * MON-x"), "wrong at character 9, field 5 \\(day of week\\): 'MON-x'"),
        ((MODULE, "--cron", "*/0 3 * * *"), "wrong at character 1, field 1 \\(minute\\): '\\*/0'"),
        ((MODULE, "--cron", "0 3 31 2 *"), "is never due: .* field 3 \\(day of month, '31'\\)"),
        ((MODULE, "--every", "0"), "one second to ten years, not 0"),
        ((MODULE, "--every", "0.5s"), "one second to ten years, not 0.5"),
        ((MODULE, "--every", "often"), "'often' is not a duration"),
        ((MODULE, "--every", "5m", "--cron", "0 3 * * *"), "give one of `every` and `cron`"),
        ((MODULE,), "give one of `every` and `cron`"),
        ((MODULE, "--every", "5m", "--timezone", "Europe/Berln"), "no time zone 'Europe/Berln'.*Europe/Berlin"),
        ((MODULE, "--every", "5m", "--timezone", "../etc/passwd"), "no time zone"),
        (("json", "--every", "5m"), "The module json has no tables with the djjobs mixin"),
        (("no_such_module", "--every", "5m"), "There is no module 'no_such_module'"),
        ((f"{MODULE}:Nothing", "--every", "5m"), f"There is no {MODULE}:Nothing"),
        (("__main__:Spectrum", "--every", "5m"), "is defined in a script or a notebook"),
        ((MODULE, "--every", "5m", "--name", ""), "A schedule's name must be one line"),
        ((MODULE, "--every", "5m", "--name", "n" * 101), "A schedule's name must be one line"),
        ((MODULE, "--every", "5m", "--name", "taken"), "There is a schedule 'taken' .* already"),
    ],
    ids=lambda value: " ".join(value[1:])[:40] if isinstance(value, tuple) else "",
)
def test_a_schedule_that_cannot_be_meant_is_refused_in_one_line_and_nothing_is_changed(
    lab: Lab, arguments: tuple[str, ...], words: str
) -> None:
    lab.add(RESULT, name="taken")
    before = rows_of(djjobs.schedules(lab.schema))
    line = complaint("schedule", "add", *arguments)
    assert re.search(words, line), line
    assert rows_of(djjobs.schedules(lab.schema)) == before


@pytest.mark.parametrize("command", ["run-now", "pause", "resume", "remove"])
def test_a_schedule_that_does_not_exist_is_refused_with_the_names_that_do(lab: Lab, command: str) -> None:
    lab.add(RESULT, name="nightly")
    before = rows_of(djjobs.schedules(lab.schema))
    options = ["--yes"] if command == "remove" else []
    line = complaint("schedule", command, lab.schema.database, "nihgtly", *options)
    assert line == f"djjobs: There is no schedule 'nihgtly' in {lab.schema.database}. There are: nightly."
    assert rows_of(djjobs.schedules(lab.schema)) == before and lab.firings() == []


def test_where_nobody_can_confirm_a_removal_says_so_and_removes_nothing(lab: Lab) -> None:
    lab.add(RESULT, name="nightly")
    assert "Say --yes" in complaint("schedule", "remove", lab.schema.database, "nightly")
    assert len(rows_of(djjobs.schedules(lab.schema))) == 1


def test_in_python_the_same_is_refused(lab: Lab) -> None:
    for options in ({"every": 0}, {"every": -1}, {"every": float("nan")}, {"every": True}, {"every": "5m"}):
        with pytest.raises(DjJobsError, match="one second to ten years"):
            djjobs.add_schedule(MODULE, **options)
    with pytest.raises(DjJobsError, match="would do nothing"):
        djjobs.add_schedule(MODULE, every=60, jobs=False)
    with pytest.raises(DjJobsError, match="may have 255 characters"):
        djjobs.add_schedule(MODULE, cron=",".join(["1"] * 200) + " 3 * * *")
    with pytest.raises(DjJobsError, match="neither an activated"):
        djjobs.remove_schedule(3, "nightly")
    with pytest.raises(DjJobsError, match="not an activated schema"):
        djjobs.schedules("nonsense")
    assert rows_of(djjobs.schedules(lab.schema)) == []


def test_inside_a_transaction_nothing_is_changed_or_run(lab: Lab) -> None:
    name = lab.add(RESULT)
    for call in (
        lambda: djjobs.add_schedule(PLOT, every=60),
        lambda: djjobs.remove_schedule(lab.schema, name),
        lambda: djjobs.run_schedule_now(lab.schema, name),
    ):
        with pytest.raises(DjJobsError, match="inside a transaction"), lab.schema.connection.transaction:
            call()
    assert [row["name"] for row in rows_of(djjobs.schedules(lab.schema))] == [name]


def test_without_the_library_a_cron_line_says_what_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(DjJobsError, match=r"pip install 'djjobs\[cli\]'"):
        djjobs.add_schedule(MODULE, cron="0 3 * * *")
    djjobs.add_schedule(MODULE, every=60)


# -- around it ------------------------------------------------------------------------------------------------------


def test_check_says_when_schedules_have_no_scheduler(lab: Lab) -> None:
    def finding() -> Any:
        return next((found for found in check(lab.schema) if found.subject.startswith("schedules")), None)

    assert finding() is None
    lab.add(RESULT)
    assert finding().level == "warning" and "djjobs scheduler" in finding().remedy
    lab.timetable.lead(new_token(), RESULT)
    assert finding().level == "ok"


def test_every_command_has_help_with_an_example_and_names_are_completed(lab: Lab) -> None:
    group = main.commands["schedule"]
    assert sorted(group.commands) == ["add", "list", "pause", "remove", "resume", "run-now"]  # type: ignore[attr-defined]
    for words in (["schedule"], *(["schedule", name] for name in group.commands), ["scheduler"]):  # type: ignore[attr-defined]
        assert "Example" in djjobs_command(*words, "--help").output
    lab.add(RESULT, name="nightly")
    complete = ShellComplete(main, {}, "djjobs", "_DJJOBS_COMPLETE")
    names = complete.get_completions(["schedule", "remove", lab.schema.database], "nig")
    assert [item.value for item in names] == ["nightly"]
    zones = complete.get_completions(["schedule", "add", MODULE, "--timezone"], "Europe/Berl")
    assert [item.value for item in zones] == ["Europe/Berlin"]
