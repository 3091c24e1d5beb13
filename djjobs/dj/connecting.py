"""Connecting within a time limit, and later.

A server that is stalled still accepts connections: the kernel does that for it. DataJoint's connections to MySQL would
then wait for its greeting for ever.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .connection import driver_of, put_driver

__all__ = ["connect_at_next_use", "connecting_within", "let_connect", "refuse_to_connect"]

#: Where DataJoint looks its drivers up: 0.14, and 2.x for each engine.
_USERS_OF_DRIVERS = ("datajoint.connection", "datajoint.adapters.mysql", "datajoint.adapters.postgres")

_here = threading.local()
#: Set while DataJoint is not to open connections of its own accord.
_refusal = threading.Event()


def refuse_to_connect() -> None:
    """The main thread is to stop: DataJoint must not connect again by itself, and wait again. We still may."""
    _look_on()
    _refusal.set()


def let_connect() -> None:
    """DataJoint may connect again."""
    _refusal.clear()


@contextmanager
def connecting_within(seconds: float) -> Iterator[None]:
    """Meanwhile, connections that this thread opens are open within so many seconds, or there is an error."""
    _look_on()
    _here.deadline = time.monotonic() + seconds
    try:
        yield
    finally:
        _here.deadline = None


@functools.cache
def _look_on() -> None:
    """Let DataJoint see the drivers through a module of ours, which knows of the limit."""
    for name in _USERS_OF_DRIVERS:
        try:
            user = importlib.import_module(name)
        except ImportError:
            continue
        driver = getattr(user, "client", None)
        if driver is not None:
            user.client = _Driver(driver)  # type: ignore[attr-defined]
    logging.getLogger("datajoint").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """DataJoint 2 would say at each try to connect that it goes on without TLS. We say once what is waited for."""
    is_ours = getattr(_here, "deadline", None) is not None
    return not (is_ours and str(record.msg).startswith("SSL connection failed"))


class _Driver:
    """A driver's module, pymysql or psycopg2, as DataJoint sees it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def connect(self, **words: Any) -> Any:
        deadline = getattr(_here, "deadline", None)
        if deadline is None:
            if _refusal.is_set() and threading.current_thread() is threading.main_thread():
                raise self._module.OperationalError(2006, "The server did not answer, and somebody wants to stop.")
            return self._module.connect(**words)
        left = deadline - time.monotonic()
        if left <= 0:
            # DataJoint 2 tries a second time, without TLS.
            raise self._module.OperationalError(2003, "The server did not answer in time.")
        if self._module.__name__ == "psycopg2":
            # The driver takes whole seconds, and less than two are two to it.
            return self._module.connect(**{**words, "connect_timeout": max(2, math.ceil(left))})
        connection = self._module.connect(**{**words, "connect_timeout": left, "read_timeout": left})
        # The limit was for the greeting. Statements may take longer.
        connection._read_timeout = None
        return connection


class _NotYet:
    """Stands for a connection of the driver until somebody needs one."""

    def __init__(self, connection: Any, connect: Callable[[Any], None]) -> None:
        self._connection, self._connect = connection, connect

    def __getattr__(self, name: str) -> Any:
        self._connect(self._connection)
        return getattr(driver_of(self._connection), name)

    def close(self) -> None:
        """There is nothing to close."""

    def cancel(self) -> None:
        """There is no statement to end."""

    def fileno(self) -> int:
        raise OSError("not connected yet")


def connect_at_next_use(connection: Any, connect: Callable[[Any], None]) -> None:
    """Leave a connection closed. It is opened by whoever uses it next."""
    put_driver(connection, _NotYet(connection, connect))
