"""Looks on while the workers work: what the dead hold, and for how long."""

from __future__ import annotations

import time
from typing import Any

from chaos.record import Record
from chaos.server import Bystander

#: After so long a process id may be somebody else's.
_REMEMBERED = 60.0
#: How soon after its end a worker that left in good order must have left nothing behind.
_AT_ONCE = 1.0
#: Who looks so much too late has lost time itself, as everybody on this machine may have.
_STALL = 1.0


class Watch:
    """Looks every now and then and records what should not be.

    Parameters
    ----------
    most : float
        How long the claims of a dead worker may stay: one lease, one heartbeat, and the slack.
    """

    EVERY = 0.3

    def __init__(self, bystander: Bystander, record: Record, most: float) -> None:
        self._bystander, self._record, self._most = bystander, record, most
        self._next = 0.0
        #: The last heartbeat of each dead process, as it was when we first looked after its death.
        self._last_heard: dict[int, Any] = {}

    def look(self) -> None:
        if self._record.in_spell:
            # The server may not answer, and nobody can be judged.
            self._next = 0.0
            return
        late = time.monotonic() - self._next
        if late < 0:
            return
        if self._next and late > _STALL:
            self._record.stalls.append(time.time())
            self._record.tell(f"no time for {late:.1f} s")
        self._look_at_claims()
        self._look_at_workers()
        self._next = time.monotonic() + self.EVERY

    def _look_at_claims(self) -> None:
        jobs = self._bystander.table("~jobs")
        rows = self._bystander.ask(f"SELECT pid, COUNT(*) FROM {jobs} WHERE status = 'reserved' GROUP BY pid")
        for pid, count in rows:
            if self._gone_for(self._record.dead, pid) > self._most:
                self._record.complain(f"{count} jobs of the dead process {pid} are reserved after {self._most:g} s")
            if self._gone_for(self._record.left, pid) > _AT_ONCE:
                self._record.complain(f"{count} jobs of the process {pid}, which had left, are still reserved")

    def _look_at_workers(self) -> None:
        workers = self._bystander.table("~workers")
        for pid, state, heard in self._bystander.ask(f"SELECT pid, state, last_heartbeat FROM {workers}"):
            if self._gone_for(self._record.left, pid) > _AT_ONCE:
                self._record.complain(f"~workers has a row of the process {pid}, which had left")
            gone = self._gone_for(self._record.dead, pid)
            if gone > self._most and state != "dead":
                self._record.complain(f"~workers says {state!r} of the process {pid}, dead for {self._most:g} s")
            # The server's clock may jump, so that only a change is a proof.
            if gone > _AT_ONCE and self._last_heard.setdefault(pid, heard) != heard:
                self._record.complain(f"the process {pid} was heard of after its death")

    def _gone_for(self, gone: dict[int, float], pid: int) -> float:
        now = time.time()
        if pid not in gone or now - gone[pid] > _REMEMBERED:
            return 0.0
        return now - self._record.since(gone[pid], now)
