"""Working: one process claims jobs and runs them, until there are none."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..events.watch import HeldEvents
from ..interrupt import Stop
from ..queue.claim import Claims, Job
from ..queue.enqueue import is_scheduling
from ..queue.queue import Queue
from ..settings import settings
from .budget import Budget, Pace
from .execute import Executor, Outcome

__all__ = ["MakeFailed", "Options", "Results", "Scheduling", "patience_with_limit", "work"]

logger = logging.getLogger("djjobs")

#: A populate that finds nothing waits for the interval between two schedulings to pass, if that is no longer than this;
#: and a bit longer, so that whoever may schedule then is through.
_LONGEST_WAIT, _SLACK = 10.0, 1.0


class MakeFailed(Exception):
    """Carries what make() raised past everything that explains errors of the queue."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Options:
    """What a populate was asked to do."""

    order: str = "original"
    priority: int | None = None
    suppress_errors: bool = False
    return_exception_objects: bool = False
    make_kwargs: dict[str, Any] | None = None
    keep_completed: bool = False
    max_calls: int | None = None
    limit: int | None = None
    processes: int | None = 1
    display_progress: bool = False
    #: Whether to run jobs, too, that only an event has put there.
    automatic: bool = True


@dataclass
class Results:
    """What populate returns."""

    success_count: int = 0
    error_list: list[tuple[dict[str, Any], Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"success_count": self.success_count, "error_list": self.error_list}

    def add(self, outcome: Outcome, as_object: bool) -> None:
        if outcome.error is not None and outcome.retry_in is None:
            self.error_list.append((outcome.key, outcome.error if as_object else outcome.message))
        elif outcome.made:
            self.success_count += 1


class Scheduling:
    """How a populate schedules: before its work, and again while it finds nothing to do.

    Parameters
    ----------
    schedule
        Schedules and returns whether that was limited, because somebody had done so just before.
    label : str
        The table, as messages name it.
    """

    def __init__(self, schedule: Callable[[], bool], label: str) -> None:
        self._schedule, self.label = schedule, label
        #: Whether the last one was limited.
        self.limited = False

    def now(self) -> None:
        self.limited = self._schedule()


def patience_with_limit(label: str) -> float:
    """How long who found nothing waits for the interval to pass; zero if that would be too long, which is said."""
    interval = settings.min_scheduling_interval
    if interval <= _LONGEST_WAIT:
        return interval + _SLACK
    logger.warning(
        "%s was scheduled less than min_scheduling_interval = %g s ago, so new keys were not looked for and there was "
        "nothing to do. To look at once: schedule_jobs(min_scheduling_interval=0).",
        label,
        interval,
    )
    return 0.0


def work(
    queue: Queue,
    claims: Claims,
    executor: Executor,
    options: Options,
    *,
    budget: Budget,
    stop: Stop,
    begin: Callable[[], None],
    scheduling: Scheduling,
    report: Callable[[Outcome], None],
) -> None:
    """Claim and run jobs until there are none, the budget is spent, or an error is not to be suppressed.

    Parameters
    ----------
    begin
        Called when there are claims to be kept alive.
    """
    pace = Pace()
    claimed: list[Job] = []
    empty_handed = True
    patient = queue.db.patient(settings.reconnect_timeout, unless=lambda: stop.requested is not None)
    with patient, HeldEvents([queue.db.connection]) as events:
        try:
            while room := budget.take(pace.batch):
                claimed = _claim(queue, claims, room, stop, scheduling, empty_handed)
                budget.put_back(room - len(claimed))
                if not claimed:
                    break
                empty_handed = False
                begin()
                while claimed:
                    stop.check()
                    job = claimed.pop(0)
                    with pace.timing():
                        outcome = executor.run(job, stop)
                    if not outcome.made and outcome.error is None:
                        budget.refund_call()
                    report(outcome)
                    executor.runs.job_over(job, claimed, stop)
                    events.act(more_jobs=bool(claimed))
                    error = outcome.error_to_raise(options.suppress_errors)
                    if error is not None:
                        raise MakeFailed(error)
            executor.runs.look(claims.claimant, stop, begin)
            stop.check()
        finally:
            executor.finisher.give_back(claimed)


def _claim(
    queue: Queue, claims: Claims, count: int, stop: Stop, scheduling: Scheduling, empty_handed: bool
) -> list[Job]:
    """Claim jobs.

    While somebody else is still scheduling, an empty queue is no reason to go home. Nor is it for who has found
    nothing yet and was not allowed to schedule: the interval is waited out once.
    """
    jobs, pause, until = claims.take(count), 0.02, 0.0
    while not jobs:
        # Asked before looking once more: a scheduling that ends in between is not overlooked.
        others_schedule = is_scheduling(queue, claims.table_name)
        jobs = claims.take(count)
        if jobs:
            break
        if not others_schedule:
            if not (empty_handed and scheduling.limited):
                break
            until = until or time.monotonic() + patience_with_limit(scheduling.label)
            if time.monotonic() >= until:
                break
        stop.sleep(random.uniform(pause / 2, pause))
        pause = min(pause * 1.5, 0.5)
        if not is_scheduling(queue, claims.table_name):
            scheduling.now()
    return jobs
