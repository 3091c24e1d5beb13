"""The thread that acts on changes, over a connection of its own, so that the code that made them does not wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from multiprocessing.util import Finalize
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import account_of, connection_of, share_schemas
from ..dj.routing import route_over
from ..interrupt import start_thread
from ..queue.database import Database
from .outbox import Change, merge_into
from .react import Agenda

__all__ = ["event_thread"]

logger = logging.getLogger("djjobs")

#: What comes within so many seconds is acted on together; while more and more comes, within up to so many.
_TOGETHER, _LONGEST_PAUSE = 0.2, 3.0
#: A connection that was not needed for so long is closed.
_IDLE = 30.0
#: How long a process that ends waits for what is still to be done.
_AT_EXIT = 5.0


class _Connections:
    """The connections of the event thread: one a server and user."""

    def __init__(self) -> None:
        self._open: dict[Any, Any] = {}

    def get(self, cls: Any) -> Any:
        theirs = connection_of(cls)
        who = account_of(theirs)
        if who not in self._open:
            db = Database(datajoint_api.another_connection(theirs))
            db.start_afresh()
            self._open[who] = db.connection
        own = self._open[who]
        share_schemas(own, theirs)
        route_over(own)
        return own

    def close(self) -> None:
        route_over(None)
        for connection in self._open.values():
            with contextlib.suppress(Exception):
                connection.close()
        self._open = {}


class _EventThread:
    """Takes committed changes, and acts on them in a thread of this process."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Forget everything: a forked process has no thread, and its parent acts on what was there."""
        self._news = threading.Condition()
        self._inbox: dict[tuple[Any, str], Change] = {}
        self._connections = _Connections()
        self._agenda = Agenda(self._connections.get)
        self._started = self._asleep = self._busy = self._ends = False
        self._thread: threading.Thread | None = None
        self._waiting = self._in_a_hurry = self._failures_told = 0
        self._pause = _TOGETHER

    def take(self, server: Any, change: Change) -> None:
        """Act on a committed change soon. Returns at once."""
        with self._news:
            merge_into(self._inbox, (server, change.table), change)
            if not self._started:
                self._thread = start_thread(self._run)
                # Also in processes of multiprocessing, which do not heed atexit.
                Finalize(None, self._finish, exitpriority=10)
                self._started = True
            if self._asleep:
                self._news.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything was acted on; return whether it was, and nothing has failed since the last time."""
        done = self._wait(timeout)
        failed, self._failures_told = self._agenda.failures > self._failures_told, self._agenda.failures
        return done and not failed

    def hurry(self, timeout: float) -> None:
        """Wait until everything was acted on, what was put off included: it does not wait for its time."""
        if self._is_done or threading.current_thread() is self._thread:
            # A hook that runs in the thread itself would wait for its own end.
            return
        with self._news:
            self._in_a_hurry += 1
        try:
            self._wait(timeout)
        finally:
            with self._news:
                self._in_a_hurry -= 1

    def _wait(self, timeout: float) -> bool:
        with self._news:
            self._waiting += 1
            self._news.notify_all()
            try:
                return self._news.wait_for(lambda: self._is_done, timeout)
            finally:
                self._waiting -= 1

    @property
    def _is_done(self) -> bool:
        return not (self._inbox or self._busy) and self._agenda.is_done

    @property
    def _is_hurried(self) -> bool:
        return self._ends or self._in_a_hurry > 0

    def _finish(self) -> None:
        self._ends = True
        self.flush(_AT_EXIT)
        if not self._is_done:
            logger.warning("The process ends before all changes were acted on; the next scheduling makes good for it.")

    # -- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if not self._is_called(_IDLE):
                self._connections.close()
                self._is_called(float("inf"))
            self._act(self._collect())

    def _is_called(self, patience: float) -> bool:
        """Wait until there is something to do; whether there is within so many seconds."""
        until = time.monotonic() + patience
        with self._news:
            while not (self._inbox or self._is_due):
                wait = min(until, self._agenda.next_time()) - time.monotonic()
                if wait <= 0:
                    return False
                self._sleep(wait)
        return True

    @property
    def _is_due(self) -> bool:
        now = float("inf") if self._is_hurried else time.monotonic()
        return not self._agenda.is_done and self._agenda.next_time() <= now

    def _collect(self) -> dict[tuple[Any, str], Change]:
        """Wait a bit for what comes along, unless somebody waits for us, and take it all."""
        until = time.monotonic() + self._pause
        with self._news:
            while not self._waiting and (wait := until - time.monotonic()) > 0:
                self._news.wait(wait)
            self._busy = True
            inbox, self._inbox = self._inbox, {}
        return inbox

    def _act(self, inbox: dict[tuple[Any, str], Change]) -> None:
        failures = self._agenda.failures
        try:
            for (server, _), change in inbox.items():
                self._agenda.add(server, [change])
            self._agenda.act(self._is_hurried)
            if self._agenda.failures > failures:
                # The next try begins with a new connection.
                self._connections.close()
        except Exception:
            logger.exception("Changes were not acted on; the next scheduling makes good for it.")
        finally:
            with self._news:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._inbox else _TOGETHER
                self._busy = False
                self._news.notify_all()

    def _sleep(self, seconds: float) -> None:
        self._asleep = True
        self._news.wait(None if seconds == float("inf") else seconds)
        self._asleep = False


event_thread = _EventThread()
os.register_at_fork(after_in_child=event_thread.start_over)
