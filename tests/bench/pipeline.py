"""The pipeline that is measured: the same two tables with our queue and with DataJoint's own."""

from __future__ import annotations

import logging
import os
from typing import Any

# only the benchmark's own settings count
os.environ["DJ_IGNORE_CONFIG_FILE"] = "true"

import datajoint as dj

import djjobs

__all__ = ["GENERATION", "Pipeline", "configure"]

GENERATION = int(dj.__version__.split(".")[0])
_SEED = 1000


def configure(settings: dict[str, Any]) -> None:
    """Point DataJoint to the server."""
    for name, value in settings.items():
        if GENERATION == 2 or name != "database.backend":
            dj.config[name] = value
    dj.config["safemode"] = False
    dj.config["loglevel"] = "ERROR"
    logging.getLogger("datajoint").setLevel("ERROR")


class Pipeline:
    """A source of keys and a table with a trivial make().

    Parameters
    ----------
    database : str
        The schema's name.
    side : str
        "ours" or "datajoint": whose queue the table has.
    """

    def __init__(self, database: str, side: str) -> None:
        self.database, self.side = database, side
        schema = dj.Schema(database)
        base = djjobs.Computed if side == "ours" else dj.Computed

        @schema
        class Recording(dj.Manual):
            definition = """
            subject : varchar(16)
            session : int
            """

        @schema
        class Summary(base):
            definition = """
            -> Recording
            ---
            value : int
            """

            def make(self, key: dict[str, Any]) -> None:
                self.insert1({**key, "value": 1})

        self.schema, self.source, self.target = schema, Recording(), Summary()
        self.connection = schema.connection
        self.queue_name: str = self._queue_name()

    def _queue_name(self) -> str:
        if self.side == "ours":
            return djjobs.jobs(self.schema).full_table_name
        if GENERATION == 0:
            return self.schema.jobs.full_table_name
        jobs = self.target.jobs
        if not jobs.is_declared:
            jobs.declare()
        return jobs.full_table_name

    def sql(self, statement: str) -> Any:
        return self.connection.query(statement)

    def fill(self, count: int) -> Pipeline:
        """Fill the source with `count` keys, by SQL, and let the server look at them."""
        djjobs.settings.events = False
        self.source.insert((f"mouse {n % 50}", n) for n in range(min(_SEED, count)))
        djjobs.settings.events = True
        have, table = _SEED, self.source.full_table_name
        while have < count:
            missing = min(have, count - have)
            self.sql(
                f"INSERT INTO {table} (subject, session)"
                f" SELECT subject, session + {have} FROM {table} WHERE session < {missing}"
            )
            have += missing
        self.sql(f"ANALYZE {'TABLE ' if self.is_mysql else ''}{table}")
        return self

    def empty(self) -> None:
        """Take out all results and all jobs."""
        self.sql(f"TRUNCATE TABLE {self.target.full_table_name}")
        self.sql(f"TRUNCATE TABLE {self.queue_name}")

    def start_over(self) -> None:
        """Take out all keys as well."""
        self.empty()
        self.sql(f"DELETE FROM {self.source.full_table_name}")

    def schedule(self) -> int:
        """Schedule all keys by our queue."""
        return int(self.target.schedule_jobs(min_scheduling_interval=0))

    def enqueue(self) -> None:
        """Put a job for each key into the queue, on DataJoint's side by SQL. DataJoint 0.14 has nothing to put."""
        if self.side == "ours":
            self.schedule()
        elif GENERATION == 2:
            source = self.source.full_table_name
            self.sql(
                f"INSERT INTO {self.queue_name} (subject, session, status, priority) "
                f"SELECT subject, session, 'pending', 5 FROM {source}"
            )

    def populate(self, **options: Any) -> int:
        """Work as a lab's worker does; return how many times make() was called."""
        if self.side == "ours" or GENERATION == 0:
            options["order"] = "random"
        return self.target.populate(reserve_jobs=True, **options)["success_count"]

    @property
    def is_mysql(self) -> bool:
        return GENERATION == 0 or self.connection.adapter.backend == "mysql"
