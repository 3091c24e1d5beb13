"""`djjobs worker`: one supervisor, and slots in child processes that work off the tables of a pipeline."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .budget import Budget, Pace
from .claiming import Claims, Job
from .compat import datajoint_api
from .database import Database, explained
from .errors import DjJobsError, LeaseLost
from .executing import Executor, Outcome, clean_up_after, describe
from .finishing import Finisher
from .identity import Claimant
from .keeper import Keeper
from .keys import Keys, table_label
from .queue import Queue
from .running import Desk
from .settings import check_seconds, settings
from .slots import Crew, Death, Slot, SlotLine
from .stopping import Stop

__all__ = ["WorkerOptions", "run_worker"]

logger = logging.getLogger("djjobs")

#: How long an idle worker waits before it asks the server again: the first time, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 15.0
#: How many slots in a row may fail to go on before the worker gives up.
_MOST_EXCUSED = 5
#: How long a slot has to give back its job when it is told to.
_PATIENCE = 3.0
#: A job is not begun if the longest one of its table, and a bit, would not fit into the time that is left.
_MARGIN = 1.2


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker was asked to do.

    Attributes
    ----------
    processes : int
        How many jobs to run side by side. Defaults to 1.
    order : str
        "original", "reverse" or "random". Defaults to "original".
    restrictions : tuple
        Conditions on the keys. Defaults to none.
    max_jobs : int, optional
        End after so many jobs.
    drain : bool
        End when nothing is left to do. Defaults to False: wait for more.
    idle_timeout : float, optional
        End after so many seconds without a job.
    walltime : float, optional
        End within so many seconds; jobs that would take longer are not begun. Defaults to what is left of the
        Slurm allocation, if there is one.
    max_jobs_per_process : int, optional
        Replace a child process after so many jobs.
    grace : float, optional
        How long running jobs may go on after a SIGTERM. Defaults to ``djjobs.settings.grace``.
    once : bool
        Run one job, if there is one, and end. Defaults to False.
    """

    processes: int = 1
    order: str = "original"
    restrictions: tuple[Any, ...] = ()
    max_jobs: int | None = None
    drain: bool = False
    idle_timeout: float | None = None
    walltime: float | None = None
    max_jobs_per_process: int | None = None
    grace: float | None = None
    once: bool = False

    def check(self) -> None:
        """Raise if something cannot be meant so."""
        for name in ("processes", "max_jobs", "max_jobs_per_process"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DjJobsError(f"{name} of a worker must be a whole number, one or more, not {value!r}.")
        for name in ("idle_timeout", "walltime", "grace"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))


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
    benches = [_Bench.of(table(), number, options) for number, table in enumerate(tables)]
    return _Supervisor(benches, options).run()


@dataclass
class _Bench:
    """One table, ready to be worked on."""

    table: Any
    number: int
    queue: Queue
    keys: Keys
    finisher: Finisher

    @classmethod
    def of(cls, table: Any, number: int, options: WorkerOptions) -> _Bench:
        with explained(table.connection, table_label(table), "work on"):
            queue, keys = table._queue_and_keys(options.restrictions)
            # A bad restriction is to be found out here, not by every slot.
            queue.db.execute(f"{keys.source_sql} LIMIT 0")
            Claims(queue, keys, options.order)
            return cls(table, number, queue, keys, table._finisher(queue, keys))

    def schedule(self, at_once: bool) -> None:
        self.table._schedule(self.queue, self.keys, interval=0 if at_once else None)

    def has_retries(self) -> bool:
        """Whether jobs wait for their next try."""
        engine, join = self.queue.engine, ""
        if self.keys.restricted:
            join = self.queue.sql(engine.join_chosen, chosen=self.keys.chosen_sql)
        sql = self.queue.sql(engine.has_retries, join_chosen=join)
        return bool(self.queue.db.execute(sql, table=self.table.table_name).fetchone()[0])


# -- the supervisor -------------------------------------------------------------------------------------


