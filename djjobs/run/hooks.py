"""The hooks of runs: a table's `prepare_run` before the first job, its `finish_run` after the last, each once.

Who calls a hook is decided by a mark in the run's row. The mark to prepare lives as long as the job in whose name it
was set is reserved; the mark to finish as long as its worker is heard of. A dead one is taken over, and what its owner
may still want to store is refused.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import DjJobsError
from ..interrupt import Stop
from ..queue.claim import Job
from ..queue.finish import Finisher, storable
from ..queue.identity import Claimant
from ..queue.policy import has_hook
from ..queue.tables import ERROR_MESSAGE_LENGTH
from ..telemetry import emit, is_heard
from .run import Run

__all__ = ["RunHooks"]

logger = logging.getLogger("djjobs")

#: How often finish_run is tried before the run ends without it, and the pause between two tries.
_MOST_TRIES, _PAUSE = 3, 0.5
#: How long somebody sleeps who waits for a run to be prepared: the first time, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0
#: How often a slot that is never idle looks for runs that are over.
_LOOK_INTERVAL = 5.0
#: A look reads the jobs of the table that wait. One that takes longer than this is followed by a rest so much longer.
_QUICK, _REST = 0.05, 20
#: How many runs are remembered.
_REMEMBERED = 100


class RunHooks:
    """What a slot does for the runs that its jobs of one table belong to.

    A table without hooks pays nothing for a job: ends of its runs are taken note of now and then.
    """

    def __init__(self, finisher: Finisher) -> None:
        self._finisher = finisher
        self._queue, self._table, self._name = finisher.queue, finisher.keys.table, finisher.name
        self._table_name = finisher.table_name
        self._prepares, self._finishes = (has_hook(self._table, name) for name in ("prepare_run", "finish_run"))
        self._ready: dict[int, Run | None] = {}
        self._touched: set[int] = set()
        self._next_look = time.monotonic() + _LOOK_INTERVAL
        self._rests_until = 0.0

    def of(self, job: Job) -> Run | None:
        """The run of a job; None if it has none, or its run is gone."""
        if job.run_id is None:
            return None
        if job.run_id in self._ready:
            return self._ready[job.run_id]
        run = Run.find(self._queue, job.run_id)
        if not self._prepares:
            self._remember(job.run_id, run)
        return run

    def _remember(self, run_id: int, run: Run | None) -> None:
        if len(self._ready) >= _REMEMBERED:
            self._ready.clear()
        self._ready[run_id] = run

    # -- before the first job ----------------------------------------------------------------------------

    def prepare(self, job: Job, restart_clock: Callable[[], None], stop: Stop) -> bool:
        """Have the job's run prepared, here or by another; whether that took its time.

        What `prepare_run` raises is raised, and the job fails with it; the next job will try again.

        Parameters
        ----------
        restart_clock : callable
            Called while the job waits, so that the time does not count for its time-out.
        """
        if not self._prepares or job.run_id is None or job.run_id in self._ready:
            return False
        pause = _FIRST_WAIT
        while (run := Run.find(self._queue, job.run_id)) is not None and not run.is_prepared:
            if self._queue.db.retry(lambda: self._take_preparing(job)):
                self._call_prepare(run, job, stop)
                continue
            # The time that make() may take has not begun. The monitor does not look for requests meanwhile.
            restart_clock()
            self._finisher.insist_on(job)
            stop.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 1.5, _LONGEST_WAIT)
        self._remember(job.run_id, run)
        restart_clock()
        return True

    def _take_preparing(self, job: Job) -> bool:
        queue, mark = self._queue, self._mark_of(job)
        with queue.db.transaction():
            row = queue.execute(queue.engine.hooks.lock_preparing, run=job.run_id).fetchone()
            if row is None or row[0] is not None:
                return False
            if row[1:] == (job.worker_id, job.claim, job.key_hash):
                # Ours already: the server's answer was lost, or the same job tries again.
                return True
            return queue.execute(queue.engine.hooks.take_preparing, table=self._table_name, **mark).rowcount == 1

    def _call_prepare(self, run: Run, job: Job, stop: Stop) -> None:
        with stop.interruptible():
            returned = self._table.prepare_run(run)
        details = _as_json(returned, f"prepare_run of {self._name}")
        if not self._queue.change(self._queue.engine.hooks.end_preparing, **self._mark_of(job), details=details):
            logger.warning("%s: what prepare_run returned is not needed; another has done it.", self._name)

    @staticmethod
    def _mark_of(job: Job) -> dict[str, Any]:
        return {"run": job.run_id, "worker": job.worker_id, "claim": job.claim, "key_hash": job.key_hash}

    # -- after the last --------------------------------------------------------------------------------------

    def job_over(self, job: Job, rest: Sequence[Job], stop: Stop) -> None:
        """A job is over; see to its run, unless more jobs of it are claimed here already."""
        if job.run_id is not None and all(other.run_id != job.run_id for other in rest):
            self._touched.add(job.run_id)
            if self._finishes and time.monotonic() >= self._rests_until:
                self._see_to_touched(job.worker_id, job.claim, stop)
        if time.monotonic() >= max(self._next_look, self._rests_until):
            self._look(job.worker_id, job.claim, stop)

    def look(self, claimant: Claimant, stop: Stop, begin: Callable[[], None] = lambda: None) -> None:
        """There is nothing else to do: see to runs that are over, those that others have left unfinished too.

        Parameters
        ----------
        begin : callable
            Called before a hook is, when there is something to be kept alive. Defaults to nothing.
        """
        self._look(claimant.worker_id, claimant.next_claim(), stop, begin)

    def _look(self, worker_id: str, claim: int, stop: Stop, begin: Callable[[], None] = lambda: None) -> None:
        self._next_look = time.monotonic() + _LOOK_INTERVAL
        if self._finishes:
            self._touched.clear()
            self._see_to(self._over(self._queue.engine.hooks.find_over_in_table), worker_id, claim, stop, begin)
        else:
            self._see_to_touched(worker_id, claim, stop)

    def _see_to_touched(self, worker_id: str, claim: int, stop: Stop) -> None:
        # The slot that ends the last job of a run has touched the run, and comes here after that.
        touched, self._touched = tuple(self._touched), set()
        if touched:
            self._see_to(self._over(self._queue.engine.hooks.find_over, runs=touched), worker_id, claim, stop)

    def _over(self, statement: str, **parameters: Any) -> list[tuple[int, bool]]:
        """The runs that are over: their id, and whether they are to be finished."""
        started = time.monotonic()
        rows = self._queue.execute(statement, table=self._table_name, **parameters).fetchall()
        took = time.monotonic() - started
        if took > _QUICK:
            self._rests_until = started + took * _REST
        return [(run, bool(todo)) for run, todo in rows]

    def _see_to(
        self,
        over: Iterable[tuple[int, bool]],
        worker_id: str,
        claim: int,
        stop: Stop,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        for run_id, is_unfinished in over:
            if not is_unfinished:
                if self._queue.change(self._queue.engine.hooks.end_run, run=run_id, table=self._table_name):
                    self._tell_of_end(run_id)
            elif self._finishes:
                begin()
                _Finishing(self, run_id, worker_id, claim, stop).run()

    def _tell_of_end(self, run_id: int) -> None:
        run = Run.find(self._queue, run_id) if is_heard("run ended") else None
        if run is not None:
            state, progress = run.state, str(run.progress())
            emit("run ended", self._name, run_id=run_id, run_name=run.name, state=state, progress=progress)


class _Finishing:
    """One slot's part in finishing a run: it takes the mark, calls the hook and stores what that returns."""

    def __init__(self, hooks: RunHooks, run_id: int, worker_id: str, claim: int, stop: Stop) -> None:
        self._hooks, self._queue, self._run_id, self._stop = hooks, hooks._queue, run_id, stop
        self._mark = {"run": run_id, "worker": worker_id, "claim": claim}
        self._what = f"finish_run of {hooks._name}"

    def run(self) -> None:
        while tries := self._queue.db.retry(self._take):
            if tries > _MOST_TRIES:
                self._fail(f"WorkerDied: {self._what} has lost its worker too often.")
            elif self._call():
                return
            if tries >= _MOST_TRIES:
                self._hooks._tell_of_end(self._run_id)
                return
            self._stop.sleep(_PAUSE * tries)

    def _take(self) -> int:
        """Take the mark; the number of this try, or 0 if it is not to be had."""
        queue, engine = self._queue, self._queue.engine
        with queue.db.transaction():
            row = queue.execute(engine.hooks.lock_finishing, run=self._run_id).fetchone()
            if row is None:
                return 0
            worker_id, claim, tries = row
            if (worker_id, claim) == (self._mark["worker"], self._mark["claim"]):
                # Ours already: the server's answer was lost.
                return tries
            table = self._hooks._table_name
            taken = queue.execute(engine.hooks.take_finishing, **self._mark, table=table).rowcount
            return tries + 1 if taken else 0

    def _call(self) -> bool:
        """Call the hook; whether that is the end of it."""
        run = Run.find(self._queue, self._run_id)
        try:
            with self._stop.interruptible():
                returned = self._hooks._table.finish_run(run)
            results = _as_json(returned, self._what)
        except BaseException as error:
            if self._stop.requested is not None:
                self._give_back()
                self._stop.check()
                raise
            self._queue.db.recover_from(error)
            logger.exception("%s failed for run %s", self._what, self._run_id)
            self._fail(f"{type(error).__name__}: {error}")
            return False
        if self._queue.change(self._queue.engine.hooks.end_finishing, **self._mark, results=results):
            self._hooks._tell_of_end(self._run_id)
        else:
            logger.warning("%s: what it returned for run %s was not stored.", self._what, self._run_id)
        return True

    def _fail(self, message: str) -> None:
        message = storable(message)[:ERROR_MESSAGE_LENGTH]
        self._queue.change(self._queue.engine.hooks.fail_finishing, **self._mark, message=message, most=_MOST_TRIES)

    def _give_back(self) -> None:
        """A stop is not an error: somebody else finishes the run, and no try is counted."""
        try:
            self._queue.db.start_afresh()
            self._queue.change(self._queue.engine.hooks.give_back_finishing, **self._mark)
        except Exception as error:
            logger.warning("Run %s could not be left to others; they will see to it later: %s", self._run_id, error)


def _as_json(value: Any, what: str) -> str | None:
    """What a hook returned, as text that every engine's JSON can hold."""
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False)
        json.dumps(value, ensure_ascii=False).encode()  # half a character has no place in a database
        if "\\u0000" in text.replace("\\\\", ""):
            raise ValueError("a text has the character NUL in it")
    except (TypeError, ValueError, RecursionError) as error:
        raise DjJobsError(
            f"{what} returned what is not JSON ({error}). Return dicts, lists, texts, numbers, booleans or None."
        ) from error
    return text
