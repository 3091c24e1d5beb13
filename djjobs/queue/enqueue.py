"""Scheduling: key_source minus target minus queue, in one statement, by one process at a time."""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unicodedata import category

from datajoint.errors import DuplicateError

from ..errors import DjJobsError
from ..settings import settings
from .database import portions
from .identity import process_id
from .keys import Keys
from .native import rehash_legacy_rows
from .policy import has_hook
from .queue import Queue
from .tables import RUN_NAME_LENGTH

__all__ = [
    "DueTime",
    "Scheduled",
    "insert_few",
    "insert_new",
    "is_scheduling",
    "put_back",
    "put_back_unmade",
    "schedule",
    "set_status",
]

#: A moment with a time zone, or a delay by the server's clock, or now.
DueTime = datetime.datetime | datetime.timedelta | None

#: The scope of a scheduling that looks at all keys of the table.
_ALL = ""
#: For how many seconds the control table remembers a scheduling under restrictions.
_REMEMBERED = 3600
#: For how many seconds a statement may have waited for the control row.
_LONGEST_WAIT_FOR_ROW = 60.0
#: The ids of runs are below this, so that JSON and floats hold them exactly.
_RUN_IDS = 2**53
#: Categories of characters that a name must not have: controls, ends of lines, and halves of characters.
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")


@dataclass(frozen=True)
class Scheduled:
    """What a scheduling did. There is no run if nothing was to do and the run has no name."""

    run_id: int | None = None
    count: int = 0
    rate_limited: bool = False


def schedule(
    queue: Queue,
    keys: Keys,
    *,
    priority: int,
    interval: float,
    force: bool = False,
    due_time: DueTime = None,
    name: str | None = None,
    take_along: bool = True,
    automatic: bool = False,
) -> Scheduled:
    """Put every key that needs a job into the queue, as one run, unless that was done a moment ago.

    Parameters
    ----------
    take_along : bool
        Whether jobs that events have put there, and that nobody has begun, become part of the run. Defaults to True.
    automatic : bool
        Whether it is an event that schedules. Defaults to False.
    """
    _due_parameter(due_time, keys.label)
    _check_name(name, keys.label)
    # After a scheduling of all keys, one of some keys is not needed.
    if interval and not force and keys.restricted and _is_scheduled(queue, keys.table.table_name, _ALL, interval):
        return Scheduled(rate_limited=True)
    with _right_to_schedule(queue, keys.table.table_name, _scope(keys, force), interval) as mine:
        if not mine:
            return Scheduled(rate_limited=True)
        rehash_legacy_rows(queue, keys.table.table_name, keys)
        return _NewRun(queue, keys, name or "", due_time, automatic=automatic).fill(priority, force, take_along)


def is_scheduling(queue: Queue, table_name: str) -> bool:
    """Whether somebody is scheduling this table right now."""
    return bool(queue.ask(queue.engine.control.is_scheduling, table=table_name, ahead=_ahead()))


def insert_new(queue: Queue, keys: Keys, status: str, priority: int, few: bool = False, automatic: bool = False) -> int:
    """Insert the keys that are neither in the target nor in the queue; return how many. `few` expects few keys."""
    about = {"status": status, "priority": priority, "run": None, "automatic": int(automatic)}
    insert = _insert_sql(queue, keys, None, few, careful=True)
    inserted = queue.db.change(insert, table=keys.table.table_name, **about, **queue.signature())
    if inserted and automatic:
        _note_automatic(queue, keys)
    if inserted:
        queue.announce()
    return inserted


def insert_few(queue: Queue, keys: Keys, priority: int) -> int:
    """Schedule a few keys for an event; return how many were new.

    They become a run only if the table has hooks of runs.
    """
    if any(has_hook(keys.table, name) for name in ("prepare_run", "finish_run")):
        return _NewRun(queue, keys, "", None, few=True, automatic=True).fill(priority).count
    return insert_new(queue, keys, "scheduled", priority, few=True, automatic=True)


def _note_automatic(queue: Queue, keys: Keys) -> None:
    """Note that there may be automatic jobs.

    This comes after the insert. Who takes such jobs into a run deletes the note before it looks for them. So no job is
    overlooked for good.
    """
    queue.change(queue.engine.control.note_automatic, table=keys.table.table_name)


def _insert_sql(queue: Queue, keys: Keys, due_time: DueTime, few: bool, careful: bool) -> str:
    """The statement that inserts new jobs. A careful one skips jobs that others insert meanwhile."""
    enqueue = queue.engine.enqueue
    statement = enqueue.schedule_new_carefully if careful else enqueue.schedule_new
    return queue.sql(statement, **enqueue.new_keys(keys.sql, few, keys.restricted), **_due(queue, due_time))


