"""Named events: what happens to jobs, workers, runs, schedules and tables, for whoever wants to know.

`emit` tells of an event, `subscribe` hears of it. A subscriber harms no job: what it raises is logged, and it is called
in a thread of its own, where it may take its time. In a child process all events go to the parent, so that a
subscriber hears of everything in one place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NAMES", "Event", "emit", "flush", "forward_to", "is_heard", "pass_on", "subscribe"]

logger = logging.getLogger("djjobs")

#: Every event that there is.
NAMES = frozenset(
    {
        "job claimed",
        "job started",
        "job done",
        "job failed",
        "job retried",
        "job cancelled",
        "job given back",
        "job lost",
        "job recovered",
        "slot died",
        "worker started",
        "worker heard",
        "worker stopping",
        "worker ended",
        "worker died",
        "run begun",
        "run ended",
        "schedule fired",
        "table scheduled",
        "table cleaned up",
    }
)
#: So many events wait for a slow subscriber; after that the oldest are dropped.
_MOST_WAITING = 10_000


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes
    ----------
    name : str
        One of `NAMES`.
    table : str
        The class name of the table; empty if it is about no table.
    key : dict, optional
        The key of the job.
    attempt : int, optional
        1 for the first attempt of the job, 2 for the second, ...
    duration : float, optional
        How many seconds it took.
    waited : float, optional
        How many seconds the job was due before it was claimed.
    details : dict
        What else is known. Plain values only: an event may cross the border of a process.
    """

    name: str
    table: str = ""
    key: Mapping[str, Any] | None = None
    attempt: int | None = None
    duration: float | None = None
    waited: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


Subscriber = Callable[[Event], Any]


class _Subscription:
    """A subscriber, and the events that wait for it."""

    def __init__(
        self, subscriber: Subscriber, names: frozenset[str], direct: bool, when: Callable[[str], bool]
    ) -> None:
        self._subscriber, self._names, self._direct, self._when = subscriber, names, direct, when
        self._name = getattr(subscriber, "__qualname__", repr(subscriber))
        self.start_over()

    def start_over(self) -> None:
        """Forget what waits: a forked process has no thread, and its parent delivers what was there."""
        self._waiting: deque[Event] = deque(maxlen=_MOST_WAITING)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_busy = self._has_failed = self._has_dropped = False

    def hears(self, name: str) -> bool:
        """Whether it wants to hear of events of this name at the moment."""
        return name in self._names and self._when(name)

    def deliver(self, event: Event) -> None:
        if self._direct:
            self._call(event)
            return
        with self._changed:
            if len(self._waiting) == _MOST_WAITING and not self._has_dropped:
                self._has_dropped = True
                logger.warning("The subscriber %s is too slow; it misses events.", self._name)
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djjobs telemetry", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                event, self._is_busy = self._waiting.popleft(), True
            self._call(event)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _call(self, event: Event) -> None:
        try:
            self._subscriber(event)
        except Exception:
            # Once: one that fails for every job would fill the log.
            if not self._has_failed:
                self._has_failed = True
                logger.exception("The subscriber %s failed for %s; further failures are not told.", self._name, event)

    def wait(self, deadline: float) -> bool:
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: not (self._waiting or self._is_busy), left)


_subscriptions: list[_Subscription] = []
_parent: Subscriber | None = None


def subscribe(
    subscriber: Subscriber, *names: str, direct: bool = False, when: Callable[[str], bool] = lambda _name: True
) -> Callable[[], None]:
    """Call a function with every event of these names, or with all events.

    Parameters
    ----------
    subscriber : callable
        Called with an `Event`.
    *names : str
        Which events, from `NAMES`. Defaults to all.
    direct : bool
        Call it at once, in the thread in which the event happens, so that the job waits for it. For what takes no time.
        Defaults to False.
    when : callable
        Given a name: whether the subscriber wants to hear of it at the moment. Defaults to always.

    Returns
    -------
    callable
        Ends the subscription.
    """
    unknown = sorted(set(names) - NAMES)
    if unknown:
        raise ValueError(f"There is no event {unknown[0]!r}. There are: {', '.join(sorted(NAMES))}.")
    subscription = _Subscription(subscriber, frozenset(names) or NAMES, direct, when)
    _subscriptions.append(subscription)

    def end() -> None:
        if subscription in _subscriptions:
            _subscriptions.remove(subscription)

    return end


def emit(
    name: str,
    table: str = "",
    key: Mapping[str, Any] | None = None,
    *,
    attempt: int | None = None,
    duration: float | None = None,
    waited: float | None = None,
    **details: Any,
) -> None:
    """Tell of an event. Never raises."""
    pass_on(Event(name, table, key, attempt, duration, waited, details))


def pass_on(event: Event) -> None:
    """Deliver an event that happened here or in a child process."""
    assert event.name in NAMES, event.name
    if _parent is not None:
        try:
            _parent(event)
        except Exception as error:
            logger.debug("an event was not passed on: %s", error)
        return
    for subscription in list(_subscriptions):
        if subscription.hears(event.name):
            subscription.deliver(event)


def is_heard(name: str) -> bool:
    """Whether anybody wants to hear of such an event: there are some about which it costs something to find out."""
    return _parent is not None or any(subscription.hears(name) for subscription in _subscriptions)


def forward_to(parent: Subscriber | None) -> None:
    """From now on this process sends its events to its parent; None ends that."""
    global _parent
    _parent = parent


def flush(timeout: float = 2.0) -> bool:
    """Wait until every subscriber has heard of what happened so far; whether it has within the timeout."""
    deadline = time.monotonic() + timeout
    return all([subscription.wait(deadline) for subscription in _subscriptions])


def _start_over() -> None:
    for subscription in _subscriptions:
        subscription.start_over()


os.register_at_fork(after_in_child=_start_over)
