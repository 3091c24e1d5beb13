"""populate(reserve_jobs=True): schedule, then work in this process or in several."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import DjJobsError
from ..interrupt import Stop
from ..queue.identity import Claimant
from ..queue.leases import recover_once
from ..queue.table_queue import TableQueue
from ..settings import settings
from ..telemetry import emit
from .bar import ProgressBar
from .budget import Budget
from .current_job import SlotState
from .empty import Scheduling, UntilEmpty
from .loop import Limits, Loop, Source
from .monitor_process import MonitorProcess
from .options import PopulateOptions
from .outcome import MakeFailed, Outcome
from .pool import SlotChannel
from .supervisor import Supervisor

__all__ = ["populate"]


def populate(jobs: TableQueue, options: PopulateOptions) -> dict[str, Any]:
    """Work off the jobs of these keys and return what DataJoint's populate would.

    Raises
    ------
    MakeFailed
        If make() failed and errors are not suppressed.
    """
    return _Populate(jobs, options).run()


class _Populate:
    """One call of populate."""

    def __init__(self, jobs: TableQueue, options: PopulateOptions) -> None:
        settings.insist_on_lease()
        self._jobs, self._options = jobs, options
        self._processes = options.processes or mp.cpu_count()
        can_fork = "fork" in mp.get_all_start_methods()
        if self._processes > 1 and not can_fork:
            raise DjJobsError(
                f"processes={self._processes} for {jobs.label} needs a system that can fork. "
                "Start several Python processes instead, each with populate(reserve_jobs=True)."
            )
        self._claimant = Claimant()
        self._claims = self._claims_for(self._claimant)
        self._scheduling = Scheduling(jobs, options.schedules, options.priority)
        self._budget = Budget(options.max_calls, options.limit, mp.get_context("fork") if self._processes > 1 else None)
        self._successes = self._failures = 0
        self._errors: list[tuple[dict[str, Any], Any]] = []
        #: What is to be raised in the end.
        self._error: BaseException | None = None

    def _claims_for(self, claimant: Claimant) -> Any:
        options = self._options
        return self._jobs.claims(options.order, options.priority, claimant, options.automatic)

    def run(self) -> dict[str, Any]:
        self._prepare()
        how_many = lambda: self._budget.most(self._claims.available())  # noqa: E731
        with ProgressBar(self._jobs.name, self._options.display_progress, how_many) as self._bar:
            if self._processes > 1:
                self._work_in_slots()
            else:
                self._work_here()
        if self._error is not None:
            raise MakeFailed(self._error)
        return {"success_count": self._successes, "error_list": self._errors}

    def _prepare(self) -> None:
        """Put back what dead workers left, and schedule."""
        queue, finisher = self._jobs.queue, self._jobs.finisher
        with Stop(connection=queue.db) as stop, self._patient(stop):
            # A stop that comes meanwhile waits for the statement to end, so that no mark is left behind.
            recover_once(queue, {self._jobs.table_name: finisher}, sleep=stop.sleep)
            self._scheduling.now()
            stop.check()

    def _patient(self, stop: Stop) -> AbstractContextManager[None]:
        """Meanwhile, wait for a server that is away or refuses."""
        return self._jobs.queue.db.patient(settings.reconnect_timeout, unless=lambda: stop.requested is not None)

    def _work_here(self) -> None:
        with Stop(connection=self._jobs.queue.db) as stop:
            try:
                with MonitorProcess(self._claimant, self._jobs) as monitor:

                    def begin() -> None:
                        if monitor.begin():
                            emit("worker started", worker=self._claimant.worker_id, tables=self._jobs.name)

                    self._loop(monitor, self._claimant, begin, self._report)
                    if monitor.has_begun:
                        self._tell_of_end()
            finally:
                # A signal that came while the worker signed off.
                stop.check()

    def _work_in_slots(self) -> None:
        def work(channel: SlotChannel, number: int) -> None:
            try:
                prepare = supervisor.prepare_slot
                self._loop(channel, self._claimant.for_slot(number), lambda: None, channel.report, prepare)
            finally:
                with contextlib.suppress(Exception):  # it may be closed already, if the server is away
                    self._jobs.queue.db.connection.close()

        supervisor = Supervisor([self._jobs], self._processes, self._claimant, self._budget, work, self._report)
        db = self._jobs.queue.db
        with Stop(connection=db) as stop:
            supervisor.register(stop, settings.reconnect_timeout)
            try:
                supervisor.run(stop)
                self._tell_of_end()
            finally:
                # Whoever wants to stop does not wait for a server that may be away.
                db.reconnect() if stop.requested is None else db.connect_later()
                supervisor.clean_up()
            stop.check()

    def _loop(
        self,
        channel: MonitorProcess | SlotChannel,
        claimant: Claimant,
        begin: Callable[[], None],
        report: Callable[[Outcome], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        db = self._jobs.queue.db
        with Stop(db.interrupt, connection=db) as stop:
            state = SlotState(channel.memory, stop)
            channel.listen(state)
            source = Source(self._jobs, self._claims_for(claimant), state, self._options.make_kwargs)
            Loop(
                [source],
                claimant,
                budget=self._budget,
                stop=stop,
                limits=Limits(suppress_errors=self._options.suppress_errors),
                when_empty=UntilEmpty(self._scheduling),
                begin=begin,
                report=report,
                patience=settings.reconnect_timeout,
                prepare=prepare,
            ).run()

    # -- what comes of it ----------------------------------------------------------------------------------

    def _report(self, outcome: Outcome) -> None:
        """A job is over. The first error that is not suppressed ends the work: no slot begins another job."""
        if outcome.error is not None and outcome.retry_in is None:
            as_object = self._options.return_exception_objects
            self._errors.append((outcome.key, outcome.error if as_object else outcome.message))
            self._failures += 1
        elif outcome.made:
            self._successes += 1
        self._bar.update(outcome)
        error = outcome.error_to_raise(self._options.suppress_errors)
        if error is not None and self._error is None:
            self._error = error
            self._budget.spend_all()

    def _tell_of_end(self) -> None:
        emit("worker ended", worker=self._claimant.worker_id, done=self._successes, failed=self._failures)
