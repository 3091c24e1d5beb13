"""What `~runs` and `~jobs` tell of runs, for one of them or for many."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any, NamedTuple

import pandas as pd

from ..dj.tables import recast
from ..queue.queue import Queue, queue_of
from ..queue.tables import Runs
from .state import Progress, state_of

__all__ = ["RunRow", "RunsOfSchema", "find_run", "look_at_run", "runs"]


class RunRow(NamedTuple):
    """A row of `~runs`, in the order of `find_run`."""

    run_id: int
    table_name: str
    name: str
    restriction: str
    user: str
    host: str
    pid: int
    created: datetime.datetime
    due_time: datetime.datetime
    total: int
    cancel_time: datetime.datetime | None
    retry_time: datetime.datetime | None
    ended_time: datetime.datetime | None
    details: str | None
    results: str | None
    error: str
    prepared_time: datetime.datetime | None
    finish: int

    def state(self, progress: Progress, tried: bool) -> str:
        return state_of(
            progress,
            cancelled=self.cancel_time is not None,
            begun=tried or self.retry_time is not None,
            unfinished=bool(self.finish),
        )


def find_run(queue: Queue, run_id: int) -> RunRow | None:
    rows = find_runs(queue, queue.engine.runs.this_run, run=run_id)
    return rows[0] if rows else None


def find_runs(queue: Queue, which: str, **parameters: Any) -> list[RunRow]:
    sql = queue.sql(queue.engine.runs.find_run, which=which)
    return [RunRow(*row) for row in queue.db.execute(sql, **parameters).fetchall()]


def look_at_run(queue: Queue, row: RunRow) -> tuple[str, Progress]:
    """The state of a run and how far it is."""
    engine = queue.engine
    sql = queue.sql(engine.runs.count_in_runs, in_tables=engine.runs.in_table, which=engine.runs.this_run)
    (look,) = _look_at(queue, [row], sql, table=row.table_name, run=row.run_id)
    return look


def look_at_runs(queue: Queue, rows: list[RunRow], which: str) -> list[tuple[str, Progress]]:
    """The same for many."""
    return _look_at(queue, rows, queue.sql(queue.engine.runs.count_in_runs, in_tables="", which=which))


def _look_at(queue: Queue, rows: list[RunRow], count: str, **parameters: Any) -> list[tuple[str, Progress]]:
    counts: dict[int, dict[str, int]] = {row.run_id: {} for row in rows}
    for run_id, status, number in queue.db.execute(count, **parameters).fetchall():
        counts.setdefault(run_id, {})[status] = number
    progress = {row.run_id: Progress.of(row.total, counts[row.run_id]) for row in rows}
    waiting = [row for row in rows if progress[row.run_id].untouched]
    begun = _begun(queue, waiting) if waiting else set()
    return [(row.state(progress[row.run_id], row.run_id in begun), progress[row.run_id]) for row in rows]


def _begun(queue: Queue, rows: list[RunRow]) -> set[int]:
    """Those of the runs of which a job that waits was begun before."""
    runs, tables = tuple(row.run_id for row in rows), tuple({row.table_name for row in rows})
    return {run_id for (run_id,) in queue.execute(queue.engine.runs.find_begun, runs=runs, tables=tables).fetchall()}


class RunsOfSchema(Runs):
    """`~runs` of a schema. A DataJoint query; `status` adds the states."""

    _queue: Queue

    @classmethod
    def of(cls, queue: Queue) -> RunsOfSchema:
        return recast(cls, queue.runs, _queue=queue)

    def status(self) -> pd.DataFrame:
        """How far the runs are, the latest first.

        Returns
        -------
        pandas.DataFrame
            Indexed by `run_id`: what each run is called, who asked for it and when, its state, and how many of its
            jobs have which status.
        """
        queue, engine = self._queue, self._queue.engine
        which = queue.sql(engine.runs.these_runs, query=self.proj().make_sql())
        rows = sorted(find_runs(queue, which), key=lambda row: row.created, reverse=True)
        lines = []
        for row, (state, progress) in zip(rows, look_at_runs(queue, rows, which), strict=True):
            about = {
                name: getattr(row, name) for name in ("run_id", "name", "table_name", "user", "created", "due_time")
            }
            ended = {"ended_time": row.ended_time, "finish_error": row.error}
            lines.append({**about, "state": state, **asdict(progress), **ended})
        columns = [
            *("run_id", "name", "table_name", "user", "created", "due_time", "state"),
            *asdict(Progress()),
            *("ended_time", "finish_error"),
        ]
        return pd.DataFrame(lines, columns=columns).set_index("run_id")


def runs(schema: Any) -> RunsOfSchema:
    """`~runs` of a schema, as a DataJoint query; ``djjobs.runs(schema).status()`` says how far each is.

    Parameters
    ----------
    schema : dj.Schema
        An activated schema.
    """
    return RunsOfSchema.of(queue_of(schema))
