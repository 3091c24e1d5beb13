"""Scheduling: key_source minus target minus queue, in one statement, by one process at a time."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import DjJobsError
from .identity import process_id
from .keys import Keys
from .queue import Queue
from .run import Run
from .settings import settings

__all__ = ["DueTime", "insert_new", "is_scheduling", "put_back", "put_back_unmade", "schedule", "set_status"]

#: A moment with a time zone, or a delay by the server's clock, or now.
DueTime = datetime.datetime | datetime.timedelta | None

#: The scope of a scheduling that looks at all keys of the table.
_ALL = ""
#: How long the control table remembers a scheduling under restrictions.
_REMEMBERED = 3600


def schedule(
    queue: Queue,
    keys: Keys,
    *,
    priority: int,
    interval: float,
    force: bool = False,
    due_time: DueTime = None,
) -> Run:
    """Put every key that needs a job into the queue, unless that was done just now."""
    # A scheduling of all keys makes one of some keys needless.
    if interval and not force and keys.restricted and _is_scheduled(queue, keys.table.table_name, _ALL, interval):
        return Run(rate_limited=True)
    with _turn_to_schedule(queue, keys.table.table_name, _scope(keys, force), interval) as mine:
        if not mine:
            return Run(rate_limited=True)
        put_back_count = put_back(queue, keys, ("error", "ignore", "cancelled"), due_time) if force else 0
        return Run(scheduled=put_back_count + insert_new(queue, keys, "scheduled", priority, due_time))


def is_scheduling(queue: Queue, table_name: str) -> bool:
    """Whether somebody is scheduling this table right now."""
    return bool(queue.ask(queue.engine.is_scheduling, table=table_name))


def insert_new(
    queue: Queue, keys: Keys, status: str, priority: int, due_time: DueTime = None, few: bool = False
) -> int:
    """Insert the keys that are neither in the target nor in the queue; return how many. `few` expects few keys."""
    engine = queue.engine
    due, turn = _due_and_turn(queue, due_time, "%(priority)s")
    sql = queue.sql(
        engine.schedule_new,
        source=keys.source_sql,
        target=keys.target.full_table_name,
        one_by_one=engine.one_by_one if few else "",
        queued_here=engine.these_queued if keys.restricted else engine.all_queued,
        same_key=keys.same_key_sql,
        json=engine.json(keys.json_sql("todo")),
        hash=keys.hash_sql("source"),
        status=f"'{status}'",
        due=due,
        turn=turn,
        microseconds=engine.microseconds(f"ROW_NUMBER() OVER (ORDER BY {keys.order_sql})"),
    )
    parameters = {
        "table": keys.table.table_name,
        "priority": priority,
        "due_time": _due_parameter(due_time, keys.label),
    }
    inserted = queue.db.change(sql, **parameters, **queue.signature())
    if inserted:
        queue.announce()
    return inserted


def put_back(queue: Queue, keys: Keys, statuses: tuple[str, ...], due_time: DueTime = None) -> int:
    """Make jobs of these statuses `scheduled` again, keeping what they tell of earlier attempts."""
    due, turn = _due_and_turn(queue, due_time, "priority")
    changes = queue.sql(queue.engine.put_back, due=due, turn=turn)
    return _change(queue, keys, changes, statuses, keys.chosen_sql, due_time=_due_parameter(due_time, keys.label))


def put_back_unmade(queue: Queue, keys: Keys) -> int:
    """Make jobs `scheduled` again that succeeded, but whose row has left the target."""
    due, turn = _due_and_turn(queue, None, "priority")
    changes = queue.sql(queue.engine.put_back, due=due, turn=turn)
    return _change(queue, keys, changes, ("success",), keys.todo_sql)


def set_status(queue: Queue, keys: Keys, statuses: tuple[str, ...], status: str) -> int:
    """Give jobs of these statuses another one."""
    changes = queue.sql(queue.engine.set_status, status=status)
    return _change(queue, keys, changes, statuses, keys.chosen_sql)


def _change(queue: Queue, keys: Keys, changes: str, statuses: tuple[str, ...], chosen: str, **parameters: Any) -> int:
    sql = queue.sql(queue.engine.change_chosen, changes=changes, chosen=chosen, also="")
    changed = queue.db.change(sql, table=keys.table.table_name, statuses=statuses, **parameters)
    if changed:
        queue.announce()
    return changed


def _due_and_turn(queue: Queue, due_time: DueTime, priority: str) -> tuple[str, str]:
    """SQL of when a job is due, and of its place in line: none while it waits for a time to come."""
    engine = queue.engine
    if due_time is None:
        return engine.now, priority
    if isinstance(due_time, datetime.timedelta):
        due = f"{engine.now} + {engine.seconds('%(due_time)s')}"
    else:
        due = engine.moment("%(due_time)s")
    return due, f"CASE WHEN {due} <= {engine.now} THEN {priority} END"


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


def _scope(keys: Keys, force: bool) -> str:
    """What a scheduling looks at. Only one that looked at the same makes another needless."""
    if not keys.restricted and not force:
        return _ALL
    # DataJoint numbers the aliases of its subqueries anew each time.
    what = re.sub(r"[`\"]\$\w+[`\"]", "", keys.source_sql) if keys.restricted else ""
    return hashlib.sha256(f"{force} {what}".encode()).hexdigest()[:32]


@contextmanager
def _turn_to_schedule(queue: Queue, table_name: str, scope: str, interval: float) -> Iterator[bool]:
    """Yield whether it is our turn: nobody else is at it, and the last time is long enough ago."""
    engine = queue.engine
    parameters = {"table": table_name, "scope": scope, "worker": process_id()}
    if not _begin(queue, scope, parameters, interval):
        yield False
        return
    try:
        yield True
    except BaseException:
        # A scheduling that failed was no scheduling: the next one need not wait, and a new scope is forgotten.
        queue.change(engine.forget_scope, **parameters)
        queue.change(engine.abandon_scheduling, **parameters)
        raise
    queue.change(engine.end_scheduling, **parameters)
    if scope != _ALL:
        forget = queue.sql(engine.forget_scopes, interval=engine.seconds("%(interval)s"))
        queue.db.change(forget, table=table_name, interval=_REMEMBERED)


def _begin(queue: Queue, scope: str, parameters: dict[str, Any], interval: float) -> bool:
    engine, table_name = queue.engine, parameters["table"]
    # Looking first keeps the many that come too early from writing.
    is_scheduled = _is_scheduled(queue, table_name, scope, interval)
    if is_scheduled is None:
        queue.change(engine.add_scope, table=table_name, scope=scope)
        if scope == _ALL and engine.rehash_legacy_rows:
            # The table's first scheduling ever: jobs that DataJoint itself recorded become ours.
            queue.db.change(queue.sql(engine.rehash_legacy_rows, hash=engine.hash(engine.stored_key)), table=table_name)
    if is_scheduled and interval:
        return False
    begin = queue.sql(engine.begin_scheduling, mark=engine.seconds("%(mark)s"), interval=engine.seconds("%(interval)s"))
    return bool(queue.db.change(begin, **parameters, interval=interval, mark=settings.scheduling_timeout))


def _is_scheduled(queue: Queue, table_name: str, scope: str, interval: float) -> bool | None:
    """Whether a scheduling of this scope runs or is recent; None if there never was one."""
    sql = queue.sql(queue.engine.is_scheduled, interval=queue.engine.seconds("%(interval)s"))
    row = queue.db.execute(sql, table=table_name, scope=scope, interval=interval).fetchone()
    return None if row is None else bool(row[0])
