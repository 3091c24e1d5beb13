"""What came of a job, and the one place where that is told."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import DjJobsError, LeaseLost
from ..queue.claim import Job
from ..queue.finish import cut
from ..telemetry import emit

__all__ = ["Fault", "MakeFailed", "Outcome", "describe", "tell_of", "tell_of_given_back"]

#: An exception that takes more than this crosses the border of a process as words only.
_LARGEST_ERROR = 2**24


class MakeFailed(Exception):
    """Carries what make() raised past everything that explains errors of the queue."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Fault:
    """An exception as it crosses the border of a process: in words, and in bytes for whoever wants the very object.

    A supervisor must not stumble over it: what can be imported in a slot may be unknown in the supervisor, or take long
    to import.
    """

    words: str
    data: bytes | None
    is_lost: bool
    is_exit: bool
    is_suppressible: bool

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        kinds = isinstance(error, LeaseLost), isinstance(error, SystemExit), _is_suppressible(error)
        return cls(describe(error), _pickled(error), *kinds)

    @cached_property
    def error(self) -> BaseException:
        """The exception itself if it can be had here, else its words."""
        if self.data is not None:
            with contextlib.suppress(BaseException):
                error = pickle.loads(self.data)
                if isinstance(error, BaseException):
                    return error
        # One that ends the process is to end the other one, too.
        return (SystemExit if self.is_exit else DjJobsError)(self.words)


def _pickled(error: BaseException) -> bytes | None:
    """The bytes of an exception, if it can be had as bytes; it is the user's class that says how."""
    with contextlib.suppress(BaseException):
        data = pickle.dumps(error)
        return data if len(data) <= _LARGEST_ERROR else None
    return None


def _is_suppressible(error: BaseException) -> bool:
    """Whether suppress_errors=True suppresses it. As in DataJoint, SystemExit is not suppressed."""
    return isinstance(error, (Exception, KeyboardInterrupt))


@dataclass(frozen=True)
class Outcome:
    """What came of a job: make() ran, or the key was there already, or there was an error, or it was cancelled.

    `raised` is the exception, or how it came from another process. `retry_in` says in how many seconds a failed job
    will be tried again.
    """

    key: dict[str, Any]
    made: bool
    raised: BaseException | Fault | None = None
    message: str = ""
    retry_in: float | None = None
    cancelled: bool = False
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether there was an error, whether or not the job is tried again."""
        return self.raised is not None

    @property
    def error(self) -> BaseException | None:
        """The exception, as far as it can be had in this process."""
        return self.raised.error if isinstance(self.raised, Fault) else self.raised

    @property
    def is_lost(self) -> bool:
        """Whether the job was given to another worker meanwhile."""
        return self.raised.is_lost if isinstance(self.raised, Fault) else isinstance(self.raised, LeaseLost)

    @property
    def stays_an_error(self) -> bool:
        """Whether the job failed and nobody will try it again."""
        return self.has_failed and self.retry_in is None and not self.is_lost

    def error_to_raise(self, suppress_errors: bool) -> BaseException | None:
        """What a populate raises because of this job."""
        if self.raised is None or self.retry_in is not None or (suppress_errors and self._is_suppressible(self.raised)):
            return None
        return self.error

    @staticmethod
    def _is_suppressible(raised: BaseException | Fault) -> bool:
        return raised.is_suppressible if isinstance(raised, Fault) else _is_suppressible(raised)

    @property
    def event(self) -> str:
        """The name of the event that it is."""
        if self.is_lost:
            return "job lost"
        if self.cancelled:
            return "job cancelled"
        if not self.has_failed:
            return "job done"
        return "job failed" if self.retry_in is None else "job retried"


def tell_of(table: str, job: Job, outcome: Outcome, **details: Any) -> None:
    """Let everybody know what came of a job. Nothing else is said about it anywhere."""
    emit(
        outcome.event,
        table,
        job.key,
        attempt=job.attempt + 1,
        duration=outcome.seconds,
        waited=job.waited,
        made=outcome.made,
        message=outcome.message,
        retry_in=outcome.retry_in,
        **details,
    )


def tell_of_given_back(table: str, jobs: list[Job]) -> None:
    """Claimed jobs went back into the queue as they were."""
    for job in jobs:
        emit("job given back", table, job.key, attempt=job.attempt + 1, waited=job.waited)


def describe(error: BaseException) -> str:
    """An error in one line, as DataJoint records it: its class and its message. Never raises."""
    try:
        text = cut(str(error))
    except Exception as failure:
        text = f"its message cannot be told, because of {type(failure).__name__}"
    return type(error).__name__ + (f": {text}" if text else "")
