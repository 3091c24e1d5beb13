"""Stopping: SIGTERM and SIGINT end a populate between two statements or inside make(), nowhere else.

An exception in the middle of a statement of the queue would leave the connection in the middle of
an answer, so a signal that comes then is kept until the statement is over. An error that another thread wants to
raise inside make() goes the same way, by a signal that nobody else pays heed to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

__all__ = ["Stop", "start_thread"]

#: SIGURG means nothing to a process that does not expect it, so one that comes too late does no harm.
_INTERRUPT = signal.SIGURG
_STOPS = (signal.SIGTERM, signal.SIGINT)
_OURS = (*_STOPS, _INTERRUPT)
#: How long a statement may still take after somebody asked for a stop: inside make(), and elsewhere.
_IN_MAKE, _ELSEWHERE = 1.5, 3.0
#: How often that is looked at.
_GLANCE = 0.25


class ServerConnection(Protocol):
    """A connection to a server that may not answer. These are called from another thread, but for `use_again`."""

    def refuse_reconnect(self) -> None:
        """Let nobody connect again by itself, after what is raised now has broken the connection."""

    def cut(self) -> None:
        """End the statement that runs now."""

    def stop_using(self) -> None:
        """End it, and ask nothing of the server any more."""

    def use_again(self) -> None:
        """The server may be asked again."""


class Stop:
    """Catches the signals while it is entered and restores the caller's handlers afterwards.

    No signal is lost: what nobody has acted upon or taken is raised in the end.
    Outside the main thread Python allows no handlers; there it catches nothing.

    Parameters
    ----------
    interrupt : callable, optional
        Makes the statement return that make() waits for, where the driver would not let Python's handler
        run before that. Called from another thread. Defaults to none.
    signals : tuple of int
        Which signals ask for a stop. Defaults to SIGTERM and SIGINT.
    connection : ServerConnection, optional
        The connection that statements wait on. If the server does not answer, no statement is waited for longer than
        for some seconds after a stop. Defaults to none.
    """

    def __init__(
        self,
        interrupt: Callable[[], None] | None = None,
        signals: tuple[int, ...] = _STOPS,
        connection: ServerConnection | None = None,
    ) -> None:
        self._signals = (*signals, _INTERRUPT)
        self.requested: int | None = None
        self.interrupted_by: type[Exception] | None = None
        #: Called with a signal that may be no stop, because somebody else says when to stop. Defaults to none.
        self.ask_about: Callable[[int], None] | None = None
        self._interruptible = False
        self._pid = os.getpid()
        self._connection = connection
        #: Since when a signal waits to be acted upon, and since when it does so outside make().
        self._pressed: float | None = None
        self._outside = time.monotonic()
        self._cut_at = 0.0
        self._stops = False
        self._thread = threading.get_ident()
        self._interrupt = interrupt
        self._previous: dict[int, Any] = {}
        self._alarm: _Alarm | None = None
        self._outer: Stop | None = None

    def __enter__(self) -> Stop:
        global _active
        if threading.current_thread() is threading.main_thread():
            if self._interrupt is not None or self._connection is not None:
                self._alarm = _Alarm(self._ring, self._press)
            self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
            self._outer, _active = _active, self
            if self._outer is not None:
                # One that came just before.
                self.requested = self._outer.requested
        return self

    def _ring(self, number: int) -> bool:
        """A signal has come; whether to see that it is acted upon. Called in the thread of the alarm."""
        if number not in self._signals or (number != _INTERRUPT and self.ask_about is not None):
            return False
        self._pressed = self._pressed or time.monotonic()
        # The handler that notes it may have to wait for the driver.
        self._stops = self._stops or number != _INTERRUPT
        if self._interruptible and self._interrupt is not None:
            # In a thread of its own: it asks the server, which may not answer.
            start_thread(self._interrupt)
        return self._connection is not None

    def _press(self) -> bool:
        """See that no statement keeps the main thread from acting on a signal; whether to look again."""
        if _active is not self or self._pressed is None or self._connection is None:
            # Perhaps another Stop inside this one sees to it, and hands it over when it ends.
            return self._pressed is not None
        now = time.monotonic()
        if self._interruptible:
            # Again and again: what make() does after the first time may wait, too.
            if now - max(self._pressed, self._cut_at) > _IN_MAKE:
                self._cut_at = now
                self._connection.cut()
        elif not self._stops:
            self._pressed = None
        elif now - max(self._pressed, self._outside) > _ELSEWHERE:
            self._connection.stop_using()
        return self._pressed is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if not self._previous:
            return
        self._restore_handlers()
        if self._outer is not None:
            self._outer._outside = time.monotonic()
        _active = self._outer
        if self._alarm is not None:
            self._alarm.close()
        if self._connection is not None and (self._outer is None or self._outer._connection is not self._connection):
            self._connection.use_again()
        if self.requested is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            # It came when nobody looked any more.
            if self._outer is None:
                self.check()
            else:
                self._outer.requested, self._outer._pressed, self._outer._stops = self.requested, self._pressed, True

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be set again from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != _INTERRUPT and self.ask_about is not None:
            self.ask_about(number)
            return
        if number != _INTERRUPT:
            self.requested = number
        if not self._interruptible:
            return
        if _fork.under_way:
            _fork.missed = True
        else:
            if self._connection is not None and (self.requested is not None or self.interrupted_by is not None):
                self._connection.refuse_reconnect()
            self._check_all()

    def _check_all(self) -> None:
        self.check()
        if self.interrupted_by is not None:
            raise self.interrupted_by("make() was interrupted.")

    def request(self, number: int) -> None:
        """Ask for a stop, as this signal does. Called from another thread."""
        self.requested, self._stops = number, True
        if self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def interrupt_with(self, error: type[Exception]) -> None:
        """Raise this error in the stretch that may be interrupted. Called from another thread."""
        self.interrupted_by = error
        if self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
        elif self._interruptible:
            # Without handlers the error waits for the next line of Python code.
            _raise_in_thread(self._thread, error)

    def forget_interrupt(self) -> None:
        """The job that was to be interrupted is over."""
        if self.interrupted_by is not None and not self._previous:
            _raise_in_thread(self._thread, None)
        self.interrupted_by = None
        if not self._stops:
            self._pressed = None

    def take(self) -> int | None:
        """The signal that asked for a stop, if one has; the next one will be news again."""
        number, self.requested, self._pressed, self._stops = self.requested, None, None, False
        return number

    def check(self) -> None:
        """Raise what a stop raises, if one was requested."""
        if self.requested == signal.SIGTERM:
            raise SystemExit("SIGTERM received")
        if self.requested is not None:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A stretch that a signal may interrupt anywhere."""
        self._interruptible = True
        try:
            self._check_all()
            yield
        finally:
            self._leave_interruptible()
            self.end_copies()

    def end_copies(self) -> None:
        """End this process if it is a copy: make() has called os.fork(), and both processes come back from it.

        Nothing here is the copy's own: not the connection, nor the pipes, nor the job.
        """
        if os.getpid() != self._pid:
            os.write(2, b"A process that make() or a hook has forked came back from there; it ends here.\n")
            os._exit(0)

    def end_interruptible(self) -> None:
        """From here on the stretch is not to be interrupted any more."""
        self._check_all()
        self._leave_interruptible()

    def _leave_interruptible(self) -> None:
        self._interruptible, self._outside = False, time.monotonic()

    def sleep(self, seconds: float) -> None:
        with self.interruptible():
            time.sleep(seconds)