class _Supervisor:
    """Starts slots, keeps watch over them, wakes them up when there may be work, and ends them well."""

    def __init__(self, benches: list[_Bench], options: WorkerOptions) -> None:
        self.benches, self.options = benches, options
        self.claimant = Claimant()
        context = mp.get_context("fork")
        self.budget = Budget(1 if options.once else options.max_jobs, None, context)
        self.deadline = _deadline(options.walltime)
        #: How long the longest job of each table took, for all slots to know.
        self.longest = context.Array("d", len(benches), lock=False)
        self._crew = Crew(context, lambda line, number: _SlotWork(self, line, number).run(), True, _say)
        self._failed = self._excused = 0
        #: Cancelled jobs whose slot was killed: table and key.
        self.to_clean: list[tuple[Any, dict[str, Any]]] = []
        self._done = 0
        self._wait, self._next_call = _FIRST_WAIT, 0.0
        self._last_job = time.monotonic()
        self._retiring = self._retries_wait = False

    def run(self) -> int:
        finishers = [bench.finisher for bench in self.benches]
        connection = self.benches[0].queue.db.connection
        with explained(connection, ", ".join(table_label(bench.table) for bench in self.benches), "work on"):
            keeper = Keeper(self.claimant, finishers, self.options.processes)
            keeper.enter()
        try:
            bell = _Bell(connection)
            for db in _one_a_connection(self.benches):
                # An open connection must not be inherited: two processes would read each other's answers.
                db.connection.close()
            names = ", ".join(type(bench.table).__name__ for bench in self.benches)
            logger.info("Worker %s works on %s.", self.claimant.worker_id, names, extra={"event": "started"})
            with Stop() as stop:
                for _ in range(self.options.processes):
                    self._crew.hire()
                self._supervise(keeper, bell, stop)
                self._end(keeper, stop)
        finally:
            self._crew.end(_PATIENCE, keeper.release)
            with contextlib.suppress(Exception):
                keeper.leave()
        words = self.claimant.worker_id, self._done, self._failed
        logger.info("Worker %s ends: %s jobs done, %s failed.", *words, extra={"event": "ended"})
        return 1 if self._failed else 0

    def _supervise(self, keeper: Keeper, bell: _Bell, stop: Stop) -> None:
        while self._crew.slots and stop.requested is None and not self._has_nothing_to_do():
            keeper.tick(self._crew.slots)
            for slot, message in self._crew.listen(self._patience(), bell.sources):
                self._hear(keeper, slot, message)
            if bell.rings():
                self._wait, self._next_call = _FIRST_WAIT, 0.0
            self._call_somebody()

    def _patience(self) -> float:
        """How long to listen: short enough to see a signal, a time-out or a call coming."""
        return min(0.2, max(0.01, settings.heartbeat_interval / 4))

    def _hear(self, keeper: Keeper, slot: Slot, message: Any) -> None:
        if isinstance(message, Outcome):
            self._count(message)
        elif message in ("idle", "waiting"):
            # Whoever goes idle last has looked last, and knows.
            slot.busy, self._retries_wait = False, message == "waiting"
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

    def _bury(self, keeper: Keeper, slot: Slot) -> None:
        burial = keeper.bury(slot, slot.story())
        self.budget.put_back(burial.released)
        if burial.job is None:
            logger.error("A slot died: %s", slot.story(), extra={"event": "died"})
            return
        self._failed += burial.status == "error"
        if burial.status == "cancelled":
            # User code; the next slot sees to it.
            self.to_clean.append((burial.table, burial.job.key))
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
        if not self._retiring and self.budget.most(1):
            self._crew.hire()
            self.to_clean.clear()

    def _count(self, outcome: Outcome) -> None:
        self._last_job = time.monotonic()
        self._excused = 0
        self._done += outcome.made
        self._failed += outcome.stays_an_error

    # -- when there is nothing to do ------------------------------------------------------------------------

    def _wait_longer(self) -> None:
        self._next_call = time.monotonic() + self._wait * random.uniform(0.75, 1.25)
        self._wait = min(self._wait * 1.5, _LONGEST_WAIT)

    def _call_somebody(self) -> None:
        """Let one idle slot look for jobs. If it finds some, the next is called at once."""
        idle = [slot for slot in self._crew.slots if not slot.busy]
        if idle and time.monotonic() >= self._next_call:
            self._wait_longer()
            idle[0].wake()

    def _has_nothing_to_do(self) -> bool:
        if any(slot.busy for slot in self._crew.slots):
            return False
        late = self.deadline is not None and time.monotonic() > self.deadline
        drained = self.options.drain and not self._retries_wait
        if late or drained or self._retiring or self.options.once:
            return True
        timeout = self.options.idle_timeout
        return timeout is not None and time.monotonic() - self._last_job > timeout

    # -- the end ------------------------------------------------------------------------------------------------

    def _end(self, keeper: Keeper, stop: Stop) -> None:
        """After a signal: let running jobs go on for a while, then have them given back."""
        number = stop.take()
        if number is None:
            return
        self._retiring = True
        self.budget.spend_all()
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
        return settings.grace if self.options.grace is None else self.options.grace


