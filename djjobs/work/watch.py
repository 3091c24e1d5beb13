"""The watch over running jobs: time-outs, requests that were passed on, and slots that do not heed them.

It looks into shared memory and sends signals. It asks no server, so it keeps its times while no server answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..settings import settings
from .messages import Request
from .shared_memory import SharedMemory, Started

__all__ = ["Watch", "Watched"]


class Watched(Protocol):
    """A slot as it is watched."""

    memory: SharedMemory
    number: int

    def ask(self, request: Request) -> None:
        """Pass on a request about a job."""

    def kill(self) -> None:
        """End the slot at once, if that is allowed."""

    def measure(self) -> None:
        """Remember how much memory it takes, in case it is killed for that."""


@dataclass
class _Asked:
    """A request that was passed on."""

    what: str
    when: float
    killed: bool = False

    def is_overdue(self, now: float) -> bool:
        """Whether the slot should have ended its job by now; not if it was only asked."""
        return self.what != "cancel" and not self.killed and now - self.when > settings.grace


class Watch:
    """Watches the jobs of a worker. Call `look` often.

    Parameters
    ----------
    timeouts : sequence of float or None
        How long a job of each table may take.
    """

    def __init__(self, timeouts: Sequence[float | None]) -> None:
        self._timeouts = list(timeouts)
        self._asked: dict[tuple[str, int], _Asked] = {}

    def look(self, slots: Iterable[Watched]) -> None:
        """Interrupt jobs that take too long, and kill slots that do not end them."""
        now, current = time.monotonic(), set()
        for slot in slots:
            started = slot.memory.read()
            if started is not None:
                current.add((started.key_hash, started.claim))
                self._look_at(slot, started, now)
        self._asked = {token: asked for token, asked in self._asked.items() if token in current}

    def _look_at(self, slot: Watched, started: Started, now: float) -> None:
        token = started.key_hash, started.claim
        asked, timeout = self._asked.get(token), self._timeouts[started.table]
        if asked is not None and asked.is_overdue(now):
            if not slot.memory.has_yielded:
                asked.killed = True
                slot.kill()
        elif timeout is not None and now - started.since > timeout:
            self.ask(slot, Request("timeout", *token))

    def ask(self, slot: Watched, request: Request) -> None:
        """Pass on a request, unless that was done. One that cannot wait goes after one that can."""
        asked = self._asked.get(request.token)
        if asked is None or (asked.what == "cancel" and request.what != "cancel"):
            self._asked[request.token] = _Asked(request.what, time.monotonic())
            slot.ask(request)

    def was_late(self, slot: Watched) -> bool:
        """Whether the job that a slot has was to end because of its time-out."""
        started = slot.memory.read()
        asked = started and self._asked.get((started.key_hash, started.claim))
        return bool(asked) and asked.what == "timeout"  # type: ignore[union-attr]
