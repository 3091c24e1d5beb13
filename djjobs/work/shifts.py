"""Shifts: where processes with short jobs share busy processors, a few of them work at a time.

A short job is little but messages to and fro between a process and the server. With more such processes than
processors each seems to find the caches full of what the others have put there: all of them together get less done
than a few. So they work in shifts: who works has one of a few places, a second at a time.

Nobody has to be relied upon. A place that is not given back is free two seconds later, whatever became of who had
it; processors that have nothing to do let others go ahead; and who waits holds no claim.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from ..interrupt import Stop
from ..settings import settings
from .budget import Pace

__all__ = ["Shifts"]

#: Jobs that take longer than this gain nothing by shifts.
_SHORT = 0.1
#: How long a shift is, and how long a place is kept for who is not heard of.
_SHIFT, _KEPT = 1.0, 2.0
#: How many places a processor has: for one process that works and one that waits for the server meanwhile.
_PLACES = 2
#: How often who waits looks again.
_LOOK = (0.1, 0.2)
#: How long the processors are looked at, and what share of that with nothing to do is too little to let others in.
_SAMPLE, _LITTLE = 0.1, 0.15

_BOARD = Path("/dev/shm")
_TIME = struct.Struct("<d")


class Shifts:
    """The shifts of this process. Use it as a context manager around its work."""

    def __init__(self) -> None:
        self._board: _Board | None = None
        self._place: int | None = None
        self._ends = 0.0

    def __enter__(self) -> Shifts:
        if settings.work_in_shifts and hasattr(os, "sched_getaffinity"):
            with contextlib.suppress(OSError):
                self._board = _Board(os.sched_getaffinity(0))
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        if self._board is not None:
            self._board.close()

    def wait(self, pace: Pace, stop: Stop, unless: Callable[[], bool]) -> None:
        """Return when this process may claim more jobs of this pace: at once, unless they are short.

        Parameters
        ----------
        unless : callable
            Whether there is nothing to wait for any more.
        """
        if self._board is None:
            return
        if not pace.is_shorter_than(_SHORT):
            self.leave()
            return
        # Without room in the shared memory, or a look at the processors, nobody waits.
        with contextlib.suppress(OSError):
            if not self._may_go_on(self._board):
                self._wait(self._board, stop, unless)

    def leave(self) -> None:
        """Let others have the place, if there is one."""
        place, self._place = self._place, None
        if place is not None and self._board is not None:
            with contextlib.suppress(OSError):
                self._board.give_back(place)

    def _may_go_on(self, board: _Board) -> bool:
        if self._place is None:
            return board.processors.idle > _LITTLE or self._take_place(board)
        if time.monotonic() >= self._ends:
            if board.has_waiters():
                self.leave()
                return False
            self._ends = time.monotonic() + _SHIFT
        board.keep(self._place)
        return True

    def _wait(self, board: _Board, stop: Stop, unless: Callable[[], bool]) -> None:
        pause = _LOOK[1]  # who has waited for longer looks before
        while not unless():
            board.say_waiting()
            stop.sleep(pause)
            # The more the processors are idle, the more go ahead, not all who wait.
            if self._take_place(board) or random.random() < board.processors.idle - _LITTLE:
                return
            pause = random.uniform(*_LOOK)

    def _take_place(self, board: _Board) -> bool:
        self._place = board.free_place()
        if self._place is None:
            return False
        board.keep(self._place)
        self._ends = time.monotonic() + _SHIFT
        return True


class _Board:
    """Until when each place is taken, and when somebody waited last: times that a user's processes share.

    Two who take a place at the same moment both work, which does no harm, so nothing is ever locked.
    """

    def __init__(self, processors: Iterable[int]) -> None:
        self.processors = _Processors(processors)
        # The first time is that of who waited last.
        self._places = [1 + _PLACES * number + n for number in self.processors.numbers for n in range(_PLACES)]
        path = _BOARD / f"djjobs-shifts-{os.getuid()}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def keep(self, place: int) -> None:
        self._write(place, time.monotonic() + _KEPT)

    def give_back(self, place: int) -> None:
        self._write(place, 0.0)

    def free_place(self) -> int | None:
        times, now = self._read(max(self._places) + 1), time.monotonic()
        # What lies further ahead was written by another clock.
        free = [place for place in self._places if not now < times[place] <= now + _KEPT]
        return random.choice(free) if free else None

    def say_waiting(self) -> None:
        self._write(0, time.monotonic())

    def has_waiters(self) -> bool:
        return 0 <= time.monotonic() - self._read(1)[0] <= 2 * _LOOK[1]

    def _write(self, number: int, moment: float) -> None:
        os.pwrite(self._file, _TIME.pack(moment), number * _TIME.size)

    def _read(self, count: int) -> list[float]:
        size = count * _TIME.size
        data = os.pread(self._file, size, 0).ljust(size, b"\0")
        return [moment for (moment,) in _TIME.iter_unpack(data)]


class _Processors:
    """The processors that this process may run on, and how busy they are."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)
        self._idle, self._looked, self._ticks = 1.0, time.monotonic(), self._count()

    @property
    def idle(self) -> float:
        """The share of the time that they had nothing to do, from one look to the next; at first all of it."""
        if time.monotonic() - self._looked >= _SAMPLE:
            before, self._ticks = self._ticks, self._count()
            self._looked = time.monotonic()
            idle, total = (now - then for now, then in zip(self._ticks, before, strict=True))
            if total > 0:
                self._idle = idle / total
        return self._idle

    def _count(self) -> tuple[float, float]:
        """The seconds that they had nothing to do since the machine was started, and all."""
        of_all = psutil.cpu_times(percpu=True)
        mine = [times for number, times in enumerate(of_all) if number in self.numbers]
        # What a guest was given counts as the user's time already.
        return sum(times.idle + times.iowait for times in mine), sum(sum(times[:8]) for times in mine)
