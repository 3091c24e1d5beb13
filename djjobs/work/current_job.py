"""The job that runs now: what make() can ask about it and tell of it, and what others tell it.

A slot and whoever keeps watch over it share a page of memory. The slot writes there what it is working on;
that costs no system call, and can be read after the slot was killed.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import DjJobsError, JobCancelled, JobTimeout
from ..interrupt import Stop
from ..queue.claim import Job

if TYPE_CHECKING:
    from ..run.run import Run

__all__ = ["CurrentJob", "Desk", "Page", "Started", "current_job"]

_PAGE_SIZE = 8192
_RECORD = struct.Struct("<dq32si")  # since when, claim, hash, which table
_RECORDS = (8, 8 + _RECORD.size)
_PROGRESS = (1024, 1024 + 3072)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Started:
    """A job that a slot has begun."""

    since: float
    claim: int
    key_hash: str
    table: int


class Page:
    """The shared page. Each of its two parts is written beside the last version, which then counts."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE_SIZE)

    def write(self, started: Started | None) -> None:
        memory = self._memory
        if started is None:
            memory[0] = 0
            return
        which = 2 if memory[0] == 1 else 1
        values = started.since, started.claim, started.key_hash.encode(), started.table
        _RECORD.pack_into(memory, _RECORDS[which - 1], *values)
        memory[1] = memory[2] = 0
        memory[0] = which

    def read(self) -> Started | None:
        which = self._memory[0]
        if not which:
            return None
        since, claim, key_hash, table = _RECORD.unpack_from(self._memory, _RECORDS[which - 1])
        return Started(since, claim, key_hash.decode(), table)

    @property
    def has_yielded(self) -> bool:
        """Whether make() has heeded an interrupt; what follows is our own business."""
        return bool(self._memory[2])

    def write_yielded(self) -> None:
        self._memory[2] = 1

    def write_progress(self, text: str) -> None:
        data = text.encode()
        if len(data) > _PROGRESS[1] - _PROGRESS[0] - _LENGTH.size:
            raise DjJobsError("The note of a progress must be shorter than 2000 characters.")
        which = 2 if self._memory[1] == 1 else 1
        place = _PROGRESS[which - 1]
        _LENGTH.pack_into(self._memory, place, len(data))
        self._memory[place + _LENGTH.size : place + _LENGTH.size + len(data)] = data
        self._memory[1] = which

    def read_progress(self) -> str | None:
        """How far the job is, as JSON; None if it has not said."""
        which = self._memory[1]
        if not which:
            return None
        place = _PROGRESS[which - 1]
        (length,) = _LENGTH.unpack_from(self._memory, place)
        return self._memory[place + _LENGTH.size : place + _LENGTH.size + length].decode()


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

    def __init__(self, job: Job, page: Page) -> None:
        self.key, self.attempt, self.priority = job.key, job.attempt + 1, job.priority
        self._job, self._page = job, page
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
        self._page.write_progress(json.dumps({"done": done, "total": total, "note": note}))


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


class Desk:
    """Where a slot works: it puts its job on the page, and orders about the job arrive here."""

    def __init__(self, page: Page, stop: Stop) -> None:
        self._page, self._stop = page, stop
        self._current: CurrentJob | None = None
        self._called_off: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @contextmanager
    def working_on(self, job: Job, table: int) -> Iterator[CurrentJob]:
        """The time that a job is on the desk."""
        current = CurrentJob(job, self._page)
        with self._lock:
            current._cancelled = (job.key_hash, job.claim) in self._called_off
            self._current = _here.job = current
        self._page.write(Started(time.monotonic(), job.claim, job.key_hash, table))
        try:
            yield current
        finally:
            with self._lock:
                self._current = _here.job = None
                self._stop.forget_interrupt()
            self._page.write(None)

    def start_the_clock(self) -> None:
        """The job begins only now: what was before does not count for its time-out."""
        started = self._page.read()
        if started is not None:
            self._page.write(replace(started, since=time.monotonic()))

    def has_yielded(self) -> None:
        """make() was interrupted and is over."""
        self._page.write_yielded()

    def order(self, what: str, key_hash: str, claim: int) -> None:
        """An order about a job, from another thread: "cancel", "force" or "timeout"."""
        with self._lock:
            current = self._current
            is_current = current is not None and (current._job.key_hash, current._job.claim) == (key_hash, claim)
            if what != "timeout":
                self._called_off.add((key_hash, claim))
            if current is None or not is_current:
                return
            if what == "timeout":
                self._stop.interrupt_with(JobTimeout)
                return
            current._cancelled = True
            if what == "force":
                self._stop.interrupt_with(JobCancelled)
