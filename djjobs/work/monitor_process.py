"""The monitor of a populate that runs jobs in its caller's own process: forked processes beside it.

A thread would not do: make() may hold the interpreter for longer than the lease. For the same reason the process of the
caller may be unable to start another monitor if the first is killed. So while a job lasts there are two of them: the
monitor, and a guard that does nothing but start the monitor again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import warnings
from collections import deque
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
from .monitor_thread import MonitorThread, Requested
from .shared_memory import SharedMemory
from .watch import Watch

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
                start_thread(self._look_after, self._child)

    def __enter__(self) -> MonitorProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._starting:
            self._has_ended = True
        if self._child is not None:
            self._child.end()
            monitor = Monitor(self._claimant, [self._jobs], 1, self._jobs.queue.db)
            if self.memory.may_hold:
                with contextlib.suppress(Exception):
                    monitor.settler.slot_died(
                        self, f"the populate of process {os.getpid()} ended without recording it."
                    )
            # What a loop that ended well has claimed, it has also ended.
            monitor.sign_off(everything=kind is not None)

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

    def _look_after(self, child: _Child) -> None:
        child.wait()
        if not self._has_ended:
            logger.warning("The process that kept this worker alive was killed; another one is started.")
            self._start()
            # If the other one of the two is still there, it sees that it is not needed any more.
            child.dismiss()


class _Child:
    """The forked process, as its parent sees it."""

    def __init__(self, claimant: Claimant, jobs: TableQueue, memory: SharedMemory) -> None:
        words, self._words = Pipe(duplex=False)
        self.messages, messages_end = Pipe(duplex=False)
        self._is_gone = threading.Event()
        parent = psutil.Process()
        self._pid = _fork()
        if self._pid == 0:
            _Main(claimant, jobs, memory, parent, words, messages_end, [self._words, self.messages]).run()
        words.close()
        messages_end.close()

    def wait(self) -> None:
        """Wait until it is gone."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._is_gone.set()

    def dismiss(self) -> None:
        """Tell it that it is not needed any more."""
        with contextlib.suppress(OSError):
            self._words.send("end")
            self._words.close()

    def end(self) -> None:
        """Tell it to end, and wait for that."""
        self.dismiss()
        if not self._is_gone.wait(_PATIENCE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._is_gone.wait(_PATIENCE)


def _fork() -> int:
    with warnings.catch_warnings():
        # The child only talks to the server; the locks of other threads do not concern it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class _Main:
    """What the forked processes do. To the monitor it stands for the one slot that there is."""

    number = 0

    def __init__(
        self,
        claimant: Claimant,
        jobs: TableQueue,
        memory: SharedMemory,
        parent: psutil.Process,
        words: Connection,
        messages: Connection,
        not_ours: list[Any],
    ) -> None:
        self._claimant, self._jobs, self.memory, self._parent = claimant, jobs, memory, parent
        self._words, self._not_ours = words, not_ours
        self._outgoing = _Outgoing(messages)
        self._is_dismissed = False

    def ask(self, request: Request) -> None:
        self._outgoing.send(request)

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
            if self._lasts():
                self._guard()
                self._monitor()
        except BaseException as error:
            logger.warning("The monitor of process %s failed: %s", self._parent.pid, error)
        finally:
            # Nothing that this process inherited is its own to close or to flush.
            os._exit(0)

    def _lasts(self) -> bool:
        """Wait until there is something to do; False if the worker ends before.

        Short jobs need no second connection before the next heartbeat is due: the worker has just registered.
        """
        next_beat = time.monotonic() + Monitor.interval()
        while time.monotonic() < next_beat and not self._is_lasting():
            if self._is_over():
                # The jobs of a worker that was killed are to be settled.
                return not self._is_dismissed
        return True

    def _guard(self) -> None:
        """Start the monitor, as often as it is killed. Returns in the monitor only."""
        while (pid := _fork()) != 0:
            if os.WIFEXITED(os.waitpid(pid, 0)[1]):
                os._exit(0)
            logger.warning("The monitor of process %s was killed; another one is started.", self._parent.pid)

    def _monitor(self) -> None:
        telemetry.forward_to(lambda event: self._outgoing.send(Told.of(event)))
        watch = Watch([self._jobs.policy.timeout])
        monitor = MonitorThread(
            lambda pass_on, settled: Monitor(self._claimant, [self._jobs], 1, pass_on=pass_on, settled=settled)
        )
        monitor.start()
        while not self._is_over():
            watch.look([self])
            # A process that was suspended does not work, so nobody may wait for it longer than for a dead one.
            monitor.watch([self], works=not self._is_suspended())
            for news in monitor.news():
                if isinstance(news, Requested):
                    watch.ask(self, news.request)
            self._outgoing.send_the_rest()
        if not self._is_dismissed:
            # Its subscribers are gone with it.
            telemetry.forward_to(None)
            story = f"the process {self._parent.pid} was killed or crashed."
            telemetry.emit("worker died", worker=self._claimant.worker_id, story=story)
            monitor.slot_died(self, story, late=False)
        monitor.close(sign_off=not self._is_dismissed)

    def _is_lasting(self) -> bool:
        """Whether a job runs that takes its time, or has a time-out: others have to hear of it, or it of them."""
        if self._jobs.policy.timeout is not None:
            return True
        started = self.memory.read()
        return started is not None and time.monotonic() - started.since >= LOOK_INTERVAL

    def _is_suspended(self) -> bool:
        try:
            return self._parent.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _is_over(self) -> bool:
        """Whether the parent has told this process to end, or is gone: the pipe ends, or the process has.

        The kernel closes the files of a process before it counts as dead, and a process that make() has started may
        hold the pipe open.
        """
        glance = min(_GLANCE, settings.heartbeat_interval / 4)
        if wait([self._words], glance):
            with contextlib.suppress(EOFError, OSError):
                self._is_dismissed = self._words.recv() == "end"
            return True
        return self._is_gone()

    def _is_gone(self) -> bool:
        """Whether the parent has ended."""
        try:
            return not self._parent.is_running() or self._parent.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


class _Outgoing:
    """What is said to the parent, which does not listen while make() holds the interpreter.

    Nothing waits for it: what it hears only for its log is dropped if there is no room, requests are sent later.
    """

    def __init__(self, messages: Connection) -> None:
        self._messages = messages
        self._room = select.poll()
        self._room.register(messages, select.POLLOUT)
        self._sending = threading.Lock()
        self._rest: deque[Request] = deque()

    def send(self, message: Request | Told) -> None:
        with self._sending:
            if not self._send(message) and isinstance(message, Request):
                self._rest.append(message)

    def send_the_rest(self) -> None:
        """Try again to send requests."""
        with self._sending:
            while self._rest and self._send(self._rest[0]):
                self._rest.popleft()

    def _send(self, message: Request | Told) -> bool:
        """Send it if there is room; whether there was. A parent that is gone hears nothing."""
        with contextlib.suppress(OSError):
            if not self._room.poll(0):
                return False
            self._messages.send(message)
        return True
