"""`Table.jobs`: the jobs of one table, keyed like the table, with the words of DataJoint 2's own queue."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..dj.compat import datajoint_api
from ..dj.connection import server_of
from ..dj.tables import (
    QueryExpression,
    declared_database,
    heading_like,
    is_cut,
    query_on,
    recast,
    set_heading,
    with_condition,
)
from ..errors import DjJobsError
from ..events.upstream import registry
from ..queue import by_hand, cleanup, enqueue
from ..queue.keys import Keys, about_keys_of, hashes_sql, is_about_jobs, table_label
from ..queue.queue import Queue
from ..queue.table_queue import TableQueue
from ..queue.tables import STATUSES, Jobs, in_all
from ..sql import queries

__all__ = ["TableJobs", "list_in_schemas"]

#: The columns of DataJoint 2's job tables in their order; and a column of the same type for those that `~jobs` lacks.
_NATIVE = "status priority created_time scheduled_time reserved_time completed_time duration error_message error_stack"
_NATIVE_COLUMNS = [*_NATIVE.split(), "user", "host", "pid", "connection_id", "version"]
_SAME_TYPE = {
    "scheduled_time": "due_time",
    "reserved_time": "created_time",
    "completed_time": "created_time",
    "duration": "run_duration",
    "version": "user",
}


class TableJobs(Jobs):
    """The jobs of one table: a DataJoint query whose primary key is that of the table's keys.

    Code written for DataJoint 2's job tables finds its columns and its methods here.
    """

    _target: Any
    _table_queue: TableQueue
    #: The names of the job's own columns here: a key attribute may be called `status`, too.
    _status: str
    _hash: str

    @classmethod
    def of(cls, queue: Queue, table: Any) -> TableJobs:
        if table.restriction:
            table = type(table)()
        keys = Keys(table, (), queue.engine)
        attributes = _attributes(queue, keys)
        view = recast(cls, queue.jobs, _target=table, _table_queue=TableQueue(table, queue, keys))
        rows = queue.jobs & {"table_name": table.table_name}
        comment = f"jobs of {type(table).__name__}"
        set_heading(rows, heading_like(queue.jobs.heading, attributes, comment))
        plain = [one._replace(attribute_expression=None) for one in attributes]
        # As a subquery: to restrictions and joins the key's attributes are columns like others.
        query_on(view, rows, heading_like(queue.jobs.heading, plain, comment))
        view._status, view._hash = (
            f"job_{name}" if name in keys.attributes else name for name in ("status", "key_hash")
        )
        return view

    @property
    def _queue(self) -> Queue:
        return self._table_queue.queue

    def from_clause(self) -> str:
        """What the query is on; of a table DataJoint takes its name."""
        return QueryExpression.from_clause(self)

    def __len__(self) -> int:
        """How many jobs there are, those included whose key is none of the table's."""
        if is_cut(self):
            return super().__len__()
        return self._queue.db.execute(queries.count(self._rows, self._queue.engine.dialect.catalog)).fetchone()[0]

    @property
    def _rows(self) -> str:
        """These jobs, whatever a projection has left of their columns."""
        return f"{self.from_clause()}{self.where_clause()}"

    @property
    def target(self) -> Any:
        """The table whose jobs these are."""
        return self._target

    @property
    def definition(self) -> str:
        """The columns, as DataJoint 2's job tables tell them."""
        lines = [
            f"{name} : {datajoint_api.declared_type(attribute)}" for name, attribute in self.heading.attributes.items()
        ]
        count = len(self.heading.primary_key)
        return "\n".join([f"# jobs of {self._target.full_table_name}", *lines[:count], "---", *lines[count:]])

    def describe(self, *_: Any, **__: Any) -> str:
        """The definition."""
        return self.definition

    # -- the words of others ------------------------------------------------------------------------------------

    def _with_status(self, status: str) -> Jobs:
        return self & f"{self._status}='{status}'"

    @property
    def pending(self) -> Jobs:
        """DataJoint 2's word for `scheduled`."""
        return self.scheduled

    def restrict(self, restriction: Any, **options: Any) -> Any:
        """As on every DataJoint query; the status `pending` finds what `.pending` does."""
        return super().restrict(in_all(restriction, self._in_our_words), **options)

    def _in_our_words(self, condition: Any) -> Any:
        if isinstance(condition, str):
            return _of_status(self._status).sub(lambda found: _PENDING.sub(r"\1scheduled\1", found[0]), condition)
        if isinstance(condition, Mapping) and condition.get(self._status) == "pending":
            return {**condition, self._status: "scheduled"}
        return condition

    def _insist_on_known(self, names: set[str]) -> None:
        """A row of another table may have attributes of its own; but one that shares none chooses nothing."""
        if names and not names & set(self.heading.names):
            self._refuse(min(names))

    @property
    def _whose(self) -> str:
        return table_label(self._target)

    def fitting(self, restrictions: tuple[Any, ...]) -> TableJobs:
        """Those of these jobs whose own key fits the restrictions, whatever key_source says."""
        fitting = self
        for restriction in (about_keys_of(one, self._target) for one in restrictions):
            if is_about_jobs(restriction):
                fitting = fitting.among(hashes_sql(restriction, self._target))
            else:
                with self._table_queue.keys.understood():
                    fitting = fitting & restriction
        return fitting

    def among(self, hashes: str) -> TableJobs:
        """Those whose hash a query gives. As a condition, DataJoint would take its words for attributes."""
        return with_condition(self, queries.among(self._hash, hashes))

    def as_stored(self) -> Jobs:
        """The same jobs with the columns that `~jobs` itself has, whatever a key attribute is called."""
        rows = self._queue.jobs & {"table_name": self._target.table_name}
        return with_condition(rows, queries.among("key_hash", self.own_hashes_sql()))

    def own_hashes_sql(self) -> str:
        """The hashes of these jobs, whatever a projection has left of their columns."""
        return queries.hashes(self._hash, self._rows)

    # -- deleting -------------------------------------------------------------------------------------------------

    def delete_quick(self, get_count: bool = False) -> int | None:
        """Delete these jobs, and no others. A running one is taken from its worker, which then commits nothing."""
        count = by_hand.delete(self._table_queue, self._hashes_by_status())
        return count if get_count else None

    def drop_quick(self) -> None:
        """Delete the jobs of this table. The queue of the schema stays."""
        TableJobs.of(self._queue, self._target).delete_quick()

    def _hashes_by_status(self) -> dict[str, list[str]]:
        """The hashes of these jobs, whatever a projection has left of their columns."""
        sql = queries.statuses_and_hashes(self._status, self._hash, f"{self._rows}{self.sorting_clauses()}")
        found: dict[str, list[str]] = {}
        for status, key_hash in self._queue.db.execute(sql).fetchall():
            found.setdefault(status, []).append(key_hash)
        return found

    def _hash_of(self, key: Mapping[str, Any]) -> str | None:
        """The hash of the job with this key, if there is one."""
        found = TableJobs.of(self._queue, self._target) & self.whole_key(key)
        return next((hashes[0] for hashes in found._hashes_by_status().values()), None)

    def insert(self, *_: Any, **__: Any) -> None:
        """Refused: jobs come from key_source."""
        self._is_no_place_to_write()

    def update1(self, *_: Any, **__: Any) -> None:
        """Refused: a job changes by what is done to it."""
        self._is_no_place_to_write()

    def _is_no_place_to_write(self) -> NoReturn:
        name = type(self._target).__name__
        raise DjJobsError(
            f"The jobs of {table_label(self._target)} cannot be written row by row. {name}.schedule_jobs() puts keys "
            f"into the queue; {name}.ignore_jobs(...), retry_jobs(...) and cancel_jobs(...) change jobs, and "
            f"{name}.jobs.delete() removes them."
        )

    def whole_key(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of the table's key, all of which must be there."""
        missing = [name for name in self.heading.primary_key if name not in key]
        if missing:
            raise DjJobsError(
                f"{dict(key)} is no key of {table_label(self._target)}: {', '.join(missing)} is missing. "
                "Nothing was changed."
            )
        return {name: key[name] for name in self.heading.primary_key}

    # -- the methods of DataJoint 2's job tables ---------------------------------------------------------------------

    def refresh(
        self,
        *restrictions: Any,
        delay: float = 0,
        priority: int | None = None,
        stale_timeout: float | None = None,
        orphan_timeout: float | None = None,
    ) -> dict[str, int]:
        """Schedule new jobs and clean up, as DataJoint 2's ``jobs.refresh()``.

        Parameters
        ----------
        *restrictions
            Conditions on key_source, for new jobs only.
        delay : float
            Seconds until the new jobs are due. Defaults to 0.
        priority : int
            Priority of the new jobs. Defaults to the table's.
        stale_timeout : float
            Remove jobs older than so many seconds whose key left key_source; 0 removes none. Jobs that are ignored or
            running stay. Defaults to ``dj.config.jobs.stale_timeout``, under DataJoint 0.14 to an hour.
        orphan_timeout : float
            Put jobs back that have been reserved for longer than so many seconds, by any worker. Jobs of workers
            that died come back without it. Defaults to None.

        Returns
        -------
        dict
            How many jobs were ``added``, ``removed``, ``orphaned`` and ``re_pended``.
        """
        table = self._target
        if stale_timeout is None:
            stale_timeout = datajoint_api.stale_timeout(table.connection)
        with self._table_queue.explained("refresh the jobs of"):
            jobs = TableQueue.of(table)
            due_time = datetime.timedelta(seconds=delay) if delay > 0 else None
            re_pended = enqueue.put_back_unmade(jobs.queue, jobs.keys)
            run = table.schedule_jobs(*restrictions, min_scheduling_interval=0, priority=priority, due_time=due_time)
            orphaned = cleanup.recover_dead(jobs.queue, jobs.finisher)
            if orphan_timeout:
                orphaned += by_hand.release_older(jobs, orphan_timeout, priority)
            removed = cleanup.remove_stale(jobs.queue, jobs.finisher, stale_timeout) if stale_timeout else 0
        return {"added": run.scheduled, "removed": removed, "orphaned": orphaned, "re_pended": re_pended}

    def reserve(self, key: Mapping[str, Any]) -> bool:
        """Take a job out of the queue by hand; whether it was there to be had.

        Nobody watches over a job that was reserved so: `complete` or `error` ends it, or
        ``refresh(orphan_timeout=...)`` puts it back.
        """
        with self._table_queue.explained("reserve a job of"):
            return by_hand.reserve(self._table_queue, self._hash_of(key))

    def complete(self, key: Mapping[str, Any], duration: float | None = None) -> None:
        """The job with this key is done: it goes or, with `keep_completed`, stays as `success`."""
        with self._table_queue.explained("complete a job of"):
            by_hand.complete(self._table_queue, key, self._hash_of(key), duration)

    def error(self, key: Mapping[str, Any], error_message: str, error_stack: str | None = None) -> None:
        """The job with this key has failed."""
        with self._table_queue.explained("record an error of"):
            by_hand.fail(self._table_queue, key, self._hash_of(key), error_message, error_stack)

    def ignore(self, key: Mapping[str, Any]) -> None:
        """Mark a key to be left alone."""
        self._target.ignore_jobs(self.whole_key(key))

    def progress(self) -> dict[str, int]:
        """How many jobs there are of each status, and in all."""
        count_by_status = self._queue.engine.jobs.count_of_table
        rows = self._queue.execute(count_by_status, table=self._target.table_name).fetchall()
        counts = dict.fromkeys(STATUSES, 0) | dict(rows)
        pending = counts.pop("scheduled")
        return {"pending": pending, **counts, "total": pending + sum(counts.values())}


#: What is compared with a status in a condition, and DataJoint 2's word for one that waits.
_PENDING = re.compile(r"(['\"])pending\1", re.IGNORECASE)


def _of_status(name: str) -> re.Pattern[str]:
    value = r"(?:'[^']*'|\"[^\"]*\")"
    return re.compile(
        rf"\b{name}\b[`\"]?\s*(?:(?:=|<>|!=)\s*{value}|(?:not\s+)?in\s*\([^)]*\))|{value}\s*(?:=|<>|!=)\s*[`\"]?{name}\b",
        re.IGNORECASE,
    )


def _attributes(queue: Queue, keys: Keys) -> list[Any]:
    """The columns of the view with their SQL: the key's, DataJoint 2's, and all others that `~jobs` has."""
    stored, engine = queue.jobs.heading.attributes, queue.engine
    computed = engine.dialect.shown_columns()
    in_key = [
        # NULL where a table of the same name that had other keys has left a job, which no array of numbers can hold.
        datajoint_api.whole(attribute)._replace(in_key=True, attribute_expression=sql, dtype=object)
        for attribute, sql in zip(keys.attributes.values(), keys.columns_sql(queue), strict=True)
    ]
    taken, others = {attribute.name for attribute in in_key}, []
    for name in dict.fromkeys([*_NATIVE_COLUMNS, *stored]):
        attribute, sql = stored[_SAME_TYPE.get(name, name)], computed.get(name)
        shown = f"job_{name}" if name in taken else name
        if sql is None and (name in taken or shown != name):
            sql = datajoint_api.quote(queue.db.connection, name)
        # A job is known by its hash, where a table has a key without attributes.
        is_key = not in_key and name == "key_hash"
        others.append(attribute._replace(name=shown, in_key=is_key, nullable=True, attribute_expression=sql))
    return [*in_key, *others]


def list_in_schemas() -> None:
    """Let DataJoint 2's ``schema.jobs`` list the jobs of our tables, too."""

    def of_schema(schema: Any) -> list[TableJobs]:
        tables: list[Any] = registry.tables_at(server_of(schema.connection))
        there = set(schema.list_tables()) if Jobs(schema.connection, schema.database).is_declared else set()
        ours = [one for one in tables if declared_database(one) == schema.database and one.table_name in there]
        return [table.jobs for table in sorted(ours, key=lambda table: table.__name__)]

    datajoint_api.list_jobs_of_schema(of_schema)