class _NewRun:
    """A run that is being made. It appears together with its jobs, or not at all."""

    def __init__(
        self, queue: Queue, keys: Keys, name: str, due_time: DueTime, few: bool = False, automatic: bool = False
    ) -> None:
        self._queue, self._keys, self._name, self._due_time, self._few = queue, keys, name, due_time, few
        self._run_id = secrets.randbelow(_RUN_IDS - 1) + 1
        self._tried = False
        # A careful statement takes longer, and is hardly ever needed.
        self._careful = few
        self._parameters = {
            "table": keys.table.table_name,
            "run": self._run_id,
            "status": "scheduled",
            "due_time": _due_parameter(due_time, keys.label),
            "automatic": int(automatic),
            **queue.signature(),
        }

    def fill(self, priority: int, force: bool = False, take_along: bool = False) -> Scheduled:
        """Put the jobs into the queue."""
        count = self._queue.db.retry(lambda: self._try(priority, force, take_along))
        if count and self._parameters["automatic"]:
            _note_automatic(self._queue, self._keys)
        if count:
            self._queue.announce()
            self._queue.has_grown(count)
        return Scheduled(self._run_id if count or self._name else None, count)

    def _try(self, priority: int, force: bool, take_along: bool) -> int:
        queue = self._queue
        if self._tried:
            # The server may have committed, though its answer was lost.
            row = queue.execute(queue.engine.runs.total_of_run, run=self._run_id).fetchone()
            if row is not None:
                return row[0]
        self._tried = True
        try:
            return self._insert(priority, force, take_along)
        except DuplicateError:
            # Others have put some of the keys into the queue since the statement began.
            if self._careful:
                raise
            self._careful = True
            return self._insert(priority, force, take_along)

    def _insert(self, priority: int, force: bool, take_along: bool) -> int:
        queue = self._queue
        insert = _insert_sql(queue, self._keys, self._due_time, self._few, self._careful)
        with queue.db.transaction():
            count = self._move_here(("error", "ignore", "cancelled")) if force else 0
            count += self._take_along(priority) if take_along else 0
            count += queue.db.execute(insert, **self._parameters, priority=priority).rowcount
            if count or self._name:
                self._add(count)
        return count

    def _move_here(self, statuses: tuple[str, ...]) -> int:
        """Put back jobs of these statuses into this run; return how many. They leave the runs that they were in."""
        queue, engine, chosen = self._queue, self._queue.engine, self._keys.sql.chosen
        parameters = {**self._parameters, "statuses": statuses}
        leaving = queue.db.execute(queue.sql(engine.runs.count_leaving, chosen=chosen), **parameters).fetchall()
        self._leave_runs(dict(leaving))
        changes = queue.sql(engine.jobs.put_back_in_run, **_due(queue, self._due_time))
        sql = queue.sql(engine.jobs.change_chosen, changes=changes, chosen=chosen, also="")
        return queue.db.execute(sql, **parameters).rowcount

    def _take_along(self, priority: int) -> int:
        """Make jobs that events have put there, and that nobody has begun, part of this run; return how many."""
        queue, engine, join = self._queue, self._queue.engine, ""
        if not queue.execute(engine.control.may_be_automatic, **self._parameters).fetchone():
            return 0
        if self._keys.restricted:
            join = queue.sql(engine.jobs.join_chosen, chosen=self._keys.sql.chosen)
        else:
            queue.execute(engine.control.forget_automatic, **self._parameters)
        find = queue.sql(engine.enqueue.find_automatic, join_chosen=join)
        hashes = [key_hash for (key_hash,) in queue.db.execute(find, **self._parameters).fetchall()]
        take_along = engine.enqueue.take_along if self._due_time is None else engine.enqueue.take_along_later
        changes = queue.sql(take_along, **_due(queue, self._due_time))
        change = queue.sql(engine.jobs.change_these, changes=changes, also="")
        count = 0
        for portion in portions(hashes):
            locked = queue.execute(engine.enqueue.lock_automatic, **self._parameters, hashes=portion).fetchall()
            if not locked:
                continue
            self._leave_runs(Counter(run_id for _, run_id in locked if run_id is not None))
            which = {"hashes": tuple(key_hash for key_hash, _ in locked), "statuses": ("scheduled",)}
            count += queue.db.execute(change, **self._parameters, **which, priority=priority).rowcount
        return count

    def _leave_runs(self, leaving: Mapping[int, int]) -> None:
        """Tell runs how many jobs leave them."""
        queue, engine = self._queue, self._queue.engine
        for run_id, count in leaving.items():
            queue.execute(engine.runs.shrink_run, run=run_id, count=count)
            queue.execute(engine.runs.end_empty_run, run=run_id)

    def _add(self, count: int) -> None:
        queue, due = self._queue, _due(self._queue, self._due_time)
        about = {
            "name": self._name,
            "restriction": self._keys.restriction_text,
            "total": count,
            "finish": int(bool(count) and has_hook(self._keys.table, "finish_run")),
        }
        queue.db.execute(queue.sql(queue.engine.runs.add_run, **due), **self._parameters, **about)


def put_back(queue: Queue, keys: Keys, statuses: tuple[str, ...]) -> int:
    """Make jobs of these statuses `scheduled` again; return how many. What they tell of earlier attempts stays."""
    return _put_back(queue, keys, statuses, keys.sql.chosen)


def put_back_unmade(queue: Queue, keys: Keys) -> int:
    """Make jobs `scheduled` again that succeeded, and whose row has left the target; return how many."""
    return _put_back(queue, keys, ("success",), keys.sql.todo)


