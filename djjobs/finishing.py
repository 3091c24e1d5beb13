"""Finishing: a claimed job succeeds, fails or is given back. Each way is one guarded statement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .claiming import Job
from .compat import pack
from .errors import LeaseLost
from .identity import run_metadata
from .queue import Queue
from .tables import ERROR_MESSAGE_LENGTH

__all__ = ["Finisher"]

_CUT = "...truncated"


def _storable(text: str) -> str:
    """A text that every column can hold: no NUL, which PostgreSQL refuses, and no half of a character."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


class Finisher:
    """Ends the jobs of one table.

    Parameters
    ----------
    table
        An instance of the table.
    keep_completed : bool
        Whether a finished job stays as `success` or goes.
    """

    def __init__(self, queue: Queue, table: Any, keep_completed: bool) -> None:
        self._queue, self._table, self._keep = queue, table, keep_completed

    @contextmanager
    def with_commit(self, job: Job, elapsed: Any) -> Iterator[None]:
        """Complete the job in the very transaction that DataJoint commits meanwhile.

        Plain and three-part make both end in `commit_transaction`. If the job is no longer ours
        the transaction must not be committed at all.
        """
        connection = self._table.connection
        commit = connection.commit_transaction

        def complete_and_commit() -> None:
            if not self._complete(job, elapsed()):
                self._queue.db.roll_back()
                raise self._lost(job)
            commit()

        connection.commit_transaction = complete_and_commit
        try:
            yield
        finally:
            del connection.commit_transaction

    def already_done(self, job: Job) -> None:
        """The key was in the target before make() was called."""
        with self._queue.db.transaction():
            if not self._complete(job, None):
                raise self._lost(job)

    def _complete(self, job: Job, duration: float | None) -> bool:
        engine = self._queue.engine
        if not self._keep:
            return self._queue.execute(engine.complete, **self._token(job)).rowcount == 1
        parameters = {**self._token(job), "duration": duration, "metadata": self._metadata()}
        return self._queue.execute(engine.complete_and_keep, **parameters).rowcount == 1

    def failed(self, job: Job, message: str, stack: str, duration: float) -> None:
        """Record an error."""
        message, stack = _storable(message), _storable(stack)
        if len(message) > ERROR_MESSAGE_LENGTH:
            message = message[: ERROR_MESSAGE_LENGTH - len(_CUT)] + _CUT
        parameters = {
            "message": message,
            "stack": pack(stack),
            "duration": duration,
            "metadata": self._metadata(),
        }
        if not self._queue.change(self._queue.engine.fail, **self._token(job), **parameters):
            raise self._lost(job)

    def give_back(self, jobs: Sequence[Job]) -> int:
        """Put claimed jobs back as they were; return how many were still ours."""
        if not jobs:
            return 0
        return self._queue.change(
            self._queue.engine.release,
            table=self._table.table_name,
            hashes=tuple(job.key_hash for job in jobs),
            worker=jobs[0].worker_id,
            claims=tuple({job.claim for job in jobs}),
        )

    def _token(self, job: Job) -> dict[str, Any]:
        return {
            "table": self._table.table_name,
            "key_hash": job.key_hash,
            "worker": job.worker_id,
            "claim": job.claim,
        }

    def _metadata(self) -> str:
        return json.dumps(run_metadata(self._table))

    def _lost(self, job: Job) -> LeaseLost:
        return LeaseLost(
            f"The job {job.key} of {type(self._table).__name__} is no longer this worker's; "
            "it was given to another, removed or changed meanwhile. Nothing of it was committed here."
        )
