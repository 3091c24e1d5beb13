"""The monitor in a thread of its own: whoever watches over slots never waits for the server.

They talk through two queues. The supervisor says what became of its slots; the monitor says what became of their jobs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..interrupt import start_thread
from ..queue.waiting import Trouble
from ..settings import settings
from .messages import Request
from .monitor import Monitor
from .settle import LostJob
from .watch import Watched

__all__ = ["MonitorThread", "News", "Recovered", "Requested", "Settled"]

logger = logging.getLogger("djjobs")

#: How long the end of a worker may take if the server answers, and if it has not done so for some time.
_PATIENCE, _LITTLE_PATIENCE = 2.0, 0.3
#: After so long the server is taken not to answer.
_ANSWERS_WITHIN = 1.0
#: How long to wait before the next try to connect for the first time.
_PAUSE = 0.5


class News:
    """Something that the monitor tells."""


@dataclass(frozen=True)
class Recovered(News):
    """So many jobs of dead workers went back into the queue."""

    count: int


@dataclass(frozen=True)
class Requested(News):
    """Somebody asks something of a job that a slot has."""

    slot: Watched
    request: Request


@dataclass(frozen=True)
class Settled(News):
    """What became of the jobs of a slot that is gone."""

    lost: LostJob


class MonitorThread:
    """Runs a monitor.

    Parameters
    ----------
    new_monitor : callable
        Makes the monitor, given what to call with a request, and with what became of jobs.
    """

    def __init__(
        self, new_monitor: Callable[[Callable[[Watched, Request], None], Callable[[LostJob], None]], Monitor]
    ) -> None:
        self._new_monitor = new_monitor
        self._monitor: Monitor | None = None
        self._orders: queue.SimpleQueue[Callable[[Monitor], object]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._slots: list[Watched] = []
        self._works = True
        self._busy_since: float | None = None
        self._is_closing = self._is_left = False
        self._trouble = Trouble()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)

    def fileno(self) -> int:
        """Ready to be read when there is news."""
        return self._reader.fileno()

    def monitor(self) -> Monitor:
        """The monitor, for as long as the thread is not started."""
        if self._monitor is None:
            self._monitor = self._new_monitor(
                lambda slot, request: self._tell(Requested(slot, request)), lambda lost: self._tell(Settled(lost))
            )
        return self._monitor

    def start(self) -> None:
        self._thread = start_thread(self._run)

    # -- what the supervisor says --------------------------------------------------------------------------------

    def watch(self, slots: Iterable[Watched], works: bool = True) -> None:
        """These are the slots now. While the worker does not work, nobody is told that it does."""
        self._slots, self._works = list(slots), works

    def slot_died(self, slot: Watched, story: str, late: bool) -> None:
        """See to the jobs of a slot that died. `Settled` tells what became of them."""
        self._orders.put(lambda monitor: monitor.settler.slot_died(slot, story, late))

    def slot_ended(self, slot: Watched) -> None:
        """Give back what a slot had that was told to end."""
        self._orders.put(lambda monitor: monitor.settler.slot_ended(slot))

    def slot_finished(self, slot: Watched) -> None:
        """A slot has ended by itself."""
        self._orders.put(lambda monitor: monitor.settler.slot_finished(slot))

    def tell_of_stop(self) -> None:
        """Let others see that this worker takes no new jobs."""
        self._orders.put(lambda monitor: monitor.tell_of_stop())

    def news(self) -> Iterator[News]:
        """What the monitor has told since the last time."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def close(self, sign_off: bool = True) -> None:
        """The worker ends: settle the rest and sign off, if the server answers. Returns soon in any case."""
        if self._thread is None:
            return
        self._is_closing = True
        busy_since = self._busy_since
        stuck = busy_since is not None and time.monotonic() - busy_since > _ANSWERS_WITHIN
        if sign_off:
            self._orders.put(lambda monitor: monitor.sign_off(patience=_PATIENCE))
        self._orders.put(self._end)
        if not self._over.wait(_LITTLE_PATIENCE if stuck else _PATIENCE + 0.5):
            if sign_off:
                logger.warning("The server does not answer, so the worker could not sign off; its lease will end.")
            # The thread is a daemon. It ends when its statement returns.
            self._is_left = True
            if self._monitor is not None:
                self._monitor.db.stop_using()

    # -- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(_Over):
            while True:
                order = self._next_order()
                self._busy_since = time.monotonic()
                self._act(order)
                self._busy_since = None

    def _next_order(self) -> Callable[[Monitor], object] | None:
        try:
            return self._orders.get(timeout=min(0.2, max(0.01, settings.heartbeat_interval / 4)))
        except queue.Empty:
            return None

    def _act(self, order: Callable[[Monitor], object] | None) -> None:
        if self._is_left:
            self._end(None)
        try:
            monitor = self.monitor()
            self._trouble.is_over()
            if order is not None:
                order(monitor)
            elif self._works and (recovered := monitor.tick(self._slots)):
                self._tell(Recovered(recovered))
        except _Over:
            raise
        except Exception as error:
            # There is no connection yet.
            self._trouble.tell(None, error)
            if self._is_closing:
                self._end(None)
            if order is not None:
                self._orders.put(order)
            time.sleep(_PAUSE)

    def _end(self, monitor: Monitor | None) -> None:
        if monitor is not None:
            with contextlib.suppress(Exception):  # it may be closed already, if the server is away
                monitor.db.connection.close()
        self._over.set()
        raise _Over

    def _tell(self, news: News) -> None:
        self._news.put(news)
        with contextlib.suppress(OSError):
            self._writer.send(b".")


class _Over(Exception):
    """The thread ends."""
