"""The mixin that gives a Computed or Imported table its queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import datajoint as dj

from ..dj.patches import apply_patches, instantiate_for
from ..errors import DjJobsError
from ..events.upstream import registry
from ..events.watch import act_now, tell_of_inserts
from ..interrupt import Stop
from ..queue.database import Database, explained
from ..queue.enqueue import DueTime
from ..queue.keys import hashes_sql, table_label
from ..queue.policy import RetryOn, default_hook, exponential
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..run.run import Run
from ..work.options import PopulateOptions
from ..work.outcome import MakeFailed
from ..work.populate import populate
from .table_jobs import TableJobs

__all__ = ["Computed", "Imported", "JobsMixin"]


class _JobsOfTable:
    """`Table.jobs`, on the class and on an instance."""

    def __get__(self, table: Any, owner: Any) -> TableJobs:
        table = owner() if table is None else table
        queue = Queue.of(table.connection, table.database)
        return TableJobs.of(queue, table)


class _FullName:
    """`Table.full_table_name`, as DataJoint puts it together; it asks for it ten times for each make()."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[type, tuple[str | None, str]] = weakref.WeakKeyDictionary()

    def __get__(self, table: Any, owner: Any) -> str:
        table = owner() if table is None else table
        known = self._known.get(owner)
        if known is None or known[0] != table.database:
            known = self._known[owner] = table.database, super(JobsMixin, table).full_table_name  # type: ignore[misc]
        return known[1]


