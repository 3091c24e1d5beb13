"""The notifier: PostgreSQL tells an idle worker when somebody has put jobs into a queue."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from multiprocessing.connection import wait
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import driver_of
from ..interrupt import start_thread
from .database import Database

__all__ = ["Notifier"]

logger = logging.getLogger("djjobs")

#: How long to wait before the server is asked again for notifications: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


class Notifier:
    """Says whether somebody has put jobs into a queue, where the engine can tell.

    It listens in a thread of its own: the server may take long to answer, or not answer at all.
    """

    def __init__(self, connection: Any) -> None:
        self._listen_sql = Database(connection).engine.workers.listen
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        if self._listen_sql:
            self._connection = connection
            start_thread(self._listen)

    @property
    def sources(self) -> list[Any]:
        """What to wait for."""
        return [self._reader]

    def has_news(self) -> bool:
        """Whether something was announced since the last time."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._reader.recv(4096))
        return False

    # -- in the thread -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                other = datajoint_api.another_connection(self._connection)
                other.query(self._listen_sql, reconnect=False)
                pause = _FIRST_PAUSE
                self._pass_on(driver_of(other))
            except Exception as error:
                logger.debug("no notifications: %s", error)
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _pass_on(self, driver: Any) -> None:
        """Pass on what is announced, until the connection is lost."""
        while True:
            wait([driver])
            driver.poll()
            if driver.notifies:
                driver.notifies.clear()
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b".")
