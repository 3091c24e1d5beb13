"""The work loop: claim jobs, run them, report what came of them, until there is nothing left or somebody says stop.

The same loop runs in the caller's process (`populate`) and in the slots of `populate(processes=N)` and of
`djjobs worker`. What they do when the queue is empty differs: see `empty`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..events.watch import HeldEvents
from ..interrupt import Stop
from ..queue.claim import Claims, Job
from ..queue.database import Database
from ..queue.identity import Claimant
from ..queue.table_queue import TableQueue
from ..telemetry import emit
from .budget import Budget, Pace
from .current_job import SlotState
from .execute import Executor, Unrecorded
from .outcome import Outcome, describe, tell_of, tell_of_given_back

__all__ = ["Limits", "Loop", "Source", "WhenEmpty", "databases_of"]

#: A job is not begun if the longest one of its table, and a bit, would not fit into the time that is left.
_MARGIN = 1.2


class Source:
    """A table whose jobs a loop runs.

    Parameters
    ----------
    jobs : TableQueue
        The queue of the table.
    claims : Claims
        What may be claimed of it.
    number : int
        The number of the table in this worker.
    """

    def __init__(
        self,
        jobs: TableQueue,
        claims: Claims,
        state: SlotState,
        make_kwargs: dict[str, Any] | None = None,
        number: int = 0,
    ) -> None:
        self.jobs, self.claims, self.number, self.state = jobs, claims, number, state
        self.executor = Executor(jobs, make_kwargs, state, number)
        self.pace = Pace()


class WhenEmpty(Protocol):
    """What a loop does when it has found no jobs."""

    def found(self) -> None:
        """There were jobs."""

    def look_again(self, loop: Loop) -> bool:
        """There were none: schedule, wait, or give up. Whether to look once more."""


@dataclass
class Limits:
    """When a loop ends although there are jobs.

    Attributes
    ----------
    max_jobs : int, optional
        After so many jobs.
    deadline : float, optional
        At this time; jobs that would take longer are not begun.
    longest : sequence of float
        How long the longest job of each table took, for all slots to know.
    suppress_errors : bool, optional
        Whether a populate goes on after an error. None for a worker, which always does.
    """

    max_jobs: int | None = None
    deadline: float | None = None
    longest: MutableSequence[float] = field(default_factory=lambda: [0.0])
    suppress_errors: bool | None = None

    def fits(self, number: int) -> bool:
        """Whether a job of this table would end in time."""
        return self.deadline is None or time.monotonic() + self.longest[number] * _MARGIN < self.deadline


class Loop:
    """Claims jobs and runs them.

    Parameters
    ----------
    sources : sequence of Source
        The tables, upstream first.
    claimant : Claimant
        In whose name jobs are claimed.
    budget : Budget
        How many jobs may be run, shared with other slots.
    stop : Stop
        Catches the signals that end the work.
    begin : callable
        Called when there are jobs to run, before the first of them.
    report : callable
        Called with the outcome of every job.
    patience : float
        For how many seconds to wait for a server that has gone away.
    prepare : callable
        Called before all else, with the same patience. Defaults to nothing.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        claimant: Claimant,
        *,
        budget: Budget,
        stop: Stop,
        limits: Limits,
        when_empty: WhenEmpty,
        begin: Callable[[], None],
        report: Callable[[Outcome], None],
        patience: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.sources, self.stop = sources, stop
        self._claimant, self._budget, self._limits, self._when_empty = claimant, budget, limits, when_empty
        self._begin, self._report, self._patience, self._prepare = begin, report, patience, prepare
        self._events = HeldEvents(db.connection for db in databases_of([source.jobs for source in sources]))
        self._jobs_done = 0
        self._has_failed = False

    def run(self) -> None:
        """Work until there is nothing left to do. A stop is raised; the jobs that were not run go back."""
        with contextlib.ExitStack() as stack:
            for source in self.sources:
                stack.enter_context(source.jobs.queue.db.patient(self._patience, unless=self._is_stopped))
            self._prepare()
            stack.enter_context(self._events)
            while not self._is_over():
                self.stop.end_copies()
                self.stop.check()
                self._events.act()
                if any(self._run_some(source) for source in self.sources):
                    self._when_empty.found()
                elif not self._when_empty.look_again(self):
                    break
            if not self._has_failed:
                self.see_to_runs()
            self.stop.check()

    def see_to_runs(self) -> None:
        """See to runs that are over, of all tables."""
        for source in self.sources:
            source.executor.runs.look(self._claimant, self.stop, self._begin)

    @property
    def is_late(self) -> bool:
        """Whether no job would fit into the time that is left."""
        return not any(self._limits.fits(source.number) for source in self.sources)

    def _is_stopped(self) -> bool:
        return self.stop.requested is not None

    def _is_over(self) -> bool:
        return self._has_failed or self._budget.is_spent or self._is_used_up

    @property
    def _is_used_up(self) -> bool:
        return self._limits.max_jobs is not None and self._jobs_done >= self._limits.max_jobs

    def _run_some(self, source: Source) -> bool:
        """Claim some jobs of a table and run them; whether there were any."""
        jobs = self._claim(source)
        if not jobs:
            return False
        try:
            self._begin()
            while jobs and self._may_go_on(source):
                self.stop.check()
                self._run(source, jobs.pop(0), jobs)
                self._events.act(more_jobs=bool(jobs))
        except BaseException:
            # What was raised tells more than that the rest could not be given back.
            with contextlib.suppress(Unrecorded):
                self._give_back(source, jobs)
            raise
        self._give_back(source, jobs)
        return True

    def _claim(self, source: Source) -> list[Job]:
        room = self._budget.take(source.pace.batch) if self._limits.fits(source.number) else 0
        if room:
            # One look may make several claims, and each try has a number of its own. All of them come after this one.
            source.state.holds_from(self._claimant.upcoming, any_later=True)
        jobs = source.claims.take(room) if room else []
        if not jobs:
            self._holds_nothing(source)
        self._budget.put_back(room - len(jobs))
        for job in jobs:
            emit("job claimed", source.jobs.name, job.key, attempt=job.attempt + 1, waited=job.waited)
        return jobs

    def _holds_nothing(self, source: Source) -> None:
        """What was claimed is over or was given back. The monitor settles what is left of it all the same."""
        source.state.holds_from(self._claimant.upcoming)

    def _may_go_on(self, source: Source) -> bool:
        return not (self._has_failed or self._budget.ended or self._is_used_up) and self._limits.fits(source.number)

    def _run(self, source: Source, job: Job, rest: list[Job]) -> None:
        emit("job started", source.jobs.name, job.key, attempt=job.attempt + 1, waited=job.waited)
        with source.pace.timing():
            outcome = source.executor.run(job, self.stop)
        longest = self._limits.longest
        longest[source.number] = max(longest[source.number], outcome.seconds)
        self._jobs_done += 1
        if not outcome.made and not outcome.has_failed:
            self._budget.refund_call()
        suppress = self._limits.suppress_errors
        self._has_failed = outcome.error_to_raise(suppress is not False) is not None and suppress is not None
        self._report(outcome)
        told = {} if suppress is None else {"suppressed": not self._has_failed}
        tell_of(source.jobs.name, job, outcome, **told)
        source.executor.runs.job_over(job, rest, self.stop)

    def _give_back(self, source: Source, jobs: list[Job]) -> None:
        """What was not begun goes back. Where it does not, the slot ends with claims, and its memory says so."""
        try:
            if jobs and source.executor.finisher.give_back(jobs):
                tell_of_given_back(source.jobs.name, jobs)
        except Exception as error:
            keys = ", ".join(str(job.key) for job in jobs[:3])
            words = f"Jobs of {source.jobs.name} could not be given back ({keys}): {describe(error)}"
            raise Unrecorded(words) from error
        # Not before: who gives back what a slot has left puts back this, too.
        self._budget.put_back(len(jobs))
        if source.state.is_settled:
            self._holds_nothing(source)


def databases_of(tables: Sequence[TableQueue]) -> list[Database]:
    """The connections that these tables use, each once."""
    return list({id(jobs.queue.db.connection): jobs.queue.db for jobs in tables}.values())
