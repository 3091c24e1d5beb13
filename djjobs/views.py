"""`Table.jobs`: the jobs of one table, with the words of DataJoint 2's own queue."""

from __future__ import annotations

import datetime
from typing import Any

from . import cleanup, scheduling
from .queue import Queue
from .tables import STATUSES, Jobs

__all__ = ["TableJobs"]


class TableJobs(Jobs):
    """The rows of `~jobs` that belong to one table.

    A DataJoint query; code written for DataJoint 2's job tables finds its methods here.
    """

    _target: Any
    _queue: Queue

    @classmethod
    def of(cls, queue: Queue, table: Any) -> TableJobs:
        view = cls.__new__(cls)
        # The heading is shared, so it is read from the server once.
        view.__dict__.update(queue.jobs.__dict__, _target=table, _queue=queue)
        return view & {"table_name": table.table_name}

    @property
    def pending(self) -> Jobs:
        """DataJoint 2's word for `scheduled`."""
        return self.scheduled

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
            Taken for compatibility: jobs whose key left key_source go at any age. Defaults to None.
        orphan_timeout : float
            Put jobs back that have been reserved for longer than so many seconds. Defaults to None.

        Returns
        -------
        dict
            How many jobs were ``added``, ``removed``, ``orphaned`` and ``re_pended``.
        """
        table, queue = self._target, self._queue
        with table._explained("refresh the jobs of"):
            _, keys = table._queue_and_keys(())
            due_time = datetime.timedelta(seconds=delay) if delay > 0 else None
            re_pended = scheduling.put_back_unmade(queue, keys)
            run = table.schedule_jobs(*restrictions, min_scheduling_interval=0, priority=priority, due_time=due_time)
            orphaned = 0 if not orphan_timeout else self._put_back_older_than(orphan_timeout)
            cleaned = cleanup.cleanup(queue, table._finisher(queue, keys))
            removed = cleaned["orphaned_success"] + cleaned["orphaned_incomplete"]
            orphaned += cleaned["recovered"]
        return {"added": run.scheduled, "removed": removed, "orphaned": orphaned, "re_pended": re_pended}

    def _put_back_older_than(self, seconds: float) -> int:
        engine = self._queue.engine
        sql = self._queue.sql(engine.release_older, interval=engine.seconds("%(seconds)s"))
        return self._queue.db.change(sql, table=self._target.table_name, seconds=seconds)

    def ignore(self, key: dict[str, Any]) -> None:
        """Mark a key to be left alone."""
        self._target.ignore_jobs({name: key[name] for name in self._target.primary_key if name in key})

    def progress(self) -> dict[str, int]:
        """How many jobs there are of each status, and in all."""
        sql = self._queue.sql(self._queue.engine.count_by_status, where="WHERE table_name = %(table)s")
        rows = self._queue.db.execute(sql, table=self._target.table_name).fetchall()
        counts = {status: 0 for status in STATUSES} | {status: count for _, status, count in rows}
        pending = counts.pop("scheduled")
        return {"pending": pending, **counts, "total": pending + sum(counts.values())}
