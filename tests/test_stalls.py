"""A server that stalls, is locked, refuses changes or has no connection left: who waits, and what is said."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import conftest
import datajoint as dj
import psutil
import pytest
import servers
from commands import Command
from helpers import wait_for
from pipelines import MODERN, rows_of
from workloads import worker_lab
from workloads.squares import CallLog, made, rows_by_number

import djjobs
from djjobs.queue.tables import JobControl

#: What is promised after a signal, whatever the server does; and what a busy machine may add.
PROMISED, SLACK = 10.0, 5.0
FIRST = "workloads.worker_lab:First"
QUICK = {"DJJOBS_HEARTBEAT_INTERVAL": "0.3", "DJJOBS_LEASE": "60", "DJJOBS_MIN_SCHEDULING_INTERVAL": "0.1"}
POSTGRESQL = pytest.mark.only(engines=("postgresql",))

#: A script that populates when it is told to. What it does first is what a lab has done before it calls populate.
SCRIPT = """
import os, sys, time, pathlib
from workloads.worker_lab import First
folder = pathlib.Path(os.environ["WORKER_LAB_FOLDER"])
First.jobs
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
try:
    First.populate(reserve_jobs=True, processes=int(sys.argv[1]))
except KeyboardInterrupt:
    (folder / "interrupted").touch()