def _put_back(queue: Queue, keys: Keys, statuses: tuple[str, ...], chosen: str) -> int:
    """Put the chosen jobs back. Their runs go on, also those that were cancelled."""
    engine, parameters = queue.engine, {"table": keys.table.table_name, "statuses": statuses}
    reopen = queue.sql(engine.runs.reopen_runs, chosen=chosen)
    changes = queue.sql(engine.jobs.put_back, **_due(queue, None))
    change = queue.sql(engine.jobs.change_chosen, changes=changes, chosen=chosen, also="")

    def attempt() -> int:
        with queue.db.transaction():
            queue.db.execute(reopen, **parameters)
            return queue.db.execute(change, **parameters).rowcount

    changed = queue.db.retry(attempt)
    if changed:
        queue.announce()
    return changed


def set_status(queue: Queue, table_name: str, chosen: str, statuses: tuple[str, ...], status: str) -> int:
    """Give another status to the chosen jobs of these statuses; return how many."""
    changes = queue.sql(queue.engine.jobs.set_status, status=status)
    change = queue.sql(queue.engine.jobs.change_chosen, changes=changes, chosen=chosen, also="")
    changed = queue.db.change(change, table=table_name, statuses=statuses)
    if changed:
        queue.announce()
    return changed


def _due(queue: Queue, due_time: DueTime) -> dict[str, str]:
    """The SQL of when a job is due, and of its turn."""
    kind = "now" if due_time is None else "delay" if isinstance(due_time, datetime.timedelta) else "moment"
    return queue.engine.dialect.due(kind)


def _due_parameter(due_time: DueTime, label: str) -> Any:
    if due_time is None:
        return None
    if isinstance(due_time, datetime.timedelta):
        return due_time.total_seconds()
    if not isinstance(due_time, datetime.datetime) or due_time.tzinfo is None:
        raise DjJobsError(
            f"due_time for {label} must be a timedelta or a datetime with a time zone, not {due_time!r}: "
            "for example timedelta(hours=2)."
        )
    return due_time.astimezone(datetime.timezone.utc).replace(tzinfo=None)


def _check_name(name: Any, label: str) -> None:
    if name is None:
        return
    if not isinstance(name, str) or not name.strip() or any(category(sign) in _NO_TEXT for sign in name):
        raise DjJobsError(f'The name of a run of {label} must be a line of text, as in "rerun m1", not {name!r}.')
    if len(name) > RUN_NAME_LENGTH:
        raise DjJobsError(
            f"The name of a run of {label} may have {RUN_NAME_LENGTH} characters; {name[:20]!r}... has {len(name)}."
        )


def _scope(keys: Keys, force: bool) -> str:
    """A name for what a scheduling looks at. The rate limit is for schedulings that look at the same."""
    if not keys.restricted and not force:
        return _ALL
    # DataJoint gives new numbers to its subqueries each time.
    what = re.sub(r"[`\"]\$\w+[`\"]", "", keys.sql.source) if keys.restricted else ""
    return hashlib.sha256(f"{force} {what}".encode()).hexdigest()[:32]


@contextmanager
def _right_to_schedule(queue: Queue, table_name: str, scope: str, interval: float) -> Iterator[bool]:
    """Yield whether we may schedule: nobody else does it now, and the last scheduling is long enough ago."""
    engine = queue.engine
    parameters = {"table": table_name, "scope": scope, "worker": process_id()}
    if not _begin(queue, scope, parameters, interval):
        yield False
        return
    try:
        yield True
    except BaseException:
        # A scheduling that failed does not count. The next one need not wait, and a new scope is forgotten.
        queue.change(engine.control.forget_scope, **parameters)
        queue.change(engine.control.abandon_scheduling, **parameters)
        raise
    queue.change(engine.control.end_scheduling, **parameters)
    if scope != _ALL:
        queue.change(engine.control.forget_scopes, table=table_name, interval=_REMEMBERED)


def _begin(queue: Queue, scope: str, parameters: dict[str, Any], interval: float) -> bool:
    engine, table_name = queue.engine, parameters["table"]
    # Many come too early. They look first, so that they need not write.
    is_scheduled = _is_scheduled(queue, table_name, scope, interval)
    if is_scheduled is None:
        queue.change(engine.control.add_scope, table=table_name, scope=scope)
    if is_scheduled and interval:
        return False
    limits = {"interval": interval, "mark": settings.scheduling_timeout, "ahead": _ahead()}
    return bool(queue.change(engine.control.begin_scheduling, **parameters, **limits))


def _is_scheduled(queue: Queue, table_name: str, scope: str, interval: float) -> bool | None:
    """Whether a scheduling of this scope runs or is recent; None if there never was one."""
    which = {"table": table_name, "scope": scope, "interval": interval, "ahead": _ahead()}
    row = queue.execute(queue.engine.control.is_scheduled, **which).fetchone()
    return None if row is None else bool(row[0])


def _ahead() -> float:
    """How far ahead a time of the control row can be. A statement that waited for the row has an earlier time than it
    finds there."""
    return settings.scheduling_timeout + _LONGEST_WAIT_FOR_ROW
