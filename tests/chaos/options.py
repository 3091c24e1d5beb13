"""What a run of the fault test is to be."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.poison import kind_of

#: Of every 500 jobs these take longer than the lease; the second does not let go of the interpreter meanwhile.
LONG, GRIPPING = 7, 257


@dataclass(frozen=True)
class Options:
    """What a run is to be.

    Attributes
    ----------
    jobs : int
        In all. Two thirds are there by and by during the faults; the rest depends on them.
    seconds : float
        How long faults happen.
    slack : float
        What a busy machine may add to a recovery, whose promise is one lease and one heartbeat. Defaults to 4 s.
    patience : float
        How long the queue may take to be drained after the last fault.
    only : tuple of str
        The kinds of faults that are wanted. Defaults to all.
    """

    seed: int
    jobs: int = 3000
    workers: int = 16
    seconds: float = 30.0
    lease: float = 4.0
    heartbeat: float = 1.0
    slack: float = 4.0
    patience: float = 90.0
    only: tuple[str, ...] = ()

    @property
    def most(self) -> float:
        return self.lease + self.heartbeat + self.slack

    @property
    def suspension(self) -> float:
        """How long a process or the server is held up, at least: longer than a worker lives that is not heard of."""
        return self.lease + self.heartbeat + 1

    @property
    def numbers(self) -> int:
        return self.jobs * 2 // 3

    @property
    def poison(self) -> list[int]:
        """The numbers that are poison."""
        wanted = not self.only or "poison" in self.only
        return [n for n in range(self.numbers) if wanted and kind_of(n)]

    def length(self, n: int) -> float:
        """How long a job takes: mostly a few milliseconds, sometimes half a second, rarely longer than the lease."""
        if n % 500 in (LONG, GRIPPING):
            return 1.5 * self.lease
        return 0.5 if n % 10 == 3 else 0.002 + n % 7 / 1000
