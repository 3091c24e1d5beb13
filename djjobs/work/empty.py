"""What a loop does when the queue is empty: end, as a populate does, or wait until it is woken up, as a slot does."""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from typing import Protocol

from ..dj.connection import server_of
from ..events.outbox import changes_here
from ..interrupt import Stop
from ..queue.table_queue import TableQueue
from ..settings import settings
from .loop import Loop
from .messages import Idle, Message, OutOfTime

__all__ = ["Scheduling", "UntilEmpty", "UntilTold", "patience_with_limit"]

logger = logging.getLogger("djjobs")

#: A populate that finds nothing waits for the interval between two schedulings to pass, if that is no longer than this;
#: and a bit longer, so that the next scheduling has been done.
_LONGEST_WAIT, _SLACK = 10.0, 1.0
#: The pauses of a loop that waits for somebody else's scheduling: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5

#: How many changes of this process had been made when a populate last scheduled a table.
_seen: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
# What the parent has changed, and has seen, is the parent's.
os.register_at_fork(after_in_child=_seen.clear)


def patience_with_limit(label: str) -> float:
    """How long to wait for the interval to pass if nothing was found; zero if that would be too long, which is said."""
    interval = settings.min_scheduling_interval
    if interval <= _LONGEST_WAIT:
        return interval + _SLACK
    logger.warning(
        "%s was scheduled less than min_scheduling_interval = %g s ago, so new keys were not looked for and there was "
        "nothing to do. To look at once: schedule_jobs(min_scheduling_interval=0).",
        label,
        interval,
    )
    return 0.0


class Scheduling:
    """How a populate schedules: before its work, and again while it finds nothing to do.

    Parameters
    ----------
    jobs : TableQueue
        The queue of the table.
    wanted : bool
        Whether it is to schedule at all.
    priority : int, optional
        The priority of new jobs.
    """

    def __init__(self, jobs: TableQueue, wanted: bool, priority: int | None) -> None:
        self.jobs, self._wanted, self._priority = jobs, wanted, priority
        #: Whether the last scheduling was limited, because somebody had scheduled just before.
        self.limited = False

    def now(self) -> None:
        """Schedule; whatever the rate limit, if this process has changed something."""
        if not self._wanted:
            return
        table = type(self.jobs.table)
        changes = changes_here[server_of(self.jobs.table.connection)]
        changed = changes > _seen.get(table, 0)
        self.limited = self.jobs.schedule(interval=0 if changed else None, priority=self._priority).rate_limited
        if not self.limited:
            _seen[table] = changes


class UntilEmpty:
    """End when there are no jobs.

    While somebody else is still scheduling, an empty queue is no reason to end. Nor is it if nothing was found yet and
    scheduling was not allowed: the interval is waited for once.
    """

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling, self._jobs = scheduling, scheduling.jobs
        self._has_found = False
        self._until = 0.0
        self._start_over()

    def _start_over(self) -> None:
        self._others_schedule: bool | None = None
        self._pause = _FIRST_PAUSE

    def found(self) -> None:
        self._has_found = True
        self._start_over()

    def look_again(self, loop: Loop) -> bool:
        others_scheduled, self._others_schedule = self._others_schedule, None
        if others_scheduled is not None:
            # Somebody was asked before the last look, so that a scheduling that ended in between is not overlooked.
            if not (others_scheduled or self._waits_for_limit()):
                return False
            loop.stop.sleep(random.uniform(self._pause / 2, self._pause))
            self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
            if not self._jobs.is_scheduling():
                self._scheduling.now()
        self._others_schedule = self._jobs.is_scheduling()
        return True

    def _waits_for_limit(self) -> bool:
        if self._has_found or not self._scheduling.limited:
            return False
        self._until = self._until or time.monotonic() + patience_with_limit(self._jobs.label)
        return time.monotonic() < self._until


class Supervised(Protocol):
    """A slot's connection to its supervisor."""

    def send(self, message: Message) -> None: ...
    def wait_until_woken(self, stop: Stop) -> None: ...


class UntilTold:
    """Schedule, tell the supervisor that there is nothing to do, and wait until it says that there may be something.

    Parameters
    ----------
    channel
        The connection to the supervisor.
    at_once : bool
        Schedule whatever the rate limit says.
    drains : bool
        Tell whether jobs wait for their next try: the worker does not end before them.
    """

    def __init__(self, channel: Supervised, at_once: bool, drains: bool) -> None:
        self._channel, self._at_once, self._drains = channel, at_once, drains
        self._has_scheduled = self._is_limited = False

    def found(self) -> None:
        self._has_scheduled = False

    def look_again(self, loop: Loop) -> bool:
        if loop.is_late:
            self._channel.send(OutOfTime())
            return False
        if not self._has_scheduled:
            self._has_scheduled = True
            self._schedule([source.jobs for source in loop.sources])
            return True
        self._has_scheduled = False
        loop.see_to_runs()
        retries_wait = self._drains and any(source.jobs.has_retries() for source in loop.sources)
        self._channel.send(Idle(retries_wait, self._is_limited))
        self._channel.wait_until_woken(loop.stop)
        return True

    def _schedule(self, tables: list[TableQueue]) -> None:
        """Schedule the tables, upstream first, as far as the first one that has new jobs."""
        self._is_limited = False
        for jobs in tables:
            if jobs.refreshes:
                scheduled = jobs.schedule(interval=0 if self._at_once else None, take_along=False)
                self._is_limited |= scheduled.rate_limited
                if scheduled.count:
                    self._has_scheduled = False
                    return
