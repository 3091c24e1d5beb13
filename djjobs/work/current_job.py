"""The job that runs now: what make() can ask about it and tell of it, and what others ask of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..errors import DjJobsError, JobCancelled, JobTimeout
from ..interrupt import Stop
from ..queue.claim import Job
from ..run.run import Run
from .messages import Request
from .shared_memory import SharedMemory, Started

__all__ = ["CurrentJob", "SlotState", "current_job"]


class CurrentJob:
    """The job whose make() is running: see `djjobs.current_job`.

    Attributes
    ----------
    key : dict
        The key that make() was called with.
    attempt : int
        1 the first time, 2 at the second try, ...
    priority : int
        The priority of the job.
    """

    def __init__(self, job: Job, memory: SharedMemory) -> None:
        self.key, self.attempt, self.priority = job.key, job.attempt + 1, job.priority
        self._job, self._memory = job, memory
        self._cancelled = False
        self._find_run: Callable[[], Run | None] = lambda: None

    @property
    def run(self) -> Run | None:
        """The run that the job belongs to, with its `details`; None if it was put into the queue without one."""
        return self._find_run()

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked to cancel this job."""
        return self._cancelled

    def check_cancelled(self) -> None:
        """Raise `JobCancelled` if somebody asked to cancel this job."""
        if self._cancelled:
            raise JobCancelled(f"The job {self.key} was cancelled.")

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Tell how far make() is, for everybody to see; also a safe point to be cancelled at.

        Parameters
        ----------
        done : float
            How much is done.
        total : float, optional
            How much there is to do.
        note : str
            What is being done. Defaults to nothing.
        """
        self.check_cancelled()
        self._memory.write_progress(json.dumps({"done": done, "total": total, "note": note}))


_here = threading.local()


def current_job() -> CurrentJob:
    """The job whose make() is running in this thread.

    Raises
    ------
    DjJobsError
        Outside make(), or if make() was not called for a job of the queue.
    """
    job = getattr(_here, "job", None)
    if job is None:
        raise DjJobsError(
            "No job of the queue is running here. current_job() works inside make(), called by "
            "populate(reserve_jobs=True) or by a worker."
        )
    return job


class SlotState:
    """What a slot is doing: the job that it runs, for its monitor to see, and what is asked of that job."""

    def __init__(self, memory: SharedMemory, stop: Stop) -> None:
        self._memory, self._stop = memory, stop
        self._current: CurrentJob | None = None
        self._cancelled: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @contextmanager
    def running(self, job: Job, table: int) -> Iterator[CurrentJob]:
        """The time that a job runs; `table` is the number of its table in this worker."""
        current = CurrentJob(job, self._memory)
        with self._lock:
            current._cancelled = (job.key_hash, job.claim) in self._cancelled
            self._current = _here.job = current
        self._memory.write(Started(time.monotonic(), job.claim, job.key_hash, table))
        try:
            yield current
        finally:
            with self._lock:
                self._current = _here.job = None
                self._stop.forget_interrupt()
            self._memory.write(None)

    def holds_from(self, first_claim: int) -> None:
        """Of the claims before this number, the slot holds none any more."""
        self._memory.write_holding(first_claim)

    def restart_clock(self) -> None:
        """The job begins only now: what was before does not count for its time-out."""
        started = self._memory.read()
        if started is not None:
            self._memory.write(replace(started, since=time.monotonic()))

    def has_yielded(self) -> None:
        """make() was interrupted and is over."""
        self._memory.write_yielded()

    def ask(self, request: Request) -> None:
        """Something is asked of a job. Called from another thread."""
        with self._lock:
            current = self._current
            is_current = current is not None and (current._job.key_hash, current._job.claim) == request.token
            if request.what != "timeout":
                self._cancelled.add(request.token)
            if current is None or not is_current:
                return
            if request.what == "timeout":
                self._stop.interrupt_with(JobTimeout)
                return
            current._cancelled = True
            if request.what == "force":
                self._stop.interrupt_with(JobCancelled)
