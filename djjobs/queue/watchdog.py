"""The watchdog: a thread that ends what takes too long, because a driver waits for a stalled server for ever."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..interrupt import start_thread

__all__ = ["limited"]

#: How often it looks while there is something to look at.
_GLANCE = 0.25


class _Watchdog:
    def __init__(self) -> None:
        #: By when each stretch has to be over, and what to do if it is not.
        self._stretches: dict[int, tuple[float, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._is_needed = threading.Event()
        self._has_thread = False

    @contextmanager
    def limited(self, seconds: float, end: Callable[[], None]) -> Iterator[None]:
        if not self._has_thread:
            self._has_thread = True
            start_thread(self._watch)
        number = next(self._numbers)
        self._stretches[number] = time.monotonic() + seconds, end
        self._is_needed.set()
        try:
            yield
        finally:
            self._stretches.pop(number, None)

    def _watch(self) -> None:
        while self._is_needed.wait():
            time.sleep(_GLANCE)
            self._is_needed.clear()
            for number, (until, end) in list(self._stretches.items()):
                self._is_needed.set()
                if time.monotonic() > until and number in self._stretches:
                    del self._stretches[number]
                    end()


_watchdog = _Watchdog()


def limited(seconds: float, end: Callable[[], None]) -> AbstractContextManager[None]:
    """A stretch that may take so many seconds. If it takes longer, `end` is called from another thread, once."""
    return _watchdog.limited(seconds, end)


def _start_over() -> None:
    """A forked process has no thread yet, and what its parent waits for is not its own."""
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_start_over)
