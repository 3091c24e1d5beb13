"""`djjobs worker`: one supervisor, and slots in child processes that work off the tables of a pipeline."""

from __future__ import annotations

import logging
import multiprocessing as mp
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from .errors import DjJobsError
from .interrupt import Stop
from .queue.database import explained
from .queue.identity import Claimant
from .queue.keys import table_label
from .queue.notifier import Bell
from .recurring.scheduler import SchedulerBeside
from .settings import settings
from .work.budget import Budget
from .work.execute import Outcome, describe
from .work.loop import patience_with_limit
from .work.monitor import Keeper
from .work.options import Bench, WorkerOptions, one_a_connection
from .work.pool import Crew, Death, Slot
from .work.slot import Shared, SlotWork
from .work.walltime import deadline

__all__ = ["WorkerOptions", "run_worker"]

logger = logging.getLogger("djjobs")

#: How long an idle worker waits before it asks the server again: the first time, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 15.0
#: How many slots in a row may fail to go on before the worker gives up.
_MOST_EXCUSED = 5
#: How long a slot has to give back its job when it is told to.
_PATIENCE = 3.0


def run_worker(tables: Sequence[type], options: WorkerOptions | None = None) -> int:
    """Work off the jobs of these tables, upstream first, and return an exit code.

    Parameters
    ----------
    tables
        Classes with the mixin.
    options : WorkerOptions, optional
        Defaults to one process that works for ever.

    Returns
    -------
    int
        0, or 1 if jobs have failed.
    """
    options = options or WorkerOptions()
    options.check()
    settings.insist_on_lease()
    if not tables:
        raise DjJobsError("There is nothing to work on: no table was given.")
    if "fork" not in mp.get_all_start_methods():
        raise DjJobsError("A worker needs a system that can fork. Call populate(reserve_jobs=True) instead.")
    benches = [Bench.of(table(), number, options) for number, table in enumerate(tables)]
    return _Supervisor(benches, options).run()


# -- the supervisor -------------------------------------------------------------------------------------


