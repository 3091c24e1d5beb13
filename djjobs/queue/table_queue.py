"""The queue of one table: everything that a table, a worker or an event does to the table's jobs goes through here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from ..dj.compat import datajoint_api
from ..errors import DjJobsError
from ..settings import check_seconds, settings
from ..sql.queries import no_rows
from ..telemetry import emit
from . import cleanup, enqueue
from .cancel import cancel
from .claim import Claims
from .database import Database, explained
from .finish import Finisher
from .identity import Claimant
from .keys import Keys, table_label
from .native import bring_native_jobs_once
from .policy import Policy, QueuedTable, has_hook
from .queue import Queue

__all__ = ["TableQueue"]


class TableQueue:
    """One table's jobs in the queue of its schema; get it with `TableQueue.of`.

    Attributes
    ----------
    table : QueuedTable
        An instance of the table.
    queue : Queue
        The queue of its schema.
    keys : Keys
        The table's keys under the restrictions.
    label : str
        How messages name the table.
    name, table_name : str
        The name of the class, and that of the table in the database.
    """

    def __init__(self, table: QueuedTable, queue: Queue, keys: Keys) -> None:
        self.table, self.queue, self.keys = table, queue, keys
        self.label, self.name, self.table_name = keys.label, type(table).__name__, table.table_name

    @classmethod
    def of(cls, table: QueuedTable, restrictions: tuple[Any, ...] = ()) -> TableQueue:
        """The queue of a table, made or brought along from DataJoint's own at its first use.

        Parameters
        ----------
        table
            An instance of a class with the mixin.
        restrictions : tuple
            Conditions on key_source. Defaults to none.
        """
        label = table_label(table)
        if table.connection.in_transaction:
            raise DjJobsError(
                f"The queue of {label} cannot be used inside a transaction, which it would commit. "
                "End the transaction first, or call the method outside its `with` block and outside make()."
            )
        queue = Queue.of(table.connection, table.database)
        try:
            keys = queue.db.retry(lambda: Keys(table, restrictions, queue.engine))
        except DjJobsError:
            queue.insist_on_write_access(label)
            raise
        bring_native_jobs_once(queue, table)
        return cls(table, queue, keys)

    def restricted_to(self, *restrictions: Any) -> TableQueue:
        """The same queue, under these restrictions alone."""
        return type(self)(self.table, self.queue, Keys(self.table, restrictions, self.queue.engine))

    def on(self, db: Database) -> TableQueue:
        """The same queue on another connection. Its keys are those of the first one, for their types."""
        return type(self)(self.table, self.queue.on(db), self.keys)

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """Turn what the server or DataJoint says into one error that names the table and the way out."""
        return explained(self.table.connection, self.label, doing)

    # -- what the table says of its jobs -----------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        return Policy.of(self.table, self.label)

    @cached_property
    def finisher(self) -> Finisher:
        """How jobs of this table end."""
        return Finisher(self.queue, self.keys, self.keeps_completed, self.policy)

    @property
    def keeps_completed(self) -> bool:
        """Whether a finished job stays as `success`."""
        if self.table.keep_completed is not None:
            return self.table.keep_completed
        return settings.keep_completed or datajoint_api.keeps_completed(self.table.connection)

    @property
    def refreshes(self) -> bool:
        """Whether work begins with a scheduling, and events schedule."""
        return datajoint_api.refresh_by_default(self.table.connection)

    def has_hook(self, name: str) -> bool:
        """Whether the table has a `before_delete`, `prepare_run` or `finish_run` of its own."""
        return has_hook(self.table, name)

    def priority(self, given: int | None = None) -> int:
        """The priority of new jobs: as given, or the table's, or DataJoint's."""
        for choice in (given, self.table.priority):
            if choice is not None:
                if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice <= 255:
                    raise DjJobsError(f"The priority of {self.label} must be 0 to 255, not {choice!r}.")
                return choice
        return datajoint_api.default_priority(self.table.connection)

    # -- putting jobs in ---------------------------------------------------------------------------------

    def schedule(
        self,
        *,
        force: bool = False,
        interval: float | None = None,
        priority: int | None = None,
        due_time: enqueue.DueTime = None,
        name: str | None = None,
        take_along: bool = True,
        automatic: bool = False,
    ) -> enqueue.Scheduled:
        """Put the keys that are still to be made into the queue; the parameters are those of `enqueue.schedule`."""
        if interval is None:
            interval = settings.min_scheduling_interval if name is None else 0.0
        scheduled = enqueue.schedule(
            self.queue,
            self.keys,
            priority=self.priority(priority),
            interval=check_seconds(f"min_scheduling_interval for {self.label}", interval),
            force=force,
            due_time=due_time,
            name=name,
            take_along=take_along,
            automatic=automatic,
        )
        if not scheduled.rate_limited:
            emit("table scheduled", self.name, count=scheduled.count, automatic=automatic)
        if scheduled.run_id is not None:
            emit("run begun", self.name, run_id=scheduled.run_id, count=scheduled.count)
        return scheduled

    def insert_for_event(self) -> int:
        """Schedule the few keys that an event has brought; return how many were new."""
        count = enqueue.insert_few(self.queue, self.keys, self.priority())
        emit("table scheduled", self.name, count=count, automatic=True)
        return count

    def insert_by_hand(self) -> int:
        """Put keys into the queue that somebody names one by one; return how many were new."""
        return enqueue.insert_new(self.queue, self.keys, "scheduled", self.priority(), few=True)

    # -- taking jobs out ---------------------------------------------------------------------------------

    def claims(
        self,
        order: str = "original",
        priority: int | None = None,
        claimant: Claimant | None = None,
        automatic: bool = True,
    ) -> Claims:
        """What a worker may claim of these jobs; the parameters are those of `Claims`."""
        return Claims(self.queue, self.keys, order, priority, claimant, automatic)

    def insist_on_source(self) -> None:
        """Raise if key_source or a restriction makes no sense to the server."""
        self.queue.db.execute(no_rows(self.keys.sql.source))

    def has_retries(self) -> bool:
        """Whether jobs wait for their next try."""
        engine, join = self.queue.engine, ""
        if self.keys.restricted:
            join = self.queue.sql(engine.jobs.join_chosen, chosen=self.keys.sql.chosen)
        sql = self.queue.sql(engine.jobs.has_retries, join_chosen=join)
        return bool(self.queue.db.execute(sql, table=self.table_name).fetchone()[0])

    def is_scheduling(self) -> bool:
        """Whether somebody is scheduling this table right now."""
        return enqueue.is_scheduling(self.queue, self.table_name)

    # -- changing jobs -----------------------------------------------------------------------------------

    def retry(self) -> int:
        """Put jobs that are `error` or `cancelled` back; return how many."""
        self.keys.insist_on_known_keys()
        return enqueue.put_back(self.queue, self.keys, ("error", "cancelled"))

    def ignore(self) -> int:
        """Mark keys to be left alone, whether they have a job already or not; return how many."""
        self.keys.insist_on_known_keys()
        statuses = ("scheduled", "error", "cancelled")
        known = enqueue.set_status(self.queue, self.table_name, self.keys.sql.chosen, statuses, "ignore")
        return known + enqueue.insert_new(self.queue, self.keys, "ignore", self.priority())

    def cancel(self, force: bool = False) -> int:
        """Cancel jobs; return how many were cancelled or asked to stop."""
        self.keys.insist_on_known_keys()
        return cancel(self.queue, self.keys, force)

    def cleanup(self, chosen: str = "") -> dict[str, int]:
        """Remove jobs that nothing needs any more; `chosen` is SQL of the hashes to look at, all if empty."""
        return cleanup.cleanup(self.queue, self.finisher, chosen)
