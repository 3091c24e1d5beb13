"""The schedules of one schema, their firings and their leader: what happens to their rows, one statement each."""

from __future__ import annotations

import datetime
import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..queue.queue import Queue
from ..queue.tables import ERROR_MESSAGE_LENGTH, Firings, Leader, Schedules
from ..settings import settings
from .rule import Rule

__all__ = ["WHAT", "Firing", "LivingLeader", "Schedule", "Timetable", "new_token", "role_for"]

#: What a schedule can be about, and the steps of it in their order.
WHAT = {"jobs": ("jobs",), "cleanup": ("cleanup",), "both": ("cleanup", "jobs")}
_ROLE_LENGTH = 16


@dataclass(frozen=True)
class Schedule:
    """What is to be done, to which tables, and when.

    Attributes
    ----------
    fault : str
        Why it cannot be fired; empty if it can. A row may have been written by hand.
    """

    name: str
    target: str
    what: str
    rule: Rule
    enabled: bool
    next_time: datetime.datetime
    fault: str = ""

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Schedule:
        """Does not raise, whatever is in the row: the other schedules must not wait for it."""
        name, target, what, every, cron, timezone, enabled, next_time = row
        rule, fault = Rule.stored(every, cron, timezone)
        if what not in WHAT:
            fault = f"What it does must be {', '.join(WHAT)}, not {what!r}."
        if not isinstance(next_time, datetime.datetime):
            fault = fault or "Its next time is no time."
        return cls(name, target, what, rule, bool(enabled), next_time, fault)


class LivingLeader(NamedTuple):
    """Where the scheduler is that leads, and how long until it is taken for dead."""

    where: str
    seconds_left: float


@dataclass(frozen=True)
class Firing:
    """One firing of a schedule. The process that has its token runs it."""

    name: str
    fire_time: datetime.datetime
    runner: str
    attempt: int = 1

    @property
    def token(self) -> dict[str, Any]:
        return {"name": self.name, "fire_time": self.fire_time, "runner": self.runner}


