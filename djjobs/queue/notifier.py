"""The notifier: PostgreSQL tells an idle worker when somebody has put jobs into a queue."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import driver_of
from .database import Database

__all__ = ["Notifier"]

logger = logging.getLogger("djjobs")

#: How long to wait before the server is asked again for notifications: after a failure, and after a lost connection.
_AFTER_FAILURE, _AFTER_LOSS = 5.0, 1.0


class Notifier:
    """Says whether somebody has put jobs into a queue, where the engine can tell."""

    def __init__(self, connection: Any) -> None:
        self._other: Any = None
        self._listen = Database(connection).engine.workers.listen
        if self._listen:
            self._connection = connection
            self._connect()

    def _connect(self) -> None:
        try:
            self._other = datajoint_api.another_connection(self._connection)
            self._other.query(self._listen)
        except Exception as error:
            logger.debug("no notifications: %s", error)
            self._other = None
            self._again = time.monotonic() + _AFTER_FAILURE

    @property
    def sources(self) -> list[Any]:
        """What to wait for."""
        return [] if self._other is None else [driver_of(self._other)]

    def has_news(self) -> bool:
        """Whether something was announced since the last time."""
        if not self._listen:
            return False
        if self._other is None:
            if time.monotonic() > self._again:
                self._connect()
            return False
        raw = driver_of(self._other)
        try:
            raw.poll()
        except Exception:
            self._other, self._again = None, time.monotonic() + _AFTER_LOSS
            return False
        has_news = bool(raw.notifies)
        raw.notifies.clear()
        return has_news
