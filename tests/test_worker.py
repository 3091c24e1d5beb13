"""`djjobs worker`: what it works off and when it ends, how it stops, and what it survives."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import datajoint as dj
import psutil
import pytest
from commands import Command
from helpers import command_of, has_ended, wait_for
from pipelines import MODERN, rows_of
from workloads import worker_lab
from workloads.squares import CallLog, another_connection, made, rows_by_number, statuses

import djjobs
from djjobs.queue.tables import JobControl
from djjobs.work import idle
from djjobs.worker import WorkerOptions, run_worker

TESTS = Path(__file__).resolve().parent
FIRST, SECOND = "workloads.worker_lab:First", "workloads.worker_lab:Second"
#: A worker that is heard of every half second and counts as dead after three.
SHORT_LEASE = {"DJJOBS_LEASE": "3", "DJJOBS_HEARTBEAT_INTERVAL": "0.5"}
#: Downstream jobs are found at once.
EAGER = {"DJJOBS_MIN_SCHEDULING_INTERVAL": "0.2"}
#: What a busy machine may add to a time that is promised.
SLACK = 6.0
#: As the first and the longest wait of an idle worker: it asks nobody again while a test lasts.
FOREVER = 300.0
#: What makes a worker's slots look for jobs only when they are called, as good as.
SELDOM = f"import djjobs.work.idle as idle; idle.FIRST_WAIT = idle._LONGEST_WAIT = {FOREVER}"
STOPS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


# -- a lab ------------------------------------------------------------------------------------------------------


class Lab:
    """The tables of workloads.worker_lab in a schema, and a folder in which make() tells what it does."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.Task, self.First, self.Second = worker_lab.declare(schema)
        self.First.jobs  # declares the queue
        self.folder = Path()

    def start_over(self, folder: Path) -> Lab:
        self.folder = folder
        self.reconnect()
        queue = djjobs.jobs(self.schema), JobControl(self.schema.connection, self.schema.database)
        for table in (self.Second(), self.First(), *queue, djjobs.workers(self.schema), self.Task()):
            table.delete_quick()
        return self

    def reconnect(self) -> None:
        if not self.schema.connection.is_connected:
            self.schema.connection.connect()

    def add(self, *acts: str, first: int = 1) -> None:
        """Tasks with these acts, numbered from `first` on."""
        self.Task.insert([{"n": n, "act": act} for n, act in enumerate(acts, first)])

    def open(self, *numbers: int) -> None:
        """Let the tasks go on that wait at a gate."""
        for n in numbers:
            (self.folder / f"open-{n}").touch()

    @property
    def calls(self) -> list[SimpleNamespace]:
        """The calls of make() so far, in their order."""
        lines = CallLog(self.folder / "calls").lines()
        return [SimpleNamespace(n=int(n), table=t, pid=int(pid), time=float(at)) for n, t, pid, at in lines]

    def has_begun(self, *numbers: int) -> bool:
        return {call.n for call in self.calls} >= set(numbers)

    @property
    def workers(self) -> list[dict[str, Any]]:
        return rows_of(djjobs.workers(self.schema))

    def run(self, *tables: Any, **options: Any) -> int:
        """A worker whose supervisor is this process. One that does not end is stopped, and the test fails."""
        alarm = threading.Timer(60, lambda: os.kill(os.getpid(), signal.SIGTERM))
        alarm.start()
        try:
            code = run_worker(tables or (self.First,), WorkerOptions(**options))
            assert alarm.is_alive(), "the worker did not end by itself"
        finally:
            alarm.cancel()
            self.reconnect()
        assert not psutil.Process().children() or not [c for c in psutil.Process().children() if is_slot(c)]
        return code


def is_slot(process: psutil.Process) -> bool:
    """Whether a child of this process is a fork of it; the guard of the database server is not."""
    return command_of(process) == command_of(psutil.Process()) and not has_ended(process)


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    lab = Lab(schema)
    yield lab
    lab.reconnect()
    schema.drop()


