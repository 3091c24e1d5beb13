"""A run: what one call of `schedule_jobs` put into the queue, with a due time, a state, a result and a cancel."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import asdict
from typing import Any

from ..errors import DjJobsError, JobNotCancellable, RunTimeout
from ..printable import as_html
from ..queue.cancel import cancel_run
from ..queue.database import explained
from ..queue.queue import Queue, queue_of
from ..queue.tables import Jobs
from ..settings import check_seconds
from .bar import RunBar
from .rows import RunRow, find_run, look_at_run
from .state import Progress

__all__ = ["Run"]

#: How long `wait` sleeps between two looks: the first time, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


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
        self._known: RunRow | None = None

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
        row = find_run(queue, run_id)
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
        """The name that it was given; empty for none."""
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

    def _row(self) -> RunRow:
        assert self.run_id is not None
        with self._explained("look at"):
            row = find_run(self._queue, self.run_id)
        if row is None:
            raise self._unknown(self._queue, self.run_id)
        return row

    def _look(self) -> tuple[str, Progress]:
        if self.run_id is None:
            return "done", Progress()
        with self._explained("look at"):
            return look_at_run(self._queue, self._row())

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
        head = "".join(f"<th>{as_html(name)}</th>" for name, _ in cells)
        body = "".join(f"<td>{as_html(str(value))}</td>" for _, value in cells)
        return f"<table><tr>{head}</tr><tr>{body}</tr></table>"


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    return None if moment is None else moment.replace(tzinfo=datetime.timezone.utc)
