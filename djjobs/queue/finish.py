"""Finishing: a claimed job succeeds, fails, waits for its next try, is cancelled or given back.

Each way is one guarded statement: a claim that was taken away changes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dj.blobs import pack
from ..dj.connection import MakeTransaction
from ..errors import JobCancelled, JobTimeout, LeaseLost
from ..interrupt import Stop
from ..sql.queries import first_row
from .claim import Job
from .identity import claims_of, run_metadata
from .keys import Keys, UnfitKey
from .policy import Policy
from .queue import Queue
from .tables import ERROR_MESSAGE_LENGTH

__all__ = ["Failure", "Finisher", "cut", "release_slot", "storable", "truncated"]

_CUT = "...truncated"
#: How many attempts a job tells of, and how much of each stack trace: its end, where the error is.
_ATTEMPTS_KEPT = 10
_STACK_KEPT = 4000
_MESSAGE_KEPT = 500
#: No text is kept that is longer than this; every server takes so much in one statement.
_LONGEST_TEXT = 2**18


@dataclass(frozen=True)
class Failure:
    """How an attempt ended: with an error, a time-out or the death of its worker."""

    kind: str
    message: str
    stack: str = ""
    duration: float | None = None
    host: str = ""
    pid: int = 0

    @property
    def in_short(self) -> Failure:
        """The same with little text, where the server does not take all of it."""
        return replace(self, message=cut(self.message, _MESSAGE_KEPT), stack="")


class _CannotLook(Exception):
    """The target cannot be looked at: it was dropped, or its key has changed."""


class Finisher:
    """Ends the jobs of one table.

    Parameters
    ----------
    keys
        The keys of the table.
    keep_completed : bool
        Whether a finished job stays as `success` or goes.
    policy : Policy, optional
        What the table says about its jobs. Defaults to what its class attributes say.
    """

    def __init__(self, queue: Queue, keys: Keys, keep_completed: bool, policy: Policy | None = None) -> None:
        self.queue, self._table, self._keep = queue, keys.table, keep_completed
        self.keys, self.name, self.table_name = keys, type(keys.table).__name__, keys.table.table_name
        self.policy = policy or Policy.of(keys.table, keys.label)
        self._committing: Job | None = None

    def on(self, queue: Queue) -> Finisher:
        """The same on another connection."""
        other = copy.copy(self)
        other.queue = queue
        return other

    def claimed(self, worker_id: str, key_hash: str, claim: int) -> Job | None:
        """The claimed job with this token, if there is still one."""
        token = {"table": self.table_name, "key_hash": key_hash, "worker": worker_id, "claim": claim}
        row = self.queue.db.retry(
            lambda: self.queue.execute(self.queue.engine.attempts.claimed_key, **token).fetchone()
        )
        return row and Job(key_hash, self.keys.decode(row[0]), row[1], row[2], worker_id, claim)

    # -- success ---------------------------------------------------------------------------------------

    def with_commit(self, job: Job, elapsed: Callable[[], float], stop: Stop) -> MakeTransaction:
        """Complete the job in the very transaction that DataJoint commits meanwhile.

        If the job is no longer ours, or was cancelled, the transaction must not be committed at all. From here on
        it is too late to interrupt.
        """

        def complete() -> None:
            stop.end_interruptible()
            timeout = self.policy.timeout
            if timeout is not None and elapsed() > timeout:
                # Whoever was to interrupt it in time could not.
                raise JobTimeout(f"make() of {self.name} took longer than {timeout:g} s.")
            if not self._complete(job, elapsed()):
                self.queue.db.roll_back()
                raise self._why_not(job)
            self._committing = job

        return MakeTransaction(self._table.connection, self.name, complete)

    def already_done(self, job: Job) -> None:
        """The key was in the target before make() was called."""

        def complete() -> bool:
            with self.queue.db.transaction():
                return self._complete(job, None)

        if self.queue.db.retry(complete):
            return
        if self._committing is job and self.claimed(job.worker_id, job.key_hash, job.claim) is None:
            # Our own commit got through, though the server's answer did not.
            return
        raise self._why_not(job)

    def _complete(self, job: Job, duration: float | None) -> bool:
        engine = self.queue.engine
        if not self._keep:
            return self.queue.execute(engine.attempts.complete, **self._token(job)).rowcount == 1
        parameters = {**self._token(job), "duration": duration, "metadata": self._metadata()}
        return self.queue.execute(engine.attempts.complete_and_keep, **parameters).rowcount == 1

    # -- failure ---------------------------------------------------------------------------------------

    def failed(self, job: Job, failure: Failure, wait: float | None) -> str:
        """End an attempt: the job is an error, or is tried again after `wait` seconds; return its status after that.

        It is a success if somebody who does not heed our claims, such as DataJoint itself, made the key meanwhile.
        """
        try:
            return self.queue.db.retry(lambda: self._fail(job, failure, wait, self._is_made))
        except Exception as error:
            if isinstance(error, LeaseLost) or self.queue.db.is_transient(error):
                raise
            # The target cannot be looked at, which may be why make() failed.
            return self.queue.db.retry(lambda: self._fail(job, failure, wait, lambda _job: False))

    def killed(self, job: Job, failure: Failure) -> str | None:
        """The slot was killed because make() did not heed its time-out; return as `crashed` does."""
        wait = self.policy.wait_after_error(JobTimeout(failure.message), job)
        return self._end_dead(job, failure, lambda: True, lambda _attempts: wait)

    def crashed(self, job: Job, failure: Failure, is_dead: Callable[[], bool] = lambda: True) -> str | None:
        """The worker died or was killed in the middle of the job.

        Parameters
        ----------
        is_dead : callable
            Asked in the same transaction; whether the worker is still dead.

        Returns
        -------
        str or None
            The job's status after that; None if the job was not to be had any more.
        """
        return self._end_dead(job, failure, is_dead, self._wait_after_crash)

    def _end_dead(
        self,
        job: Job,
        failure: Failure,
        is_dead: Callable[[], bool],
        wait_after: Callable[[list[dict[str, Any]]], float | None],
    ) -> str | None:
        def end(
            failure: Failure, wait_after: Callable[..., float | None], is_made: Callable[[Job], bool]
        ) -> str | None:
            with self.queue.db.transaction():
                statement = self.queue.engine.attempts.look_at_dead_claim
                row = self.queue.execute(statement, **self._token(job)).fetchone() if is_dead() else None
                return None if row is None else self._end_attempt(job, failure, row, wait_after, is_made)

        try:
            return self.queue.db.retry(lambda: end(failure, wait_after, self._is_made))
        except _CannotLook as reason:
            # Nobody would take the job back if this were left to others. As an error it tells people what to do.
            told = replace(failure, message=f"{failure.message} {reason}")
            return self.queue.db.retry(lambda: end(told, lambda _attempts: None, lambda _job: False))

    def _fail(self, job: Job, failure: Failure, wait: float | None, is_made: Callable[[Job], bool]) -> str:
        with self.queue.db.transaction():
            row = self.queue.execute(self.queue.engine.attempts.look_at_claim, **self._token(job)).fetchone()
            if row is None:
                raise self._lost(job)
            return self._end_attempt(job, failure, row, lambda _attempts: wait, is_made)

    def _end_attempt(
        self,
        job: Job,
        failure: Failure,
        row: Any,
        wait_after: Callable[[list[dict[str, Any]]], float | None],
        is_made: Callable[[Job], bool],
    ) -> str:
        """End an attempt of the job with this row, which is locked; return the job's status after that."""
        queue, engine, token = self.queue, self.queue.engine, self._token(job)
        used_up, stored, cancel_request, now = row
        if cancel_request:
            queue.execute(engine.attempts.cancel_claimed, **token)
            return "cancelled"
        if failure.kind != "timeout" and is_made(job):
            self._complete(job, None)
            return "success"
        attempts = json.loads(stored) if isinstance(stored, str) else stored or []
        attempts.append(self._record(used_up + 1, now, failure))
        wait = wait_after(attempts[-(used_up + 1) :])
        parameters = {**token, **self._story(failure), "attempts": json.dumps(attempts[-_ATTEMPTS_KEPT:])}
        if wait is not None:
            queue.execute(engine.attempts.try_again, **parameters, wait=wait)
            return "scheduled"
        queue.execute(engine.attempts.fail, **parameters)
        return "error"

    def _wait_after_crash(self, attempts: list[dict[str, Any]]) -> float | None:
        number = attempts[-1]["attempt"]
        crashes = sum(attempt["kind"] == "crash" for attempt in attempts)
        # The history is bounded, the number of crashes is not.
        crashes = number if crashes >= _ATTEMPTS_KEPT else crashes
        return 0.0 if self.policy.comes_back(number, crashes) else None

    def _is_made(self, job: Job) -> bool:
        """Whether the target has the key. The server compares it with the key in the queue.

        A restriction would not do: DataJoint 0.14 cannot restrict by every text.
        """
        if isinstance(job.key, UnfitKey):
            return False
        try:
            made = first_row(self.keys.made_sql(self.queue))
            parameters = {"table": self.table_name, "key_hash": job.key_hash}
            return self.queue.db.execute(made, **parameters).fetchone() is not None
        except Exception as error:
            if self.queue.db.is_transient(error):
                raise
            raise _CannotLook(
                f"Whether its result is there cannot be seen: {error} "
                f"See to the table of {self.name}; then retry_jobs() or cleanup_jobs()."
            ) from error

    def _record(self, number: int, now: Any, failure: Failure) -> dict[str, Any]:
        who = self.queue.signature()
        return {
            "attempt": number,
            "kind": failure.kind,
            "time": f"{now:%Y-%m-%d %H:%M:%S}",
            "host": failure.host or who["host"],
            "pid": failure.pid or who["pid"],
            "message": storable(failure.message[:ERROR_MESSAGE_LENGTH])[:ERROR_MESSAGE_LENGTH],
            "stack": storable(_end_of_stack(failure)[-_STACK_KEPT:])[-_STACK_KEPT:],
        }

    def _story(self, failure: Failure) -> dict[str, Any]:
        return {
            "message": truncated(failure.message),
            "stack": pack(storable(cut(failure.stack))),
            "duration": failure.duration,
            "metadata": self._metadata(),
        }

    # -- neither ---------------------------------------------------------------------------------------

    def cancelled(self, job: Job) -> None:
        """The job was cancelled, and nothing of it is there."""
        if not self.queue.change(self.queue.engine.attempts.cancel_claimed, **self._token(job)):
            raise self._lost(job)

    def insist_on(self, job: Job) -> None:
        """Raise if the job is no longer ours, or was cancelled."""
        if self.queue.db.retry(lambda: self._request_about(job)) != "":
            raise self._why_not(job)

    def give_back(self, jobs: Sequence[Job]) -> int:
        """Put claimed jobs back as they were; return how many were still ours."""
        claims: dict[tuple[str, int], list[str]] = {}
        for job in jobs:
            claims.setdefault((job.worker_id, job.claim), []).append(job.key_hash)
        return sum(self._release(*token, hashes) for token, hashes in claims.items())

    def _release(self, worker_id: str, claim: int, hashes: list[str]) -> int:
        parameters = {"table": self.table_name, "hashes": tuple(hashes), "worker": worker_id, "claim": claim}
        released = 0
        for statement in self.queue.engine.attempts.release:
            if released < len(hashes):
                released += self.queue.change(statement, **parameters)
        return released

    # -- all ---------------------------------------------------------------------------------------------

    def _token(self, job: Job) -> dict[str, Any]:
        return {
            "table": self.table_name,
            "key_hash": job.key_hash,
            "worker": job.worker_id,
            "claim": job.claim,
        }

    def _metadata(self) -> str:
        return json.dumps(run_metadata(self._table))

    def _why_not(self, job: Job) -> JobCancelled | LeaseLost:
        """Why a job could not be completed."""
        if self._request_about(job):
            return JobCancelled(f"The job {job.key} of {self.name} was cancelled.")
        return self._lost(job)

    def _request_about(self, job: Job) -> str | None:
        """What a job was asked, which may be nothing; None if it is no longer ours."""
        with self.queue.db.transaction():
            row = self.queue.execute(self.queue.engine.attempts.look_at_claim, **self._token(job)).fetchone()
        return None if row is None else row[2]

    def _lost(self, job: Job) -> LeaseLost:
        return LeaseLost(
            f"The job {job.key} of {self.name} is no longer this worker's; "
            "it was given to another, removed or changed meanwhile. Nothing of it was committed here."
        )


