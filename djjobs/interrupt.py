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
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stop", "start_thread"]

#: SIGURG means nothing to a process that does not expect it, so one that comes too late does no harm.
_INTERRUPT = signal.SIGURG
_STOPS = (signal.SIGTERM, signal.SIGINT)
_OURS = (*_STOPS, _INTERRUPT)


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
    """

    def __init__(self, interrupt: Callable[[], None] | None = None, signals: tuple[int, ...] = _STOPS) -> None:
        self._signals = (*signals, _INTERRUPT)
        self.requested: int | None = None
        self.interrupted_by: type[Exception] | None = None
        #: Called with a signal that may be no stop, because somebody else says when to stop. Defaults to none.
        self.ask_about: Callable[[int], None] | None = None
        self._interruptible = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._interrupt = interrupt
        self._previous: dict[int, Any] = {}
        self._alarm: _Alarm | None = None
        self._outer: Stop | None = None

    def __enter__(self) -> Stop:
        global _active
        if threading.current_thread() is threading.main_thread():
            if self._interrupt is not None:
                self._alarm = _Alarm(self._ring)
            self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
            self._outer, _active = _active, self
        return self

    def _ring(self, number: int) -> None:
        acts = number == _INTERRUPT or (number in self._signals and self.ask_about is None)
        if acts and self._interruptible and self._interrupt is not None:
            self._interrupt()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if not self._previous:
            return
        self._restore_handlers()
        _active = self._outer
        if self._alarm is not None:
            self._alarm.close()
        if self.requested is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            # It came when nobody looked any more.
            if self._outer is None:
                self.check()
            else:
                self._outer.requested = self.requested

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
            self._check_all()

    def _check_all(self) -> None:
        self.check()
        if self.interrupted_by is not None:
            raise self.interrupted_by("make() was interrupted.")

    def request(self, number: int) -> None:
        """Ask for a stop, as this signal does. Called from another thread."""
        self.requested = number
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

    def take(self) -> int | None:
        """The signal that asked for a stop, if one has; the next one will be news again."""
        number, self.requested = self.requested, None
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
            self._interruptible = False
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
        self._interruptible = False

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
    """Hears of signals in a thread of its own, at once, while the main thread sits in a driver's C code."""

    def __init__(self, ring: Callable[[int], None]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        start_thread(self._listen, ring)

    def _listen(self, ring: Callable[[int], None]) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                if self._previous >= 0:
                    os.write(self._previous, numbers)  # an event loop's, as in a notebook
                for number in numbers:
                    ring(number)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous)
        self._writer.close()
