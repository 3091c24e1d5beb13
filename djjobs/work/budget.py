"""How many jobs a populate may still run, and how many it should claim at once."""

from __future__ import annotations

import fcntl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

__all__ = ["Budget", "Pace"]

#: A claim is to be worth about this many seconds of work: many short jobs, or one long one.
_CLAIM_SECONDS = 1.0
_LARGEST_CLAIM = 32
_UNLIMITED = 2**62


class _Number(Protocol):
    value: int


class _Plain:
    def __init__(self, value: int) -> None:
        self.value = value


class _SharedLock:
    """A lock between forked processes. The kernel gives it back when its holder is killed."""

    def __init__(self) -> None:
        # The file has no name, and each process that inherits it is another one to the kernel.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the lock is there

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class Budget:
    """`max_calls` and `limit`, which the processes of a populate spend together.

    Parameters
    ----------
    max_calls : int, optional
        How many times make() may be called. Defaults to no limit.
    limit : int, optional
        How many jobs may be looked at, whether or not make() has to be called. Defaults to no limit.
    context : optional
        The multiprocessing context of the processes that share it. Defaults to none, one process.
    """

    def __init__(self, max_calls: int | None = None, limit: int | None = None, context: Any = None) -> None:
        def number(most: int | None) -> _Number:
            value = _UNLIMITED if most is None else max(most, 0)
            return context.Value("q", value, lock=False) if context else _Plain(value)

        self._calls, self._looks, self._ended = number(max_calls), number(limit), number(0)
        # Without limits the numbers need not be right.
        limited = max_calls is not None or limit is not None
        self._lock: AbstractContextManager[Any] = _SharedLock() if context and limited else threading.Lock()

    def take(self, count: int) -> int:
        """Reserve up to `count` calls; how many are granted."""
        if self._ended.value:
            return 0
        with self._lock:
            granted = min(count, self._calls.value, self._looks.value)
            self._calls.value -= granted
            self._looks.value -= granted
        return granted

    def put_back(self, count: int) -> None:
        """Give back what no job was found for."""
        with self._lock:
            self._calls.value += count
            self._looks.value += count

    def refund_call(self) -> None:
        """A job was looked at whose key was in the target already: make() was not called."""
        with self._lock:
            self._calls.value += 1

    def spend_all(self) -> None:
        """Let nobody take any more."""
        self._ended.value = 1

    @property
    def ended(self) -> bool:
        """Whether nobody is to take any more, not even what was granted."""
        return bool(self._ended.value)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is to be had at the moment; somebody may still put back something."""
        return self.ended or not self.most(1)

    def most(self, available: int) -> int:
        """How many of the available jobs the budget is enough for."""
        return min(available, self._calls.value, self._looks.value)


class Pace:
    """How long the last jobs took, and so how many to claim next."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    @contextmanager
    def timing(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - started
            self._seconds = took if self._seconds is None else 0.7 * self._seconds + 0.3 * took

    @property
    def batch(self) -> int:
        if self._seconds is None:
            return 1
        return max(1, min(_LARGEST_CLAIM, int(_CLAIM_SECONDS / max(self._seconds, 1e-6))))