@pytest.fixture
def lab(standing: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("WORKER_LAB_FOLDER", str(tmp_path))
    return standing.start_over(tmp_path)


# -- a worker as a command ------------------------------------------------------------------------------------


class Worker(Command):
    """`djjobs worker`, its slots in the same session."""

    def __init__(self, lab: Lab, arguments: tuple[str, ...], environment: dict[str, str], preface: str) -> None:
        targets = () if any(word.startswith("workloads.") for word in arguments) else (FIRST,)
        program = f"{preface}\nfrom djjobs.cli import main\nmain()"
        command = ["-c", program] if preface else ["-m", "djjobs.cli"]
        where = {"WORKER_LAB": lab.schema.database, "WORKER_LAB_FOLDER": str(lab.folder)}
        super().__init__([*command, "worker", *targets, *arguments], lab.folder, {**where, **environment})

    def slots(self) -> list[int]:
        return [pid for pid in self.processes() if pid != self.pid]

    def send_all(self, number: int) -> None:
        """As a terminal does: to every process of the group."""
        os.killpg(self.pid, number)


@contextmanager
def working(lab: Lab, *arguments: str, preface: str = "", **environment: Any) -> Iterator[Worker]:
    """A worker at work; `preface` is Python that its process runs first. Afterwards it is gone, come what may."""
    started = Worker(lab, arguments, {name: str(value) for name, value in environment.items()}, preface)
    try:
        yield started
    finally:
        started.clear_away()


def policy(**members: Any) -> dict[str, str]:
    """The environment in which First has this policy."""
    return {"WORKER_LAB_POLICY": json.dumps(members)}


# -- what it works off -------------------------------------------------------------------------------------------


def test_a_chain_of_tables_is_worked_off_upstream_first_and_the_log_tells_of_every_job(lab: Lab) -> None:
    lab.add("", "fail no such file", "", "print hello from make")
    with working(lab, SECOND, FIRST, "--drain", **policy(max_attempts=2, backoff=0.2)) as worker:
        assert worker.end() == 1
    order = [(call.table, call.n) for call in lab.calls]
    assert order[:2] == [("First", 1), ("First", 2)]
    assert order.index(("Second", 1)) > order.index(("First", 4))
    assert (made(lab.First()), made(lab.Second())) == ([1, 3, 4], [1, 3, 4])
    assert statuses(lab.First) == {2: "error"}
    assert lab.workers == []
    for table, n in [("First", 1), ("First", 3), ("Second", 4)]:
        assert re.search(rf"{table} {{'n': {n}}} started", worker.log)
        assert re.search(rf"{table} {{'n': {n}}} done in \d+\.\d+ s", worker.log)
    failed = r"First {'n': 2} failed in \d+\.\d+ s: ValueError: no such file"
    assert len(re.findall(rf"{failed}; tried again in 0 s", worker.log)) == 1
    assert len(re.findall(rf"{failed}$", worker.log, re.MULTILINE)) == 1
    assert "hello from make" in worker.log
    assert re.search(r"ends: 6 jobs done, 1 failed", worker.log)


def test_processes_work_side_by_side(lab: Lab) -> None:
    """Each of the jobs waits for the others, so one after the other they would never end."""
    lab.add("meet 3", "meet 3", "meet 3")
    assert lab.run(processes=3, drain=True) == 0
    assert len({call.pid for call in lab.calls}) == 3
    assert made(lab.First()) == [1, 2, 3]


def test_a_draining_worker_waits_for_retries_that_are_due_later(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.First, "max_attempts", 2)
    monkeypatch.setattr(lab.First, "backoff", 1.5)
    monkeypatch.setenv("WORKER_LAB_ACTS", "1")
    lab.add("fail at first")
    assert lab.run(drain=True, processes=2) == 0
    assert made(lab.First()) == [1]
    first, second = lab.calls
    assert second.time - first.time >= 1.5


def test_a_draining_worker_does_not_wait_for_retries_that_it_would_not_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.First, "max_attempts", 2)
    monkeypatch.setattr(lab.First, "backoff", 3600)
    lab.add("", "fail")
    lab.run(max_jobs=2)
    assert rows_by_number(lab.First)[2]["attempt"] == 1
    lab.add("", first=3)
    assert lab.run(drain=True, restrictions=("n <> 2",)) == 0
    assert made(lab.First()) == [1, 3]


