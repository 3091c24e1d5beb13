"""The pulse of a populate that runs jobs in its caller's own process: a keeper beside it.

The keeper is a forked process, because make() may hold the interpreter for longer than the lease; where processes
cannot be forked it is a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from ..interrupt import start_thread
from ..queue.finish import Finisher
from ..queue.identity import Claimant
from ..settings import settings
from .current_job import Desk, Page
from .monitor import LOOK_INTERVAL, Keeper

__all__ = ["Pulse"]

logger = logging.getLogger("djjobs")

#: How often the keeper looks whether the process that it watches is there, and at the time.
_GLANCE = 0.5


class Pulse:
    """Keeps the claims of this process alive from the first one on. Use it as a context manager."""

    number = 0

    def __init__(self, claimant: Claimant, finisher: Finisher) -> None:
        self.page = Page()
        self._claimant, self._finisher = claimant, finisher
        self._desk: Desk | None = None
        self._keeper: _Forked | _Thread | None = None

    def listen(self, desk: Desk) -> None:
        self._desk = desk

    def begin(self) -> None:
        """Register the worker and start its keeper, unless that was done."""
        if self._keeper is not None:
            return
        # On our own connection, so that a missing privilege is the caller's to see.
        Keeper(self._claimant, [self._finisher], 1, self._finisher.queue.db).enter()
        self._keeper = _Forked(self) if hasattr(os, "fork") else _Thread(self)

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is None:
            return
        self._keeper.end()
        Keeper(self._claimant, [self._finisher], 1, self._finisher.queue.db).leave()

    # -- for the keeper ----------------------------------------------------------------------------------

    def make_keeper(self) -> Keeper | None:
        """A keeper with a connection of its own; None if there is no server at the moment."""
        try:
            return Keeper(self._claimant, [self._finisher], 1)
        except Exception as error:
            logger.warning("The worker cannot be kept alive at the moment: %s", error)
            return None

    def is_lasting(self) -> bool:
        """Whether a job runs that takes its time, or may run out of it: others have to hear of it, or it of them."""
        if self._finisher.policy.timeout is not None:
            return True
        started = self.page.read()
        return started is not None and time.monotonic() - started.since >= LOOK_INTERVAL

    def order(self, *order: Any) -> None:
        if self._desk is not None:
            self._desk.order(*order)


class _Thread:
    """A keeper in a thread of the same process."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self._ended = pulse, threading.Event()
        self.page, self.number = pulse.page, pulse.number
        start_thread(self._run)

    def tell(self, what: str, key_hash: str, claim: int) -> None:
        self._pulse.order(what, key_hash, claim)

    def kill(self) -> None:
        """The process is the caller's."""

    def measure(self) -> None:
        """Nobody will tell how it ended."""

    def _run(self) -> None:
        keeper = None
        while not self._ended.wait(_GLANCE):
            keeper = keeper or self._pulse.make_keeper()
            if keeper:
                keeper.tick([self])
        if keeper:
            keeper.db.connection.close()

    def end(self) -> None:
        self._ended.set()


class _Forked:
    """A keeper in a process of its own."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        child_end, self._words = Pipe(duplex=False)
        orders, orders_end = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # The child does nothing but talk to the server; the locks of other threads do not concern it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _Guardian(pulse, parent, child_end, orders_end, [self._words, orders]).run()
        child_end.close()
        orders_end.close()
        self._ended = False
        self._substitute: _Thread | None = None
        start_thread(self._hear, orders)

    def _hear(self, orders: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._pulse.order(*orders.recv())
        if not self._ended:
            logger.warning("The process that kept this worker alive was killed; a thread does so from now on.")
            self._substitute = _Thread(self._pulse)

    def end(self) -> None:
        """Let the keeper go, and see it off."""
        self._ended = True
        if self._substitute is not None:
            self._substitute.end()
        with contextlib.suppress(OSError):
            self._words.send("end")
            self._words.close()
        deadline = time.monotonic() + 2
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                time.sleep(0.002)


class _Guardian:
    """What the forked process does."""

    def __init__(self, pulse: Pulse, parent: int, words: Connection, orders: Connection, not_ours: list[Any]) -> None:
        self._pulse, self._parent, self._words, self._orders = pulse, parent, words, orders
        self._not_ours = not_ours
        self.page, self.number = pulse.page, pulse.number
        self._dismissed = False

    def tell(self, what: str, key_hash: str, claim: int) -> None:
        with contextlib.suppress(OSError):
            self._orders.send((what, key_hash, claim))

    def kill(self) -> None:
        """The process is the caller's."""

    def measure(self) -> None:
        """Nobody will tell how it ended."""

    def run(self) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # They are for the process that this one watches, and may be sent to the whole group.
                signal.signal(number, signal.SIG_IGN)
            for end in self._not_ours:
                end.close()
            self._watch()
        except BaseException as error:
            logger.warning("The keeper of process %s failed: %s", self._parent, error)
        finally:
            # Nothing that this process inherited is its own to close or to flush.
            os._exit(0)

    def _watch(self) -> None:
        # Short jobs need no second connection before the worker, who has just entered, has to be heard of again.
        keeper, next_beat = None, time.monotonic() + Keeper.interval()
        while not self._is_over():
            if keeper is None and (time.monotonic() >= next_beat or self._pulse.is_lasting()):
                keeper = self._pulse.make_keeper()
            # A process that was suspended does not work, so nobody may wait for it longer than for a dead one.
            if keeper and not self._is_suspended():
                keeper.tick([self])
        if not self._dismissed and (keeper := keeper or self._pulse.make_keeper()):
            keeper.bury(self, f"the process {self._parent} was killed or crashed.")
            keeper.leave()
        if keeper:
            keeper.db.connection.close()

    def _is_suspended(self) -> bool:
        try:
            return psutil.Process(self._parent).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _is_over(self) -> bool:
        """Whether the parent has sent this process home, or is gone: the pipe ends, or somebody else is the parent.

        The kernel closes a dead process's files before it gives its children another parent, and a process that
        make() has started may hold the pipe open.
        """
        glance = min(_GLANCE, settings.heartbeat_interval / 4)
        if wait([self._words], glance):
            with contextlib.suppress(EOFError, OSError):
                self._dismissed = self._words.recv() == "end"
            return True
        return os.getppid() != self._parent