def _raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_active: Stop | None = None


class _Fork(threading.local):
    """The fork that this thread is making. What a handler raises meanwhile, Python ignores."""

    under_way = False
    #: Whether a handler was called that would have raised.
    missed = False
    mask: set[int] = set()


_fork = _Fork()


def _hold_signals() -> None:
    """A signal that reached a new process before it has its own handlers would be lost on it."""
    if _active is not None:
        _fork.under_way = True
        # Remembered before it is changed: the change may end in what a handler of the caller's raises.
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)


def _let_signals_in() -> None:
    if _fork.under_way:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
        finally:
            _fork.under_way = False


def _let_signals_in_parent() -> None:
    _let_signals_in()
    if _fork.missed:
        _fork.missed = False
        start_thread(_remind)


def _remind() -> None:
    """Have the handler called again when the fork is over."""
    time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)


def _forget_in_child() -> None:
    """A process that make() forks is not ours: it gets the caller's handlers, and a Pool can end it."""
    global _active
    while _active is not None:
        signal.set_wakeup_fd(-1)
        _active._restore_handlers()
        _active = _active._outer
    _let_signals_in()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in_parent, after_in_child=_forget_in_child)


def start_thread(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Start a thread that leaves the signals to the main thread, which alone can act on them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


class _Alarm:
    """Hears of signals in a thread of its own, at once, while the main thread sits in a driver's C code.

    Parameters
    ----------
    ring : callable
        Called with each signal; whether it is to be looked after.
    press : callable
        Called again and again after that; whether to go on with it.
    """

    def __init__(self, ring: Callable[[int], bool], press: Callable[[], bool]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        start_thread(self._listen, ring, press)

    def _listen(self, ring: Callable[[int], bool], press: Callable[[], bool]) -> None:
        presses = False
        with self._reader:
            while True:
                self._reader.settimeout(_GLANCE if presses else None)
                try:
                    numbers = self._reader.recv(64)
                except TimeoutError:
                    presses = press()
                    continue
                if not numbers:
                    return
                if self._previous >= 0:
                    with suppress(OSError):  # it may just be closed
                        os.write(self._previous, numbers)  # an event loop's, as in a notebook
                # All of them are told; a list, because `any` would stop at the first.
                presses = any([ring(number) for number in numbers]) or presses

    def close(self) -> None:
        # Not to be written to any more: its number may soon belong to another file.
        previous, self._previous = self._previous, -1
        signal.set_wakeup_fd(previous)
        self._writer.close()
