"""A lab with schedules, for the tests of what they are and of who fires them."""

from __future__ import annotations

import datetime
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datajoint as dj
import psutil
from helpers import wait_for
from pipelines import rows_of
from workloads import schedule_lab

import djjobs
from djjobs.scheduler import run_scheduler
from djjobs.tables import JobControl
from djjobs.timetable import Timetable

TESTS = Path(__file__).resolve().parent
MODULE = "workloads.schedule_lab"
RESULT, PLOT = f"{MODULE}:Result", f"{MODULE}:Plot"
#: A leader that is taken for dead after two seconds.
SHORT_EXPIRY = {"DJJOBS_LEADER_EXPIRY": "2"}
LONG_AGO = datetime.timedelta(hours=1)


class Lab:
    """The tables of workloads.schedule_lab in a schema, and a folder in which firings tell what they do."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.Task, self.Result, self.Plot = schedule_lab.declare(schema)
        self.folder = Path()
        # Where a target is looked for.
        for table in (self.Task, self.Result, self.Plot):
            setattr(schedule_lab, table.__name__, table)
        self.timetable = Timetable.of(schema.connection, schema.database)

    def start_over(self, folder: Path) -> Lab:
        self.folder = folder
        self.reconnect()
        queue = djjobs.jobs(self.schema), JobControl(self.schema.connection, self.schema.database)
        history = self.timetable.schedules, self.timetable.firings
        for table in (self.Plot(), self.Result(), *queue, djjobs.workers(self.schema), *history, self.Task()):
            table.delete_quick()
        self.retire_the_leader()
        return self

    def reconnect(self) -> None:
        if not self.schema.connection.is_connected:
            self.schema.connection.connect()

    def retire_the_leader(self) -> None:
        self.timetable.leader.update1({"role": "scheduler", "leader": "", "expires": self.timetable.now()})

    def fill(self, count: int) -> None:
        self.Task.insert([{"n": n} for n in range(count)])

    def add(self, target: Any = RESULT, due: bool = False, **options: Any) -> str:
        """Add a schedule, every hour unless told otherwise; `due` makes it due an hour ago."""
        options = {"every": 3600} | options if "cron" not in options else options
        name = djjobs.add_schedule(target, **options)
        if due:
            self.make_due(name)
        return name

    def make_due(self, name: str, since: datetime.timedelta = LONG_AGO) -> datetime.datetime:
        due = self.timetable.now() - since
        self.timetable.schedules.update1({"name": name, "next_time": due})
        return due

    def schedule(self, name: str) -> SimpleNamespace:
        (row,) = [row for row in rows_of(djjobs.schedules(self.schema)) if row["name"] == name]
        return SimpleNamespace(**row)

    def firings(self, name: str | None = None) -> list[SimpleNamespace]:
        rows = [SimpleNamespace(**row) for row in rows_of(djjobs.firings(self.schema))]
        return sorted((row for row in rows if name in (None, row.name)), key=lambda row: row.fire_time)

    def states(self, name: str | None = None) -> list[str]:
        return [firing.state for firing in self.firings(name)]

    @property
    def told(self) -> list[SimpleNamespace]:
        """What firings told: a word, the schedule, the time of the firing, and which attempt."""
        log = self.folder / "log"
        lines = [line.split("|") for line in log.read_text().splitlines()] if log.exists() else []
        return [
            SimpleNamespace(word=word, name=name, time=datetime.datetime.fromisoformat(time), attempt=int(attempt))
            for word, name, time, attempt in lines
        ]

    @property
    def leader(self) -> dict[str, Any]:
        (row,) = rows_of(self.timetable.leader)
        return row

    def fire(self, *tables: Any) -> int:
        """Fire what is due, in this process, and return the exit code."""
        try:
            return run_scheduler(tables or (self.Result,), once=True)
        finally:
            self.reconnect()

    @contextmanager
    def closed(self, table: str = "Result") -> Iterator[None]:
        """Firings that come to this table wait meanwhile."""
        gate = self.folder / f"close-{table}"
        gate.touch()
        try:
            yield
        finally:
            gate.unlink(missing_ok=True)

    def open(self, table: str = "Result") -> None:
        (self.folder / f"close-{table}").unlink()


@contextmanager
def standing_lab() -> Iterator[Lab]:
    lab = Lab(dj.Schema(f"djjobs_test_{secrets.token_hex(4)}"))
    yield lab
    lab.reconnect()
    lab.schema.drop()


class Command:
    """`djjobs ...` in a session of its own, by which everything that it starts is found."""

    def __init__(self, lab: Lab, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._log = lab.folder / f"output-{secrets.token_hex(4)}"
        where = {"SCHEDULE_LAB": lab.schema.database, "SCHEDULE_LAB_FOLDER": str(lab.folder)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "djjobs.cli", *arguments],
                cwd=TESTS,
                env={**os.environ, **where, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float = 45) -> int:
        """Wait for its end, see that nothing of it is left, and return its exit code."""
        code = self._process.wait(timeout)
        wait_for(lambda: not self.processes(), timeout=10)
        return code

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.end()

    def clear_away(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        print(f"process {self.pid} ended with {self._process.returncode} and said:\n{self.log}")


@contextmanager
def running(lab: Lab, *arguments: str, **environment: str) -> Iterator[Command]:
    """A command at work. Afterwards it is gone, come what may."""
    command = Command(lab, arguments, environment)
    try:
        yield command
    finally:
        command.clear_away()
