"""The plan of a run: which faults happen, and when. A seed makes it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: How often each fault occurs, in proportion.
WEIGHTS = {
    "kill worker": 6,
    "kill worker and children": 4,
    "kill slot": 8,
    "kill monitor": 2,
    "suspend worker": 4,
    "suspend worker and children": 4,
    "suspend slot": 2,
    "terminate": 7,
    "terminate, then kill": 3,
    "cut connections": 10,
    "cut all connections": 1,
}
#: Faults in a second.
RATE = 1.25
#: What happens to the server as a whole: it goes away, or it lives and does not do what it should.
OUTAGES = ("restart server", "crash server")
SPELLS = ("read-only spell", "lock tables", "stall server", "limit connections")
#: Its clock is set forward or back for a while, and everything else goes on meanwhile.
JUMPS = ("clock forward", "clock back")
#: From so many seconds on a run is a long one.
LONG_RUN = 60.0

#: All kinds. Poison is in the queue, and happens to who takes it.
KINDS = (*WEIGHTS, *OUTAGES, *SPELLS, *JUMPS, "poison")
#: These need a server that answers, or one that nothing else happens to. They wait until a spell is over.
NEED_THE_SERVER = {*OUTAGES, *SPELLS, *JUMPS, "cut connections", "cut all connections"}


@dataclass(frozen=True)
class Fault:
    """Something that happens `at` so many seconds; the numbers between 0 and 1 say to whom, and how much of it."""

    at: float
    kind: str
    whom: float = 0.0
    how: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:6.2f} s  {self.kind} ({self.whom:.3f}, {self.how:.3f})"


def plan(seed: int, seconds: float, only: Sequence[str] = ()) -> list[Fault]:
    """The faults of a run: each kind once and more often as its weight says, and meanwhile the server has its own.

    In a long run everything happens to the server, one thing after the other; in a short run one outage, one spell and
    one jump of its clock.

    Parameters
    ----------
    only
        The kinds that are wanted; the others are left out. Defaults to all.
    """
    chance = random.Random(seed)
    more = max(0, round(seconds * RATE) - len(WEIGHTS))
    wanted = [*WEIGHTS, *chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=more)]
    moments = [(chance.uniform(0, seconds), kind) for kind in wanted]
    is_long = seconds >= LONG_RUN or bool(only)
    for kinds in (_of_server(chance, is_long), _of_clock(chance, is_long)):
        moments += _spread([kind for kind in kinds if not only or kind in only], seconds, chance)
    faults = [Fault(at, kind, chance.random(), chance.random()) for at, kind in moments]
    return sorted((fault for fault in faults if not only or fault.kind in only), key=lambda fault: fault.at)


def _of_server(chance: random.Random, is_long: bool) -> list[str]:
    kinds = [*OUTAGES, *SPELLS] if is_long else [chance.choice(OUTAGES), chance.choice(SPELLS)]
    chance.shuffle(kinds)
    return kinds


def _of_clock(chance: random.Random, is_long: bool) -> list[str]:
    jumps = list(JUMPS)
    chance.shuffle(jumps)
    return jumps if is_long else jumps[:1]


def _spread(kinds: list[str], seconds: float, chance: random.Random) -> list[tuple[float, str]]:
    """Each at the beginning of a part of the time, so that it is over when the next one comes."""
    part = seconds / max(1, len(kinds))
    return [(part * (number + chance.uniform(0.1, 0.25)), kind) for number, kind in enumerate(kinds)]
