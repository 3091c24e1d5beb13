"""The queue of one schema: found or declared at first use, and the way to its statements."""

from __future__ import annotations

import copy
import logging
import os
import platform
from typing import Any

from ..dj.compat import AccessError, datajoint_api
from ..dj.connection import keep_with, kept_with
from ..dj.patches import apply_patches
from ..dj.tables import copy_over
from ..errors import DjJobsError
from ..settings import settings
from .database import Database, explained
from .tables import (
    EARLIER_MARKS,
    JSON_COLUMNS,
    UNFINISHED_MARK,
    VERSION_MARK,
    JobControl,
    Jobs,
    QueueTable,
    Runs,
    Sightings,
    Workers,
    job_columns,
)

__all__ = ["Queue", "jobs", "queue_of", "workers"]

logger = logging.getLogger("djjobs")

#: So many new jobs at once may mislead an engine about the length of the queue.
_MANY = 1000
#: `~jobs` as DataJoint 0.14 declares it.
_LEGACY_COLUMNS = frozenset(
    "table_name key_hash status key error_message error_stack user host pid connection_id timestamp".split()
)


class Queue:
    """`~jobs`, `~jobs_control`, `~workers`, `~sightings` and `~runs` of one schema.

    One object for a connection and a schema: get it with `Queue.of`.
    """

    def __init__(self, connection: Any, database: str) -> None:
        self.database = database
        self.db = Database(connection)
        self.engine = self.db.engine
        self.jobs = Jobs(connection, database)
        self.control = JobControl(connection, database)
        self.workers = Workers(connection, database)
        self.sightings = Sightings(connection, database)
        self.runs = Runs(connection, database)
        #: The tables of which what DataJoint itself has recorded is ours already.
        self.taken_over: set[str] = set()

    @classmethod
    def of(cls, connection: Any, database: str) -> Queue:
        """The queue of a schema, declared if it is not there yet."""
        settings.insist_on_environment()
        apply_patches()
        queues: dict[str, Queue] = kept_with(connection, "queues") or keep_with(connection, "queues", {})
        queue = queues.get(database)
        with explained(connection, f"`{database}`.`~jobs`", "use the queue"):
            # The schema may have been dropped since, and somebody may just be declaring its new queue.
            if queue is None or not queue._is_complete():
                queue = cls(connection, database)
                queue.db.retry(queue._find_or_declare)
        queues[database] = queue
        return queue

    def _find_or_declare(self) -> None:
        if not self._is_complete():
            with self.db.locked(f"djjobs {self.database}"):
                if not self._is_complete():
                    self._declare()
        self._insist_on_version()
        datajoint_api.mark_json(self.jobs, JSON_COLUMNS)
        datajoint_api.mark_json(self.workers, Workers.json_columns)
        datajoint_api.mark_json(self.runs, Runs.json_columns)

    def _is_complete(self) -> bool:
        found = self._find_tables()
        return len(found) == len(self._tables) and found[Jobs._name] == VERSION_MARK

    def _find_tables(self) -> dict[str, str]:
        """Those of the queue's tables that are there at this moment, with their comments."""
        names = tuple(table._name for table in self._tables.values())
        return dict(self.db.execute(self.engine.tables.find_tables, schema=self.database, names=names).fetchall())

    def _declare(self) -> None:
        found = self._find_tables()
        if found.get(Jobs._name) == UNFINISHED_MARK:
            # Whoever declared it died on the way; nobody can have put a job into it.
            self.jobs.drop_quick()
            del found[Jobs._name]
        elif Jobs._name in found and version_of(self.jobs) == "legacy" and not len(self.jobs):
            # DataJoint 0.14 declares it as soon as somebody looks at `schema.jobs`.
            self.jobs.drop_quick()
            del found[Jobs._name]
        elif Jobs._name in found:
            self._insist_on_version()
        for table in (self.runs, self.control, self.workers, self.sightings):
            if table._name not in found:
                self.declare(table)
        if Jobs._name not in found:
            # The last one: its comment says when all is there.
            self._declare_jobs()

    def _declare_jobs(self) -> None:
        self.jobs = Jobs(self.db.connection, self.database)
        self.jobs.declare()
        columns = self.engine.tables.modify(job_columns(self.db.connection, self.engine).values())
        self.db.execute(self.sql(self.engine.tables.after_declare, modify_columns=columns, comment=VERSION_MARK))
        self.jobs = Jobs(self.db.connection, self.database)

    def declare(self, table: QueueTable) -> None:
        """Declare a table that belongs to the queue and has texts of any language."""
        table.declare()
        if self.engine.tables.any_language:
            self.db.execute(self.sql(self.engine.tables.any_language, table=table.full_table_name))

    def _insist_on_version(self) -> None:
        if version_of(self.jobs) == "current":
            return
        name = f"`{self.database}`.`~jobs`"
        if version_of(self.jobs) == "legacy":
            raise DjJobsError(
                f"{name} was made by DataJoint itself and lacks the columns of a queue. Nothing was changed. "
                f"To upgrade it in place, keeping its rows: djjobs migrate {self.database} "
                f"(or in Python: djjobs.migrate({self.database!r}))."
            )
        if version_of(self.jobs) == "earlier":
            raise DjJobsError(
                f"{name} was made by an earlier version of djjobs. Nothing was changed. "
                f"To upgrade it in place, keeping its rows: djjobs migrate {self.database} "
                f"(or in Python: djjobs.migrate({self.database!r}))."
            )
        raise DjJobsError(
            f"{name} is of a version that this djjobs does not know ({_comment(self.jobs)!r}). Nothing was changed. "
            "Install the djjobs that made it, or rename the table and let djjobs make a new one."
        )

    def insist_on_write_access(self, label: str) -> None:
        """Raise if the user may only look."""
        may_write = self.engine.tables.may_write
        if may_write and not self.db.execute(may_write, jobs=self.jobs.full_table_name).fetchone()[0]:
            raise AccessError(f"no INSERT and UPDATE on the queue of {label}")

    def on(self, db: Database) -> Queue:
        """The same queue on another connection altogether: its statements, its tables and who acts."""
        other = copy.copy(self)
        other.db, other.engine = db, db.engine
        other.jobs, other.control = copy_over(self.jobs, db.connection), copy_over(self.control, db.connection)
        other.workers, other.runs = copy_over(self.workers, db.connection), copy_over(self.runs, db.connection)
        other.sightings = copy_over(self.sightings, db.connection)
        return other

    # -- statements ---------------------------------------------------------------------------------

    def sql(self, statement: str, **parts: str) -> str:
        """A statement of the engine, with this queue's tables."""
        tables = {name: table.full_table_name for name, table in self._tables.items()}
        return self.engine.render(statement, **{**tables, **parts})

    @property
    def _tables(self) -> dict[str, QueueTable]:
        return {
            "jobs": self.jobs,
            "control": self.control,
            "workers": self.workers,
            "sightings": self.sightings,
            "runs": self.runs,
        }

    def execute(self, statement: str, **parameters: Any) -> Any:
        return self.db.execute(self.sql(statement), **parameters)

    def change(self, statement: str, **parameters: Any) -> int:
        """Run a statement that changes rows and return how many."""
        return self.db.change(self.sql(statement), **parameters)

    def ask(self, statement: str, **parameters: Any) -> Any:
        """The single value that a statement returns."""
        return self.execute(statement, **parameters).fetchone()[0]

    def announce(self) -> None:
        """Tell idle workers that there is something to do, where the engine can."""
        if self.engine.workers.notify:
            self.db.execute(self.engine.workers.notify, schema=self.database)

    def has_grown(self, count: int) -> None:
        """So many jobs have come at once: let the engine look at them, if it would plan as if they were not there."""
        engine, jobs = self.engine, self.jobs.full_table_name
        if count < _MANY or not engine.enqueue.underestimates:
            return
        try:
            if self.db.execute(engine.enqueue.underestimates, jobs=jobs, count=count).fetchone()[0]:
                self.execute(engine.enqueue.look_at_queue)
        except Exception as error:
            logger.warning("%s: the server could not look at its new jobs; it will by itself: %s", jobs, error)

    def signature(self) -> dict[str, Any]:
        """Who acts, as the rows record it."""
        return {
            "user": self.db.user,
            "host": platform.node(),
            "pid": os.getpid(),
            "connection_id": self.db.connection.connection_id,
        }


