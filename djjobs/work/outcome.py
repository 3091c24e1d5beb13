"""What came of a job, and the one place where that is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import LeaseLost
from ..queue.claim import Job
from ..telemetry import emit

__all__ = ["MakeFailed", "Outcome", "describe", "tell_of", "tell_of_given_back"]


class MakeFailed(Exception):
    """Carries what make() raised past everything that explains errors of the queue."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Outcome:
    """What came of a job: make() ran, or the key was there already, or there was an error, or it was cancelled.

    `retry_in` says in how many seconds a failed job will be tried again.
    """

    key: dict[str, Any]
    made: bool
    error: BaseException | None = None
    message: str = ""
    retry_in: float | None = None
    cancelled: bool = False
    seconds: float = 0.0

    @property
    def stays_an_error(self) -> bool:
        """Whether the job failed and nobody will try it again."""
        return self.error is not None and self.retry_in is None and not isinstance(self.error, LeaseLost)

    def error_to_raise(self, suppress_errors: bool) -> BaseException | None:
        """What a populate raises because of this job. As in DataJoint, SystemExit is not suppressed."""
        suppressed = suppress_errors and isinstance(self.error, (Exception, KeyboardInterrupt))
        return None if suppressed or self.retry_in is not None else self.error

    @property
    def event(self) -> str:
        """The name of the event that it is."""
        if isinstance(self.error, LeaseLost):
            return "job lost"
        if self.cancelled:
            return "job cancelled"
        if self.error is None:
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
    """An error in one line, as DataJoint records it: its class and its message."""
    text = str(error)
    return type(error).__name__ + (f": {text}" if text else "")
