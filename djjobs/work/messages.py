"""What a slot and its supervisor say to each other.

Only plain data crosses the border of a process: what a user's class does when it is read again, or that it cannot be
imported there, must not be the supervisor's problem.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from ..telemetry import Event
from .outcome import Fault, Outcome
from .plain_data import plain

__all__ = [
    "End",
    "Idle",
    "JobOver",
    "Log",
    "Message",
    "OutOfTime",
    "Request",
    "Signalled",
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

    @classmethod
    def of(cls, outcome: Outcome) -> JobOver:
        raised = outcome.raised
        fault = Fault.of(raised) if isinstance(raised, BaseException) else raised
        return cls(replace(outcome, key=plain(outcome.key), raised=fault))


@dataclass(frozen=True)
class SlotFailed(Message):
    """The slot cannot go on, through no fault of a job."""

    fault: Fault

    @property
    def error(self) -> BaseException:
        """Why it cannot go on."""
        return self.fault.error


@dataclass(frozen=True)
class Signalled(Message):
    """A signal that means stop has reached the slot while it ran this job, and the supervisor has not said so."""

    key_hash: str
    claim: int


@dataclass(frozen=True)
class Told(Message):
    """An event that happened in the slot."""

    event: Event

    @classmethod
    def of(cls, event: Event) -> Told:
        return cls(replace(event, key=plain(event.key), details=plain(event.details)))


@dataclass(frozen=True)
class Log(Message):
    """A line of the slot's log: the attributes of its record."""

    attributes: dict[str, Any]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Log:
        told = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}
        if record.exc_info:
            told["exc_text"] = logging.Formatter().formatException(record.exc_info)
        return cls(plain(told))

    @property
    def record(self) -> logging.LogRecord:
        return logging.makeLogRecord(self.attributes)


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
class End:
    """Give back what you have, and end."""


@dataclass(frozen=True)
class Request:
    """Something is asked of a running job: "cancel" or "force", or to end with an error: "timeout" or "signal"."""

    what: str
    key_hash: str
    claim: int

    @property
    def token(self) -> tuple[str, int]:
        """Which claim of which job it is about."""
        return self.key_hash, self.claim
