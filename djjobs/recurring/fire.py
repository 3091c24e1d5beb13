"""A firing: the jobs of a target are scheduled, cleaned up, or both, and the outcome is written down."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ..dj.compat import datajoint_api
from ..interrupt import start_thread
from ..queue.database import Database
from ..settings import settings
from ..work.outcome import describe
from .rows import WHAT, Firing, Schedule, Timetable

__all__ = ["carry_out", "carry_out_here"]


def carry_out(timetable: Timetable, schedule: Schedule, firing: Firing, tables: Sequence[Any]) -> tuple[str, str]:
    """Do what the schedule says with its tables, and record the outcome.

    The target in the row is only a name here: it is never imported.

    All of it can be done twice without harm, so a firing whose process has died is simply carried out again, and a
    step that has lost its connection is done again on a new one.

    Returns
    -------
    tuple of str
        The state, "done", "failed" or "lost", and the outcome in words. Lost: somebody else has the firing.
    """
    if not timetable.keep(firing):
        return "lost", "It was given to another scheduler."
    lines, failures = [], []
    try:
        for table in tables:
            for step in WHAT[schedule.what]:
                # One table that cannot be seen to does not keep the others waiting.
                try:
                    lines.append(timetable.queue.db.retry(functools.partial(_STEPS[step], table)))
                except Exception as error:
                    failures.append(describe(error))
        if "cleanup" in WHAT[schedule.what]:
            timetable.forget_old()
    except Exception as error:
        failures.append(describe(error))
    state, outcome = ("failed" if failures else "done"), "; ".join([*failures, *lines])
    if not timetable.end(firing, state, outcome):
        return "lost", "It was given to another scheduler."
    return state, outcome


def _schedule_jobs(table: Any) -> str:
    # 0: what somebody else scheduled a moment ago is no reason to leave this out.
    count = int(table.schedule_jobs(min_scheduling_interval=0))
    return f"{count} {'job' if count == 1 else 'jobs'} scheduled in {table.__name__}"


def _clean_up(table: Any) -> str:
    counts = table.cleanup_jobs()
    removed = sum(count for name, count in counts.items() if name != "recovered")
    return f"{removed} removed and {counts['recovered']} recovered in {table.__name__}"


_STEPS = {"jobs": _schedule_jobs, "cleanup": _clean_up}


def carry_out_here(timetable: Timetable, schedule: Schedule, firing: Firing, tables: Sequence[Any]) -> tuple[str, str]:
    """Carry it out in this process, which somebody asked to; if that is interrupted, the firing has failed."""
    try:
        with _kept(timetable, firing):
            return carry_out(timetable, schedule, firing, tables)
    except BaseException as error:
        timetable.queue.db.start_afresh()
        timetable.end(firing, "failed", describe(error))
        raise


@contextlib.contextmanager
def _kept(timetable: Timetable, firing: Firing) -> Iterator[None]:
    """Meanwhile, a thread with a connection of its own shows that the firing runs."""
    db = Database(datajoint_api.another_connection(timetable.queue.db.connection))
    beside = Timetable(timetable.queue.on(db))
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(settings.leader_expiry / 3):
            with contextlib.suppress(Exception):
                beside.keep(firing)
        db.connection.close()

    start_thread(keep)
    try:
        yield
    finally:
        ended.set()
