"""Reacting to changes: what a change upstream means for a table's queue is looked up, put off or done."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import account_of, connection_of
from ..dj.tables import instance_over
from ..queue.database import Database, explained
from ..queue.keys import table_label
from ..queue.table_queue import TableQueue
from ..settings import settings
from .outbox import Change, merge_into
from .upstream import Upstream, listens, registry, restrictions_for

__all__ = ["Agenda"]

logger = logging.getLogger("djjobs")

#: How often a scheduling of all keys gives way to somebody else's.
_GIVES_WAY = 2


@dataclass
class _Task:
    """What is to be done for one table. Times are this process's own, and only say how long to wait."""

    #: What happened upstream, one change a table.
    changes: dict[tuple[Any, str], Change] = field(default_factory=dict)
    #: Inserted keys have come that were not looked at yet.
    keys: bool = False
    #: All keys are to be looked at, but not before this time; how often that was put off.
    everything: bool = False
    not_before: float = 0.0
    put_off: int = 0
    cleanup: bool = False

    @property
    def is_done(self) -> bool:
        return not (self.keys or self.everything or self.cleanup)


class Agenda:
    """What is still to be done for the tables downstream of changes.

    Parameters
    ----------
    connect : callable
        Gives the connection to use for a class.
    by_jobs : bool
        Whether it is jobs that make the changes. The rate limit holds for them, however many there are. Defaults to
        False.
    """

    def __init__(self, connect: Callable[[type], Any], by_jobs: bool = False) -> None:
        self._connect, self._by_jobs = connect, by_jobs
        self._tasks: dict[type, _Task] = {}
        self._tables: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
        self._upstream: weakref.WeakKeyDictionary[type, Upstream] = weakref.WeakKeyDictionary()
        self._cleaned: weakref.WeakKeyDictionary[type, float] = weakref.WeakKeyDictionary()
        #: Tables for which something has failed; the next time all of their keys are looked at.
        self._missed: weakref.WeakSet[type] = weakref.WeakSet()
        #: Accounts for which a table could not be looked at; the next time that is tried again.
        self._out_of_reach: set[tuple[Any, ...]] = set()
        #: How often something has failed.
        self.failures = 0

    @property
    def is_done(self) -> bool:
        return not self._tasks

    def add(self, server: Any, changes: Iterable[Change]) -> None:
        """Find out which tables a change matters to, and what is to be done for them."""
        self._out_of_reach.clear()
        for change in changes:
            for table in registry.downstream(server, change.table, self._upstream_of):
                if listens(table):
                    self._add(table, server, change)

    def _add(self, table: Any, server: Any, change: Change) -> None:
        task = self._tasks.get(table) or _Task()
        is_own, schedules = (
            change.table == table.full_table_name,
            datajoint_api.refresh_by_default(connection_of(table)),
        )
        if schedules and change.inserted and not is_own:
            if table in self._missed:
                task.everything = True
            else:
                task.keys = True
        if schedules and change.deleted and is_own:
            # Which results are gone is not known, but that they are to be made again.
            task.everything = True
            task.put_off = 0 if self._by_jobs else _GIVES_WAY
        task.cleanup = task.cleanup or change.deleted
        if not task.is_done:
            merge_into(task.changes, (server, change.table), change.copy())
            self._tasks[table] = task

    def rest(self) -> list[tuple[Any, Change]]:
        """Take off the agenda what was put off; where it came from."""
        tasks, self._tasks = self._tasks, {}
        rest = []
        for task in tasks.values():
            for (server, name), change in task.changes.items():
                keys = None if task.everything and change.inserted else change.keys
                rest.append((server, Change(name, change.attributes, keys, task.cleanup and change.deleted)))
        return rest

    def next_time(self) -> float:
        """When there is something to do next, by `time.monotonic`."""
        return min((self._time_of(table, task) for table, task in self._tasks.items()), default=float("inf"))

    def _time_of(self, table: type, task: _Task) -> float:
        if task.keys:
            return 0.0
        times = [task.not_before] if task.everything else []
        return min([*times, self._time_to_clean(table)] if task.cleanup else times)

    def _time_to_clean(self, table: type) -> float:
        return self._cleaned.get(table, float("-inf")) + settings.min_scheduling_interval

    # -- doing it ------------------------------------------------------------------------------------------

    def act(self, at_once: bool = False) -> None:
        """Do what is due. Never raises: what fails is made good by the next scheduling.

        Parameters
        ----------
        at_once : bool
            Do also what was put off. Defaults to False.
        """
        for table, task in list(self._tasks.items()):
            try:
                if at_once or self._time_of(table, task) <= time.monotonic():
                    self._act(table, task, at_once)
            except Exception as error:
                self._fail(table, task, error)
            if task.is_done:
                del self._tasks[table]

    def _fail(self, table: Any, task: _Task, error: Exception) -> None:
        task.keys = task.everything = task.cleanup = False
        self._tables.pop(table, None)
        if self._is_gone(table):
            return
        names = ", ".join(name for _, name in task.changes)
        logger.warning(
            "A change of %s was not acted on: %s: %s The next scheduling of %s makes good for it.",
            names,
            type(error).__name__,
            error,
            table.__name__,
            extra={"event": "event failed", "table": table.__name__},
        )
        self.failures += 1
        self._missed.add(table)

    def _is_gone(self, cls: type) -> bool:
        """Whether a table was dropped, so that nothing is left to be done for it."""
        try:
            table = self._table(cls)
            db = Database(table.connection)
            return not db.execute(
                db.engine.tables.find_tables, schema=table.database, names=(table.table_name,)
            ).fetchall()
        except Exception:
            return False

    def _act(self, cls: Any, task: _Task, at_once: bool) -> None:
        table = self._table(cls)
        with explained(table.connection, table_label(table), "schedule"):
            jobs = TableQueue.of(table)
            if task.cleanup and (at_once or self._time_to_clean(cls) <= time.monotonic()):
                self._clean_up(jobs, task)
            if task.keys:
                self._schedule_inserted(jobs, task)
            if task.everything and (at_once or task.not_before <= time.monotonic()):
                self._schedule_all(jobs, task, at_once)

    def _clean_up(self, jobs: TableQueue, task: _Task) -> None:
        removed = jobs.cleanup()
        self._cleaned[type(jobs.table)] = time.monotonic()
        task.cleanup = False
        if any(removed.values()):
            # It may have kept a key from being scheduled that was inserted meanwhile.
            task.keys = any(change.inserted for change in task.changes.values())
        _log("cleaned up", jobs, task, removed)

    def _schedule_inserted(self, jobs: TableQueue, task: _Task) -> None:
        upstream = self._upstream_of(type(jobs.table))
        task.keys = False
        for change in task.changes.values():
            if change.table == jobs.table.full_table_name or not change.inserted:
                continue
            told = upstream is not None and upstream.is_told_by_keys_of(change.table)
            conditions = restrictions_for(jobs.table, change, jobs.queue.engine) if told else None
            if conditions is None:
                task.everything = True
                continue
            # With no regard to the rate limit: a scheduling of all keys a moment ago did not see these.
            scheduled = sum(jobs.restricted_to(condition).insert_for_event() for condition in conditions)
            _log("scheduled", jobs, task, scheduled)

    def _schedule_all(self, jobs: TableQueue, task: _Task, at_once: bool) -> None:
        insist = at_once or task.put_off >= _GIVES_WAY
        scheduled = jobs.schedule(interval=0 if insist else None, take_along=False, automatic=True)
        if scheduled.rate_limited:
            task.put_off += 1
            task.not_before = time.monotonic() + settings.min_scheduling_interval
            return
        task.everything, task.put_off = False, 0
        self._missed.discard(type(jobs.table))
        _log("scheduled of all keys", jobs, task, scheduled.count)

    # -- tables --------------------------------------------------------------------------------------------

    def _table(self, cls: type) -> Any:
        """The table over the connection that is to be used."""
        connection = self._connect(cls)
        table = self._tables.get(cls)
        if table is None or table.connection is not connection:
            table = self._tables[cls] = instance_over(cls, connection)
        return table

    def _upstream_of(self, cls: Any) -> Upstream | None:
        """What a table depends on; None while it is out of reach, which is no reason to pass over the others."""
        account = account_of(connection_of(cls))
        if cls not in self._upstream and account not in self._out_of_reach:
            try:
                self._upstream[cls] = self._find_upstream(self._table(cls))
            except Exception as error:
                if self._is_gone(cls):
                    return None
                logger.warning(
                    "Changes upstream of %s are not acted on: %s: %s The next scheduling makes good for it.",
                    cls.full_table_name,
                    type(error).__name__,
                    error,
                    extra={"event": "event failed", "table": cls.__name__},
                )
                self.failures += 1
                self._out_of_reach.add(account)
        if cls not in self._upstream:
            self._missed.add(cls)
        return self._upstream.get(cls)

    @staticmethod
    def _find_upstream(table: Any) -> Upstream:
        try:
            return Upstream.of(table)
        except Exception as error:
            if Database(table.connection).is_lost(error):
                raise
            label = table_label(table)
            logger.warning("What the key_source of %s depends on could not be found out: %s", label, error)
            return Upstream.unknown(table)


def _log(what: str, jobs: TableQueue, task: _Task, result: Any) -> None:
    names = ", ".join(name for _, name in task.changes)
    words = jobs.name, what, result, names
    logger.debug("%s %s: %s, after a change of %s", *words, extra={"event": "event", "table": jobs.name})
