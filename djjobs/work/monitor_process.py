"""The monitor of a populate that runs jobs in its caller's own process: a forked process beside it.

A thread would not do: make() may hold the interpreter for longer than the lease.
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

from .. import telemetry
from ..interrupt import start_thread
from ..queue.identity import Claimant
from ..queue.table_queue import TableQueue
from ..settings import settings
from .current_job import SlotState
from .messages import Request, Told
from .monitor import LOOK_INTERVAL, Monitor
from .shared_memory import SharedMemory

__all__ = ["MonitorProcess"]

logger = logging.getLogger("djjobs")

#: How often the monitor looks whether the process that it watches is there, and at the time.
_GLANCE = 0.5
#: How long the monitor has to end when it is told to.
_PATIENCE = 2.0


class MonitorProcess:
    """Keeps the claims of this process alive from the first one on. Use it as a context manager.

    If the monitor is killed, another one is started in its place.
    """

    number = 0

    def __init__(self, claimant: Claimant, jobs: TableQueue) -> None:
        self.memory = SharedMemory()
        self._claimant, self._jobs = claimant, jobs
        self._state: SlotState | None = None
        self._child: _Child | None = None
        self._starting = threading.Lock()
        self._has_ended = False

    def listen(self, state: SlotState) -> None:
        """Let requests about jobs arrive there."""
        self._state = state

    @property
    def has_begun(self) -> bool:
        """Whether the worker was registered."""
        return self._child is not None

    def begin(self) -> bool:
        """Register the worker and start the monitor, unless that was done; whether it was done now."""
        if self._child is not None:
            return False
        # On our own connection, so that a missing privilege is the caller's to see.
        Monitor(self._claimant, [self._jobs], 1, self._jobs.queue.db).register()
        self._start()
        return True

    def _start(self) -> None:
        with self._starting:
            if not self._has_ended:
                self._child = _Child(self._claimant, self._jobs, self.memory)
                start_thread(self._hear, self._child)

    def __enter__(self) -> MonitorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            self._has_ended = True
        if self._child is not None:
            self._child.end()
            monitor = Monitor(self._claimant, [self._jobs], 1, self._jobs.queue.db)
            if self.memory.may_hold:
                with contextlib.suppress(Exception):
                    monitor.slot_died(self, f"the populate of process {os.getpid()} ended without recording it.")
            monitor.sign_off()

    def ask(self, request: Request) -> None:
        """Nothing runs any more when this process settles what it has left itself."""

    def kill(self) -> None:
        """Nor is there anything to kill."""

    def measure(self) -> None:
        """Nor to measure."""

    def _hear(self, child: _Child) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = child.messages.recv()
                if isinstance(message, Told):
                    telemetry.pass_on(message.event)
                elif self._state is not None:
                    self._state.ask(message)
        if not self._has_ended:
            logger.warning("The process that kept this worker alive was killed; another one is started.")
            child.forget()
            self._start()


class _Child:
    """The forked process, as its parent sees it."""

    def __init__(self, claimant: Claimant, jobs: TableQueue, memory: SharedMemory) -> None:
        words, self._words = Pipe(duplex=False)
        self.messages, messages_end = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # The child only talks to the server; the locks of other threads do not concern it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _Main(claimant, jobs, memory, parent, words, messages_end, [self._words, self.messages]).run()
        words.close()
        messages_end.close()

    def forget(self) -> None:
        """It was killed: let the kernel forget it, too."""
        self._words.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def end(self) -> None:
        """Tell it to end, and wait for that."""
        with contextlib.suppress(OSError):
            self._words.send("end")
            self._words.close()
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                time.sleep(0.002)


class _Main:
    """What the forked process does. To its monitor it stands for the one slot that there is."""

    number = 0

    def __init__(
        self,
        claimant: Claimant,
        jobs: TableQueue,
        memory: SharedMemory,
        parent: int,
        words: Connection,
        messages: Connection,
        not_ours: list[Any],
    ) -> None:
        self._claimant, self._jobs, self.memory, self._parent = claimant, jobs, memory, parent
        self._words, self._messages, self._not_ours = words, messages, not_ours
        self._is_dismissed = False

    def ask(self, request: Request) -> None:
        with contextlib.suppress(OSError):
            self._messages.send(request)

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
            telemetry.forward_to(lambda event: self._messages.send(Told(event)))
            self._watch()
        except BaseException as error:
            logger.warning("The monitor of process %s failed: %s", self._parent, error)
        finally:
            # Nothing that this process inherited is its own to close or to flush.
            os._exit(0)

    def _watch(self) -> None:
        # Short jobs need no second connection before the next heartbeat is due: the worker has just registered.
        monitor, next_beat = None, time.monotonic() + Monitor.interval()
        while not self._is_over():
            if monitor is None and (time.monotonic() >= next_beat or self._is_lasting()):
                monitor = self._new_monitor()
            # A process that was suspended does not work, so nobody may wait for it longer than for a dead one.
            if monitor and not self._is_suspended():
                monitor.tick([self])
        if not self._is_dismissed and (monitor := monitor or self._new_monitor()):
            # The parent is gone, and its subscribers with it.
            telemetry.forward_to(None)
            story = f"the process {self._parent} was killed or crashed."
            telemetry.emit("worker died", worker=self._claimant.worker_id, story=story)
            monitor.slot_died(self, story)
            monitor.sign_off()
        if monitor:
            monitor.db.connection.close()

    def _new_monitor(self) -> Monitor | None:
        """A monitor with a connection of its own; None if there is no server at the moment."""
        try:
            return Monitor(self._claimant, [self._jobs], 1)
        except Exception as error:
            logger.warning("The worker cannot be kept alive at the moment: %s", error)
            return None

    def _is_lasting(self) -> bool:
        """Whether a job runs that takes its time, or has a time-out: others have to hear of it, or it of them."""
        if self._jobs.policy.timeout is not None:
            return True
        started = self.memory.read()
        return started is not None and time.monotonic() - started.since >= LOOK_INTERVAL

    def _is_suspended(self) -> bool:
        try:
            return psutil.Process(self._parent).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _is_over(self) -> bool:
        """Whether the parent has told this process to end, or is gone: the pipe ends, or it has another parent.

        The kernel closes a dead process's files before it gives its children another parent, and a process that
        make() has started may hold the pipe open.
        """
        glance = min(_GLANCE, settings.heartbeat_interval / 4)
        if wait([self._words], glance):
            with contextlib.suppress(EOFError, OSError):
                self._is_dismissed = self._words.recv() == "end"
            return True
        return os.getppid() != self._parent
