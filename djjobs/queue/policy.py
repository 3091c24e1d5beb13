"""What a table is to the queue, and what it says about its jobs: how often to try, how long to wait, its hooks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import DjJobsError
from ..settings import settings
from .claim import Job

__all__ = ["Policy", "QueuedTable", "RetryOn", "default_hook", "exponential", "has_hook"]

logger = logging.getLogger("djjobs")

#: Ten years: no longer wait can be meant, and every engine can add it to a date.
_LONGEST_WAIT = 10 * 365 * 86400.0


@dataclass(frozen=True)
class exponential:
    """Seconds to wait after an attempt: `first`, then `base` times as long each time.

    Parameters
    ----------
    base : float
        How many times as long as the wait before. Defaults to 2.
    first : float
        Seconds after the first attempt. Defaults to 1.
    most : float
        Never longer than this. Defaults to an hour.
    jitter : float
        The share by which waits differ at random, so that jobs that failed together do not come back
        together. Defaults to 0.1.
    """

    base: float = 2.0
    first: float = 1.0
    most: float = 3600.0
    jitter: float = 0.1

    def __call__(self, attempt: int) -> float:
        """The wait after the attempt with this number, which begins at 1."""
        # Below the cap by the jitter, so that the longest waits differ too.
        most = self.most / (1 + self.jitter)
        try:
            wait = min(most, self.first * self.base ** (attempt - 1))
        except OverflowError:
            wait = most
        return wait * random.uniform(1 - self.jitter, 1 + self.jitter)


Hook = TypeVar("Hook", bound=Callable[..., Any])


def default_hook(method: Hook) -> Hook:
    """Mark a hook that does nothing, so that a table which does not have its own is told from one that has."""
    method.is_default_hook = True  # type: ignore[attr-defined]
    return method


def has_hook(table: Any, name: str) -> bool:
    """Whether a table has a hook of its own."""
    return not getattr(getattr(type(table), name), "is_default_hook", False)


RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException, Job], Any]


class QueuedTable(Protocol):
    """An instance of a class with the mixin, as the queue sees it."""

    @property
    def connection(self) -> Any: ...
    @property
    def database(self) -> Any: ...
    @property
    def table_name(self) -> str: ...
    @property
    def full_table_name(self) -> str: ...
    @property
    def heading(self) -> Any: ...
    @property
    def primary_key(self) -> list[str]: ...
    @property
    def key_source(self) -> Any: ...
    @property
    def restriction(self) -> Any: ...

    priority: int | None
    keep_completed: bool | None
    max_attempts: int | None
    retry_on: RetryOn
    backoff: Callable[[int], float] | float
    timeout: float | None
    events: bool | None

    def make(self, key: dict[str, Any]) -> Any: ...
    def on_cancel(self, key: dict[str, Any]) -> None: ...
    def before_delete(self, job: dict[str, Any]) -> None: ...
    def prepare_run(self, run: Any) -> Any: ...
    def finish_run(self, run: Any) -> Any: ...


@dataclass(frozen=True)
class Policy:
    """The policy of one table, checked."""

    max_attempts: int | None
    retry_on: RetryOn
    backoff: Callable[[int], float]
    timeout: float | None

    @classmethod
    def of(cls, table: Any, label: str) -> Policy:
        """Read a table's class attributes."""
        most, timeout, retry_on, backoff = table.max_attempts, table.timeout, table.retry_on, table.backoff
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise DjJobsError(f"max_attempts of {label} must be a whole number, one or more, not {most!r}.")
        if timeout is not None and not (_is_number(timeout) and timeout > 0):
            raise DjJobsError(f"timeout of {label} must be a number of seconds above zero, or None, not {timeout!r}.")
        if not (_is_error_class(retry_on) or (callable(retry_on) and not isinstance(retry_on, type))):
            raise DjJobsError(
                f"retry_on of {label} must be exception classes or a function of the exception and the job, "
                f"not {retry_on!r}."
            )
        if not callable(backoff):
            if not (_is_number(backoff) and backoff >= 0):
                raise DjJobsError(
                    f"backoff of {label} must be seconds, or a function of the attempt's number such as "
                    f"djjobs.exponential(), not {backoff!r}."
                )
            seconds = float(backoff)
            return cls(most, retry_on, lambda _attempt: seconds, timeout)
        return cls(most, retry_on, backoff, timeout)

    def wait_after_error(self, error: BaseException, job: Job) -> float | None:
        """Seconds until the next try; None if the error is to stay."""
        attempt = job.attempt + 1
        if attempt >= (self.max_attempts or 1):
            return None
        try:
            return self._wait(error, job, attempt)
        except Exception:
            logger.exception("The retry policy failed for %s; its error stays", job.key)
            return None

    def _wait(self, error: BaseException, job: Job, attempt: int) -> float | None:
        wanted = isinstance(error, self.retry_on) if _is_error_class(self.retry_on) else self.retry_on(error, job)  # type: ignore[arg-type, operator]
        if not wanted:
            return None
        wait = float(self.backoff(attempt))
        if math.isnan(wait):
            raise ValueError("the backoff is not a number")
        return min(max(0.0, wait), _LONGEST_WAIT)

    def comes_back(self, attempt: int, crashes: int) -> bool:
        """Whether a job comes back that has just lost its worker, for the `crashes`th time."""
        return crashes < settings.max_crashes if self.max_attempts is None else attempt < self.max_attempts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_error_class(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_error_class, value))
    return isinstance(value, type) and issubclass(value, BaseException)
