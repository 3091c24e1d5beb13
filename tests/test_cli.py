"""What a user types, and what the screen says."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datajoint as dj
import fork_server
import pytest
from click.testing import CliRunner
from helpers import wait_for
from pipelines import INT, job_counts, rows_of, sessions

import djjobs as djjobs_package
from djjobs import DjJobsError
from djjobs.cli import logs, main
from djjobs.table.targets import module_or_schema, tables_of
from djjobs.worker import WorkerOptions


def djjobs(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as from a shell in this folder."""
    return fork_server.run(["-m", "djjobs.cli", *arguments], cwd=folder, env={**os.environ, **environment})


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command gave instead of a result."""
    assert (done.returncode, done.stdout) == (2, ""), (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("djjobs: "), done.stderr
    return lines[0]


# -- the pipeline of a lab, as a module in a folder ----------------------------------------------------------

PIPELINE = """
import datajoint as dj
import djjobs

schema = dj.Schema("{database}")

@schema
class Session(dj.Manual):
    definition = '''
    subject : varchar(16)
    session : {INT}
    ---
    day : {INT}
    '''

@schema
class Spectrum(djjobs.JobsMixin, dj.Computed):
    definition = "-> Session"

    def make(self, key):
        if key["session"] == 2:
            raise ValueError("CUDA is out of memory")
        self.insert1(key)

@schema
class Peaks(djjobs.JobsMixin, dj.Computed):
    definition = "-> Spectrum"

    def make(self, key):
        self.insert1(key)

@schema
class Plain(dj.Computed):
    definition = "-> Session"

    def make(self, key):
        self.insert1(key)

