"""The state of a run, which follows from its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STATES", "Progress", "state_of"]

STATES = ("pending", "running", "done", "cancelling", "cancelled")


@dataclass(frozen=True)
class Progress:
    """How many jobs of a run there are of each status.

    Attributes
    ----------
    total : int
        How many there are.
    scheduled, reserved, error, cancelled, ignore : int
        How many have this status.
    done : int
        How many succeeded, or are gone from the queue.
    """

    total: int = 0
    scheduled: int = 0
    reserved: int = 0
    done: int = 0
    error: int = 0
    cancelled: int = 0
    ignore: int = 0

    @classmethod
    def of(cls, total: int, counts: Mapping[str, int]) -> Progress:
        """From the jobs that are still there: of those that succeed, some tables keep none."""
        left = {status: count for status, count in counts.items() if status != "success"}
        # Every job that is there counts, also if it was put there later.
        total = max(total, sum(counts.values()))
        return cls(total, done=total - sum(left.values()), **left)

    @property
    def open(self) -> int:
        """How many are still to be done."""
        return self.scheduled + self.reserved

    @property
    def untouched(self) -> bool:
        """Whether all of them wait."""
        return self.scheduled == self.total > 0

    @property
    def over(self) -> int:
        """How many are not to be done any more, whatever came of them."""
        return self.total - self.open

    @property
    def fraction(self) -> float:
        """How much of the run is over, from 0 to 1."""
        return self.over / self.total if self.total else 1.0

    def __str__(self) -> str:
        others = {"failed": self.error, "cancelled": self.cancelled, "ignored": self.ignore, "running": self.reserved}
        more = "".join(f", {count} {name}" for name, count in others.items() if count)
        return f"{self.over} of {self.total} jobs over{more}"


def state_of(progress: Progress, *, cancelled: bool, begun: bool, unfinished: bool) -> str:
    """The state of a run. It is stored nowhere: this is the only place that knows.

    Parameters
    ----------
    cancelled : bool
        Whether somebody called the run off.
    begun : bool
        Whether a job was begun that is waiting again: for its next try, or because somebody put it back.
    unfinished : bool
        Whether the table's `finish_run` is still to be called.
    """
    if cancelled:
        return "cancelling" if progress.open else "cancelled"
    if progress.open:
        return "running" if begun or not progress.untouched else "pending"
    return "running" if unfinished else "done"
