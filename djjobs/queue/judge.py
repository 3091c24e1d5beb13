"""Who is dead: a worker whose heartbeat has not changed for its lease, as measured by whoever judges.

Servers stall, and their clocks jump. So no time of the server is ever subtracted from another. Whoever judges compares
a heartbeat with the one that it saw before, and takes the time in between from the clock of its own machine.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..settings import settings
from .queue import Queue

__all__ = ["Judge", "Sightings", "Sign", "find_dead_at_once", "is_still_silent", "this_boot"]

logger = logging.getLogger("djjobs")

#: What was seen of workers that are no longer there is forgotten after a day.
_REMEMBERED = 86400
#: How often somebody who looks only once looks again if the server stalls meanwhile.
_TRIES = 3
#: A server that answers within so many seconds does not stall; it may only be busy.
_PROMPT = 0.5


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a worker.

    Attributes
    ----------
    heartbeat : str
        It is another one after each heartbeat. Empty if the worker has no row.
    beats : int
        How many heartbeats it has sent.
    lease : float
        For how many seconds it may stay the same.
    holds : bool
        Whether the worker holds jobs or runs of the tables that were asked about.
    known_dead : bool
        Whether somebody has found out already that the worker is dead.
    """

    heartbeat: str
    beats: int
    lease: float
    holds: bool = True
    known_dead: bool = False

    @property
    def matters(self) -> bool:
        """Whether somebody has to find out if this worker is dead."""
        return self.holds or not self.known_dead


Signs = dict[str, Sign]


def _signs(queue: Queue, tables: Sequence[str]) -> Signs:
    """The sign of life of each worker that is in the list, or that holds something of these tables."""
    workers = queue.engine.workers
    holders = {holder for (holder,) in queue.execute(workers.holders, tables=tuple(tables)).fetchall()}
    signs = {
        worker_id: Sign(_heartbeat(beats, heard), beats, lease, worker_id in holders, state == "dead")
        for worker_id, beats, heard, lease, state in queue.execute(workers.signs_of_life).fetchall()
    }
    missing = {worker_id: Sign("", 0, settings.lease) for worker_id in holders - signs.keys()}
    return {**signs, **missing}


def _heartbeat(beats: int, heard: object) -> str:
    # The number alone would do, but for a worker whose row was removed and that has entered itself anew.
    return f"{beats} {heard}"


def is_still_silent(queue: Queue, worker_id: str, sign: Sign) -> bool:
    """Whether a worker has not been heard since this sign of life; a worker that is gone from the list has not."""
    row = queue.execute(queue.engine.workers.sign_of_life, worker=worker_id).fetchone()
    return row is None or _heartbeat(*row) == sign.heartbeat


def _not_locked(queue: Queue, signs: Signs) -> Signs:
    """Those whose rows nobody keeps locked. A worker whose row is locked cannot send a heartbeat."""
    listed = tuple(worker_id for worker_id, sign in signs.items() if sign.heartbeat)
    free = {id_ for (id_,) in queue.execute(queue.engine.workers.unlocked, workers=listed).fetchall()} if listed else ()
    return {worker_id: sign for worker_id, sign in signs.items() if worker_id in free or not sign.heartbeat}


class _Observations(dict[str, tuple[str, float]]):
    """The heartbeat of each worker, and since when it has been the same by the clock of this machine."""

    def take_in(self, signs: Mapping[str, Sign], answered: float) -> None:
        """Begin anew with those whose heartbeat has changed."""
        for worker_id, sign in signs.items():
            if worker_id not in self or self[worker_id][0] != sign.heartbeat:
                self[worker_id] = sign.heartbeat, answered

    def silent(self, signs: Mapping[str, Sign], asked: float, share: float = 1.0) -> Signs:
        """Those whose heartbeat has been the same for their lease, or for a share of it."""
        return {id_: sign for id_, sign in signs.items() if asked - self[id_][1] >= share * sign.lease}


def _longest_gap(lease: float) -> float:
    """How long a judge may have sent no heartbeat, if the time is to count for a worker with this lease.

    A monitor looks at the clock every half second, so for very short leases half of them would be too little.
    """
    return max(lease / 2, min(1.0, 0.9 * lease))


