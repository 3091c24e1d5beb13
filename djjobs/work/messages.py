"""What a slot and its supervisor say to each other."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..telemetry import Event
from .outcome import Outcome

__all__ = [
    "Idle",
    "JobOver",
    "Log",
    "Message",
    "OutOfTime",
    "Request",
    "SlotDied",
    "SlotEnded",
    "SlotFailed",
    "Told",
    "Wake",
    "Working",
]


class Message:
    """Something that a slot says, or that is said of it."""


# -- from a slot to its supervisor ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Working(Message):
    """The slot has found jobs."""


@dataclass(frozen=True)
class Idle(Message):
    """The slot has found no jobs and waits until it is woken up.

    Attributes
    ----------
    retries_wait : bool
        Whether jobs wait for their next try.
    limited : bool
        Whether it was not allowed to schedule, because somebody had just done so.
    """

    retries_wait: bool = False
    limited: bool = False


@dataclass(frozen=True)
class OutOfTime(Message):
    """No job would fit into the time that is left."""


@dataclass(frozen=True)
class JobOver(Message):
    """An attempt of a job has ended."""

    outcome: Outcome


@dataclass(frozen=True)
class SlotFailed(Message):
    """The slot cannot go on, through no fault of a job."""

    error: BaseException


@dataclass(frozen=True)
class Told(Message):
    """An event that happened in the slot."""

    event: Event


@dataclass(frozen=True)
class Log(Message):
    """A line of the slot's log."""

    record: logging.LogRecord


# -- from the pool, of a slot that is gone ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotEnded(Message):
    """The slot has ended by itself, with nothing left to do."""


@dataclass(frozen=True)
class SlotDied(Message):
    """The slot has ended without having been told to; how that happened, in words."""

    story: str


# -- from a supervisor or a monitor to a slot --------------------------------------------------------------------------


@dataclass(frozen=True)
class Wake:
    """There may be jobs: look for them."""


@dataclass(frozen=True)
class Request:
    """Something is asked of a running job: "cancel", "force" or "timeout"."""

    what: str
    key_hash: str
    claim: int

    @property
    def token(self) -> tuple[str, int]:
        """Which claim of which job it is about."""
        return self.key_hash, self.claim
