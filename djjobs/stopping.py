"""Stopping: SIGTERM and SIGINT end a populate between two statements or inside make(), nowhere else.

An exception in the middle of a statement of the queue would leave the connection in the middle of
an answer, so a signal that comes then is kept until the statement is over.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stop"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Catches the signals while it is entered and restores the caller's handlers afterwards.

    Outside the main thread Python allows no handlers; there it catches nothing.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be set again from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = number
        if self._interruptible:
            self.check()

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
            self.check()
            yield
        finally:
            self._interruptible = False

    def sleep(self, seconds: float) -> None:
        with self.interruptible():
            time.sleep(seconds)
