"""What a populate or a worker was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DjJobsError
from ..settings import check_seconds

__all__ = ["PopulateOptions", "WorkerOptions"]


@dataclass(frozen=True)
class PopulateOptions:
    """What a populate was asked to do; see `JobsMixin.populate`."""

    order: str = "original"
    priority: int | None = None
    suppress_errors: bool = False
    return_exception_objects: bool = False
    make_kwargs: dict[str, Any] | None = None
    max_calls: int | None = None
    limit: int | None = None
    processes: int | None = 1
    display_progress: bool = False
    #: Whether to schedule before working.
    schedules: bool = True
    #: Whether to run jobs, too, that only an event has put there.
    automatic: bool = True


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker was asked to do.

    Attributes
    ----------
    processes : int
        How many jobs to run side by side. Defaults to 1.
    order : str
        "original", "reverse" or "random". Defaults to "original".
    restrictions : tuple
        Conditions on the keys. Defaults to none.
    max_jobs : int, optional
        End after so many jobs.
    drain : bool
        End when nothing is left to do. Defaults to False: wait for more.
    idle_timeout : float, optional
        End after so many seconds without a job.
    walltime : float, optional
        End within so many seconds; jobs that would take longer are not begun. Defaults to what is left of the
        Slurm allocation, if there is one.
    max_jobs_per_process : int, optional
        Replace a child process after so many jobs.
    grace : float, optional
        How long running jobs may go on after a SIGTERM. Defaults to ``djjobs.settings.grace``.
    once : bool
        Run one job, if there is one, and end. Defaults to False.
    with_scheduler : bool
        Also fire the schedules of the tables' schemas, in a process beside the slots. Defaults to False.
    """

    processes: int = 1
    order: str = "original"
    restrictions: tuple[Any, ...] = ()
    max_jobs: int | None = None
    drain: bool = False
    idle_timeout: float | None = None
    walltime: float | None = None
    max_jobs_per_process: int | None = None
    grace: float | None = None
    once: bool = False
    with_scheduler: bool = False

    def check(self) -> None:
        """Raise if something cannot be meant so."""
        for name in ("processes", "max_jobs", "max_jobs_per_process"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DjJobsError(f"{name} of a worker must be a whole number, one or more, not {value!r}.")
        for name in ("idle_timeout", "walltime", "grace"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))
