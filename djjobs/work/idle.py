"""When idle slots are woken up to look for jobs: at first every second, then less and less often."""

from __future__ import annotations

import random
import time

from .messages import Idle
from .pool import Slot

__all__ = ["FIRST_WAIT", "IdleSlots"]

#: How long an idle worker waits before it asks the server again: the first time, and at most.
FIRST_WAIT, _LONGEST_WAIT = 1.0, 15.0


class IdleSlots:
    """Says when the next idle slot is to be woken up.

    Parameters
    ----------
    hurries : bool
        Whether the worker ends when it has been idle for some time, so that it looks again as soon as it may schedule.
    """

    def __init__(self, hurries: bool) -> None:
        self._hurries = hurries
        self._wait, self._next_call = FIRST_WAIT, 0.0
        self._is_called_for = False
        #: What the slot said that has looked last.
        self.last = Idle()

    def hear(self, idle: Idle) -> None:
        """A slot has found no jobs."""
        self.last = idle
        # It has not seen what was announced after its look.
        if not self._is_called_for:
            self._wait_longer()

    def working(self) -> None:
        """A slot has found jobs: there may be more."""
        self._wait, self._next_call = FIRST_WAIT, 0.0

    def announced(self) -> None:
        """Somebody says that there are jobs."""
        self._wait, self._next_call, self._is_called_for = FIRST_WAIT, 0.0, True

    def wake_one(self, slots: list[Slot]) -> None:
        """Let one idle slot look for jobs if it is time. If it finds some, the next one is woken up at once."""
        idle = [slot for slot in slots if not slot.busy]
        if idle and time.monotonic() >= self._next_call:
            self._is_called_for = False
            self._wait_longer()
            idle[0].wake()

    def _wait_longer(self) -> None:
        hurries = self._hurries and self.last.limited
        wait = min(self._wait, FIRST_WAIT) if hurries else self._wait
        self._next_call = time.monotonic() + wait * random.uniform(0.75, 1.25)
        self._wait = min(self._wait * 1.5, _LONGEST_WAIT)
