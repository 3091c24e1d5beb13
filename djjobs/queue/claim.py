"""Claiming: scheduled jobs become this worker's, a few at a time, in the order asked for."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import DjJobsError
from .identity import Claimant, version_metadata
from .keys import Keys
from .queue import Queue

__all__ = ["ORDERS", "Claims", "Job"]

ORDERS = ("original", "reverse", "random")
#: Below every turn there can be.
_FIRST = -(2**62)
#: How many jobs are lined up, or looked up for a restriction, at once.
_PAGE = 500
#: How many more rows to look at for jobs at random than the jobs wanted, if most rows are such jobs, and if few are.
_FEW_MORE, _MANY_MORE = 20, 1000
#: How often a page is looked up again, all of whose jobs others are just claiming.
_PATIENCE = 20


@dataclass(frozen=True)
class Job:
    """A claimed job. `worker_id` and `claim` are the token that guards its completion."""

    key_hash: str
    key: dict[str, Any]
    attempt: int
    priority: int
    worker_id: str
    claim: int
    run_id: int | None = None
    #: For how many seconds it was due when it was claimed; None if that is not known.
    waited: float | None = None


class Claims:
    """What one worker may claim of a table's jobs, and how.

    Parameters
    ----------
    keys
        The table's keys under the worker's restrictions.
    order : str
        "original" (as scheduled), "reverse" or "random", among jobs of the same priority.
    priority : int, optional
        Leave jobs alone whose priority number is higher than this.
    claimant : Claimant, optional
        In whose name to claim. Defaults to a worker of its own.
    automatic : bool
        Whether to take jobs, too, that only an event has put there. Defaults to True.
    """

    def __init__(
        self,
        queue: Queue,
        keys: Keys,
        order: str = "original",
        priority: int | None = None,
        claimant: Claimant | None = None,
        automatic: bool = True,
    ) -> None:
        if order not in ORDERS:
            raise DjJobsError(f"Unknown order {order!r} for {keys.label}. Choose one of {', '.join(ORDERS)}.")
        self._queue, self._keys, self._order, self._priority = queue, keys, order, priority
        self.table_name = keys.table.table_name
        self.claimant = claimant or Claimant()
        self._automatic = automatic
        metadata = version_metadata(keys.table)
        self._reserve = queue.sql(
            queue.engine.claims.reserve, versioned=queue.engine.claims.with_version if metadata else ""
        )
        self._metadata = json.dumps(metadata)

    def take(self, count: int) -> list[Job]:
        """Claim up to `count` jobs. None at all means that there are none to be had now."""
        jobs: list[Job] = []

        def left() -> int:
            return count - len(jobs)

        picks = self._picks_of_restriction(left) if self._keys.restricted else self._picks_of_turns(left)
        for statement, parameters in picks:
            jobs += self._claim(statement, {**parameters, "count": left()})
            if not left():
                break
        return jobs

    def available(self) -> int:
        """How many jobs there are to claim now."""
        engine, keys = self._queue.engine, self._keys
        if keys.restricted:
            sql = self._queue.sql(engine.claims.count_chosen, chosen=keys.sql.chosen, only=self._only("job"))
        else:
            sql = self._queue.sql(engine.claims.count_scheduled, only=self._only())
        self._first_turn(_FIRST)
        return self._queue.db.execute(sql, **self._parameters()).fetchone()[0]

    def _only(self, alias: str = "") -> str:
        """SQL of which jobs this worker may claim."""
        return self._queue.engine.claims.only(self._automatic, self._priority is not None, alias)

    def _parameters(self, **more: Any) -> dict[str, Any]:
        return {"table": self.table_name, "priority": self._priority, **more}

    def _claim(self, statement: str, parameters: dict[str, Any]) -> list[Job]:
        """Lock what the statement picks and make it ours, in one transaction."""
        return self._queue.db.retry(lambda: self._claim_once(statement, parameters))

    def _claim_once(self, statement: str, parameters: dict[str, Any]) -> list[Job]:
        queue = self._queue
        token: dict[str, Any] = {"worker": self.claimant.worker_id, "claim": self.claimant.next_claim()}
        try:
            with queue.db.transaction():
                rows = queue.db.execute(statement, **self._parameters(**parameters)).fetchall()
                if not rows:
                    return []
                if "hashes" in parameters:
                    # Looked up by their hashes, they come in the order of these.
                    rows = sorted(rows, key=lambda row: parameters["hashes"].index(row[0]))
                hashes = tuple(row[0] for row in rows)
                parameters = {"table": self.table_name, "hashes": hashes, "metadata": self._metadata}
                queue.db.execute(self._reserve, **parameters, **token, **queue.signature())
        except Exception as error:
            if queue.db.is_transient(error):
                # The commit may have got through before the connection broke.
                queue.change(queue.engine.claims.release_claim, table=self.table_name, **token)
            raise
        return [
            Job(key_hash, self._keys.decode(key), attempt, priority, token["worker"], token["claim"], run_id, waited)
            for key_hash, key, attempt, priority, waited, run_id in rows
        ]

    # -- all jobs of the table -------------------------------------------------------------------------

    def _picks_of_turns(self, left: Callable[[], int]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What to pick, turn after turn: usually the first one has all we want."""
        turn = self._first_turn(_FIRST)
        while turn is not None:
            if self._order == "random":
                yield from self._picks_at_random(turn, left)
            claims = self._queue.engine.claims
            parts = {"direction": claims.direction[self._order], "asked_for": claims.only(self._automatic)}
            yield self._queue.sql(claims.pick_in_order, **parts), {"turn": turn}
            turn = self._first_turn(turn)

    def _first_turn(self, floor: int) -> int | None:
        queue = self._queue
        sql = queue.sql(queue.engine.claims.next_turn, only=self._only())
        turn, is_due = queue.db.execute(sql, **self._parameters(floor=floor)).fetchone()
        if is_due and floor == _FIRST:
            queue.db.retry(self._line_up)
            turn, _ = queue.db.execute(sql, **self._parameters(floor=floor)).fetchone()
        return turn

    def _line_up(self) -> None:
        """Put some of the jobs that have become due into line; others may do the same with others."""
        queue = self._queue
        with queue.db.transaction():
            rows = queue.execute(queue.engine.claims.pick_due, table=self.table_name, count=_PAGE).fetchall()
            if rows:
                queue.execute(queue.engine.claims.line_up, table=self.table_name, hashes=tuple(row[0] for row in rows))

    def _picks_at_random(self, turn: int, left: Callable[[], int]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What to pick at random. It may miss jobs that are rare among the table's rows; these go in order."""
        queue, claims = self._queue, self._queue.engine.claims
        for more in (_FEW_MORE, _MANY_MORE):
            place = {"turn": turn, "start": secrets.token_hex(16), "window": left() + more, "count": left()}
            find = queue.sql(claims.find_near, asked_for=claims.only(self._automatic, alias="near"))
            rows = queue.db.execute(find, **self._parameters(**place)).fetchall()
            if rows:
                yield queue.sql(claims.pick_these), {"hashes": tuple(row[0] for row in rows)}

    # -- jobs that a restriction chooses -------------------------------------------------------------------

    def _picks_of_restriction(self, left: Callable[[], int]) -> Iterator[tuple[str, dict[str, Any]]]:
        self._first_turn(_FIRST)
        for _ in range(_PATIENCE):
            page = self._page()
            if not page:
                return
            # No more than are wanted: which of them a limit took would be up to the server.
            while page:
                hashes, page = page[: left()], page[left() :]
                yield self._queue.sql(self._queue.engine.claims.pick_these), {"hashes": hashes}
            # Others hold these at the moment: they are claiming them, or give them back.
            time.sleep(random.uniform(0, 0.05))

    def _page(self) -> tuple[str, ...]:
        queue, claims = self._queue, self._queue.engine.claims
        parts = {"chosen": self._keys.sql.chosen, "only": self._only("job"), "order": claims.order[self._order]}
        sql = queue.sql(claims.find_chosen, **parts)
        rows = queue.db.execute(sql, **self._parameters(count=_PAGE, start=secrets.token_hex(16)))
        return tuple(row[0] for row in rows.fetchall())
