"""Cancelling: scheduled jobs are called off at once; running ones are asked to stop."""

from __future__ import annotations

from typing import Any

from ..errors import JobNotCancellable
from ..sql.queries import first_row
from .database import portions
from .keys import Keys
from .queue import Queue

__all__ = ["cancel", "cancel_run"]

#: How often jobs are looked for that others claim just then.
_MOST_PASSES = 20


def cancel(queue: Queue, keys: Keys, force: bool = False) -> int:
    """Call off the jobs of these keys; return how many were cancelled or asked to stop."""
    count = _CallingOff(queue, keys.table.table_name, keys.sql.chosen, queue.engine.jobs.change_chosen).run(force)
    if not count:
        _insist_on_cancellable(queue, keys)
    return count


def cancel_run(queue: Queue, table_name: str, run_id: int, force: bool = False) -> int | None:
    """Call off a run and its jobs; return how many were cancelled or asked to stop, None if all were over."""
    engine, run = queue.engine, {"table": table_name, "run": run_id}
    called_off = queue.change(engine.runs.cancel_run, **run)
    hashes = [key_hash for (key_hash,) in queue.execute(engine.runs.find_open_jobs, **run).fetchall()]
    chosen, count = queue.sql(engine.runs.these_jobs), 0
    for portion in portions(hashes):
        which = {"run": run_id, "hashes": portion}
        count += _CallingOff(
            queue, table_name, chosen, engine.jobs.change_these, engine.runs.still_in_run, **which
        ).run(force)
    return count if called_off or count else None


class _CallingOff:
    """Some jobs of a table, to be called off: those that `chosen` selects and `change` changes, if `also` holds."""

    def __init__(
        self, queue: Queue, table_name: str, chosen: str, change: str, also: str = "", **parameters: Any
    ) -> None:
        self._queue, self._chosen, self._change, self._also = queue, chosen, change, also
        self._parameters = {"table": table_name, **parameters}

    def run(self, force: bool) -> int:
        """Call them off; how many were cancelled or are asked to stop."""
        queue, engine = self._queue, self._queue.engine
        has_uncalled = queue.sql(engine.jobs.has_uncalled, chosen=self._chosen, also=self._also)
        cancelled = asked = 0
        for _ in range(_MOST_PASSES):
            # Running jobs first: one that is given back meanwhile is found among the scheduled ones.
            asked = self._ask_running("force" if force else "cancel")
            cancelled += self._to(queue.sql(engine.jobs.set_status, status="cancelled"), "scheduled")
            # One that was claimed between the two has escaped both.
            if not queue.db.execute(has_uncalled, **self._parameters).fetchone()[0]:
                break
        if cancelled:
            queue.announce()
        return cancelled + asked

    def _to(self, changes: str, status: str, also: str = "", **parameters: Any) -> int:
        parts = {"changes": changes, "chosen": self._chosen, "also": f"{also} {self._also}"}
        change = self._queue.sql(self._change, **parts)
        return self._queue.db.change(change, statuses=(status,), **self._parameters, **parameters)

    def _ask_running(self, how: str) -> int:
        queue, engine = self._queue, self._queue.engine
        self._to(engine.jobs.request_cancel, "reserved", engine.jobs.has_worker, how=how)
        # Counted afterwards: to MySQL a row that had this request already has not changed.
        find = queue.sql(engine.jobs.asked_to_stop, chosen=self._chosen)
        asked = dict(queue.db.execute(find, **self._parameters).fetchall())
        if asked:
            queue.execute(engine.workers.call_workers, workers=tuple(asked))
        return sum(asked.values())


def _insist_on_cancellable(queue: Queue, keys: Keys) -> None:
    find = queue.sql(queue.engine.jobs.statuses_of, chosen=keys.sql.chosen)
    statuses = dict(queue.db.execute(find, table=keys.table.table_name).fetchall())
    over = {status: count for status, count in statuses.items() if status in ("success", "error", "ignore")}
    if "cancelled" in statuses:
        return
    name = type(keys.table).__name__
    if over:
        what = ", ".join(f"{count} {status}" for status, count in over.items())
        raise JobNotCancellable(
            f"Nothing of {keys.label} is left to cancel: {what}. {name}.ignore_jobs(...) keeps failed jobs from "
            "being retried; to undo what is done, delete it from the table."
        )
    if keys.restricted and queue.db.execute(first_row(keys.sql.made_among)).fetchone():
        raise JobNotCancellable(f"Nothing of {keys.label} is left to cancel: it is in the table already.")
