"""Executing: make() for one claimed job, by DataJoint's own hand, and what comes of it."""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import dataclass
from typing import Any

from .claiming import Job
from .errors import LeaseLost
from .finishing import Finisher
from .queue import Queue
from .stopping import Stop

__all__ = ["Executor", "Outcome"]

logger = logging.getLogger("djjobs")

#: How often a job is tried again at once after a deadlock or a lost connection.
_TRANSIENT_TRIES = 3


@dataclass(frozen=True)
class Outcome:
    """What came of a job: make() ran, or the key was there already, or there was an error."""

    key: dict[str, Any]
    made: bool
    error: Exception | None = None
    message: str = ""


class Executor:
    """Runs the jobs of one table, one after the other."""

    def __init__(self, queue: Queue, table: Any, finisher: Finisher, make_kwargs: dict[str, Any] | None) -> None:
        self._queue, self._table, self._finisher, self._make_kwargs = queue, table, finisher, make_kwargs

    def run(self, job: Job, stop: Stop) -> Outcome:
        """Run a job to its end. Errors come back in the outcome; a stop gives the job back and is raised."""
        started = time.monotonic()
        try:
            return self._make(job, stop, started)
        except Exception as error:
            self._queue.db.roll_back()
            if stop.requested is None:
                return self._fail(job, error, time.monotonic() - started)
            # The stop broke the connection first, and DataJoint stumbled over that.
            self._give_back_after_stop(job)
            stop.check()
            raise
        except BaseException:
            self._give_back_after_stop(job)
            raise

    def _make(self, job: Job, stop: Stop, started: float) -> Outcome:
        for tries_left in reversed(range(_TRANSIENT_TRIES)):
            try:
                with (
                    self._finisher.with_commit(job, lambda: time.monotonic() - started),
                    stop.interruptible(),
                ):
                    made = self._table._populate1(job.key, None, False, True, make_kwargs=self._make_kwargs)
            except Exception as error:
                if stop.requested or not tries_left or not self._queue.db.is_transient(error):
                    raise
                logger.warning("%s %s is tried again: %s", type(self._table).__name__, job.key, error)
                self._queue.db.roll_back()
                continue
            if not made:
                self._finisher.already_done(job)
            return Outcome(job.key, made)
        raise AssertionError("not reached")

    def _give_back_after_stop(self, job: Job) -> None:
        self._queue.db.start_afresh()
        self._finisher.give_back([job])

    def _fail(self, job: Job, error: Exception, duration: float) -> Outcome:
        logger.debug("%s %s failed: %s", type(self._table).__name__, job.key, describe(error))
        if not isinstance(error, LeaseLost):
            try:
                self._finisher.failed(job, describe(error), "".join(traceback.format_exception(error)), duration)
            except LeaseLost as lost:
                error = lost
        return Outcome(job.key, made=False, error=error, message=describe(error))


def describe(error: BaseException) -> str:
    """An error in one line, as DataJoint records it: its class and its message."""
    text = str(error)
    return type(error).__name__ + (f": {text}" if text else "")