print("imported")
"""


class Folder:
    """A folder with a module that defines Session, Spectrum, Peaks (after Spectrum) and Plain, which has no mixin."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.name = f"lab_{secrets.token_hex(4)}"
        self.write(self.name, PIPELINE.format(database=schema.database, INT=INT))
        self.module = importlib.import_module(self.name)
        rows = [{"subject": f"m{number % 2}", "session": number, "day": 10 * number} for number in range(4)]
        self.module.Session.insert(rows)

    def write(self, name: str, text: str) -> str:
        (self.path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return djjobs(*arguments, folder=self.path, **environment)


@pytest.fixture
def folder(schema: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Folder(tmp_path, schema)


# -- help, and mistakes ----------------------------------------------------------------------------------------


def test_mistakes_get_one_line_and_exit_code_2(schema: Any) -> None:
    for arguments in (("status", "no_such_thing"), ("migrate", "no_such_schema"), ("check", "no_such_thing")):
        assert arguments[1] in complaint(djjobs(*arguments))


def test_a_wrong_password_is_said_to_be_one(server: Any) -> None:
    line = complaint(djjobs("status", "anything", DJ_PASS="not the password"))
    assert line.startswith("djjobs: Cannot connect: ") and "refused the password" in line


def test_what_is_printed_for_a_program_has_nothing_else_in_it(folder: Folder) -> None:
    """Modules print when they are imported, and DataJoint 2 greets on standard output."""
    done = folder.run("status", folder.name, "--json", DJ_LOG_LEVEL="INFO")
    assert json.loads(done.stdout)["Spectrum"]["scheduled"] == 0
    assert "imported" in done.stderr


# -- status ----------------------------------------------------------------------------------------------------


def test_status_shows_a_table_or_json(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    shown = djjobs("status", schema.database)
    assert shown.returncode == 0, shown.stderr
    assert "scheduled" in shown.stdout and "12" in shown.stdout
    told = json.loads(djjobs("status", schema.database, "--json").stdout)
    assert told["__spectrum"]["scheduled"] == 12


def test_a_schema_that_is_called_like_some_module(folder: Folder) -> None:
    folder.write(folder.schema.database, "nothing = None\n")
    assert isinstance(module_or_schema(folder.schema.database), dj.Schema)
    assert module_or_schema(folder.name) is folder.module


# -- targets -----------------------------------------------------------------------------------------------------


def names(*targets: str) -> list[str]:
    return [table.__name__ for table in tables_of(targets)]


def test_a_modules_tables_are_those_with_the_mixin_upstream_first(folder: Folder) -> None:
    assert names(folder.name) == ["Spectrum", "Peaks"]
    assert names(f"{folder.name}:Peaks", f"{folder.name}:Spectrum", folder.name) == ["Spectrum", "Peaks"]


def test_imported_tables_count_only_when_they_are_named(folder: Folder) -> None:
    other = folder.write("other", f"import {folder.name} as lab\nfrom {folder.name} import Spectrum, Plain\n")
    assert names(f"{other}:Spectrum") == ["Spectrum"]
    assert names(f"{other}:lab") == ["Spectrum", "Peaks"]
    assert names(f"{other}:lab.Peaks") == ["Peaks"]
    with pytest.raises(
        DjJobsError, match=rf"only imports Spectrum \(schema {folder.schema.database}\).*other:Spectrum"
    ):
        tables_of([other])


def test_a_package_collects_the_tables_of_its_own_modules(folder: Folder) -> None:
    package = folder.path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .analysis import Spectrum\n")
    (folder.path / f"{folder.name}.py").rename(package / "analysis.py")
    assert names("package") == ["Spectrum"]


def test_adopted_tables_count(folder: Folder) -> None:
    folder.write("adopting", f"import djjobs, {folder.name} as lab\ndjjobs.adopt(lab)\n")
    assert set(names("adopting:lab")) == {"Spectrum", "Peaks", "Plain"}


def test_tables_that_are_not_there(folder: Folder) -> None:
    with pytest.raises(DjJobsError, match=r"There is no .*:Peak. The tables with the mixin there: Spectrum, Peaks"):
        tables_of([f"{folder.name}:Peak"])
    with pytest.raises(DjJobsError, match=r"Plain has no djjobs mixin. .*Spectrum, Peaks"):
        tables_of([f"{folder.name}:Plain"])
    with pytest.raises(DjJobsError, match=r"Not a Computed or Imported table: .*Session. .*Spectrum, Peaks"):
        tables_of([f"{folder.name}:Session"])


def test_modules_that_are_none(folder: Folder) -> None:
    for target in ("no_such_module", "no_such_module:Spectrum", f"{folder.name}.deeper", "", ".", "a-b"):
        with pytest.raises(DjJobsError, match=r"There is no module"):
            tables_of([target])
    with pytest.raises(DjJobsError, match=rf"is a file.*import: {folder.name}\."):
        tables_of([f"{folder.name}.py"])


def test_a_module_with_a_schema_that_is_not_activated(server: Any, folder: Folder) -> None:
    text = "import datajoint as dj, djjobs\nschema = dj.Schema()\n@schema\nclass Later(djjobs.Computed):\n    pass\n"
    folder.write("asleep", text)
    with pytest.raises(DjJobsError, match="not activated"):
        tables_of(["asleep"])
    with pytest.raises(DjJobsError, match="not activated"):
        tables_of(["asleep:Later"])


def test_the_workers_bad_input_is_told_in_one_line(folder: Folder) -> None:
    folder.write("broken", "def ratio():\n    return 1 / 0\n\nratio()\n")
    folder.write("exits", "raise SystemExit('no')\n")
    folder.write("slip", "x = = 1\n")
    folder.write("wants", "import no_such_library\n")
    folder.write("empty", "")
    folder.write("plain", PIPELINE.format(database=folder.schema.database, INT=INT).replace("djjobs.JobsMixin, ", ""))
    folder.write("importing", f"from {folder.name} import Spectrum\n")
    for target, says in {
        "broken": "The module broken does not import: ZeroDivisionError: division by zero",
        "exits": "does not import: SystemExit: no",
        "slip": "does not import: SyntaxError: invalid syntax",
        "wants": "ModuleNotFoundError: No module named 'no_such_library'",
        "empty": "no tables with the djjobs mixin",
        "plain": "only Spectrum, Peaks, Plain. Derive them from djjobs.JobsMixin as well, or have the module call "
        "djjobs.adopt(plain)",
        "importing": f"only imports Spectrum (schema {folder.schema.database})",
        "no_such_module": "There is no module 'no_such_module'",
    }.items():
        done = folder.run("worker", target)
        assert done.stderr.count("Traceback") == 0
        lines = [line for line in done.stderr.splitlines() if line != "imported"]
        assert (done.returncode, len(lines)) == (2, 1), done.stderr
        assert lines[0].startswith("djjobs: ") and says in lines[0]


def test_a_module_that_cannot_reach_its_server_says_so(folder: Folder) -> None:
    line = complaint(folder.run("worker", folder.name, DJ_PASS="not the password"))
    assert "Cannot connect" in line and "refused the password" in line


# -- changing jobs -------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(folder: Folder) -> Folder:
    """Sessions 0, 1 and 3 are made, session 2 failed; Peaks has three jobs waiting."""
    folder.module.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    folder.module.Peaks.schedule_jobs()
    assert job_counts(folder.module.Spectrum) == {"error": 1}
    assert job_counts(folder.module.Peaks) == {"scheduled": 3}
    return folder


def test_errors_are_retried(busy: Folder) -> None:
    done = busy.run("retry", busy.name, "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Spectrum: 1 job put back", "Peaks: 0 jobs put back"]
    assert job_counts(busy.module.Spectrum) == {"scheduled": 1}


def test_jobs_are_chosen_by_key_restriction_and_row(busy: Folder) -> None:
    peaks, spectrum = f"{busy.name}:Peaks", f"{busy.name}:Spectrum"
    assert json.loads(busy.run("cancel", peaks, "--key", "session=1", "--json").stdout) == {"Peaks": 1}
    assert json.loads(busy.run("cancel", peaks, "--restrict", "subject LIKE '%0'", "--json").stdout) == {"Peaks": 1}
    assert job_counts(busy.module.Peaks) == {"cancelled": 2, "scheduled": 1}
    for words, count in (("%disk%", 0), ("%CUDA%", 1)):
        done = busy.run("retry", spectrum, "--where", f"error_message LIKE '{words}'", "--json")
        assert json.loads(done.stdout) == {"Spectrum": count}
    assert json.loads(busy.run("retry", spectrum, "--restrict", "day > 100", "--json").stdout) == {"Spectrum": 0}


def test_jobs_are_scheduled_as_from_a_crontab(folder: Folder) -> None:
    done = folder.run("schedule-jobs", folder.name)
    assert (done.returncode, done.stdout) == (0, "Spectrum: 4 jobs scheduled\nPeaks: 0 jobs scheduled\n")
    nothing = {"run_id": None, "jobs_scheduled": 0}
    assert json.loads(folder.run("schedule-jobs", folder.name, "--json").stdout) == dict.fromkeys(
        ("Spectrum", "Peaks"), nothing
    )
    folder.module.Session.insert([{"subject": "m8", "session": n, "day": n} for n in (8, 9)])
    target = f"{folder.name}:Spectrum"
    done = folder.run("schedule-jobs", target, "--restrict", "session = 9", "--priority", "1", "--delay", "2h")
    assert done.stdout == "Spectrum: 1 job scheduled\n"
    (row,) = [row for row in rows_of(folder.module.Spectrum.jobs) if row["key"]["session"] == 9]
    assert (row["priority"], row["turn"], row["due_time"] > row["created_time"]) == (1, None, True)
    assert "--restrict" in complaint(folder.run("schedule-jobs", target, "--restrict", ""))


def test_a_run_is_named_listed_looked_at_and_called_off(folder: Folder) -> None:
    target = f"{folder.name}:Spectrum"
    options = ["--restrict", "session < 3", "--name", "rerun m1", "--due", "2035-01-31T18:00+01:00"]
    done = folder.run("schedule-jobs", target, *options)
    number = re.fullmatch(r"Spectrum: 3 jobs scheduled \(run (\d+)\)\n", done.stdout)
    assert number, (done.stdout, done.stderr)
    run_id = int(number[1])
    (line,) = folder.run("runs", folder.name).stdout.splitlines()[1:]
    assert line.split("  ")[0] == str(run_id)
    for word in ("rerun m1", "__spectrum", "2035-01-31 17:00:00", "pending", "0/3"):
        assert word in line
    assert folder.run("runs", folder.schema.database, "--state", "done", "--json").stdout == "[]\n"
    (listed,) = json.loads(folder.run("runs", folder.schema.database, "--state", "pending", "--json").stdout)
    assert (listed["run_id"], listed["scheduled"], listed["due_time"]) == (run_id, 3, "2035-01-31T17:00:00Z")
    assert "progress:     total 3, scheduled 3" in folder.run("runs", folder.name, str(run_id)).stdout
    done = folder.run("cancel", target, "--run", str(run_id))
    assert done.stdout == f"Run {run_id}: 3 jobs cancelled or asked to stop\n"
    about = json.loads(folder.run("runs", folder.name, str(run_id), "--json").stdout)
    assert (about["state"], about["name"], about["progress"]["cancelled"]) == ("cancelled", "rerun m1", 3)
    again = json.loads(folder.run("cancel", folder.schema.database, "--run", str(run_id), "--json").stdout)
    assert again == {"run_id": run_id, "cancelled": 0, "state": "cancelled"}


def test_to_wait_for_a_run_is_to_wait_for_workers(folder: Folder) -> None:
    target = f"{folder.name}:Spectrum"
    command = ["-m", "djjobs.cli", "schedule-jobs", target, "--wait", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with fork_server.start(command, cwd=folder.path, **pipes) as waiting:
        wait_for(lambda: job_counts(folder.module.Spectrum) == {"scheduled": 4})
        folder.module.Spectrum.populate(reserve_jobs=True, suppress_errors=True, schedule_jobs=False)
        told = json.loads(waiting.communicate(timeout=60)[0])["Spectrum"]
    assert (waiting.returncode, told["state"], told["done"], told["error"]) == (1, "done", 3, 1)


def test_bad_input_about_runs_is_told_in_one_line(folder: Folder) -> None:
    target, many = f"{folder.name}:Spectrum", "x" * 256
    for words, says in {
        ("schedule-jobs", target, "--due", "2035-01-31T18:00"): "no time zone",
        ("schedule-jobs", target, "--due", "tomorrow"): "no date and time",
        ("schedule-jobs", target, "--due", "2035-01-31T18:00Z", "--delay", "2h"): "give one of them",
        ("schedule-jobs", target, "--name", many): "255 characters",
        ("runs", folder.schema.database, "4711"): "no run 4711",
        ("runs", folder.schema.database, "m1"): "m1",
        ("cancel", folder.schema.database, "--run", "4711"): "no run 4711",
        ("cancel", target, "--run", "4711", "--restrict", "session = 1"): "a whole run",
    }.items():
        done = folder.run(*words)
        lines = [line for line in done.stderr.splitlines() if line != "imported"]
        assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), (words, done.stderr)
        assert says in lines[0]
    assert len(folder.module.Spectrum.jobs) == 0


def test_keys_are_ignored_and_orphans_cleaned_up(busy: Folder) -> None:
    busy.module.Session.insert1({"subject": "m9", "session": 9, "day": 1})
    done = busy.run("ignore", f"{busy.name}:Spectrum", "--key", "session=9")
    assert done.stdout == "Spectrum: 1 job ignored\n"
    assert job_counts(busy.module.Spectrum) == {"error": 1, "ignore": 1}
    done = busy.run("ignore", f"{busy.name}:Peaks", "--yes")
    assert done.stdout == "Peaks: 3 jobs ignored\n"
    (busy.module.Session & "session = 9").delete_quick()
    done = busy.run("cleanup", busy.name, "--yes", "--json")
    told = json.loads(done.stdout)
    assert (told["Spectrum"]["orphaned_incomplete"], told["Peaks"]["orphaned_incomplete"]) == (1, 0)


def test_without_a_terminal_all_jobs_are_changed_only_on_request(busy: Folder) -> None:
    for command in ("retry", "ignore", "cancel", "cleanup"):
        done = CliRunner().invoke(main, [command, busy.name])
        assert done.exit_code == 2
        assert done.stderr.startswith("djjobs: ") and "--yes" in done.stderr
    assert job_counts(busy.module.Peaks) == {"scheduled": 3}


def at_a_terminal(folder: Folder, *arguments: str, answer: str) -> tuple[int, str]:
    """Run a command whose questions go to a terminal; return its exit code and what the terminal showed."""
    ours, theirs = pty.openpty()
    command = ["-m", "djjobs.cli", *arguments]
    with fork_server.start(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder.path) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # how a terminal ends on Linux
            pass
    os.close(ours)
    return process.returncode, shown.decode()


def test_at_a_terminal_more_than_one_job_takes_a_yes(busy: Folder) -> None:
    code, shown = at_a_terminal(busy, "cancel", busy.name, answer="n\n")
    assert code == 1 and "Cancel 3 jobs of Spectrum, Peaks?" in shown, shown
    assert "Nothing was changed" in shown
    assert job_counts(busy.module.Peaks) == {"scheduled": 3}
    code, shown = at_a_terminal(busy, "cancel", busy.name, answer="y\n")
    assert code == 0 and "Peaks: 3 jobs" in shown, shown
    assert job_counts(busy.module.Peaks) == {"cancelled": 3}
    code, shown = at_a_terminal(busy, "retry", f"{busy.name}:Spectrum", answer="")
    assert code == 0 and "?" not in shown and "1 job put back" in shown, shown


def test_colours_are_for_terminals(busy: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, shown = at_a_terminal(busy, "jobs", busy.name, answer="")
    assert code == 0 and "\x1b[" in shown
    assert "\x1b[" not in busy.run("jobs", busy.name).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in at_a_terminal(busy, "jobs", busy.name, answer="")[1]


def test_there_must_be_something_left_to_cancel(busy: Folder) -> None:
    done = CliRunner().invoke(main, ["cancel", f"{busy.name}:Spectrum", "--yes"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("djjobs: ") and "Spectrum" in done.stderr
    done = CliRunner().invoke(main, ["cancel", busy.name, "--yes", "--json"])
    assert json.loads(done.stdout) == {"Spectrum": 0, "Peaks": 3}


def test_force_reaches_the_tables_only_when_it_is_given(busy: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def cancel_jobs(self: Any, *restrictions: Any, **options: Any) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(busy.module.Peaks, "cancel_jobs", cancel_jobs)
    for options in ([], ["--force"]):
        done = CliRunner().invoke(main, ["cancel", f"{busy.name}:Peaks", "--yes", *options])
        assert done.exit_code == 0, done.output
    assert calls == [{}, {"force": True}]


def test_conditions_that_mean_nothing_change_nothing(busy: Folder) -> None:
    for options, says in {
        ("--key", "sesion=1"): "has no 'sesion' in its key, which is subject, session",
        ("--key", "session=one"): "session is a number",
        ("--restrict", "no_such_column = 1"): "no_such_column",
        ("--restrict", "session = "): "Check",
        ("--where", "no_such_column = 1"): "no_such_column",
    }.items():
        done = CliRunner().invoke(main, ["cancel", f"{busy.name}:Peaks", *options])
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("djjobs: ") and says in line
    assert job_counts(busy.module.Peaks) == {"scheduled": 3}


# -- listing jobs and workers --------------------------------------------------------------------------------------


def test_jobs_are_listed(busy: Folder) -> None:
    done = busy.run("jobs", busy.name)
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:5] == ["table", "key", "status", "attempt", "host"]
    assert len(lines) == 4
    (failed,) = (line for line in lines if line.startswith("Spectrum"))
    assert "subject=m0 session=2" in failed and " error " in failed and "CUDA is out of memory" in failed


def test_jobs_are_listed_for_a_program(busy: Folder) -> None:
    (job,) = json.loads(busy.run("jobs", busy.name, "--status", "error", "--json").stdout)
    assert (job["table"], job["table_name"], job["status"]) == ("Spectrum", "__spectrum", "error")
    assert (job["key"], job["attempt"]) == ({"subject": "m0", "session": 2}, 1)
    assert "CUDA" in job["error_message"] and job["timestamp"].endswith("Z") and job["host"]


def test_jobs_are_listed_by_condition_and_no_more_than_asked_for(busy: Folder) -> None:
    def listed(*options: str) -> int:
        done = CliRunner().invoke(main, ["jobs", *options, "--json"])
        assert done.exit_code == 0, done.stderr
        return len(json.loads(done.stdout))

    assert listed(busy.name) == 4
    assert listed(busy.name, "--limit", "2") == 2
    assert listed(busy.name, "--limit", "0") == 4
    assert listed(busy.name, "--key", "subject=m1") == 2
    assert listed(busy.name, "--restrict", "subject LIKE '%1' OR session = 2") == 3
    assert listed(busy.name, "--where", "error_message LIKE '%CUDA%'") == 1
    assert listed(busy.name, "--status", "error", "--status", "scheduled") == 4
    assert listed(busy.schema.database) == 4
    assert listed(busy.schema.database, "--where", "status = 'error'") == 1
    more = CliRunner().invoke(main, ["jobs", busy.name, "--limit", "1"])
    assert "3 jobs more" in more.stderr and len(more.stdout.splitlines()) == 2
    refused = CliRunner().invoke(main, ["jobs", busy.schema.database, "--key", "subject=m1"])
    assert refused.exit_code == 2 and "is a schema" in refused.stderr


def test_a_job_whose_key_is_gone_is_listed_too(busy: Folder) -> None:
    (busy.module.Session & "session = 2").delete_quick()
    shown = CliRunner().invoke(main, ["jobs", busy.name, "--key", "session=2"])
    assert "CUDA" in shown.stdout


def test_workers_are_listed(folder: Folder) -> None:
    assert "No workers" in CliRunner().invoke(main, ["workers", folder.name]).stderr
    worker = {"worker_id": "w" * 36, "host": "node7", "pid": 4711, "slots": 8, "cluster_job": "123_4"}
    djjobs_package.workers(folder.schema).insert1(
        {**worker, "tables": ["__spectrum"], "started": "2024-05-01 12:00:00"}
    )
    for target in (folder.name, folder.schema.database):
        shown = CliRunner().invoke(main, ["workers", target])
        assert shown.exit_code == 0, shown.output
        assert all(word in shown.stdout for word in ("node7", "4711", "123_4", "__spectrum", "working"))
    (told,) = json.loads(CliRunner().invoke(main, ["workers", folder.name, "--json"]).stdout)
    assert worker.items() <= told.items()
    assert (told["schema"], told["tables"]) == (folder.schema.database, ["__spectrum"])
    assert told["started"] == "2024-05-01T12:00:00Z"


# -- the worker: what the command makes of its options, and whether it works -----------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workers that would have been started: tables and options."""
    calls: list[Any] = []

    def run_worker(tables: list[type], options: WorkerOptions) -> int:
        calls.append(([table.__name__ for table in tables], options))
        return len(calls) - 1

    monkeypatch.setattr(logs, "set_up", lambda **_: None)
    monkeypatch.setattr(sys.modules["djjobs.cli.worker"], "run_worker", run_worker)
    return calls


def test_the_workers_options_reach_it(folder: Folder, started: list[Any]) -> None:
    plain = CliRunner().invoke(main, ["worker", folder.name])
    assert plain.exit_code == 0, plain.output
    words = "--processes 3 --order random --restrict a=1 --restrict b=2 --max-jobs 9 --drain --idle-timeout 2m"
    words += " --walltime 1-00:00:01 --max-jobs-per-process 5 --once --grace 0"
    full = CliRunner().invoke(main, ["worker", f"{folder.name}:Peaks", f"{folder.name}:Spectrum", *words.split()])
    assert full.exit_code == 1  # as the worker said
    assert started == [
        (["Spectrum", "Peaks"], WorkerOptions()),
        (["Spectrum", "Peaks"], WorkerOptions(3, "random", ("a=1", "b=2"), 9, True, 120.0, 86401.0, 5, 0.0, True)),
    ]


def test_a_worker_works_until_nothing_is_left(folder: Folder) -> None:
    done = folder.run("worker", folder.name, "--drain", "--processes", "2")
    assert (done.returncode, done.stdout) == (1, "")  # session 2 has failed
    assert "CUDA is out of memory" in done.stderr and "Traceback" not in done.stderr
    assert (len(folder.module.Spectrum()), len(folder.module.Peaks())) == (3, 3)
    folder.module.Spectrum.ignore_jobs("session = 2")
    again = folder.run("worker", folder.name, "--drain", "--quiet")
    assert (again.returncode, again.stderr.replace("imported\n", "")) == (0, "")


def test_a_worker_logs_for_programs(folder: Folder) -> None:
    done = folder.run("worker", folder.name, "--drain", "--json-logs", DJ_LOG_LEVEL="INFO")
    lines = [json.loads(line) for line in done.stderr.splitlines() if line != "imported"]
    ended = {line["key"]["session"]: line for line in lines if line.get("table") == "Spectrum" and "seconds" in line}
    assert set(ended) == {0, 1, 2, 3}
    assert "CUDA" in ended[2]["message"] and ended[2]["level"] == "error"
    assert all(line["time"] and line["message"] and line["level"] for line in lines)


def test_a_lease_shorter_than_the_heartbeat(folder: Folder) -> None:
    done = folder.run("worker", folder.name, "--drain", DJJOBS_LEASE="5", DJJOBS_HEARTBEAT_INTERVAL="10")
    lines = done.stderr.replace("imported\n", "").splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("djjobs: ") and "DJJOBS_LEASE" in lines[0]
    assert len(folder.module.Spectrum()) == 0


def test_a_restriction_that_the_worker_cannot_understand(folder: Folder) -> None:
    done = folder.run("worker", folder.name, "--drain", "--restrict", "no_such_column = 1")
    lines = done.stderr.replace("imported\n", "").splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("djjobs: ") and "no_such_column" in lines[0]


@pytest.fixture
def outsider(folder: Folder, engine: str) -> Iterator[dict[str, str]]:
    """A user who may do all with the rows of the schema, but only look at `~workers`; as the environment names one."""
    name, password = f"guest_{secrets.token_hex(4)}", secrets.token_hex(8)
    folder.module.Spectrum.schedule_jobs()
    connection, database = folder.schema.connection, folder.schema.database
    workers = djjobs_package.workers(folder.schema).full_table_name
    if engine == "postgresql":
        users = [name]
        connection.query(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        connection.query(f'GRANT USAGE ON SCHEMA "{database}" TO {name}')
        connection.query(f'GRANT ALL ON ALL TABLES IN SCHEMA "{database}" TO {name}')
        connection.query(f"REVOKE INSERT, UPDATE, DELETE ON {workers} FROM {name}")
    else:
        users = [f"'{name}'@'{host}'" for host in ("%%", "localhost")]
        others = connection.query(f"SHOW TABLES IN `{database}`").fetchall()
        for user in users:
            connection.query(f"CREATE USER {user} IDENTIFIED BY '{password}'")
            connection.query(f"GRANT SELECT ON `{database}`.* TO {user}")
            for (table,) in others:
                if f"`{table}`" not in workers:
                    connection.query(f"GRANT INSERT, UPDATE, DELETE ON `{database}`.`{table}` TO {user}")
    yield {"DJ_USER": name, "DJ_PASS": password}
    for user in users:
        if engine == "postgresql":
            connection.query(f"DROP OWNED BY {user}")
        connection.query(f"DROP {'ROLE' if engine == 'postgresql' else 'USER'} {user}")


def test_no_permission_to_write_workers(folder: Folder, outsider: dict[str, str]) -> None:
    done = folder.run("worker", folder.name, "--drain", **outsider)
    lines = done.stderr.replace("imported\n", "").splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("djjobs: ") and "lacks a privilege" in lines[0] and "workers" in lines[0]
    assert len(folder.module.Spectrum()) == 0
    checked = folder.run("check", folder.name, **outsider)
    assert checked.returncode == 1 and "INSERT, UPDATE, DELETE on ~workers" in checked.stdout


# -- the worker's logs -------------------------------------------------------------------------------------------


# -- completion ----------------------------------------------------------------------------------------------------


def completions(*words: str) -> list[str]:
    from click.shell_completion import ShellComplete

    *before, last = words
    return [item.value for item in ShellComplete(main, {}, "djjobs", "_DJJOBS_COMPLETE").get_completions(before, last)]


def test_modules_and_schemas_are_completed(folder: Folder) -> None:
    package = folder.path / "lab_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "analysis.py").touch()
    assert completions("worker", "lab_p") == ["lab_package"]
    assert completions("worker", "lab_package.") == ["lab_package.analysis"]
    assert folder.name in completions("status", "lab_")
    assert folder.schema.database in completions("status", "djjobs_test_")
    assert folder.schema.database in completions("migrate", "")
    assert "random" in completions("worker", "--order", "")
    assert "worker" in completions("wor")