def _say(line: str) -> None:
    """What a make() prints."""
    logger.info("%s", line, extra={"event": "output"})


class _Bell:
    """Rings when somebody has put jobs into a queue, where the engine can tell."""

    def __init__(self, connection: Any) -> None:
        self._other: Any = None
        self._listen = Database(connection).engine.listen
        if self._listen:
            self._connection = connection
            self._hang_up()

    def _hang_up(self) -> None:
        try:
            self._other = datajoint_api.another_connection(self._connection)
            self._other.query(self._listen)
        except Exception as error:
            logger.debug("no notifications: %s", error)
            self._other = None
            self._again = time.monotonic() + 5

    @property
    def sources(self) -> list[Any]:
        return [] if self._other is None else [self._other._conn]

    def rings(self) -> bool:
        if not self._listen:
            return False
        if self._other is None:
            if time.monotonic() > self._again:
                self._hang_up()
            return False
        raw = self._other._conn
        try:
            raw.poll()
        except Exception:
            self._other, self._again = None, time.monotonic() + 1
            return False
        rang = bool(raw.notifies)
        raw.notifies.clear()
        return rang


# -- a slot -------------------------------------------------------------------------------------------------


class _SlotWork:
    """What a slot does: look for jobs, upstream first, run them, and wait to be called when there are none."""

    def __init__(self, supervisor: _Supervisor, line: SlotLine, number: int) -> None:
        self._benches, self._options, self._budget = supervisor.benches, supervisor.options, supervisor.budget
        self._line, self._deadline, self._longest = line, supervisor.deadline, supervisor.longest
        self._to_clean = list(supervisor.to_clean)
        claimant = supervisor.claimant.for_slot(number)
        self._claims = [Claims(b.queue, b.keys, self._options.order, None, claimant) for b in self._benches]
        self._paces = [Pace() for _ in self._benches]
        self._jobs_done = 0

    def run(self) -> None:
        # Ctrl-C in a terminal reaches the whole group; it is the supervisor's to decide.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        databases = [bench.queue.db for bench in self._benches]
        with Stop(databases[0].interrupt, signals=(signal.SIGTERM,)) as stop, contextlib.ExitStack() as patience:
            for db in databases:
                patience.enter_context(db.patient(float("inf"), unless=lambda: stop.requested is not None))
            for db in _one_a_connection(self._benches):
                db.reconnect()
            desk = Desk(self._line.page, stop)
            self._line.listen(desk)
            for table, key in self._to_clean:
                clean_up_after(table, key)
            self._executors = [Executor(bench.finisher, None, desk, bench.number) for bench in self._benches]
            self._work(stop)

    def _work(self, stop: Stop) -> None:
        while not self._budget.ended and not self._is_used_up():
            stop.check()
            if self._is_late():
                self._line.send("retired")
                return
            room = self._budget.take(1)
            if not room:
                return
            self._budget.put_back(room)
            if self._look(stop):
                continue
            wait = self._options.drain and any(bench.has_retries() for bench in self._benches)
            self._line.send("waiting" if wait else "idle")
            self._line.wait_until_called(stop)

    def _look(self, stop: Stop) -> bool:
        """Run what is there for the first table that has jobs; schedule if none has. Whether there were any."""
        for bench in self._benches:
            if self._run_some(bench, stop):
                return True
        for bench in self._benches:
            bench.schedule(at_once=self._options.drain or self._options.once)
            if self._run_some(bench, stop):
                return True
        return False

    def _run_some(self, bench: _Bench, stop: Stop) -> bool:
        number = bench.number
        if not self._fits(number):
            return False
        room = self._budget.take(self._paces[number].batch)
        jobs = self._claims[number].take(room) if room else []
        self._budget.put_back(room - len(jobs))
        if not jobs:
            return False
        self._line.send("working")
        try:
            while jobs and not self._budget.ended and not self._is_used_up() and self._fits(number):
                stop.check()
                self._run(bench, jobs.pop(0), stop)
        finally:
            self._budget.put_back(len(jobs))
            bench.finisher.give_back(jobs)
        return True

    def _run(self, bench: _Bench, job: Job, stop: Stop) -> None:
        name = bench.finisher.name
        about = {"table": name, "key": job.key}
        logger.info("%s %s started", name, job.key, extra={**about, "event": "job started"})
        with self._paces[bench.number].timing():
            outcome = self._executors[bench.number].run(job, stop)
        self._longest[bench.number] = max(self._longest[bench.number], outcome.seconds)
        self._jobs_done += 1
        if not outcome.made and outcome.error is None:
            self._budget.refund_call()
        _log(name, outcome)
        self._line.report(outcome)

    def _is_used_up(self) -> bool:
        most = self._options.max_jobs_per_process
        return most is not None and self._jobs_done >= most

    # -- the time that is left -----------------------------------------------------------------------------------

    def _fits(self, number: int) -> bool:
        return self._deadline is None or time.monotonic() + self._longest[number] * _MARGIN < self._deadline

    def _is_late(self) -> bool:
        return not any(self._fits(bench.number) for bench in self._benches)