def test_only_the_restricted_jobs_are_run_in_the_order_asked_for(lab: Lab) -> None:
    lab.add(*[""] * 5)
    assert lab.run(drain=True, restrictions=("n > 1", "n < 5"), order="reverse") == 0
    assert [call.n for call in lab.calls] == [4, 3, 2]
    assert lab.run(drain=True, order="random") == 0
    assert made(lab.First()) == [1, 2, 3, 4, 5]


def test_at_most_so_many_jobs_are_run(lab: Lab) -> None:
    lab.add(*[""] * 8)
    assert lab.run(max_jobs=5, processes=2) == 0
    assert len(made(lab.First())) == 5
    assert list(statuses(lab.First).values()) == ["scheduled"] * 3


def test_a_death_does_not_take_the_number_of_jobs_that_others_may_run_with_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot claims several short jobs at once; those that it had not begun are still to be run."""
    monkeypatch.setattr(lab.First, "max_attempts", 1)
    lab.add("", "die SIGKILL", "", "", "")
    assert lab.run(max_jobs=4) == 1
    assert made(lab.First()) == [1, 3, 4]
    assert statuses(lab.First) == {2: "error", 5: "scheduled"}


def test_once_runs_one_job_and_ends_also_if_there_is_none(lab: Lab) -> None:
    lab.add("", "")
    assert lab.run(once=True) == 0
    assert made(lab.First()) == [1]
    lab.run(drain=True)
    assert lab.run(once=True) == 0
    assert len(lab.calls) == 2


def test_a_process_is_replaced_after_so_many_jobs(lab: Lab) -> None:
    lab.add(*[""] * 5)
    assert lab.run(drain=True, max_jobs_per_process=2) == 0
    pids = [call.pid for call in lab.calls]
    assert made(lab.First()) == [1, 2, 3, 4, 5]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]


def test_an_idle_worker_ends_after_its_idle_timeout_but_not_while_a_job_runs(lab: Lab) -> None:
    lab.add("sleep 1.5")
    began = time.monotonic()
    assert lab.run(idle_timeout=1) == 0
    assert made(lab.First()) == [1]
    assert time.monotonic() - began >= 2.5


# -- how long it works ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 1], ids=["same process", "a fresh process for each job"])
def test_a_job_that_would_not_end_in_time_is_not_begun(lab: Lab, most: int | None) -> None:
    """Judged by how long the jobs of its table took: those of another table still fit."""
    lab.add(*["sleep 2.5"] * 3)
    walltime = 5.25
    began = time.monotonic()
    assert lab.run(lab.First, lab.Second, walltime=walltime, max_jobs_per_process=most, drain=True) == 0
    assert time.monotonic() - began < walltime + SLACK
    assert (made(lab.First()), made(lab.Second())) == ([1], [1])
    waiting = {n: (row["status"], row["attempt"]) for n, row in rows_by_number(lab.First).items()}
    assert waiting == {2: ("scheduled", 0), 3: ("scheduled", 0)}
    assert len(lab.calls) == 2


@pytest.mark.parametrize("told_by", ["--walltime", "SLURM_JOB_END_TIME", "squeue"])
def test_a_worker_ends_with_its_walltime_however_long_it_would_have_waited_for_jobs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told_by: str
) -> None:
    monkeypatch.setattr(idle, "FIRST_WAIT", 20.0)
    monkeypatch.setattr(idle, "_LONGEST_WAIT", 20.0)
    options = {}
    if told_by == "--walltime":
        options["walltime"] = 1.0
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if told_by == "SLURM_JOB_END_TIME":
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 2))
    if told_by == "squeue":
        command = tmp_path / "squeue"
        command.write_text('#!/bin/sh\n[ "$*" = "-h -j 4711 -o %L" ] && echo 0:01\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    began = time.monotonic()
    assert lab.run(**options) == 0
    assert 0.9 <= time.monotonic() - began < 2 + SLACK


# -- while there is nothing to do ---------------------------------------------------------------------------------


def test_jobs_that_are_inserted_later_are_picked_up(lab: Lab, engine: str) -> None:
    """PostgreSQL wakes the worker up: by itself it would have asked again only after five minutes."""
    with working(lab, preface=SELDOM if engine == "postgresql" else "") as worker:
        wait_for(lambda: lab.workers)
        lab.add("")
        lab.First.schedule_jobs(min_scheduling_interval=0)
        wait_for(lambda: made(lab.First()) == [1])
        lab.add("", first=2)
        lab.First.schedule_jobs(min_scheduling_interval=0)
        wait_for(lambda: made(lab.First()) == [1, 2])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0


#: The first look of a slot is over, but it has not said so before jobs were announced.
ANNOUNCED_AFTER_THE_LOOK = f"""
{SELDOM}
import os, time
from pathlib import Path
from djjobs.queue.notifier import Notifier
from djjobs.work.messages import Idle
from djjobs.work.pool import SlotChannel
looked, announced = (Path(os.environ["WORKER_LAB_FOLDER"], name) for name in ("looked", "announced"))
has_news, send = Notifier.has_news, SlotChannel.send

