"""A schema as a scheduler watches it: which schedules are for this scheduler, and which of these it leads."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..settings import settings
from ..table.targets import loaded_tables
from .rows import LivingLeader, Schedule, Timetable

__all__ = ["LONGEST_WAIT", "Led", "Watch"]

logger = logging.getLogger("djjobs")

#: New schedules are noticed after so many seconds at most.
LONGEST_WAIT = 5.0


@dataclass(frozen=True)
class Led:
    """A schedule that this scheduler leads, and its tables."""

    schedule: Schedule
    tables: tuple[Any, ...]


class Watch:
    """One schema.

    Parameters
    ----------
    timetable : Timetable
        Its schedules.
    tables : sequence of type
        The tables of this schema that the scheduler was started for, upstream first. It touches no others.
    scheduler : str
        The id of the scheduler.
    """

    def __init__(self, timetable: Timetable, tables: Sequence[Any], scheduler: str) -> None:
        self.timetable = timetable
        self._tables, self._scheduler = tuple(tables), scheduler
        #: When to look again, on this process's own clock.
        self.next_look = 0.0
        #: How many rows could not be understood.
        self.faults = 0
        #: The schedules that could not be fired the last time, because the server refused it.
        self.stuck: set[str] = set()
        self._next_sign = 0.0
        #: For each target: whether this scheduler leads it.
        self._leads: dict[str, bool] = {}
        self._told: set[tuple[str, str]] = set()

    def led(self) -> list[Led]:
        """The schedules that this scheduler leads now. Also says when to look again, if nothing is due before."""
        mine, others = [], []
        for schedule in self.timetable.everything():
            tables = self._own_tables(schedule.target)
            if tables:
                mine.append(Led(schedule, tables))
            elif schedule.enabled:
                others.append(schedule)
        self._lead({one.schedule.target for one in mine})
        if others:
            self._leave(others)
        return [one for one in mine if self._leads[one.schedule.target] and not self._is_faulty(one.schedule)]

    def doubt(self) -> None:
        """Something was not as a leader expects it: look at once whether this scheduler still leads."""
        self._next_sign = 0.0

    def wait(self, seconds: float) -> None:
        """Look again after so many seconds."""
        self.next_look = time.monotonic() + seconds

    def wait_at_most(self, seconds: float) -> None:
        """Look again after so many seconds, or earlier if that was said before."""
        self.next_look = min(self.next_look, time.monotonic() + max(0.0, seconds))

    def _own_tables(self, target: str) -> tuple[Any, ...]:
        """The tables that a target names, if this scheduler was started for all of them; else none."""
        named = loaded_tables(target, self.timetable.database)
        own = tuple(table for table in self._tables if table in named)
        return own if len(own) == len(named) else ()

    # -- leading -------------------------------------------------------------------------------------------------

    def _lead(self, targets: set[str]) -> None:
        """Keep the lead of these targets, or get it where nobody else has it."""
        before = self._leads
        has_to_show = time.monotonic() >= self._next_sign
        if has_to_show:
            self._next_sign = time.monotonic() + settings.leader_expiry / 3
        led = {target for target in targets if before.get(target)}
        leaders = self.timetable.living_leaders(targets) if led != targets else {}
        wanted = {target for target in targets if (has_to_show if target in led else target not in leaders)}
        got = {target for target in sorted(wanted) if self.timetable.lead(self._scheduler, target)}
        self._leads = {target: target in (got if target in wanted else led) for target in targets}
        self.wait(min(LONGEST_WAIT, max(0.0, self._next_sign - time.monotonic())))
        if lost := wanted - got:
            leaders |= self.timetable.living_leaders(lost)
        for target in targets:
            if not self._leads[target] and target in leaders:
                # Looked at again the moment that the other one is taken for dead.
                self.wait_at_most(leaders[target].seconds_left)
        self._tell_who_leads(before, leaders)

    def _tell_who_leads(self, before: dict[str, bool], leaders: dict[str, LivingLeader]) -> None:
        changed: dict[str, list[str]] = {}
        for target, leads in sorted(self._leads.items()):
            if leads != before.get(target):
                other = leaders.get(target)
                words = "leads" if leads else "stands by" if other is None else f"stands by, {other.where} leads"
                changed.setdefault(words, []).append(target)
        for words, targets in changed.items():
            where = f"{self.timetable.database}: {', '.join(targets)}"
            logger.info("Scheduler %s %s in %s.", self._scheduler, words, where, extra={"event": "leader"})

    # -- what it does not fire ------------------------------------------------------------------------------------

    def _leave(self, schedules: list[Schedule]) -> None:
        """Say once which schedules are for others. If there are no others, say so, and show it in the row."""
        now, leaders = self.timetable.now(), self.timetable.living_leaders({one.target for one in schedules})
        for schedule in schedules:
            why = f"it is about {schedule.target}, and this scheduler was not started for all of these tables"
            self._tell_once(logging.INFO, schedule, f"is not for this scheduler: {why}. It is left to others.")
            if schedule.target in leaders or schedule.fault:
                continue
            # Whoever leads it may have been started just now.
            if (now - schedule.next_time).total_seconds() > settings.leader_expiry:
                start = f"If you know this target, start one: {shlex.join(['djjobs', 'scheduler', schedule.target])}."
                words = f"is due, and no scheduler runs for its tables. {start} Else {self._remove(schedule)}."
                if self._tell_once(logging.WARNING, schedule, words):
                    self.timetable.note_unfired(schedule, "waiting", "No scheduler runs for its tables.")

    def _is_faulty(self, schedule: Schedule) -> bool:
        """Whether the row means nothing; says so once."""
        if not (schedule.fault and schedule.enabled):
            return bool(schedule.fault)
        self.complain(schedule, schedule.fault)
        return True

    def complain(self, schedule: Schedule, fault: str) -> None:
        """A schedule cannot be fired, and it will be so the next time, too: say it once, and in its row."""
        self.faults += 1
        remedy = f"Pause it, or {self._remove(schedule)} and add it again."
        if self._tell_once(logging.ERROR, schedule, f"cannot be fired: {fault} {remedy}"):
            self.timetable.note_unfired(schedule, "failed", f"It cannot be fired: {fault}")

    def _remove(self, schedule: Schedule) -> str:
        """What to type. The name of a schedule may be anything, also to a shell."""
        words = ["djjobs", "schedule", "remove", self.timetable.database, schedule.name]
        return f"remove it ({shlex.join(words)})"

    def _tell_once(self, level: int, schedule: Schedule, words: str) -> bool:
        """Whether it was not told before."""
        if (schedule.name, words) in self._told:
            return False
        self._told.add((schedule.name, words))
        event = "failed" if level == logging.ERROR else "left"
        logger.log(level, "The schedule %s %s", schedule.name, words, extra={"event": event, "schedule": schedule.name})
        return True