def release_slot(queue: Queue, tables: Sequence[str], worker_id: str, slot: int, but: str = "") -> int:
    """Give back what a slot had claimed and not begun, all but the job with this hash; return how many.

    Runs that it was finishing are for others to finish.
    """
    first, last = claims_of(slot)
    engine, whose = queue.engine, {"worker": worker_id, "first": first, "last": last}
    runs = queue.execute(engine.hooks.find_finishing, tables=tuple(tables), **whose).fetchall()
    if runs:
        queue.change(engine.hooks.release_finishing, runs=tuple(run_id for (run_id,) in runs), **whose)
    hashes: dict[str, list[str]] = {}
    for table_name, key_hash in queue.execute(
        engine.attempts.find_claims_of_slot, tables=tuple(tables), but=but, **whose
    ):
        hashes.setdefault(table_name, []).append(key_hash)
    return sum(
        queue.change(statement, table=table_name, hashes=tuple(these), **whose)
        for table_name, these in hashes.items()
        for statement in engine.attempts.release_slot
    )


def _end_of_stack(failure: Failure) -> str:
    """The stack trace with not too much of a long message, which would leave no room for it."""
    said = failure.message.partition(": ")[2]
    if len(said) <= _MESSAGE_KEPT:
        return failure.stack
    end = failure.stack.rfind(said[:_MESSAGE_KEPT]) + _MESSAGE_KEPT
    return failure.stack[:end] + _CUT if end >= _MESSAGE_KEPT else failure.stack


def cut(text: str, most: int = _LONGEST_TEXT) -> str:
    """A text that is not longer than this, with its beginning and its end. Defaults to what every server takes."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def truncated(message: str) -> str:
    """A message that the column can hold, as long as it may be; DataJoint cuts it off in the same way."""
    kept = storable(message[: ERROR_MESSAGE_LENGTH + 1])
    return kept if len(kept) <= ERROR_MESSAGE_LENGTH else kept[: ERROR_MESSAGE_LENGTH - len(_CUT)] + _CUT


def storable(text: str) -> str:
    """A text that every column can hold: no NUL, which PostgreSQL refuses, and no half of a character."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
