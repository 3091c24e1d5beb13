"""A pipeline for schedules: each scheduling tells of itself, and does what the test wants.

`python -m djjobs.cli scheduler workloads.schedule_lab` finds its tables in the schema that SCHEDULE_LAB names. What
the tests and the processes of a scheduler tell each other goes through files in SCHEDULE_LAB_FOLDER.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import datajoint as dj
from pipelines import INT, rows_of

import djjobs
from djjobs.dj.compat import datajoint_api

END_OWN_CONNECTION = {
    "postgresql": "SELECT pg_terminate_backend(pg_backend_pid())",
    "mysql": "KILL CONNECTION_ID()",
}


def folder() -> Path:
    return Path(os.environ["SCHEDULE_LAB_FOLDER"])


def tell(table: Any, word: str) -> None:
    """A line for the firing that runs: the word, and which firing it is."""
    targets = [__name__, f"{__name__}:{type(table).__name__}"]
    names = [row["name"] for row in rows_of(djjobs.schedules(table)) if row["target"] in targets]
    for row in rows_of(djjobs.firings(table) & "running = 1" & [{"name": name} for name in names]):
        line = f"{word}|{row['name']}|{row['fire_time'].isoformat()}|{row['attempt']}\n"
        with open(folder() / "log", "a") as log:
            log.write(line)


def act(table: Any) -> None:
    """What the test wants of a table: to wait, to die, to lose its connection once, to fail."""
    name = type(table).__name__
    gate = folder() / f"close-{name}"
    while gate.exists():
        time.sleep(0.02)
    if (folder() / f"die-{name}").exists():
        os.kill(os.getpid(), 9)
    lose = folder() / f"lose-{name}"
    if lose.exists():
        lose.unlink()
        with suppress(Exception):  # ending its own connection is an error, too
            table.connection.query(END_OWN_CONNECTION[datajoint_api.backend(table.connection)], reconnect=False)
        table.connection.query("SELECT 1", reconnect=False)
    if (folder() / f"fail-{name}").exists():
        raise ValueError(f"no luck with {name}, \N{SNOWMAN}")


class Telling(djjobs.JobsMixin):
    def schedule_jobs(self, *restrictions: Any, **options: Any) -> Any:
        tell(self, "begin")
        act(self)
        run = super().schedule_jobs(*restrictions, **options)
        tell(self, "end")
        return run


def declare(schema: Any) -> tuple[Any, Any, Any]:
    """Task, Result and Plot, which depend on each other in this order."""

    @schema
    class Task(dj.Manual):
        definition = f"n : {INT}"

    @schema
    class Result(Telling, dj.Computed):
        definition = "-> Task"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    @schema
    class Plot(Telling, dj.Computed):
        definition = "-> Result"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    for table in (Task, Result, Plot):
        table.__qualname__ = table.__name__  # as if it stood in the module by itself, where a target is looked for
    return Task, Result, Plot


if "SCHEDULE_LAB" in os.environ:
    Task, Result, Plot = declare(dj.Schema(os.environ["SCHEDULE_LAB"]))
