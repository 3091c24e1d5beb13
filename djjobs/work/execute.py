"""Run one claimed job: DataJoint calls make(), and what came of it is recorded."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..dj.connection import MakeTransaction
from ..dj.tables import make_one
from ..errors import DjJobsError, JobCancelled, JobTimeout, LeaseLost
from ..interrupt import Stop
from ..queue.claim import Job
from ..queue.finish import Failure, cut
from ..queue.table_queue import TableQueue
from ..run.hooks import RunHooks
from .current_job import CurrentJob, JobSignalled, SlotState
from .outcome import Outcome, describe, tell_of_given_back

__all__ = ["Executor", "Unrecorded", "clean_up_after"]

logger = logging.getLogger("djjobs")
T = TypeVar("T")

#: How often a job is tried again at once after a deadlock or a lost connection.
_TRANSIENT_TRIES = 3
#: How often the end of a job is tried to be recorded, and the pauses between. Each try waits for a server that is away.
_RECORDING_TRIES = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
#: How much is kept of each part of a stack trace.
_PART_KEPT = 2**16


class Unrecorded(DjJobsError):
    """The end of a job could not be recorded, whatever was tried. Whoever sees to dead slots has to settle the job."""


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
        """Run a job to its end. Errors come back in the outcome; a stop gives the job back and is raised.

        Raises
        ------
        Unrecorded
            If nothing could be recorded about the job. Then it still counts as running.
        """
        started = time.monotonic()
        with self._state.running(job, self._number) as current:
            current._find_run = lambda: self.runs.of(job)
            outcome = None
            try:
                outcome = self._make(job, current, stop)
            except BaseException as raised:
                # If there is a stop, it is the stop itself, or DataJoint stumbled over the connection that it broke.
                if stop.requested is not None:
                    self._give_back_after_stop(job)
                else:
                    outcome = self._end(job, self._error_after(raised, job, stop), stop, started)
        if outcome is None:
            stop.check()
            raise AssertionError("not reached")
        return outcome

    def _make(self, job: Job, current: CurrentJob, stop: Stop) -> Outcome:
        started = time.monotonic()

        def elapsed() -> float:
            return time.monotonic() - started

        transaction: MakeTransaction
        for tries_left in reversed(range(_TRANSIENT_TRIES)):
            try:
                current.check_cancelled()
                self.finisher.keys.insist_on_fit(job.key)
                if self.runs.prepare(job, self._state.restart_clock, stop):
                    started = time.monotonic()
                with self.finisher.with_commit(job, elapsed, stop) as transaction, stop.interruptible():
                    made = make_one(self._table, job.key, self._make_kwargs, lambda: _in_make(transaction, stop))
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
        error, db = raised, self._queue.db
        if stop.interrupted_by is not None:
            # It is the interrupt itself, or what the driver says of the statement that it broke.
            self._state.has_yielded()
            error = self._interruption(stop.interrupted_by, job).with_traceback(raised.__traceback__)
        # What the connection is in the middle of is seen again, and waited for, when the end is recorded.
        with suppress(Exception):
            if error is raised and isinstance(raised, Exception):
                db.roll_back()
            else:
                # A KeyboardInterrupt by a handler of make()'s own may have come in the middle of an answer.
                db.start_afresh()
        return error

    def _interruption(self, kind: type[Exception], job: Job) -> Exception:
        if kind is JobTimeout:
            return JobTimeout(f"make() of {self._name} took longer than {self.finisher.policy.timeout:g} s.")
        if kind is JobSignalled:
            return JobSignalled(
                f"The process {os.getpid()}, in which make() of {self._name} ran, was signalled to stop, and not by "
                "its worker. To stop a worker, signal the worker itself; to stop a job, call cancel_jobs."
            )
        return JobCancelled(f"The job {job.key} of {self._name} was cancelled.")

    def _give_back_after_stop(self, job: Job) -> None:
        try:
            self._queue.db.start_afresh()
            if self.finisher.give_back([job]):
                tell_of_given_back(self._name, [job])
        except Exception as error:
            logger.warning("%s could not be given back: %s", job.key, describe(error))
            raise Unrecorded(f"{job.key} of {self._name} could not be given back: {describe(error)}") from error

    def _end(self, job: Job, error: BaseException, stop: Stop, started: float) -> Outcome:
        message, seconds = describe(error), time.monotonic() - started
        try:
            if isinstance(error, JobCancelled):
                self._insist(lambda _tried: self.finisher.cancelled(job), job, error, stop)
                return self._cancelled(job, message, seconds)
            if not isinstance(error, LeaseLost):
                wait = self.finisher.policy.wait_after_error(error, job)
                kind = "timeout" if isinstance(error, JobTimeout) else "error"
                failure = Failure(kind, message, _stack_of(error), seconds)

                def record(tried: int) -> str:
                    return self.finisher.failed(job, failure.in_short if tried else failure, wait)

                status = self._insist(record, job, error, stop)
                if status == "cancelled":
                    return self._cancelled(job, message, seconds)
                if status == "success" and isinstance(error, Exception):
                    logger.info("%s %s: somebody else made it meanwhile; here: %s", self._name, job.key, message)
                    return Outcome(job.key, made=False, seconds=seconds)
                return Outcome(job.key, False, error, message, wait, seconds=seconds)
        except LeaseLost as lost:
            error, message = lost, describe(lost)
        return Outcome(job.key, False, error, message, seconds=seconds)

    def _insist(self, record: Callable[[int], T], job: Job, error: BaseException, stop: Stop) -> T:
        """Record the end of a job, if need be at a later try. `record` is given how often it was tried before."""
        pause = _FIRST_PAUSE
        for tried in range(_RECORDING_TRIES):
            try:
                return record(tried)
            except LeaseLost:
                raise
            except Exception as problem:
                if not tried:
                    logger.warning("The end of %s %s is not recorded yet: %s", self._name, job.key, describe(problem))
                # Where the server has gone away, it was waited for already; but less text may be all that it takes.
                gone = bool(tried) and self._is_away(problem)
                if gone or stop.requested is not None or tried == _RECORDING_TRIES - 1:
                    raise Unrecorded(
                        f"The end of {job.key} of {self._name} could not be recorded ({describe(problem)}). "
                        f"It had failed: {describe(error)}"
                    ) from problem
            time.sleep(pause)
            pause = min(pause * 3, _LONGEST_PAUSE)
            # What is wrong with the connection the next try will say, if it is the connection.
            with suppress(Exception):
                self._queue.db.start_afresh()
        raise AssertionError("not reached")

    def _is_away(self, problem: Exception) -> bool:
        db = self._queue.db
        return db.is_lost(problem) or db.engine.errors.diagnose(problem) == "unreachable"

    def _cancelled(self, job: Job, message: str, seconds: float) -> Outcome:
        clean_up_after(self._table, job.key)
        return Outcome(job.key, made=False, cancelled=True, message=message, seconds=seconds)


@contextmanager
def _in_make(transaction: MakeTransaction, stop: Stop) -> Iterator[None]:
    """A stretch in which make() itself runs. A copy of this process that comes back from it goes no further."""
    try:
        with transaction.in_make():
            yield
    finally:
        stop.end_copies()


def _stack_of(error: BaseException) -> str:
    """The stack trace of an error. Never raises, and has no part that is very long."""
    try:
        return cut("".join(cut(part, _PART_KEPT) for part in traceback.format_exception(error)))
    except Exception as failure:
        return f"The stack trace cannot be told, because of {describe(failure)}"


def clean_up_after(table: Any, key: dict[str, Any]) -> None:
    """A job was cancelled: what make() left behind elsewhere is the table's own to remove."""
    process = os.getpid()
    try:
        table.on_cancel(key)
    except BaseException:
        logger.exception("on_cancel of %s failed for %s", type(table).__name__, key)
    finally:
        if os.getpid() != process:
            os._exit(0)
