"""A run: what one call of `schedule_jobs` put into the queue, with a due time, a state, a result and a cancel."""

from __future__ import annotations

import datetime
import html
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pandas as pd

from .cancelling import cancel_run
from .database import explained
from .errors import DjJobsError, JobNotCancellable, RunTimeout
from .progress import RunBar
from .queue import Queue, queue_of
from .settings import check_seconds
from .tables import Jobs, Runs

__all__ = ["STATES", "Progress", "Run", "RunsOfSchema", "runs", "state_of"]

STATES = ("pending", "running", "done", "cancelling", "cancelled")

#: How long `wait` sleeps between two looks: the first time, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(frozen=True)
class Progress:
    """How many jobs of a run there are of each status.

    Attributes
    ----------
    total : int
        How many there are.
    scheduled, reserved, error, cancelled, ignore : int
        How many have this status.
    done : int
        How many succeeded, or are gone from the queue.
    """

    total: int = 0
    scheduled: int = 0
    reserved: int = 0
    done: int = 0
    error: int = 0
    cancelled: int = 0
    ignore: int = 0

    @classmethod
    def of(cls, total: int, counts: Mapping[str, int]) -> Progress:
        """From the jobs that are still there: of those that succeed, some tables keep none."""
        left = {status: count for status, count in counts.items() if status != "success"}
        # Every job that is there counts, whoever may have put it there.
        total = max(total, sum(counts.values()))
        return cls(total, done=total - sum(left.values()), **left)

    @property
    def open(self) -> int:
        """How many are still to be done."""
        return self.scheduled + self.reserved

    @property
    def over(self) -> int:
        """How many are not to be done any more, whatever came of them."""
        return self.total - self.open

    @property
    def fraction(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return self.over / self.total if self.total else 1.0

    def __str__(self) -> str:
        others = {"failed": self.error, "cancelled": self.cancelled, "ignored": self.ignore, "running": self.reserved}
        more = "".join(f", {count} {name}" for name, count in others.items() if count)
        return f"{self.over} of {self.total} jobs over{more}"


def state_of(progress: Progress, *, cancelled: bool, begun: bool, unfinished: bool) -> str:
    """The state of a run. It is stored nowhere: this is the only place that knows.

    Parameters
    ----------
    cancelled : bool
        Whether somebody called the run off.
    begun : bool
        Whether a job was begun that is waiting again: for its next try, or because somebody put it back.
    unfinished : bool
        Whether the table's `finish_run` is still to be called.
    """
    if cancelled:
        return "cancelling" if progress.open else "cancelled"
    if progress.open:
        return "running" if begun or progress.over or progress.reserved else "pending"
    return "running" if unfinished else "done"


class _Row(NamedTuple):
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


class Run:
    """What a call of `schedule_jobs` did, and what has become of it. ``int(run)`` is the number of jobs it scheduled.

    Others find a run by its id: ``djjobs.Run.of(schema, run_id)``.

    Attributes
    ----------
    run_id : int or None
        None if there was nothing to do and nobody named the run; then it is kept nowhere.
    scheduled : int
        How many jobs were put into the queue, or back into it.
    rate_limited : bool
        True if nothing was looked at, because the table was scheduled less than
        `min_scheduling_interval` ago, or is being scheduled right now by somebody else.
    """

    def __init__(self, queue: Queue, run_id: int | None, scheduled: int, rate_limited: bool = False) -> None:
        self._queue, self.run_id, self.scheduled, self.rate_limited = queue, run_id, scheduled, rate_limited
        self._known: _Row | None = None

    @classmethod
    def of(cls, schema: Any, run_id: int) -> Run:
        """Pick up a run, from any process.

        Parameters
        ----------
        schema : dj.Schema
            The schema of the table, or a table of it.
        run_id : int
            The `run_id` of the run; ``djjobs.runs(schema)`` has them all.

        Raises
        ------
        DjJobsError
            If there is no such run.
        """
        queue = queue_of(schema)
        if isinstance(run_id, bool) or not isinstance(run_id, int):
            raise DjJobsError(f"The id of a run of {queue.database} is a whole number, not {run_id!r}.")
        run = cls.find(queue, run_id)
        if run is None:
            raise cls._unknown(queue, run_id)
        return run

    @classmethod
    def find(cls, queue: Queue, run_id: int) -> Run | None:
        """The run with this id, as it is now; None if there is none."""
        row = _find(queue, run_id)
        if row is None:
            return None
        run = cls(queue, run_id, row.total)
        run._known = row
        return run

    @staticmethod
    def _unknown(queue: Queue, run_id: int) -> DjJobsError:
        return DjJobsError(
            f"There is no run {run_id} in {queue.database}, or no longer. "
            f"Those there are: djjobs.runs(schema), or djjobs runs {queue.database}."
        )

    def __int__(self) -> int:
        return self.scheduled

    # -- what does not change ----------------------------------------------------------------------------

    def _fact(self, name: str) -> Any:
        if self.run_id is None:
            return None
        self._known = self._known or self._row()
        return getattr(self._known, name)

    @property
    def name(self) -> str:
        """What whoever asked for it calls it; empty for no name."""
        return self._fact("name") or ""

    @property
    def table_name(self) -> str:
        """DataJoint's name of the table in its schema."""
        return self._fact("table_name") or ""

    @property
    def restriction(self) -> str:
        """Which keys were asked for, in words."""
        return self._fact("restriction") or ""

    @property
    def user(self) -> str:
        """The database user who asked."""
        return self._fact("user") or ""

    @property
    def created(self) -> datetime.datetime | None:
        """When it was scheduled, in UTC."""
        return _utc(self._fact("created"))

    @property
    def due_time(self) -> datetime.datetime | None:
        """Its jobs are not run before this time, in UTC."""
        return _utc(self._fact("due_time"))

    @property
    def jobs(self) -> Jobs:
        """The rows of `~jobs` that belong to it: a DataJoint query."""
        return self._queue.jobs & ({"run_id": self.run_id} if self.run_id is not None else "FALSE")

    # -- what does ---------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`pending`, `running`, `done`, `cancelling` or `cancelled`."""
        return self._look()[0]

    def progress(self) -> Progress:
        """How many of its jobs have which status."""
        return self._look()[1]

    @property
    def details(self) -> Any:
        """What the table's `prepare_run` returned; None before that."""
        if self._known is None or self._known.prepared_time is None:
            self._known = self._row() if self.run_id is not None else None
        return _value(self._known and self._known.details)

    @property
    def is_prepared(self) -> bool:
        """Whether the table's `prepare_run` was called for it, and has returned."""
        return self._fact("prepared_time") is not None

    @property
    def results(self) -> Any:
        """What the table's `finish_run` returned; None before that."""
        return None if self.run_id is None else _value(self._row().results)

    @property
    def error(self) -> str:
        """What `finish_run` failed with; empty if it did not."""
        return "" if self.run_id is None else self._row().error

    @property
    def ended(self) -> datetime.datetime | None:
        """When somebody saw that it was over, in UTC."""
        return None if self.run_id is None else _utc(self._row().ended_time)

    def _row(self) -> _Row:
        assert self.run_id is not None
        with self._explained("look at"):
            row = _find(self._queue, self.run_id)
        if row is None:
            raise self._unknown(self._queue, self.run_id)
        return row

    def _look(self) -> tuple[str, Progress]:
        if self.run_id is None:
            return "done", Progress()
        with self._explained("look at"):
            row = self._row()
            counts, tried = _count(self._queue, self._queue.engine.this_run, run=self.run_id).get(
                self.run_id, ({}, False)
            )
        progress = Progress.of(row.total, counts)
        return row.state(progress, tried), progress

    # -- acting ---------------------------------------------------------------------------------------------

    def wait(self, display_progress: bool = False, timeout: float | None = None) -> Run:
        """Wait until the run is over. The work is for others to do: workers, or a populate elsewhere.

        Parameters
        ----------
        display_progress : bool
            Show a progress bar. Defaults to False.
        timeout : float
            Wait no longer than so many seconds. Defaults to None, no limit.

        Returns
        -------
        Run
            The run itself, `done` or `cancelled`.

        Raises
        ------
        RunTimeout
            If it is not over in time. It goes on all the same.
        """
        if timeout is not None:
            timeout = check_seconds("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE
        self._insist_on_no_transaction("waited for")
        state, progress = self._look()
        with RunBar(self.name or "run", display_progress, progress.total) as bar:
            while True:
                bar.show(progress.over, progress.error, progress.total)
                if state in ("done", "cancelled"):
                    return self
                left = float("inf") if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise RunTimeout(
                        f"{self._label} is still {state} after {timeout:g} s: {progress}. "
                        "It goes on; wait again, or look at run.progress()."
                    )
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                state, progress = self._look()

    def cancel(self, force: bool = False) -> int:
        """Call the run off: its scheduled jobs at once, those that run at their next safe point.

        Parameters
        ----------
        force : bool
            Interrupt running jobs now, as in `cancel_jobs`. Defaults to False.

        Returns
        -------
        int
            How many jobs were cancelled or asked to stop.

        Raises
        ------
        JobNotCancellable
            If all of it is over already.
        """
        if self.run_id is None:
            return 0
        self._insist_on_no_transaction("cancelled")
        with self._explained("cancel"):
            count = cancel_run(self._queue, self._row().table_name, self.run_id, force)
            if count is None and self._row().cancel_time is None:
                raise JobNotCancellable(
                    f"Nothing of {self._label} is left to cancel: {self.progress()}. To undo what is done, "
                    "delete it from the table."
                )
        return count or 0

    def _insist_on_no_transaction(self, what: str) -> None:
        if self._queue.db.connection.in_transaction:
            raise DjJobsError(f"{self._label} cannot be {what} inside a transaction. End the transaction first.")

    def _explained(self, doing: str) -> Any:
        return explained(self._queue.db.connection, f"`{self._queue.database}`.`~runs`", doing)

    # -- in words -------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"The run {self.run_id}{name} of {self.table_name} (schema {self._queue.database})"

    def __repr__(self) -> str:
        if self.run_id is None:
            why = "rate limited" if self.rate_limited else "nothing to do"
            return f"<djjobs.Run: {why}>"
        named = f" {self._known.name!r}" if self._known and self._known.name else ""
        return f"<djjobs.Run {self.run_id}{named}: {self.scheduled} jobs scheduled>"

    def _repr_html_(self) -> str:
        state, progress = self._look()
        facts = {
            "run": self.run_id,
            "name": self.name,
            "table": self.table_name,
            "due (UTC)": self.due_time and f"{self.due_time:%Y-%m-%d %H:%M:%S}",
            "state": state,
            **asdict(progress),
        }
        cells = [(name, value) for name, value in facts.items() if value not in (None, "")]
        head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in cells)
        body = "".join(f"<td>{html.escape(str(value))}</td>" for _, value in cells)
        return f"<table><tr>{head}</tr><tr>{body}</tr></table>"


class RunsOfSchema(Runs):
    """`~runs` of a schema. A DataJoint query; `status` adds the states."""

    _queue: Queue

    @classmethod
    def of(cls, queue: Queue) -> RunsOfSchema:
        view = cls.__new__(cls)
        view.__dict__.update(queue.runs.__dict__, _queue=queue)
        return view

    def status(self) -> pd.DataFrame:
        """How far the runs are, the latest first.

        Returns
        -------
        pandas.DataFrame
            Indexed by `run_id`: what each run is called, who asked for it and when, its state, and how many of its
            jobs have which status.
        """
        queue, engine = self._queue, self._queue.engine
        which = queue.sql(engine.these_runs, query=self.proj().make_sql())
        rows = sorted(_rows(queue, which), key=lambda row: row.created, reverse=True)
        counts = _count(queue, which)
        lines = []
        for row in rows:
            of_run, tried = counts.get(row.run_id, ({}, False))
            progress = Progress.of(row.total, of_run)
            about = {
                name: getattr(row, name) for name in ("run_id", "name", "table_name", "user", "created", "due_time")
            }
            ended = {"ended_time": row.ended_time, "finish_error": row.error}
            lines.append({**about, "state": row.state(progress, tried), **asdict(progress), **ended})
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


def _find(queue: Queue, run_id: int) -> _Row | None:
    rows = _rows(queue, queue.engine.this_run, run=run_id)
    return rows[0] if rows else None


def _rows(queue: Queue, which: str, **parameters: Any) -> list[_Row]:
    engine = queue.engine
    texts = {name: engine.json_as_text(name) for name in ("details", "results")}
    sql = queue.sql(engine.find_run, which=which, **texts)
    return [_Row(*row) for row in queue.db.execute(sql, **parameters).fetchall()]


def _count(queue: Queue, which: str, **parameters: Any) -> dict[int, tuple[dict[str, int], bool]]:
    """The jobs of each run by status, and whether one of them has been tried."""
    sql = queue.sql(queue.engine.count_in_runs, which=which)
    counts: dict[int, tuple[dict[str, int], bool]] = {}
    for run_id, status, count, attempt in queue.db.execute(sql, **parameters).fetchall():
        of_run, tried = counts.get(run_id, ({}, False))
        counts[run_id] = {**of_run, status: count}, tried or attempt > 0
    return counts


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    return None if moment is None else moment.replace(tzinfo=datetime.timezone.utc)
