"""A lab with schedules, for the tests of what they are and of who fires them."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datajoint as dj
from commands import Command
from pipelines import rows_of
from workloads import schedule_lab

import djjobs
from djjobs.queue.tables import JobControl
from djjobs.recurring.rows import Timetable
from djjobs.recurring.scheduler import run_scheduler

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
        self.timetable.leader.delete_quick()

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
        """Of the leaders of all targets, the one that was heard of last."""
        return max(rows_of(self.timetable.leader), key=lambda row: row["expires"], default={})

    def fire(self, *tables: Any) -> int:
        """Fire what is due, in this process, and return the exit code."""
        try:
            return run_scheduler(tables or (self.Result, self.Plot), once=True)
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


class Scheduling(Command):
    """A command of the lab."""

    gone_within = 10.0

    def __init__(self, lab: Lab, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        where = {"SCHEDULE_LAB": lab.schema.database, "SCHEDULE_LAB_FOLDER": str(lab.folder)}
        super().__init__(["-m", "djjobs.cli", *arguments], lab.folder, {**where, **environment})


@contextmanager
def running(lab: Lab, *arguments: str, **environment: str) -> Iterator[Command]:
    """A command at work. Afterwards it is gone, come what may."""
    command = Scheduling(lab, arguments, environment)
    try:
        yield command
    finally:
        command.clear_away()