class Timetable:
    """`~schedules`, `~firings` and `~leader` of one schema.

    Parameters
    ----------
    queue
        The queue of the schema, on the connection that is to be used.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.database = queue.database
        self.schedules, self.firings, self.leader = self._tables = self.tables_in(queue.db.connection, queue.database)

    @staticmethod
    def tables_in(connection: Any, database: str) -> tuple[Schedules, Firings, Leader]:
        return Schedules(connection, database), Firings(connection, database), Leader(connection, database)

    @classmethod
    def of(cls, connection: Any, database: str) -> Timetable:
        """The timetable of a schema, declared if it is not there yet."""
        timetable = cls(Queue.of(connection, database))
        timetable.queue.db.retry(timetable._find_or_declare)
        return timetable

    def _find_or_declare(self) -> None:
        db = self.queue.db
        if all(table.is_declared for table in self._tables):
            return
        with db.locked(f"djjobs {self.database}"):
            for table in self._tables:
                if not table.is_declared:
                    self.queue.declare(table)

    @classmethod
    def if_declared(cls, connection: Any, database: str) -> Timetable | None:
        """The timetable of a schema, if it has one; nothing is declared."""
        declared = all(table.is_declared for table in cls.tables_in(connection, database))
        return cls.of(connection, database) if declared else None

    def _execute(self, statement: str, parts: dict[str, str] | None = None, **parameters: Any) -> Any:
        """Run one statement, which is a transaction by itself."""
        names = {
            "schedules": self.schedules.full_table_name,
            "firings": self.firings.full_table_name,
            "leader": self.leader.full_table_name,
            **(parts or {}),
        }
        limits = {"expiry": settings.leader_expiry, "retention": settings.retention}
        return self.queue.db.execute(self.queue.sql(statement, **names), **limits, **parameters)

    def _who(self) -> dict[str, Any]:
        return {name: value for name, value in self.queue.signature().items() if name != "connection_id"}

    def now(self) -> datetime.datetime:
        """The server's time, which alone counts."""
        return self._execute(self.queue.engine.connection.server_time).fetchone()[0]

    # -- schedules ---------------------------------------------------------------------------------------------

    def everything(self) -> list[Schedule]:
        """All schedules, in the order of their names."""
        rows = self._execute(self.queue.engine.schedules.find_schedules).fetchall()
        return [Schedule.from_row(row) for row in rows]

    def find(self, name: str) -> Schedule | None:
        row = self._execute(self.queue.engine.schedules.find_schedule, name=name).fetchone()
        return row and Schedule.from_row(row)

    def add(self, schedule: Schedule) -> bool:
        """Enter a schedule; whether its name was still to be had."""
        rule = schedule.rule
        values = {"name": schedule.name, "target": schedule.target, "what": schedule.what, "every": rule.every}
        when = {"cron": rule.cron, "timezone": rule.timezone, "next": schedule.next_time}
        user = self._who()["user"]
        return bool(self._execute(self.queue.engine.schedules.add_schedule, None, **values, **when, user=user).rowcount)

    def remove(self, name: str) -> bool:
        """Remove a schedule, then its history; whether there was one."""
        removed = bool(self._execute(self.queue.engine.schedules.remove_schedule, name=name).rowcount)
        self._execute(self.queue.engine.schedules.forget_firings_of, name=name)
        return removed

    def pause(self, name: str) -> bool:
        return bool(self._execute(self.queue.engine.schedules.pause_schedule, name=name).rowcount)

    def resume(self, schedule: Schedule) -> bool:
        """Let it be due again, from now on: what was due meanwhile is not made up."""
        engine, now = self.queue.engine, self.now()
        next_time = schedule.rule.following(schedule.next_time, now)
        return bool(self._execute(engine.schedules.resume_schedule, name=schedule.name, next=next_time).rowcount)

    # -- the leader ----------------------------------------------------------------------------------------------

    # Each target has a leader of its own. A scheduler that was not started for the tables of a schedule then keeps
    # nobody from firing it.

    def lead(self, leader: str, target: str) -> bool:
        """Become the leader for a target, or go on being it; whether that is so."""
        engine, role = self.queue.engine, role_for(target)
        if self._lead(leader, role):
            return True
        if target in self.living_leaders([target]):
            return False
        # Perhaps nobody ever led it.
        self._execute(engine.schedules.add_leader, role=role)
        return self._lead(leader, role)

    def _lead(self, leader: str, role: str) -> bool:
        who = self._who()
        return bool(self._execute(self.queue.engine.schedules.lead, leader=leader, role=role, **who).rowcount)

    def resign(self, leader: str) -> None:
        """Let others take over at once all that it leads."""
        self._execute(self.queue.engine.schedules.resign, leader=leader)

    def living_leaders(self, targets: Iterable[str]) -> dict[str, LivingLeader]:
        """The schedulers that lead some targets. A target is missing if nobody is known to be alive who leads it."""
        rows = self._execute(self.queue.engine.schedules.living_leaders).fetchall()
        by_role = {
            role: LivingLeader(f"{host} (process {pid})", (expires - now).total_seconds())
            for role, host, pid, expires, now in rows
        }
        return {target: by_role[role_for(target)] for target in targets if role_for(target) in by_role}

    # -- firings -------------------------------------------------------------------------------------------------

    def fire(self, schedule: Schedule, now: datetime.datetime, leader: str) -> tuple[Firing | None, str]:
        """Fire a schedule that is due, once for all that was missed; it is due again at a time to come.

        Should this process die between two statements, the next leader finds the firing there and goes on from it.

        Returns
        -------
        Firing or None
            The firing, if this process has to run it.
        str
            Why it was skipped; empty if it was not.
        """
        due, engine = schedule.next_time, self.queue.engine
        guard = {"due": due, "leader": leader, "role": role_for(schedule.target)}
        entered = self._execute(engine.schedules.entered_already, name=schedule.name, due=due).fetchone()[0]
        if entered is not None:
            self._advance(schedule, entered, entered, guard)
            return None, ""
        firing = Firing(schedule.name, schedule.rule.latest(due, now), new_token())
        about = {**guard, "missed_since": due if firing.fire_time > due else None, "by_hand": 0}
        mine, skipped = self._insert(firing, "running", "", engine.schedules.still_due, **about), ""
        if not mine:
            why = self._why_skipped(schedule.name)
            skipped = why if self._insert(firing, "skipped", why, engine.schedules.still_due, **about) else ""
        self._advance(schedule, firing.fire_time, now, guard)
        return (firing if mine else None), skipped

    def _advance(
        self, schedule: Schedule, fire_time: datetime.datetime, now: datetime.datetime, guard: dict[str, Any]
    ) -> None:
        parts = {"fired": self.queue.sql(self.queue.engine.schedules.fired, firings=self.firings.full_table_name)}
        following = schedule.rule.following(schedule.next_time, now)
        token = {"name": schedule.name, "fire_time": fire_time}
        self._execute(self.queue.engine.schedules.advance, parts, next=following, **token, **guard)

    def fire_by_hand(self, name: str) -> tuple[Firing, str]:
        """An extra firing, now; and why it was skipped, if it was."""
        firing = Firing(name, self.now(), new_token())
        about: dict[str, Any] = {"missed_since": None, "by_hand": 1}
        if self._insert(firing, "running", "", **about):
            return firing, ""
        why = self._why_skipped(name)
        self._insert(firing, "skipped", why, **about)
        return firing, why

    def _insert(self, firing: Firing, state: str, outcome: str, guard: str = "", **about: Any) -> bool:
        values = {"state": state, "outcome": outcome, "running": 1 if state == "running" else None}
        parts = {"guard": guard and self.queue.sql(guard, leader=self.leader.full_table_name)}
        inserted = self._execute(
            self.queue.engine.schedules.fire, parts, **firing.token, **values, **about, **self._who()
        )
        return bool(inserted.rowcount)

    def _why_skipped(self, name: str) -> str:
        row = self._execute(self.queue.engine.schedules.running_firing, name=name).fetchone()
        if row is None:
            return "the firing before it still ran"
        return f"the firing of {row[0]:%Y-%m-%d %H:%M:%S} UTC still ran on {row[1]} (process {row[2]})"

    def lost_firings(self) -> list[tuple[Firing, str]]:
        """The firings whose process was not heard of for too long, and where that was."""
        rows = self._execute(self.queue.engine.schedules.find_lost_firings).fetchall()
        return [
            (Firing(name, fire_time, runner, attempt), f"{host} (process {pid})")
            for name, fire_time, runner, attempt, host, pid in rows
        ]

    def take_up(self, lost: Firing, leader: str, target: str) -> Firing | None:
        """Get a lost firing into the hands of this process, which leads its target; None if somebody else has it."""
        firing = Firing(lost.name, lost.fire_time, new_token(), lost.attempt + 1)
        token = {**firing.token, "lost": lost.runner, "leader": leader, "role": role_for(target)}
        taken = self._execute(self.queue.engine.schedules.take_up_firing, None, **token, **self._who()).rowcount
        return firing if taken else None

    def keep(self, firing: Firing) -> bool:
        """Show that a firing runs; whether that is still true."""
        return bool(self._execute(self.queue.engine.schedules.keep_firing, None, **firing.token).rowcount)

    def end(self, firing: Firing, state: str, outcome: str) -> bool:
        """The firing is done or has failed; whether it was still this process's to say so."""
        engine, result = self.queue.engine, {"state": state, "outcome": outcome[:ERROR_MESSAGE_LENGTH]}
        self._execute(engine.schedules.note_outcome, None, **firing.token, **result)
        return bool(self._execute(engine.schedules.end_firing, None, **firing.token, **result).rowcount)

    def give_back(self, firing: Firing) -> None:
        """Let the next leader run it, at once."""
        self._execute(self.queue.engine.schedules.give_back_firing, None, **firing.token)

    def forget_old(self) -> None:
        """Remove the history that is older than the retention, and leaders that nobody has heard of since then."""
        self._execute(self.queue.engine.schedules.forget_firings)
        self._execute(self.queue.engine.schedules.forget_leaders)

    def note_unfired(self, schedule: Schedule, state: str, why: str) -> None:
        """Let everybody see why a schedule that is due is not fired. It stays due."""
        why = why[:ERROR_MESSAGE_LENGTH]
        self._execute(self.queue.engine.schedules.note_unfired, name=schedule.name, state=state, outcome=why)


def role_for(target: str) -> str:
    """The key of the row in `~leader` that says who leads a target."""
    return hashlib.sha256(target.encode()).hexdigest()[:_ROLE_LENGTH]


def new_token() -> str:
    """What no other process ever has."""
    return str(uuid.uuid4())
