"""Waiting for a server that is away, refuses changes or has no connection left: with growing pauses, and said once."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from ..sql.connection import CROWDED

__all__ = ["GOES_ON", "WAITS", "Patience", "Trouble"]

logger = logging.getLogger("djjobs")

#: What the lines of the log are called that tell of it.
WAITS, GOES_ON = "waiting", "goes on"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
#: What has passed after so short a time is not worth a line.
_WORTH_A_LINE = 0.2


class Trouble:
    """Says what is waited for, once, and once that it goes on."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said: set[str] = set()

    def tell(self, reason: str | None, error: BaseException) -> None:
        """Something has to be waited for."""
        self._since = self._since or time.monotonic()
        reason = reason or "the worker cannot be kept alive at the moment"
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("Waiting: %s (%s).", reason, _first_line(error), extra={"event": WAITS, "reason": reason})

    def is_over(self) -> None:
        """It has passed."""
        if self._since is not None:
            took = time.monotonic() - self._since
            logger.warning("It goes on after %.0f s of waiting.", took, extra={"event": GOES_ON})
            self._since = None
            self._said.clear()


class Patience:
    """How long somebody waits for a server. Without any, the first fault counts.

    Parameters
    ----------
    seconds : float
        For how long.
    given_up : callable
        Whether somebody wants this process to stop.
    """

    def __init__(self, seconds: float = 0.0, given_up: Callable[[], bool] = lambda: False) -> None:
        self._seconds, self.given_up = seconds, given_up
        self._since: float | None = None
        self._trouble = Trouble()
        self._pause = _FIRST_PAUSE

    def is_left(self) -> bool:
        """Whether to wait once more."""
        if self._seconds <= 0 or self.given_up():
            return False
        return self._since is None or time.monotonic() + self._pause <= self._since + self._seconds

    def pause(self, reason: str, error: BaseException) -> None:
        """Wait a bit, each time for longer; say once what for."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        # A supervisor has to know at once which of its slots have no connection.
        if now - self._since >= _WORTH_A_LINE or reason == CROWDED:
            self._trouble.tell(reason, error)
        until = now + random.uniform(self._pause / 2, self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        while not self.given_up() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _WORTH_A_LINE))

    def is_over(self) -> None:
        """What was waited for has passed."""
        if self._since is not None:
            self._trouble.is_over()
            self._since, self._pause = None, _FIRST_PAUSE


def _first_line(error: BaseException) -> str:
    text = " ".join(str(part) for part in error.args if str(part)) or type(error).__name__
    return text.strip().splitlines()[0][:200]
