"""Cancelling: scheduled jobs are called off at once; running ones are asked to stop."""

from __future__ import annotations

from .errors import JobNotCancellable
from .keys import Keys
from .queue import Queue
from .scheduling import set_status

__all__ = ["cancel"]


def cancel(queue: Queue, keys: Keys, force: bool = False) -> int:
    """Call off the jobs of these keys; return how many were cancelled or asked to stop."""
    # Running jobs first: one that is given back meanwhile is found among the scheduled ones.
    asked = _ask_running(queue, keys, "force" if force else "cancel")
    cancelled = set_status(queue, keys, ("scheduled",), "cancelled")
    if not asked + cancelled:
        _insist_on_cancellable(queue, keys)
    return asked + cancelled


def _ask_running(queue: Queue, keys: Keys, how: str) -> int:
    engine, table_name = queue.engine, keys.table.table_name
    parts = {"changes": engine.request_cancel, "also": engine.has_worker}
    request = queue.sql(engine.change_chosen, chosen=keys.chosen_sql, **parts)
    queue.db.change(request, table=table_name, statuses=("reserved",), how=how)
    # Counted afterwards: to MySQL a row that had this request already has not changed.
    find = queue.sql(engine.asked_to_stop, chosen=keys.chosen_sql)
    asked = dict(queue.db.execute(find, table=table_name).fetchall())
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