def _one_a_connection(benches: list[_Bench]) -> Iterable[Database]:
    return {id(bench.queue.db.connection): bench.queue.db for bench in benches}.values()


def _log(name: str, outcome: Outcome) -> None:
    about = {"table": name, "key": outcome.key, "seconds": round(outcome.seconds, 3)}
    if isinstance(outcome.error, LeaseLost):
        logger.warning("%s %s was given to another", name, outcome.key, extra={**about, "event": "job lost"})
    elif outcome.cancelled:
        logger.info("%s %s cancelled", name, outcome.key, extra={**about, "event": "job cancelled"})
    elif outcome.error is None:
        what = "done" if outcome.made else "was done already"
        logger.info(
            "%s %s %s in %.2f s", name, outcome.key, what, outcome.seconds, extra={**about, "event": "job done"}
        )
    else:
        again = "" if outcome.retry_in is None else f"; tried again in {outcome.retry_in:.0f} s"
        what = f"{outcome.message.splitlines()[0]}{again}"
        extra = {**about, "event": "job failed"}
        logger.error("%s %s failed in %.2f s: %s", name, outcome.key, outcome.seconds, what, extra=extra)


def _deadline(walltime: float | None) -> float | None:
    """Until when to work, by this machine's clock; under Slurm until the end of the allocation."""
    if walltime is None:
        walltime = _left_of_allocation()
    return None if walltime is None else time.monotonic() + walltime


def _left_of_allocation() -> float | None:
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        return float(end) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return seconds_of(answer.stdout.strip())


def seconds_of(text: str) -> float | None:
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds; None if it is no time, as for UNLIMITED."""
    days, _, rest = text.rpartition("-")
    with contextlib.suppress(ValueError):
        parts = [int(part) for part in rest.split(":")]
        while len(parts) < 3:
            parts.insert(0, 0)
        hours, minutes, seconds = parts
        return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
    return None
