"""What a worker was asked to do, and the tables that it does it for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..dj.compat import datajoint_api
from ..errors import DjJobsError
from ..queue.claim import Claims
from ..queue.database import Database, explained
from ..queue.finish import Finisher
from ..queue.keys import Keys, table_label
from ..queue.queue import Queue
from ..settings import check_seconds

__all__ = ["Bench", "WorkerOptions", "one_a_connection"]


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


@dataclass
class Bench:
    """One table, ready to be worked on."""

    table: Any
    number: int
    queue: Queue
    keys: Keys
    finisher: Finisher

    @classmethod
    def of(cls, table: Any, number: int, options: WorkerOptions) -> Bench:
        with explained(table.connection, table_label(table), "work on"):
            queue, keys = table._queue_and_keys(options.restrictions)
            # A bad restriction is to be found out here, not by every slot.
            queue.db.execute(f"{keys.source_sql} LIMIT 0")
            Claims(queue, keys, options.order)
            return cls(table, number, queue, keys, table._finisher(queue, keys))

    def schedule(self, at_once: bool) -> bool:
        """Schedule, unless that is left to people; whether it was limited, because somebody had done so just before."""
        if not datajoint_api.refresh_by_default(self.table.connection):
            return False
        interval = 0 if at_once else None
        return self.table._schedule(self.queue, self.keys, interval=interval, take_along=False).rate_limited

    def has_retries(self) -> bool:
        """Whether jobs wait for their next try."""
        engine, join = self.queue.engine, ""
        if self.keys.restricted:
            join = self.queue.sql(engine.jobs.join_chosen, chosen=self.keys.chosen_sql)
        sql = self.queue.sql(engine.jobs.has_retries, join_chosen=join)
        return bool(self.queue.db.execute(sql, table=self.table.table_name).fetchone()[0])


def one_a_connection(benches: list[Bench]) -> Iterable[Database]:
    return {id(bench.queue.db.connection): bench.queue.db for bench in benches}.values()
