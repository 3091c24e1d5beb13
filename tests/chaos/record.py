"""What was done to whom, for the verdict."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from chaos.plan import OUTAGES

#: So long after the server is up again, processes may still end that had given up on it: they are many, and cores few.
AFTERMATH = 4.0


@dataclass
class Hit:
    """A fault that may cost the jobs of this process an attempt, from `when` on."""

    pid: int
    kind: str
    when: float
    #: As long as this, whatever the process claims may be taken from it.
    until: float = 0.0
    #: When it was woken up: what it claims before it is heard of again may be taken from it, too.
    woken: float = 0.0


@dataclass
class Spell:
    """A time in which the server was away, or did not do what it should. Nobody can be recovered meanwhile."""

    kind: str
    since: float
    until: float = math.inf

    @property
    def is_outage(self) -> bool:
        return self.kind in OUTAGES


@dataclass
class Record:
    """What was done to whom, by the clock of this machine, which does not jump."""

    hits: list[Hit] = field(default_factory=list)
    #: The processes that are gone: those that were killed, and those that left in good order.
    dead: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    spells: list[Spell] = field(default_factory=list)
    cuts: list[float] = field(default_factory=list)
    #: When this process itself got no time for a while: others may not have been heard of either, and nobody is judged.
    stalls: list[float] = field(default_factory=list)
    #: From when on the server's clock was so many seconds ahead of ours.
    offsets: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    done: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    #: What happened, line by line, for whoever wants to know why.
    story: list[str] = field(default_factory=list)

    # -- what happens ------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        now = time.time()
        self.story.append(f"{time.strftime('%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03} {text}")

    def hit(self, pids: list[int], kind: str, deadly: bool = True) -> list[Hit]:
        now = time.time()
        self.tell(f"{kind}: {pids}")
        hits = [Hit(pid, kind, now) for pid in pids]
        self.hits += hits
        if deadly:
            self.dead.update(dict.fromkeys(set(pids) - set(self.dead), now))
        return hits

    def begin(self, kind: str) -> Spell:
        """From now on this happens to the server."""
        spell = Spell(kind, time.time())
        self.spells.append(spell)
        self.tell(kind)
        return spell

    def end(self, spell: Spell) -> None:
        spell.until = time.time()
        self.tell(f"{spell.kind}: over")

    def note_cut(self, count: int) -> None:
        self.cuts.append(time.time())
        self.tell(f"cut {count} connections")

    def clock_jumped(self, offset: float) -> None:
        """The server's clock is so many seconds ahead of ours from now on."""
        self.offsets.append((time.time(), offset))
        self.tell(f"the server's clock is {offset:+g} s off" if offset else "the server's clock is right again")

    def complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)
            self.tell(f"WRONG: {text.splitlines()[0]}")

    # -- what is asked about it ----------------------------------------------------------------------------------

    @property
    def in_spell(self) -> bool:
        """Whether the server is not to be asked anything now."""
        return any(spell.until == math.inf for spell in self.spells)

    @property
    def clock_is_off(self) -> bool:
        return self.offsets[-1][1] != 0

    def since(self, when: float, until: float) -> float:
        """From when on something could be done about what happened `when`: not before all were heard of again."""
        over = [min(spell.until, until) for spell in self.spells if spell.since <= until]
        return max([when, *over, *(stall for stall in self.stalls if stall <= until)])

    def spell_between(self, since: float, until: float) -> Spell | None:
        """What happened to the server in a part of this time, or a moment before."""
        met = [spell for spell in self.spells if spell.since <= until and since <= spell.until + AFTERMATH]
        return met[-1] if met else None

    def moments(self, server_time: float) -> list[float]:
        """When the server's clock showed this time: more than once, if it was set back."""
        ends = [*(since for since, _ in self.offsets[1:]), math.inf]
        moments = [(server_time - offset, since, end) for (since, offset), end in zip(self.offsets, ends, strict=True)]
        # The server gives whole seconds.
        return [moment for moment, since, end in moments if since - 1 <= moment <= end] or [server_time]