def hear(notifier):
    news = has_news(notifier)
    if news and looked.exists():
        announced.touch()
    return news

def say(channel, message):
    if isinstance(message, Idle) and not looked.exists():
        looked.touch()
        while not announced.exists():
            time.sleep(0.01)
    send(channel, message)

Notifier.has_news, SlotChannel.send = hear, say
"""


@pytest.mark.only(engines=["postgresql"])
def test_jobs_that_are_announced_between_a_slots_look_and_its_rest_are_not_forgotten(lab: Lab) -> None:
    with working(lab, preface=ANNOUNCED_AFTER_THE_LOOK) as worker:
        wait_for((lab.folder / "looked").exists)
        lab.add("")
        lab.First.schedule_jobs(min_scheduling_interval=0)
        wait_for(lambda: made(lab.First()) == [1])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0


class Witness:
    """A database user whose statements and connections the server counts."""

    def __init__(self, server: Any, engine: str) -> None:
        self.name, self.password = f"lab_{secrets.token_hex(4)}", secrets.token_hex(8)
        self._postgresql, self._server = engine == "postgresql", server
        self._connection = another_connection()
        if self._postgresql:
            self._old_log = len(self._log())
            self._ask(f"CREATE ROLE {self.name} LOGIN SUPERUSER PASSWORD '{self.password}'")
            self._ask(f"ALTER ROLE {self.name} SET log_statement = 'all'")
        else:
            self._ask(f"CREATE USER '{self.name}'@'%%' IDENTIFIED BY '{self.password}'")
            self._ask(f"GRANT ALL ON *.* TO '{self.name}'@'%%'")
            self._ask("SET GLOBAL log_output = 'TABLE'")
            self._ask("SET GLOBAL general_log = 'ON'")

    @property
    def environment(self) -> dict[str, str]:
        return {"DJ_USER": self.name, "DJ_PASS": self.password}

    def connections(self) -> int:
        if self._postgresql:
            where = f"pg_stat_activity WHERE usename = '{self.name}'"
        else:
            where = f"information_schema.processlist WHERE user = '{self.name}'"
        return self._ask(f"SELECT COUNT(*) FROM {where}")[0][0]

    def looks(self) -> list[float]:
        """The moments at which somebody looked for jobs to claim, in seconds."""
        if self._postgresql:
            statement = r"^(\S+ [\d:.]+) .*?LOG:  statement: "
            pieces = re.split(statement, self._log()[self._old_log :], flags=re.MULTILINE)[1:]
            rows = [
                (datetime.datetime.fromisoformat(at).timestamp(), text)
                for at, text in zip(*[iter(pieces)] * 2, strict=True)
            ]
        else:
            rows = self._ask(
                "SELECT UNIX_TIMESTAMP(event_time), CONVERT(argument USING utf8mb4) FROM mysql.general_log "
                f"WHERE user_host LIKE '{self.name}[%%' AND command_type IN ('Query', 'Execute')"
            )
        return sorted(float(at) for at, text in rows if "MIN(turn)" in text)

    def _log(self) -> str:
        return (self._server.folder / "log").read_text(errors="replace")

    def _ask(self, sql: str) -> Any:
        cursor = self._connection.query(sql, args=())
        return cursor.fetchall() if cursor.description else None

    def close(self) -> None:
        if self._postgresql:
            self._ask(f"DROP ROLE {self.name}")
        else:
            self._ask("SET GLOBAL general_log = 'OFF'")
            self._ask("TRUNCATE mysql.general_log")
            self._ask(f"DROP USER '{self.name}'@'%%'")
        self._connection.close()


@pytest.fixture
def witness(lab: Lab, server: Any, engine: str) -> Iterator[Witness]:
    if engine == "postgresql" and not hasattr(server, "folder"):
        pytest.skip("the log of DJJOBS_TEST_HOST is not ours to read")
    witness = Witness(server, engine)
    yield witness
    witness.close()


def pace(looks: list[float], since: float, until: float) -> float:
    """How many looks there were between two moments. Each claims before it schedules, and after."""
    return sum(since <= at < until for at in looks) / 2


def pauses(looks: list[float]) -> list[float]:
    """How long nobody looked, time and again. One look is some statements in quick succession."""
    return [later - at for at, later in itertools.pairwise(looks) if later - at > 0.6]


def test_an_idle_worker_asks_at_most_once_a_second_then_less_on_few_connections(lab: Lab, witness: Witness) -> None:
    processes = 3
    lab.add(*["gate"] * processes)
    with working(lab, "--processes", str(processes), **witness.environment) as worker:
        wait_for(lambda: lab.has_begun(1, 2, 3))
        assert witness.connections() <= 2 + processes
        lab.open(1, 2, 3)
        wait_for(lambda: len(made(lab.First())) == processes)
        begin = max(witness.looks())

        def looks() -> list[float]:
            return [at for at in witness.looks() if at >= begin]

        wait_for(lambda: len(pauses(looks())) >= 3, timeout=90, every=0.5)
        assert witness.connections() <= 2 + processes
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    seen = looks()
    # Each slot sees for itself that nothing is left; after that one asks for all.
    middle, end = (begin + seen[-1]) / 2, seen[-1]
    assert pace(seen, begin, middle) <= middle - begin + processes
    assert pace(seen, middle, end) <= end - middle
    # Each pause is meant to be half as long again as the one before, give or take a quarter.
    first, _, third, *_ = pauses(seen)
    assert third > 1.2 * first


def test_a_worker_that_waits_for_a_retry_asks_no_more_often_than_an_idle_one(lab: Lab, witness: Witness) -> None:
    lab.add("fail")
    environment = {**witness.environment, **policy(max_attempts=2, backoff=6)}
    with working(lab, "--processes", "3", "--drain", WORKER_LAB_ACTS=1, **environment) as worker:
        assert worker.end() == 0
    first, second = lab.calls
    begin = min(witness.looks())
    assert second.time - first.time >= 5.4
    # At first each slot sees for itself that nothing is left.
    assert pace(witness.looks(), begin + 1, begin + 5) <= 4 + 3


# -- what others see of it ----------------------------------------------------------------------------------------


def test_a_worker_says_who_it_is_and_signs_off(lab: Lab) -> None:
    lab.add("gate")
    arguments = FIRST, SECOND, "--processes", "2", "--json-logs", "--grace", "30"
    environment = {**EAGER, "SLURM_JOB_ID": "4711", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    with working(lab, *arguments, **SHORT_LEASE, **environment) as worker:
        wait_for(lambda: lab.has_begun(1))
        (row,) = lab.workers
        assert (row["pid"], row["slots"], row["state"], row["cluster_job"]) == (worker.pid, 2, "working", "4711")
        tables = row["tables"] if isinstance(row["tables"], list) else json.loads(row["tables"])
        assert tables == [lab.First.table_name, lab.Second.table_name]
        assert rows_by_number(lab.First)[1]["worker_id"] == row["worker_id"]
        lab.add("", first=2)
        lab.First.schedule_jobs(min_scheduling_interval=0)
        wait_for(lambda: made(lab.Second()) == [2])
        worker.send(signal.SIGTERM)
        wait_for(lambda: [row["state"] for row in lab.workers] == ["stopping"])
        lab.add("", first=3)
        lab.First.schedule_jobs(min_scheduling_interval=0)
        lab.open(1)
        assert worker.end() == 0
    assert lab.workers == []
    assert made(lab.First()) == [1, 2], "the running job may end, and no other is begun"
    assert statuses(lab.First) == {3: "scheduled"}
    lines = [json.loads(line) for line in worker.log.splitlines()]
    told = [(line["event"], line["table"], line["key"]) for line in lines if "key" in line]
    for n in (1, 2):
        assert told.index(("job started", "First", {"n": n})) < told.index(("job done", "First", {"n": n}))
    assert all(line["seconds"] >= 0 for line in lines if line["event"] == "job done")
    assert {"time", "level", "message"} <= set.intersection(*map(set, lines))


def test_json_logs_are_json_whatever_make_prints(lab: Lab) -> None:
    lab.add("print 50%% of what make() says", "fail with a 'quote'")
    with working(lab, "--json-logs", "--drain") as worker:
        assert worker.end() == 1
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert any("of what make() says" in line["message"] for line in lines)
    assert any(line["level"] == "error" and "with a 'quote'" in line["message"] for line in lines)


def test_a_quiet_worker_tells_only_of_failures(lab: Lab) -> None:
    lab.add("", "fail loudly")
    with working(lab, "--quiet", "--drain") as worker:
        assert worker.end() == 1
    assert made(lab.First()) == [1]
    (line,) = worker.log.splitlines()
    assert re.search(r"First {'n': 2} failed in \d+\.\d+ s: ValueError: loudly", line)


def test_a_condition_that_the_server_does_not_understand_is_one_line_and_exit_code_two(lab: Lab) -> None:
    with working(lab, "--drain", "--restrict", "no_such_attribute = 1") as worker:
        assert worker.end() == 2
    assert len(worker.log.splitlines()) == 1
    assert "no_such_attribute" in worker.log
    assert lab.workers == []


# -- a slot that dies ---------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_seen_at_once_and_its_job_tells_how(lab: Lab) -> None:
    """The lease is ten minutes: nothing of this comes from waiting for it."""
    lab.add("die SIGSEGV", "die SIGKILL", "leave 3", "")
    lease = {"DJJOBS_LEASE": "600", "DJJOBS_HEARTBEAT_INTERVAL": "200"}
    with working(lab, "--drain", **policy(max_attempts=1), **lease) as worker:
        assert worker.end() == 1
    rows = rows_by_number(lab.First)
    assert {n: (row["status"], row["attempt"]) for n, row in rows.items()} == {n: ("error", 1) for n in (1, 2, 3)}
    pids = {call.n: call.pid for call in lab.calls}
    assert len(set(pids.values())) == 4
    for n, how in [(1, "was ended by SIGSEGV"), (2, "was ended by SIGKILL"), (3, "ended with exit code 3")]:
        message = rows[n]["error_message"]
        assert f"the process {pids[n]} {how}" in message
        assert f"the last words of {n}" in message
        assert message.split("\n", 1)[0] in worker.log
        assert "out-of-memory" not in message
    assert "line 29 of 1" in rows[1]["error_message"]
    assert "line 3 of 1\n" not in rows[1]["error_message"]
    assert made(lab.First()) == [4]


def test_a_job_that_killed_its_process_is_tried_again_and_that_is_no_failure(lab: Lab) -> None:
    lab.add("die SIGKILL", "")
    with working(lab, "--drain", WORKER_LAB_ACTS=2) as worker:
        assert worker.end() == 0
    assert [call.n for call in lab.calls if call.n == 1] == [1, 1, 1]
    assert made(lab.First()) == [1, 2]


@pytest.mark.parametrize("act", ["leave 0", "quit"], ids=["os._exit(0)", "sys.exit()"])
def test_a_job_that_ends_its_process_as_if_all_were_well_is_an_error(lab: Lab, act: str) -> None:
    """Given back each time, or held by a process that is gone, it would be begun or waited for without end."""
    lab.add(act, "")
    with working(lab, "--max-jobs", "20", "--idle-timeout", "3", **policy(max_attempts=1)) as worker:
        wait_for(lambda: made(lab.First()) == [2])
        wait_for(lambda: statuses(lab.First) == {1: "error"}, timeout=10)
        worker.send(signal.SIGTERM)
        assert worker.end() == 1
    assert len([call for call in lab.calls if call.n == 1]) == 1


# -- stopping -----------------------------------------------------------------------------------------------------


def returned(lab: Lab) -> dict[int, tuple[str, int, Any]]:
    """What a stop must leave of a job: as if it had never been begun."""
    return {n: (row["status"], row["attempt"], row["worker_id"]) for n, row in rows_by_number(lab.First).items()}


@STOPS
def test_a_stop_gives_running_jobs_back_after_the_grace_period(lab: Lab, number: int) -> None:
    """Ctrl-C in a terminal reaches the slots too."""
    lab.add("sleep 60", "sleep 60", "")
    with working(lab, "--processes", "2", "--grace", "1") as worker:
        wait_for(lambda: lab.has_begun(1, 2))
        began = time.monotonic()
        (worker.send_all if number == signal.SIGINT else worker.send)(number)
        assert worker.end() == 0
        assert 1 <= time.monotonic() - began < 1 + SLACK
    assert returned(lab) == {n: ("scheduled", 0, None) for n in (1, 2, 3)}
    assert made(lab.First()) == []
    assert len(lab.calls) == 2
    assert lab.workers == []


def test_a_stop_is_over_within_ten_seconds_even_if_a_job_is_stuck_in_c(lab: Lab) -> None:
    lab.add("stick", "sleep 60")
    with working(lab, "--processes", "2") as worker:
        wait_for(lambda: lab.has_begun(2) and (lab.folder / "stuck-1").exists())
        began = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
        assert time.monotonic() - began < 10 + SLACK / 2
    assert returned(lab) == {n: ("scheduled", 0, None) for n in (1, 2)}
    assert lab.workers == []


@STOPS
def test_a_second_signal_is_immediate(lab: Lab, number: int) -> None:
    lab.add("sleep 60")
    with working(lab, "--grace", "1000") as worker:
        wait_for(lambda: lab.has_begun(1))
        worker.send(number)
        wait_for(lambda: "1000 s to end" in worker.log)
        began = time.monotonic()
        worker.send(number)
        assert worker.end() == 0
        assert time.monotonic() - began < SLACK
    assert returned(lab) == {1: ("scheduled", 0, None)}
    assert lab.workers == []


def test_an_idle_worker_stops_at_once(lab: Lab) -> None:
    with working(lab, "--processes", "2", "--grace", "1000") as worker:
        wait_for(lambda: lab.workers and len(worker.slots()) == 2)
        began = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
        assert time.monotonic() - began < SLACK
    assert lab.workers == []


def test_a_term_that_is_followed_by_a_kill_loses_nothing(lab: Lab) -> None:
    """As Slurm and Kubernetes do. What was running comes back when the lease is over."""
    lab.add("sleep 60", "", "sleep 60")
    with working(lab, "--processes", "2", "--grace", "1000", **SHORT_LEASE) as worker:
        wait_for(lambda: lab.has_begun(1, 3))
        worker.send(signal.SIGTERM)
        time.sleep(1)
        worker.send(signal.SIGKILL)
        assert worker.end() == -signal.SIGKILL
    assert statuses(lab.First) == {1: "reserved", 3: "reserved"}
    lab.add("", first=4)
    # A slot is called as soon as there is something to do again: by itself it would not look for minutes.
    at_once = {"DJJOBS_MIN_SCHEDULING_INTERVAL": 0, "WORKER_LAB_ACTS": 0}
    with working(lab, preface=SELDOM, **at_once, **SHORT_LEASE) as worker:
        wait_for(lambda: made(lab.First()) == [1, 2, 3, 4])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert statuses(lab.First) == {}
    assert sorted(call.n for call in lab.calls) == [1, 1, 2, 3, 3, 4]
    assert "was not heard of for longer than its lease" in worker.log


def test_a_kill_of_the_supervisor_takes_the_slots_with_it_also_one_that_is_stuck_in_c(lab: Lab) -> None:
    lab.add("stick", "sleep 60")
    with working(lab, "--processes", "3") as worker:
        wait_for(lambda: lab.has_begun(2) and (lab.folder / "stuck-1").exists())
        wait_for(lambda: len(worker.slots()) == 3)
        worker.send(signal.SIGKILL)
        assert worker.end() == -signal.SIGKILL
    assert made(lab.First()) == []


# -- the server goes away -------------------------------------------------------------------------------------------


@pytest.fixture
def other_lab(private_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab on a server that can be restarted. This process stays connected to both."""
    info = private_server.settings
    where = [info[f"database.{name}"] for name in ("host", "user", "password")]
    connection = dj.Connection(*where, port=info["database.port"], use_tls=info["database.use_tls"])
    lab = Lab(dj.Schema(f"djjobs_test_{secrets.token_hex(4)}", connection=connection))
    lab.folder = tmp_path
    if MODERN:
        for name, value in info.items():
            if value is not None:
                monkeypatch.setenv(conftest.VARIABLES[name], str(value))
    else:
        # 0.14 takes the port from a file in the home folder only.
        given = {name: value for name, value in info.items() if name != "database.backend"}
        (tmp_path / ".datajoint_config.json").write_text(json.dumps({**given, "safemode": False, "loglevel": "ERROR"}))
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("host", "user", "password"):
            monkeypatch.setenv(conftest.VARIABLES[f"database.{name}"], str(info[f"database.{name}"]))
    yield lab
    connection.close()


