"""The job that runs now: what make() can ask about it and tell of it, and what others ask of it."""

from __future__ import annotations

import json
import math
import numbers
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import DjJobsError, JobCancelled, JobTimeout
from ..interrupt import Stop
from ..queue.claim import Job
from ..queue.finish import storable
from ..run.run import Run
from .messages import Request
from .shared_memory import LONGEST_PROGRESS, SharedMemory, Started

__all__ = ["CurrentJob", "JobSignalled", "SlotState", "current_job"]

#: Whole numbers beyond this are told as floating-point numbers. Not every engine keeps all their digits.
_LARGEST_WHOLE = 2**63 - 1


class JobSignalled(DjJobsError):
    """Somebody has signalled the process of make() to stop, and it was not the worker."""


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
        self._writing = threading.Lock()
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
            How much is done. Any real number, also one of numpy's.
        total : float, optional
            How much there is to do.
        note : str
            What is being done; a long one is cut. Defaults to nothing.
        """
        self.check_cancelled()
        numbers_told = {"done": _number("done", done), "total": None if total is None else _number("total", total)}
        text = _progress(numbers_told, str(note))
        with self._writing:
            self._memory.write_progress(text)


def _number(name: str, value: Any) -> int | float:
    """A number as JSON can hold it."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise DjJobsError(f"progress() takes numbers; {name} was {value!r:.100}.") from None
    if not math.isfinite(number):
        raise DjJobsError(f"progress() takes finite numbers; {name} was {number}.")
    return int(value) if isinstance(value, numbers.Integral) and abs(number) < _LARGEST_WHOLE else number


def _progress(told: dict[str, Any], note: str) -> str:
    """A progress as JSON. Of the note as much as there is room for."""
    note = storable(note[:LONGEST_PROGRESS])
    while len(text := json.dumps({**told, "note": note})) > LONGEST_PROGRESS:
        note = note[: len(note) * 3 // 4]
    return text


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
        self._memory, self.stop = memory, stop
        self._current: CurrentJob | None = None
        self._cancelled: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._began = 0.0
        #: Ends what make() has started in the last seconds, and left; where the process is a slot's.
        self.end_processes_of: Callable[[float], None] = lambda _seconds: None

    @contextmanager
    def running(self, job: Job, table: int) -> Iterator[CurrentJob]:
        """The time that a job runs; `table` is the number of its table in this worker.

        If something is raised in here, nobody has seen to the job: the monitor still reads that it runs, and settles it
        when the slot is gone.
        """
        current = CurrentJob(job, self._memory)
        with self._lock:
            current._cancelled = (job.key_hash, job.claim) in self._cancelled
            self._current = _here.job = current
        self._began = time.monotonic()
        self._memory.write(Started(time.monotonic(), job.claim, job.key_hash, table))
        try:
            yield current
        finally:
            with self._lock:
                self._current = _here.job = None
                self.stop.forget_interrupt()
        self._memory.write(None)

    @property
    def token(self) -> tuple[str, int] | None:
        """Which claim of which job runs now. Never waits, so that the handler of a signal may ask."""
        current = self._current
        return None if current is None else (current._job.key_hash, current._job.claim)

    def holds_from(self, first_claim: int, any_later: bool = False) -> None:
        """Of the claims before this number the slot holds none any more, nor later ones if it does not say so."""
        self._memory.write_holding(first_claim, any_later)

    @property
    def is_settled(self) -> bool:
        """Whether no job has begun whose end is not recorded."""
        return self._memory.read() is None

    def restart_clock(self) -> None:
        """The job begins only now: what was before does not count for its time-out."""
        started = self._memory.read()
        if started is not None:
            self._memory.write(replace(started, since=time.monotonic()))

    def has_yielded(self) -> None:
        """make() was interrupted and is over, and so is what it has started."""
        self._memory.write_yielded()
        self.end_processes_of(time.monotonic() - self._began)

    def ask(self, request: Request) -> None:
        """Something is asked of a job. Called from another thread."""
        with self._lock:
            current = self._current
            is_current = current is not None and (current._job.key_hash, current._job.claim) == request.token
            if request.what in _ERRORS:
                if is_current:
                    self.stop.interrupt_with(_ERRORS[request.what])
                return
            self._cancelled.add(request.token)
            if current is None or not is_current:
                return
            current._cancelled = True
            if request.what == "force":
                self.stop.interrupt_with(JobCancelled)


#: What is raised inside make() on requests that are errors of the job.
_ERRORS: dict[str, type[Exception]] = {"timeout": JobTimeout, "signal": JobSignalled}