class Judge:
    """Finds dead workers of one schema, for a process that sends heartbeats itself.

    Time counts only while its own heartbeats got through. If they did not, those of others may not have either.

    Parameters
    ----------
    tables : sequence of str
        The tables whose jobs are to be recovered.
    """

    def __init__(self, queue: Queue, tables: Sequence[str]) -> None:
        self._queue, self._tables = queue, tuple(tables)
        self._seen = _Observations()
        self._signs: Signs = {}
        self._heard = time.monotonic()

    def heard(self) -> None:
        """A heartbeat of our own got through. After a gap all have to be observed anew."""
        now = time.monotonic()
        gap, self._heard = now - self._heard, now
        for worker_id, sign in self._signs.items():
            if gap > _longest_gap(sign.lease):
                self._seen.pop(worker_id, None)

    def find_dead(self) -> Signs:
        """The dead that hold something, or of whose death nobody knows yet. Call it right after `heard`."""
        asked = time.monotonic()
        self._signs = _signs(self._queue, self._tables)
        answered = time.monotonic()
        self._seen.take_in(self._signs, answered)
        for gone in self._seen.keys() - self._signs.keys():
            del self._seen[gone]
        self._begin_anew_with_locked(asked)
        return {id_: sign for id_, sign in self._seen.silent(self._signs, asked).items() if sign.matters}

    def _begin_anew_with_locked(self, asked: float) -> None:
        """A worker whose row somebody keeps locked cannot send a heartbeat. That time does not count."""
        quiet = {id_: sign for id_, sign in self._seen.silent(self._signs, asked, share=0.25).items() if sign.matters}
        for locked in quiet.keys() - _not_locked(self._queue, quiet).keys():
            self._seen[locked] = quiet[locked].heartbeat, time.monotonic()

    def due(self) -> float:
        """When the next heartbeat and the next look have to follow, at the latest.

        Looks must follow each other closely enough for the shortest lease. And when a lease is over, nobody should
        have to wait for the next heartbeat.
        """
        times = [
            min(self._seen[worker_id][1] + sign.lease, self._heard + sign.lease / 4)
            for worker_id, sign in self._signs.items()
            if sign.matters and worker_id in self._seen and self._heard - self._seen[worker_id][1] < sign.lease
        ]
        return min(times, default=math.inf)


class Sightings:
    """What the processes of this machine have seen of the workers of a schema, from one visit to the next.

    The processes of a machine share a clock. With those of other machines they have none in common, so each machine
    has a row of its own in `~sightings`.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue, self._statements = queue, queue.engine.workers

    def load(self) -> _Observations:
        row = self._queue.execute(self._statements.sightings, boot=this_boot()).fetchone()
        seen = json.loads(row[0]) if row and isinstance(row[0], str) else (row and row[0]) or {}
        return _Observations({worker_id: (heartbeat, since) for worker_id, (heartbeat, since) in seen.items()})

    def save(self, seen: _Observations, present: Mapping[str, Sign]) -> None:
        """Leave it to those who come later; what concerns workers that are long gone is left out."""
        oldest = time.monotonic() - _REMEMBERED
        kept = {id_: entry for id_, entry in seen.items() if id_ in present or entry[1] > oldest}
        parameters = {"boot": this_boot(), "seen": json.dumps(kept)}
        if not self._queue.execute(self._statements.note_sightings, **parameters).rowcount:
            self._queue.execute(self._statements.enter_sightings, **parameters)


def find_dead_at_once(
    queue: Queue, tables: Sequence[str], sleep: Callable[[float], None] = time.sleep
) -> dict[str, Sign]:
    """The dead who hold something of these tables, for somebody who looks only once.

    It notes whom it has seen. Only who was seen by a process of this machine a lease ago, and has not been heard
    since, can be dead. The server may have been away or locked in between, until just now. So before it judges
    anybody, it makes sure that heartbeats get through, and gives all the time to send one.
    """
    sightings = Sightings(queue)
    seen, asked = sightings.load(), time.monotonic()
    signs = _signs(queue, tables)
    before = dict(seen)
    seen.take_in(signs, time.monotonic())
    if seen != before:
        sightings.save(seen, signs)
    suspects = {worker_id: sign for worker_id, sign in seen.silent(signs, asked).items() if sign.holds}
    return _not_locked(queue, _silent_after_a_pause(queue, tables, suspects, sleep)) if suspects else {}


def _silent_after_a_pause(
    queue: Queue, tables: Sequence[str], suspects: Signs, sleep: Callable[[float], None]
) -> Signs:
    pause = max(min(settings.heartbeat_interval, sign.lease / 2) for sign in suspects.values())
    logger.info("%d workers seem to be dead; they have %.3g s to be heard.", len(suspects), pause)
    for _ in range(_TRIES):
        queue.execute(queue.engine.workers.try_to_write)
        sleep(pause)
        asked = time.monotonic()
        queue.execute(queue.engine.workers.try_to_write)
        signs = _signs(queue, tables)
        suspects = {
            id_: sign for id_, sign in suspects.items() if id_ in signs and signs[id_].heartbeat == sign.heartbeat
        }
        # If this took long, the server has stalled, and the pause does not count.
        if time.monotonic() - asked < max(pause, _PROMPT) or not suspects:
            return suspects
    return {}


@cache
def this_boot() -> str:
    """What the processes of this machine have in common, from its start on: `time.monotonic()` is the same to them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # The system does not tell. Then what this process has seen is of no use to others.
        return str(uuid.uuid4())
