"""The bell of an idle worker: PostgreSQL tells it when somebody has put jobs into a queue."""

from __future__ import annotations

import logging
import time
from typing import Any

from ..dj.compat import datajoint_api
from ..dj.connection import driver_of
from .database import Database

__all__ = ["Bell"]

logger = logging.getLogger("djjobs")


class Bell:
    """Rings when somebody has put jobs into a queue, where the engine can tell."""

    def __init__(self, connection: Any) -> None:
        self._other: Any = None
        self._listen = Database(connection).engine.listen
        if self._listen:
            self._connection = connection
            self._hang_up()

    def _hang_up(self) -> None:
        try:
            self._other = datajoint_api.another_connection(self._connection)
            self._other.query(self._listen)
        except Exception as error:
            logger.debug("no notifications: %s", error)
            self._other = None
            self._again = time.monotonic() + 5

    @property
    def sources(self) -> list[Any]:
        return [] if self._other is None else [driver_of(self._other)]

    def rings(self) -> bool:
        if not self._listen:
            return False
        if self._other is None:
            if time.monotonic() > self._again:
                self._hang_up()
            return False
        raw = driver_of(self._other)
        try:
            raw.poll()
        except Exception:
            self._other, self._again = None, time.monotonic() + 1
            return False
        rang = bool(raw.notifies)
        raw.notifies.clear()
        return rang
