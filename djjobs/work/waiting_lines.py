"""Lines about waiting: the processes of a worker wait for the same server, and one line in the log says so."""

from __future__ import annotations

import logging

from ..queue.waiting import GOES_ON, WAITS

__all__ = ["WaitingLines"]


class WaitingLines(logging.Filter):
    """Lets pass what the first process says that waits, and what the last one says that goes on.

    Attributes
    ----------
    waiting : dict
        Which process waits for what.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, str] = {}
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, "event", None)
        process = record.process or 0
        if event == WAITS:
            reason = getattr(record, "reason", "")
            is_news = reason not in self._said
            self.waiting[process] = reason
            self._said.add(reason)
            return is_news
        if event == GOES_ON:
            return self.forget(process)
        return True

    def forget(self, process: int | None) -> bool:
        """A process waits no more, or is gone; whether it was the last one that waited."""
        waited = self.waiting.pop(process or 0, None) is not None
        if self.waiting or not waited:
            return False
        self._said.clear()
        return True
