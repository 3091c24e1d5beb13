"""Run one claimed job: DataJoint calls make(), and what came of it is recorded."""

from __future__ import annotations

import logging
import time
import traceback
from typing import Any

from ..dj.tables import make_one
from ..errors import JobCancelled, JobTimeout, LeaseLost
from ..interrupt import Stop
from ..queue.claim import Job
from ..queue.finish import Failure
from ..queue.table_queue import TableQueue
from ..run.hooks import RunHooks
from .current_job import CurrentJob, SlotState
from .outcome import Outcome, describe, tell_of_given_back

__all__ = ["Executor", "clean_up_after"]

logger = logging.getLogger("djjobs")

#: How often a job is tried again at once after a deadlock or a lost connection.
_TRANSIENT_TRIES = 3


class Executor:
    """Runs the jobs of one table, one after the other.

    Parameters
    ----------
    jobs : TableQueue
        The queue of the table.
    make_kwargs : dict, optional
        Passed on to make().
    state : SlotState
        Shows which job runs, and is asked to cancel it.
    number : int
        The number of the table in this worker. Defaults to 0.
    """

    def __init__(self, jobs: TableQueue, make_kwargs: dict[str, Any] | None, state: SlotState, number: int = 0) -> None:
        self.finisher, self._make_kwargs, self._state, self._number = jobs.finisher, make_kwargs, state, number
        self._queue, self._name = jobs.queue, jobs.name
        self._table: Any = jobs.table
        self.runs = RunHooks(jobs.finisher)

    def run(self, job: Job, stop: Stop) -> Outcome:
        """Run a job to its end. Errors come back in the outcome; a stop gives the job back and is raised."""
        started = time.monotonic()
        with self._state.running(job, self._number) as current:
            current._find_run = lambda: self.runs.of(job)
            try:
                return self._make(job, current, stop)
            except BaseException as raised:
                if stop.requested is not None:
                    # It is the stop itself, or DataJoint stumbled over the connection that the stop broke first.
                    self._give_back_after_stop(job)
                    stop.check()
                return self._end(job, self._error_after(raised, job, stop), time.monotonic() - started)

    def _make(self, job: Job, current: CurrentJob, stop: Stop) -> Outcome:
        started = time.monotonic()

        def elapsed() -> float:
            return time.monotonic() - started

        for tries_left in reversed(range(_TRANSIENT_TRIES)):
            try:
                current.check_cancelled()
                self.finisher.keys.insist_on_fit(job.key)
                if self.runs.prepare(job, self._state.restart_clock, stop):
                    started = time.monotonic()
                with self.finisher.with_commit(job, elapsed, stop), stop.interruptible():
                    made = make_one(self._table, job.key, self._make_kwargs)
            except Exception as error:
                interrupted = stop.requested or stop.interrupted_by
                if interrupted or not tries_left or not self._queue.db.is_transient(error):
                    raise
                logger.warning("%s %s is tried again: %s", self._name, job.key, error)
                self._queue.db.recover_from(error)
                continue
            if not made:
                self.finisher.already_done(job)
            return Outcome(job.key, made, seconds=elapsed())
        raise AssertionError("not reached")

    def _error_after(self, raised: BaseException, job: Job, stop: Stop) -> BaseException:
        """What the job failed with. What make() raises is its error, whatever the class; the connection works again."""
        db = self._queue.db
        if stop.interrupted_by is not None:
            # It is the interrupt itself, or what the driver says of the statement that it broke.
            self._state.has_yielded()
            db.reconnect()
            return self._interruption(stop.interrupted_by, job).with_traceback(raised.__traceback__)
        if isinstance(raised, Exception):
            db.roll_back()
        else:
            # A KeyboardInterrupt by a handler of make()'s own may have come in the middle of an answer.
            db.reconnect()
        return raised

    def _interruption(self, kind: type[Exception], job: Job) -> Exception:
        if kind is JobTimeout:
            return JobTimeout(f"make() of {self._name} took longer than {self.finisher.policy.timeout:g} s.")
        return JobCancelled(f"The job {job.key} of {self._name} was cancelled.")

    def _give_back_after_stop(self, job: Job) -> None:
        try:
            self._queue.db.start_afresh()
            if self.finisher.give_back([job]):
                tell_of_given_back(self._name, [job])
        except Exception as error:
            logger.warning("%s could not be given back; its lease will end: %s", job.key, error)

    def _end(self, job: Job, error: BaseException, seconds: float) -> Outcome:
        message = describe(error)
        try:
            if isinstance(error, JobCancelled):
                self.finisher.cancelled(job)
                return self._cancelled(job, message, seconds)
            if not isinstance(error, LeaseLost):
                wait = self.finisher.policy.wait_after_error(error, job)
                kind = "timeout" if isinstance(error, JobTimeout) else "error"
                stack = "".join(traceback.format_exception(error))
                status = self.finisher.failed(job, Failure(kind, message, stack, seconds), wait)
                if status == "cancelled":
                    return self._cancelled(job, message, seconds)
                if status == "success" and isinstance(error, Exception):
                    logger.info("%s %s: somebody else made it meanwhile; here: %s", self._name, job.key, message)
                    return Outcome(job.key, made=False, seconds=seconds)
                return Outcome(job.key, made=False, error=error, message=message, retry_in=wait, seconds=seconds)
        except LeaseLost as lost:
            error, message = lost, describe(lost)
        return Outcome(job.key, made=False, error=error, message=message, seconds=seconds)

    def _cancelled(self, job: Job, message: str, seconds: float) -> Outcome:
        clean_up_after(self._table, job.key)
        return Outcome(job.key, made=False, cancelled=True, message=message, seconds=seconds)


def clean_up_after(table: Any, key: dict[str, Any]) -> None:
    """A job was cancelled: what make() left behind elsewhere is the table's own to remove."""
    try:
        table.on_cancel(key)
    except Exception:
        logger.exception("on_cancel of %s failed for %s", type(table).__name__, key)