def start_again(lab: Lab, server: Any) -> None:
    server.start()
    lab.schema.connection.connect()


def test_workers_survive_a_restart_of_the_database_and_commit_nothing_twice(
    other_lab: Lab, private_server: Any
) -> None:
    lab, server = other_lab, private_server
    lab.add("gate", "", "gate", "")
    with working(lab, FIRST, SECOND, "--processes", "2", **SHORT_LEASE, **EAGER) as worker:
        # While jobs run: a shutdown in good order.
        wait_for(lambda: lab.has_begun(1, 3))
        server.restart()
        lab.schema.connection.connect()
        lab.open(1, 3)
        wait_for(lambda: made(lab.Second()) == [1, 2, 3, 4])
        assert [row["state"] for row in lab.workers] == ["working"]
        times = {n: sum(call.n == n for call in lab.calls if call.table == "First") for n in (1, 2, 3, 4)}
        assert times == {1: 2, 2: 1, 3: 2, 4: 1}, "what was running was made again, and only that"
        # While it is idle: a crash, after which the server is away for a while.
        server.kill()
        wait_for(lambda: "Waiting: there is no connection to the server" in worker.log)
        start_again(lab, server)
        lab.add("", first=5)
        wait_for(lambda: made(lab.Second()) == [1, 2, 3, 4, 5])
        wait_for(lambda: [row["pid"] for row in lab.workers] == [worker.pid])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert statuses(lab.First) == statuses(lab.Second) == {}
    assert lab.workers == []


def test_a_worker_can_be_stopped_while_the_database_is_away(other_lab: Lab, private_server: Any) -> None:
    lab, server = other_lab, private_server
    lab.add("sleep 60", "sleep 60")
    with working(lab, "--processes", "3", "--grace", "1", **SHORT_LEASE) as worker:
        wait_for(lambda: lab.has_begun(1, 2))
        server.kill()
        began = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
        assert time.monotonic() - began < 10 + SLACK / 2
    assert "Traceback" not in worker.log
    start_again(lab, server)
    assert made(lab.First()) == []
    # Nobody could give the jobs back; they come back by the lease.
    with working(lab, WORKER_LAB_ACTS=0, **SHORT_LEASE) as worker:
        wait_for(lambda: made(lab.First()) == [1, 2])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert statuses(lab.First) == {}