def version_of(jobs: Jobs) -> str:
    """'current', 'earlier', 'unfinished', 'legacy' (DataJoint 0.14's own) or 'unknown'."""
    if _comment(jobs) == VERSION_MARK:
        return "current"
    if _comment(jobs) == UNFINISHED_MARK:
        return "unfinished"
    if _comment(jobs) in EARLIER_MARKS:
        return "earlier"
    # A migration that was interrupted has left one column more.
    return "legacy" if set(jobs.heading.names) - {"key_json"} == _LEGACY_COLUMNS else "unknown"


def _comment(jobs: Jobs) -> str:
    return (jobs.heading.table_status or {}).get("comment") or ""


def queue_of(schema: Any) -> Queue:
    """The queue of an activated schema."""
    if not getattr(schema, "database", None):
        raise DjJobsError(f"{schema!r} is not an activated schema. Pass the dj.Schema object of the pipeline.")
    return Queue.of(schema.connection, schema.database)


def jobs(schema: Any) -> Jobs:
    """The whole `~jobs` of a schema, as a DataJoint query.

    Parameters
    ----------
    schema : dj.Schema
        An activated schema.
    """
    return queue_of(schema).jobs


def workers(schema: Any) -> Workers:
    """`~workers` of a schema, as a DataJoint query: who works there, and when each was heard of last.

    Parameters
    ----------
    schema : dj.Schema
        An activated schema.
    """
    return queue_of(schema).workers