class JobsMixin:
    """Adds a job queue to a Computed or Imported table.

    Put it before DataJoint's class::

        @schema
        class Spectrum(djjobs.JobsMixin, dj.Computed):
            ...

    Attributes
    ----------
    priority : int
        The priority of new jobs, 0 to 255; lower is more urgent. Defaults to 5, on DataJoint 2 to
        ``dj.config.jobs.default_priority``.
    keep_completed : bool
        Keep finished jobs as `success` rows, with their duration and metadata. Defaults to
        ``djjobs.settings.keep_completed`` and, on DataJoint 2, ``dj.config.jobs.keep_completed``.
    max_attempts : int
        How often a job is tried before its error stays. Defaults to None: an error stays at once, and a job that
        loses its worker comes back up to ``djjobs.settings.max_crashes`` times.
    retry_on : exception classes or callable
        Which errors are tried again, if `max_attempts` allows it: classes, or a function of the exception and
        the job. Defaults to every `Exception`.
    backoff : callable or float
        Seconds until the next try, after the attempt with this number. Defaults to ``djjobs.exponential()``.
    timeout : float
        Seconds that one make() may take. Defaults to None, no limit.
    events : bool
        Whether inserts upstream schedule jobs by themselves, and deletes clean up after themselves. Defaults to
        ``djjobs.settings.events``.
    jobs : TableJobs
        The jobs of this table: a DataJoint query with the attributes of the table's key, and `.scheduled`,
        `.reserved`, `.errors`, `.ignored`, `.completed` and `.cancelled`.
    """

    if TYPE_CHECKING:  # what DataJoint's class adds
        connection: Any
        database: Any
        table_name: str
        heading: Any
        primary_key: list[str]
        key_source: Any
        restriction: Any

        def make(self, key: dict[str, Any]) -> Any: ...

    priority: int | None = None
    keep_completed: bool | None = None
    max_attempts: int | None = None
    retry_on: RetryOn = Exception
    backoff: Callable[[int], float] | float = exponential()
    timeout: float | None = None
    events: bool | None = None
    jobs = _JobsOfTable()
    full_table_name = _FullName()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        registry.add(cls)
        if cls.__module__ != __name__:  # Computed and Imported, below, are no tables yet
            apply_patches()

    @default_hook
    def on_cancel(self, key: dict[str, Any]) -> None:
        """Called after a running job was cancelled and rolled back: remove what make() left elsewhere."""

    @default_hook
    def before_delete(self, job: dict[str, Any]) -> None:
        """Called with the row of a job before `cleanup_jobs` removes it. If it raises, the job stays."""

    @default_hook
    def prepare_run(self, run: Run) -> Any:
        """Called once before the first job of a run; what it returns, as JSON, is every job's ``run.details``."""

    @default_hook
    def finish_run(self, run: Run) -> Any:
        """Called once after the last job of a run; what it returns, as JSON, stays as ``run.results``."""

    def schedule_jobs(
        self,
        *restrictions: Any,
        force: bool = False,
        min_scheduling_interval: float | None = None,
        priority: int | None = None,
        due_time: DueTime = None,
        name: str | None = None,
    ) -> Run:
        """Put the keys that are still to be made into the queue.

        These are the keys of key_source that are neither in this table nor in the queue. Nothing
        happens if the table was scheduled a moment ago.

        Parameters
        ----------
        *restrictions
            Conditions on key_source, as in `populate`.
        force : bool
            Also put jobs back that are `error`, `ignore` or `cancelled`; they belong to this run then. Defaults to
            False.
        min_scheduling_interval : float
            Do nothing if the last scheduling is younger than so many seconds; 0 means always
            schedule. Defaults to ``dj.config["min_scheduling_interval"]``, with a `name` to 0.
        priority : int
            Priority of the new jobs; lower is more urgent. Defaults to the table's.
        due_time : datetime or timedelta
            Not to be run before: a moment with a time zone, or a delay from now on. Defaults to now.
        name : str
            What to call the run. One with a name is kept in `~runs` even if there is nothing to do. Defaults to none.

        Returns
        -------
        Run
            ``int(run)`` is the number of jobs that were scheduled.
        """
        with _explained(self, "schedule"):
            jobs = TableQueue.of(self, restrictions)
            act_now(_FLUSH)
            scheduled = jobs.schedule(
                force=force, interval=min_scheduling_interval, priority=priority, due_time=due_time, name=name
            )
            return Run(jobs.queue, scheduled.run_id, scheduled.count, scheduled.rate_limited)

    def populate(
        self,
        *restrictions: Any,
        keys: list[dict[str, Any]] | None = None,
        suppress_errors: bool = False,
        return_exception_objects: bool = False,
        reserve_jobs: bool = False,
        order: str = "original",
        limit: int | None = None,
        max_calls: int | None = None,
        display_progress: bool = False,
        processes: int | None = 1,
        make_kwargs: dict[str, Any] | None = None,
        priority: int | None = None,
        refresh: bool | None = None,
        schedule_jobs: bool = True,
    ) -> dict[str, Any]:
        """Call make() for every key that is still to be made.

        With ``reserve_jobs=False`` this is DataJoint's own populate. With ``reserve_jobs=True``
        jobs are scheduled, then claimed from the queue and run until none is left, side by side
        with any number of other workers.

        Parameters
        ----------
        *restrictions
            Conditions on key_source; only jobs whose keys fit are run.
        keys : list of dict
            Run only these keys. Defaults to all.
        suppress_errors : bool
            Go on after an error and return it. Defaults to False: the error is raised.
        return_exception_objects : bool
            Return errors as exceptions instead of as text. Defaults to False.
        reserve_jobs : bool
            Work from the queue. Defaults to False.
        order : str
            "original" (as scheduled), "reverse" or "random", among jobs of the same priority.
            Defaults to "original".
        limit : int
            Look at no more than so many jobs. Defaults to no limit.
        max_calls : int
            Call make() no more than so many times. Defaults to no limit.
        display_progress : bool
            Show a progress bar. Defaults to False.
        processes : int
            How many processes work; None for one a core. Defaults to 1, this process.
        make_kwargs : dict
            Passed on to make(). Defaults to none.
        priority : int
            Run only jobs of this priority number or lower, and give it to new jobs. Defaults to all.
        refresh : bool
            DataJoint 2's word: schedule before working. False also leaves alone what only an event has put into the
            queue. Defaults to ``dj.config.jobs.auto_refresh``, under DataJoint 0.14 to True.
        schedule_jobs : bool
            Schedule before working; False leaves that to others and runs what they put there. Defaults to True.

        Returns
        -------
        dict
            ``success_count``, and ``error_list`` with a pair of key and error for each error.
        """
        if not reserve_jobs:
            given = {name: value for name, value in locals().items() if name in _POPULATE_DEFAULTS}
            changed = {name: value for name, value in given.items() if value != _POPULATE_DEFAULTS[name]}
            result = super().populate(*restrictions, **changed)  # type: ignore[misc]
            if processes != 1:
                # DataJoint ends its processes without asking, and what they had to tell is lost.
                tell_of_inserts(self)
            return result
        if keys is not None:
            restrictions = (*restrictions, list(keys))
        try:
            # Whatever the server does, Ctrl-C ends this.
            with _explained(self, "populate"), Stop(connection=Database(self.connection)) as stop:
                jobs = TableQueue.of(self, restrictions)
                refresh = jobs.refreshes if refresh is None else refresh
                options = PopulateOptions(
                    order=order,
                    priority=priority,
                    suppress_errors=suppress_errors,
                    return_exception_objects=return_exception_objects,
                    make_kwargs=make_kwargs,
                    max_calls=max_calls,
                    limit=limit,
                    processes=processes,
                    display_progress=display_progress,
                    schedules=refresh and schedule_jobs,
                    automatic=refresh,
                )
                if options.schedules:
                    act_now(_FLUSH)
                stop.check()
                return populate(jobs, options)
        except MakeFailed as failed:
            error = failed.error
        raise error

    def cleanup_jobs(self, *restrictions: Any) -> dict[str, int]:
        """Remove jobs that nothing needs any more. Safe while workers run.

        Parameters
        ----------
        *restrictions
            Conditions on the key attributes of the jobs, or queries on `~jobs`. Defaults to all jobs.

        Returns
        -------
        dict
            How many jobs were removed: ``orphaned_success`` (the row in this table is gone) and
            ``orphaned_incomplete`` (the key left key_source); how many were ``recovered`` from dead workers; and
            how many finished jobs (``expired``) and runs (``runs``) were removed because they are older than
            ``djjobs.settings.retention``. A clean-up of some jobs leaves the runs alone.
        """
        with _explained(self, "clean up"):
            jobs = TableQueue.of(self)
            chosen = hashes_sql(TableJobs.of(jobs.queue, self).fitting(restrictions), self) if restrictions else ""
            return jobs.cleanup(chosen)

    def retry_jobs(self, *restrictions: Any) -> int:
        """Put jobs that are `error` or `cancelled` back into the queue; return how many."""
        with _explained(self, "retry jobs of"):
            return TableQueue.of(self, restrictions).retry()

    def ignore_jobs(self, *restrictions: Any) -> int:
        """Mark keys to be left alone, whether they have a job already or not; return how many.

        Jobs that are running or done stay as they are.
        """
        with _explained(self, "ignore jobs of"):
            if not restrictions:
                raise DjJobsError(
                    f"Say which jobs of {table_label(self)} to ignore: pass a key or a restriction, or True for all."
                )
            return TableQueue.of(self, restrictions).ignore()

    def cancel_jobs(self, *restrictions: Any, force: bool = False) -> int:
        """Call off jobs; they stay `cancelled` until they are retried.

        Scheduled jobs are cancelled at once. A running job is asked to stop at its next safe point: when make()
        calls ``djjobs.current_job().check_cancelled()`` or tells its progress, at the latest just before the
        commit. It is rolled back then, and `on_cancel` is called.

        Parameters
        ----------
        *restrictions
            Which jobs, as in `populate`.
        force : bool
            Interrupt running jobs now; a worker kills a process that does not yield. Defaults to False.

        Returns
        -------
        int
            How many jobs were cancelled or asked to stop.

        Raises
        ------
        JobNotCancellable
            If all that was chosen is over already.
        """
        with _explained(self, "cancel jobs of"):
            return TableQueue.of(self, restrictions).cancel(force)


def _explained(table: Any, doing: str) -> AbstractContextManager[None]:
    return explained(table.connection, table_label(table), doing)


#: How long somebody who schedules by hand waits for what this process has changed to be acted on.
_FLUSH = 10.0

_POPULATE_DEFAULTS = {
    name: default
    for name, default in (JobsMixin.populate.__kwdefaults__ or {}).items()
    if name not in ("reserve_jobs", "schedule_jobs")
}

instantiate_for("schedule_jobs", "cleanup_jobs", "retry_jobs", "ignore_jobs", "cancel_jobs")


class Computed(JobsMixin, dj.Computed):
    """`dj.Computed` with a job queue."""


class Imported(JobsMixin, dj.Imported):
    """`dj.Imported` with a job queue."""
