"""A run: what one call of `schedule_jobs` put into the queue."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Run"]


@dataclass(frozen=True)
class Run:
    """What a call of `schedule_jobs` did. ``int(run)`` is the number of jobs it scheduled.

    Attributes
    ----------
    scheduled : int
        How many jobs were put into the queue, or back into it.
    rate_limited : bool
        True if nothing was looked at, because the table was scheduled less than
        `min_scheduling_interval` ago, or is being scheduled right now by somebody else.
    """

    scheduled: int = 0
    rate_limited: bool = False

    def __int__(self) -> int:
        return self.scheduled