"""


class Lab:
    """The tables of workloads.worker_lab on a server of their own, which can be stalled."""

    def __init__(self, server: Any, settings: dict[str, Any]) -> None:
        self.server, self.settings = server, settings
        self.folder = Path()
        self.schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}", connection=self.connect())
        self.Task, self.First, self.Second = worker_lab.declare(self.schema)
        self.First.jobs  # declares the queue

    def connect(self) -> Any:
        where = [self.settings[f"database.{name}"] for name in ("host", "user", "password")]
        return dj.Connection(*where, port=self.settings["database.port"], use_tls=self.settings["database.use_tls"])

    def start_over(self, folder: Path) -> Lab:
        self.folder = folder
        queue = djjobs.jobs(self.schema), JobControl(self.schema.connection, self.schema.database)
        for table in (self.Second(), self.First(), *queue, djjobs.workers(self.schema), self.Task()):
            table.delete_quick()
        return self

    def add(self, *acts: str) -> None:
        self.Task.insert([{"n": n, "act": act} for n, act in enumerate(acts, 1)])

    def open(self, *numbers: int) -> None:
        for n in numbers:
            (self.folder / f"open-{n}").touch()

    def has_begun(self, *numbers: int) -> bool:
        return {int(n) for n, *_ in CallLog(self.folder / "calls").lines()} >= set(numbers)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """The server takes connections and statements, and answers nobody."""
        processes = [psutil.Process(self.server.pid), *psutil.Process(self.server.pid).children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Somebody keeps the tables of the queue locked, as a dump or an ALTER TABLE does."""
        tables = [djjobs.jobs(self.schema).full_table_name, djjobs.workers(self.schema).full_table_name]
        with closing(self.connect()) as other:
            if self.is_postgresql:
                other.query("BEGIN")
                other.query(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")
            else:
                other.query(f"LOCK TABLES {', '.join(f'{table} WRITE' for table in tables)}")
            yield

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self._set_read_only(True)
        try:
            yield
        finally:
            self._set_read_only(False)

    def _set_read_only(self, on: bool) -> None:
        with closing(self.connect()) as admin:
            if self.is_postgresql:
                admin.query(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
                admin.query("SELECT pg_reload_conf()")
            else:
                admin.query(f"SET GLOBAL super_read_only = {'ON' if on else 'OFF'}")
                admin.query(f"SET GLOBAL read_only = {'ON' if on else 'OFF'}")

    @property
    def is_postgresql(self) -> bool:
        return self.settings["database.backend"] == "postgresql"


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    try:
        private = servers.start(conftest.ENGINE)
    except servers.NoServer as missing:
        pytest.skip(f"needs a server of its own: {missing}")
    with private:
        lab = Lab(private, private.settings)
        yield lab
        lab.schema.connection.close()


@pytest.fixture
def lab(standing: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    go_to(standing.settings, tmp_path, monkeypatch)
    return standing.start_over(tmp_path)


def go_to(settings: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let processes that are started from now on use this server."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not MODERN:
        # 0.14 takes the port from a file in the home folder only.
        given.pop("database.backend", None)
        (folder / ".datajoint_config.json").write_text(
            json.dumps({**given, "database.use_tls": settings["database.use_tls"], "safemode": False})
        )
        patch.setenv("HOME", str(folder))
    for name, value in given.items():
        patch.setenv(conftest.VARIABLES[name], str(value))


@contextmanager
def started(lab: Lab, *words: str, **environment: Any) -> Iterator[Command]:
    where = {"WORKER_LAB": lab.schema.database, "WORKER_LAB_FOLDER": str(lab.folder), **QUICK}
    command = Command(words, lab.folder, {**where, **{name: str(value) for name, value in environment.items()}})
    try:
        yield command
    finally:
        command.clear_away()


def working(lab: Lab, *arguments: str, **environment: Any) -> Any:
    return started(lab, "-m", "djjobs.cli", "worker", FIRST, *arguments, **environment)


def policy(**members: Any) -> dict[str, str]:
    return {"WORKER_LAB_POLICY": json.dumps(members)}


def wait_until_blocked(pid: int) -> None:
    """Until a process has done nothing for a while."""

    def is_at_rest() -> bool:
        before = psutil.Process(pid).cpu_times()
        time.sleep(0.3)
        return psutil.Process(pid).cpu_times()[:2] == before[:2]

    wait_for(is_at_rest)


def seconds_until_end(command: Command) -> float:
    began = time.monotonic()
    command.end()
    return time.monotonic() - began


# -- whoever watches does not wait for the server ------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["stalled", "locked"])
def test_a_worker_ends_in_time_whatever_the_server_does(lab: Lab, fault: str) -> None:
    """One slot runs a job, one is idle. The monitor is in the middle of a statement."""
    lab.add("sleep 60")
    with working(lab, "--processes", "2", "--grace", "1") as worker:
        wait_for(lambda: lab.has_begun(1))
        with getattr(lab, fault)():
            wait_for(lambda: "Waiting: " in worker.log)
            worker.send(signal.SIGTERM)
            assert seconds_until_end(worker) < PROMISED + SLACK
    assert made(lab.First()) == []
    assert "Traceback" not in worker.log


def test_a_second_signal_is_heard_while_the_server_stalls(lab: Lab) -> None:
    lab.add("sleep 60")
    with working(lab, "--grace", "60") as worker:
        wait_for(lambda: lab.has_begun(1))
        with lab.stalled():
            worker.send(signal.SIGTERM)
            wait_for(lambda: "running jobs have 60 s" in worker.log, timeout=PROMISED)
            worker.send(signal.SIGTERM)
            assert seconds_until_end(worker) < PROMISED + SLACK


def test_a_time_out_ends_make_while_the_server_stalls(lab: Lab) -> None:
    lab.add("linger 60")
    with working(lab, "--drain", **policy(timeout=1), DJJOBS_GRACE=2) as worker:
        wait_for(lambda: lab.has_begun(1))
        with lab.stalled():
            wait_for(lambda: lab.has("over-1"), timeout=PROMISED)
        assert worker.end() == 1
    row = rows_by_number(lab.First)[1]
    assert (row["status"], row["attempt"]) == ("error", 1)
    assert "JobTimeout" in row["error_message"]


def test_a_slot_that_waits_for_a_stalled_server_beyond_its_time_is_killed(lab: Lab) -> None:
    """The statement is make()'s own, and no answer comes to it."""
    lab.add("ask 60")
    with working(lab, **policy(timeout=1), DJJOBS_GRACE=1) as worker:
        wait_for(lambda: lab.has_begun(1))
        (slot,) = [pid for pid in worker.processes() if pid != worker.pid]
        with lab.stalled():
            wait_for(lambda: slot not in worker.processes(), timeout=PROMISED)
        wait_for(lambda: rows_by_number(lab.First)[1]["status"] == "error")
    assert "JobTimeout" in rows_by_number(lab.First)[1]["error_message"]
    assert made(lab.First()) == []


def test_a_job_whose_time_is_over_is_not_committed_even_if_nobody_could_interrupt_it(lab: Lab) -> None:
    """The supervisor, which would have done that, is suspended."""
    lab.add("gate")
    with working(lab, **policy(timeout=1)) as worker:
        wait_for(lambda: lab.has_begun(1))
        worker.send(signal.SIGSTOP)
        began = time.monotonic()
        wait_for(lambda: time.monotonic() - began > 1.2)
        lab.open(1)
        wait_for(lambda: rows_by_number(lab.First)[1]["status"] == "error")
        worker.send(signal.SIGCONT)
    assert "JobTimeout" in rows_by_number(lab.First)[1]["error_message"]
    assert made(lab.First()) == []


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("when", ["before", "in a statement of make", "in make"])
def test_ctrl_c_ends_a_populate_whatever_the_server_does(lab: Lab, when: str, processes: int) -> None:
    act = {"before": "", "in a statement of make": "ask 60", "in make": "sleep 60"}[when]
    lab.add(*[act] * processes)
    with started(lab, "-c", SCRIPT, str(processes)) as script:
        wait_for(lambda: lab.has("ready"))
        if when != "before":
            (lab.folder / "go").touch()
            wait_for(lambda: lab.has_begun(*range(1, processes + 1)))
        with lab.stalled():
            (lab.folder / "go").touch()
            if when != "in make":
                wait_until_blocked(script.pid)
            script.send(signal.SIGINT)
            assert seconds_until_end(script) < PROMISED + SLACK
    assert lab.has("interrupted")
    assert made(lab.First()) == []


def test_after_a_populate_that_was_interrupted_the_connection_works_again(lab: Lab) -> None:
    """Nobody has waited for the server in the end; whoever asks it next does."""
    again = SCRIPT + "print('rows:', len(First()), First.populate(reserve_jobs=True)['success_count'])"
    lab.add("")
    with started(lab, "-c", again, "1") as script:
        wait_for(lambda: lab.has("ready"))
        with lab.stalled():
            (lab.folder / "go").touch()
            wait_until_blocked(script.pid)
            script.send(signal.SIGINT)
            wait_for(lambda: lab.has("interrupted"), timeout=PROMISED + SLACK)
        assert script.end() == 0
    assert "rows: 0 1" in script.log


# -- a server that refuses -------------------------------------------------------------------------------------------


@pytest.mark.only(engines=("postgresql", "mysql"))
def test_workers_wait_out_a_read_only_spell_and_say_so_once(lab: Lab) -> None:
    lab.add("gate", "", "")
    with working(lab, "--processes", "2") as worker:
        wait_for(lambda: lab.has_begun(1) and made(lab.First()) == [2, 3])
        with lab.read_only():
            lab.open(1)
            wait_for(lambda: "Waiting: the server is read-only" in worker.log)
            # Every process of the worker meets it: the monitor with a heartbeat, the slot with its commit.
            wait_until_blocked(worker.pid)
        wait_for(lambda: made(lab.First()) == [1, 2, 3])
        lab.Task.insert([{"n": 4, "act": ""}])
        wait_for(lambda: made(lab.First()) == [1, 2, 3, 4])
        wait_for(lambda: "It goes on" in worker.log)
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert worker.log.count("Waiting: ") == worker.log.count("It goes on") == 1
    assert rows_of(djjobs.jobs(lab.schema)) == []
    assert "Traceback" not in worker.log


@pytest.mark.only(engines=("postgresql", "mysql"))
def test_a_worker_that_is_started_in_a_read_only_spell_waits(lab: Lab) -> None:
    lab.add("")
    with lab.read_only(), working(lab, "--drain") as worker:
        wait_for(lambda: "Waiting: the server is read-only" in worker.log)
        lab._set_read_only(False)
        assert worker.end() == 0
    assert made(lab.First()) == [1]


@contextmanager
def few_connections(lab: Lab, count: int) -> Iterator[dict[str, Any]]:
    """How to connect as somebody who may have so many connections."""
    name, password = f"few_{secrets.token_hex(4)}", secrets.token_hex(8)
    admin = lab.schema.connection
    if lab.is_postgresql:
        admin.query(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' CONNECTION LIMIT {count}")
        admin.query(f'GRANT ALL ON SCHEMA "{lab.schema.database}" TO {name}')
        admin.query(f'GRANT ALL ON ALL TABLES IN SCHEMA "{lab.schema.database}" TO {name}')
    else:
        for host in ("%%", "localhost"):
            admin.query(f"CREATE USER '{name}'@'{host}' IDENTIFIED BY '{password}' WITH MAX_USER_CONNECTIONS {count}")
            admin.query(f"GRANT ALL ON *.* TO '{name}'@'{host}'")
    yield {**lab.settings, "database.user": name, "database.password": password}


def test_a_worker_with_fewer_connections_than_slots_works_with_fewer_slots_and_ends(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.add(*[""] * 5)
    with few_connections(lab, 3) as settings:
        go_to(settings, tmp_path, monkeypatch)
        with working(lab, "--drain", "--processes", "5") as worker:
            assert worker.end() == 0
    assert made(lab.First()) == [1, 2, 3, 4, 5]
    assert re.search(r"works with [12] of its 5 slots: the server allows no more connections", worker.log)
    assert worker.log.count("Waiting: the server allows no more connections") == 1


def test_a_populate_with_fewer_connections_than_processes_ends(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.add(*[""] * 5)
    with few_connections(lab, 3) as settings:
        go_to(settings, tmp_path, monkeypatch)
        with started(lab, "-c", SCRIPT, "5") as script:
            (lab.folder / "go").touch()
            assert script.end() == 0
    assert made(lab.First()) == [1, 2, 3, 4, 5]


def test_slots_that_all_find_no_connection_wait_for_one(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.add("", "")
    with few_connections(lab, 3) as settings:
        go_to(settings, tmp_path, monkeypatch)
        with working(lab, "--processes", "2") as worker:
            wait_for(lambda: made(lab.First()) == [1, 2])
            info = [settings[f"database.{name}"] for name in ("host", "user", "password")]
            where = {"port": settings["database.port"], "use_tls": settings["database.use_tls"]}
            for pid in worker.processes():
                if pid != worker.pid:
                    os.kill(pid, signal.SIGKILL)
            # Somebody else is quicker than the slots that take their place.
            others: list[Any] = []

            def are_all_taken() -> bool:
                try:
                    others.append(dj.Connection(*info, **where))
                except Exception:
                    return "Waiting: the server allows no more connections" in worker.log
                return False

            wait_for(are_all_taken, every=0.01)
            lab.Task.insert([{"n": 3, "act": ""}])
            for other in others:
                other.close()
            wait_for(lambda: made(lab.First()) == [1, 2, 3])
            worker.send(signal.SIGTERM)
            assert worker.end() == 0