class _Supervisor:
    """Starts slots, keeps watch over them, wakes them up when there may be work, and ends them well."""

    def __init__(self, benches: list[Bench], options: WorkerOptions) -> None:
        self._benches, self._options, self._claimant = benches, options, Claimant()
        context = mp.get_context("fork")
        self._budget = Budget(1 if options.once else options.max_jobs, None, context)
        longest = context.Array("d", len(benches), lock=False)
        self._shared = Shared(benches, options, self._claimant, self._budget, deadline(options.walltime), longest)
        self._crew = Crew(context, lambda line, number: SlotWork(self._shared, line, number).run(), True, _say)
        self._failed = self._excused = 0
        self._done = 0
        self._wait, self._next_call = _FIRST_WAIT, 0.0
        self._last_job = time.monotonic()
        self._retiring = self._retries_wait = self._is_called_for = self._is_limited = False
        self._patience_with_limit: float | None = None
        self._scheduler = SchedulerBeside([type(b.table) for b in benches]) if options.with_scheduler else None

    def run(self) -> int:
        finishers = [bench.finisher for bench in self._benches]
        connection = self._benches[0].queue.db.connection
        with explained(connection, ", ".join(table_label(bench.table) for bench in self._benches), "work on"):
            keeper = Keeper(self._claimant, finishers, self._options.processes)
            keeper.enter()
        with Stop() as stop:
            try:
                bell = Bell(connection)
                for db in one_a_connection(self._benches):
                    # An open connection must not be inherited: two processes would read each other's answers.
                    db.connection.close()
                names = ", ".join(type(bench.table).__name__ for bench in self._benches)
                logger.info("Worker %s works on %s.", self._claimant.worker_id, names, extra={"event": "started"})
                for _ in range(self._options.processes):
                    self._crew.hire()
                self._supervise(keeper, bell, stop)
                self._end(keeper, stop)
            finally:
                if self._scheduler is not None:
                    self._scheduler.close()
                self._crew.end(_PATIENCE, keeper.give_back, self._hear_the_last)
                keeper.leave()
                stop.take()
        words = self._claimant.worker_id, self._done, self._failed
        logger.info("Worker %s ends: %s jobs done, %s failed.", *words, extra={"event": "ended"})
        return 1 if self._failed else 0

    def _supervise(self, keeper: Keeper, bell: Bell, stop: Stop) -> None:
        while self._crew.slots and stop.requested is None and not self._has_nothing_to_do():
            recovered = keeper.tick(self._crew.slots)
            for slot, message in self._crew.listen(self._patience(), bell.sources):
                self._hear(keeper, slot, message)
            if bell.rings() or recovered:
                self._wait, self._next_call, self._is_called_for = _FIRST_WAIT, 0.0, True
            self._call_somebody()
            if self._scheduler is not None:
                self._scheduler.tick()

    def _patience(self) -> float:
        """How long to listen: short enough to see a signal, a time-out or a call coming."""
        return min(0.2, max(0.01, settings.heartbeat_interval / 4))

    def _hear(self, keeper: Keeper, slot: Slot, message: Any) -> None:
        if isinstance(message, Outcome):
            self._count(message)
        elif message in ("idle", "waiting", "limited"):
            # Whoever goes idle last has looked last, and knows.
            slot.busy, self._retries_wait, self._is_limited = False, message == "waiting", message == "limited"
            # But what came after its look it has not seen.
            if not self._is_called_for:
                self._wait_longer()
        elif message == "working":
            slot.busy = True
            self._wait, self._next_call = _FIRST_WAIT, 0.0
        elif message == "retired":
            self._retiring = True
        elif isinstance(message, Death):
            self._bury(keeper, slot)
            self._replace()
        elif message is None:
            self._replace()
        elif isinstance(message, BaseException):
            self._excuse(message)

    def _hear_the_last(self, slot: Slot, message: Any) -> None:
        """What a slot says that is to end: only what became of its job matters."""
        if isinstance(message, Outcome):
            self._count(message)

    def _bury(self, keeper: Keeper, slot: Slot) -> None:
        burial = keeper.bury(slot, slot.story())
        self._budget.put_back(burial.released)
        if burial.job is None:
            logger.error("A slot died: %s", slot.story(), extra={"event": "died"})
            return
        self._failed += burial.status == "error"
        if burial.status == "cancelled":
            # User code; the next slot sees to it.
            self._shared.to_clean.append((burial.table, burial.job.key))
        name, words = type(burial.table).__name__, burial.failure.message.splitlines()[0]
        extra = {"event": "died", "table": name, "key": burial.job.key}
        logger.error("%s %s: %s", name, burial.job.key, words, extra=extra)

    def _excuse(self, error: BaseException) -> None:
        """A slot could not go on, through no fault of a job. Another may; but not for ever."""
        self._excused += 1
        if self._excused > _MOST_EXCUSED:
            raise error
        logger.error("A slot could not go on: %s", describe(error), extra={"event": "slot failed"})
        time.sleep(min(0.1 * 2**self._excused, 2.0))

    def _replace(self) -> None:
        if not self._retiring and self._budget.most(1):
            self._crew.hire()
            self._shared.to_clean.clear()

    def _count(self, outcome: Outcome) -> None:
        self._last_job = time.monotonic()
        self._excused = 0
        self._done += outcome.made
        self._failed += outcome.stays_an_error

    # -- when there is nothing to do ------------------------------------------------------------------------

    def _wait_longer(self) -> None:
        # Who is about to end looks again as soon as it may schedule.
        hurries = self._is_limited and self._options.idle_timeout is not None
        wait = min(self._wait, _FIRST_WAIT) if hurries else self._wait
        self._next_call = time.monotonic() + wait * random.uniform(0.75, 1.25)
        self._wait = min(self._wait * 1.5, _LONGEST_WAIT)

    def _call_somebody(self) -> None:
        """Let one idle slot look for jobs. If it finds some, the next is called at once."""
        idle = [slot for slot in self._crew.slots if not slot.busy]
        if idle and time.monotonic() >= self._next_call:
            self._is_called_for = False
            self._wait_longer()
            idle[0].wake()

    def _has_nothing_to_do(self) -> bool:
        if any(slot.busy for slot in self._crew.slots):
            return False
        until = self._shared.deadline
        late = until is not None and time.monotonic() > until
        drained = self._options.drain and not self._retries_wait
        if late or drained or self._retiring or self._options.once:
            return True
        timeout = self._options.idle_timeout
        return timeout is not None and time.monotonic() - self._last_job > timeout + self._extra_patience()

    def _extra_patience(self) -> float:
        """Who was not allowed to schedule does not end before it was, or somebody else has done so again."""
        if not self._is_limited:
            return 0.0
        if self._patience_with_limit is None:
            names = ", ".join(table_label(bench.table) for bench in self._benches)
            self._patience_with_limit = patience_with_limit(names) + _FIRST_WAIT
        return self._patience_with_limit

    # -- the end ------------------------------------------------------------------------------------------------

    def _end(self, keeper: Keeper, stop: Stop) -> None:
        """After a signal: let running jobs go on for a while, then have them given back."""
        number = stop.take()
        if number is None:
            return
        self._retiring = True
        self._budget.spend_all()
        signal_name = signal.Signals(number).name
        logger.info("%s: running jobs have %g s to end.", signal_name, self._grace, extra={"event": "stopping"})
        keeper.stopping()
        deadline = time.monotonic() + self._grace
        for slot in self._crew.slots:
            if not slot.busy:
                slot.terminate()
        while any(slot.page.read() for slot in self._crew.slots) and time.monotonic() < deadline:
            if stop.take() is not None:
                logger.info("A second signal: jobs are given back at once.", extra={"event": "stopping"})
                break
            keeper.tick(self._crew.slots)
            for slot, message in self._crew.listen(0.1):
                self._hear(keeper, slot, message)

    @property
    def _grace(self) -> float:
        return settings.grace if self._options.grace is None else self._options.grace


def _say(line: str) -> None:
    """What a make() prints."""
    logger.info("%s", line, extra={"event": "output"})
