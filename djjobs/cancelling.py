"""Cancelling: scheduled jobs are called off at once; running ones are asked to stop."""

from __future__ import annotations

from typing import Any

from .errors import JobNotCancellable
from .keys import Keys
from .queue import Queue
from .scheduling import set_status

__all__ = ["cancel", "cancel_run"]

#: How often jobs are looked for that others claim just then.
_MOST_PASSES = 20


def cancel(queue: Queue, keys: Keys, force: bool = False) -> int:
    """Call off the jobs of these keys; return how many were cancelled or asked to stop."""
    cancelled, asked = _call_off(queue, keys.table.table_name, keys.chosen_sql, force)
    if not asked + cancelled:
        _insist_on_cancellable(queue, keys)
    return asked + cancelled


def cancel_run(queue: Queue, table_name: str, run_id: int, force: bool = False) -> int | None:
    """Call off a run and its jobs; return how many were cancelled or asked to stop, None if all were over."""
    engine = queue.engine
    called_off = queue.change(engine.cancel_run, run=run_id)
    chosen = queue.sql(engine.jobs_of_run)
    cancelled, asked = _call_off(queue, table_name, chosen, force, engine.still_in_run, run=run_id)
    return cancelled + asked if called_off or cancelled or asked else None


def _call_off(
    queue: Queue, table_name: str, chosen: str, force: bool, also: str = "", **also_by: Any
) -> tuple[int, int]:
    """Call off the chosen jobs; how many were cancelled, and how many are asked to stop."""
    how = "force" if force else "cancel"
    has_uncalled = queue.sql(queue.engine.has_uncalled, chosen=chosen, also=also)
    cancelled = asked = 0
    for _ in range(_MOST_PASSES):
        # Running jobs first: one that is given back meanwhile is found among the scheduled ones.
        asked = _ask_running(queue, table_name, chosen, how, also, **also_by)
        cancelled += set_status(queue, table_name, chosen, ("scheduled",), "cancelled", also, **also_by)
        # One that was claimed between the two has escaped both.
        if not queue.db.execute(has_uncalled, table=table_name, **also_by).fetchone()[0]:
            break
    return cancelled, asked


def _ask_running(queue: Queue, table_name: str, chosen: str, how: str, also: str, **also_by: Any) -> int:
    engine = queue.engine
    parts = {"changes": engine.request_cancel, "also": f"{engine.has_worker} {also}"}
    request = queue.sql(engine.change_chosen, chosen=chosen, **parts)
    queue.db.change(request, table=table_name, statuses=("reserved",), how=how, **also_by)
    # Counted afterwards: to MySQL a row that had this request already has not changed.
    find = queue.sql(engine.asked_to_stop, chosen=chosen)
    asked = dict(queue.db.execute(find, table=table_name, **also_by).fetchall())
    if asked:
        queue.execute(engine.call_workers, workers=tuple(asked))
    return sum(asked.values())


def _insist_on_cancellable(queue: Queue, keys: Keys) -> None:
    find = queue.sql(queue.engine.statuses_of, chosen=keys.chosen_sql)
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
    if keys.restricted and queue.db.execute(f"{keys.made_among_sql} LIMIT 1").fetchone():
        raise JobNotCancellable(f"Nothing of {keys.label} is left to cancel: it is in the table already.")
