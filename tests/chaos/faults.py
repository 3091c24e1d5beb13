"""What happens to the workers: a plan that a seed makes, and the doing of it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.server import Bystander
from chaos.workers import Worker, WorkerPool

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
#: So long after the server is up again, processes may still end that had given up on it: they are many, and cores few.
AFTERMATH = 4.0
#: From so many seconds on a run is a long one.
LONG_RUN = 60.0


@dataclass(frozen=True)
class Fault:
    """Something that happens `at` so many seconds; the numbers between 0 and 1 say to whom, and how much of it."""

    at: float
    kind: str
    whom: float = 0.0
    how: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:6.2f} s  {self.kind} ({self.whom:.3f}, {self.how:.3f})"


def plan(seed: int, seconds: float) -> list[Fault]:
    """The faults of a run: each kind once and more often as its weight says, and in between the server goes away.

    In a short run it does so once; in a long one it is both restarted in good order and crashed.
    """
    chance = random.Random(seed)
    more = max(0, round(seconds * RATE) - len(WEIGHTS))
    wanted = [*WEIGHTS, *chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=more)]
    faults = [Fault(chance.uniform(0, seconds), kind, chance.random(), chance.random()) for kind in wanted]
    outages = ["restart server", "crash server"]
    chance.shuffle(outages)
    shares = (0.3, 0.65) if seconds >= LONG_RUN else (0.45,)
    for kind, share in zip(outages, shares, strict=False):
        faults.append(Fault(seconds * (share + chance.uniform(0, 0.1)), kind, chance.random(), chance.random()))
    return sorted(faults, key=lambda fault: fault.at)


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
class Record:
    """What was done to whom, by the clock that the server has too."""

    hits: list[Hit] = field(default_factory=list)
    #: The processes that are gone: those that were killed, and those that left in good order.
    dead: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    outages: list[tuple[float, float]] = field(default_factory=list)
    cuts: list[float] = field(default_factory=list)
    #: When this process itself got no time for a while: others may not have been heard of either, and nobody is judged.
    stalls: list[float] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    #: What happened, line by line, for whoever wants to know why.
    story: list[str] = field(default_factory=list)

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

    def since(self, when: float, until: float) -> float:
        """From when on something could be done about what happened `when`: not before all were heard of again."""
        return max([when, *(over for over in (*(up for _, up in self.outages), *self.stalls) if over <= until)])

    def in_outage(self, since: float, until: float) -> bool:
        """Whether the server was away for a part of this time, or a moment before."""
        return any(down <= until and since <= up + AFTERMATH for down, up in self.outages)

    def complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)
            self.tell(f"WRONG: {text.splitlines()[0]}")


class Mayhem:
    """Does what the plan says.

    Parameters
    ----------
    suspension : float
        How long a process is suspended, at least; longer than the lease.
    """

    def __init__(self, server: Any, bystander: Bystander, pool: WorkerPool, record: Record, suspension: float) -> None:
        self._server, self._bystander, self._pool, self._record = server, bystander, pool, record
        self._suspension = suspension
        self._later: list[tuple[float, Callable[[], None]]] = []

    def do(self, fault: Fault) -> None:
        """Let a fault happen; it falls through if there is nobody it could happen to."""
        act = {
            "kill worker": self._kill_worker,
            "kill worker and children": self._kill_all_of_worker,
            "kill slot": self._kill_slot,
            "kill monitor": self._kill_monitor,
            "suspend worker": self._suspend_worker,
            "suspend worker and children": self._suspend_all_of_worker,
            "suspend slot": self._suspend_slot,
            "terminate": self._terminate,
            "terminate, then kill": self._preempt,
            "cut connections": self._cut_some,
            "cut all connections": self._cut_all,
            "restart server": self._restart_server,
            "crash server": self._crash_server,
        }[fault.kind]
        if act(fault):
            self._record.done[fault.kind] = self._record.done.get(fault.kind, 0) + 1

    def go_on(self) -> None:
        """Do what was put off and is due."""
        due = [action for when, action in self._later if when <= time.time()]
        self._later = [(when, action) for when, action in self._later if when > time.time()]
        for action in due:
            action()

    @property
    def is_over(self) -> bool:
        return not self._later

    # -- to whom ---------------------------------------------------------------------------------------

    def _worker(self, whom: float, kind: str = "") -> Worker | None:
        fit = [
            worker
            for _, worker in sorted(self._pool.workers.items())
            if worker.state == "up" and worker.kind in (kind or worker.kind) and worker.is_ready()
        ]
        return fit[int(whom * len(fit))] if fit else None

    def _child(self, fault: Fault, kind: str) -> tuple[Worker, int] | None:
        worker = self._worker(fault.whom, kind)
        children = worker.children() if worker else []
        return (worker, children[int(fault.how * len(children))]) if worker and children else None

    @staticmethod
    def _family(worker: Worker) -> list[int]:
        """The worker and its children; held still, so that no child is overlooked."""
        worker.signal(signal.SIGSTOP)
        return [worker.pid, *worker.children()]

    # -- killed ------------------------------------------------------------------------------------------

    def _kill_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        family = self._family(worker)
        worker.state = "killed"
        worker.signal(signal.SIGKILL)
        self._record.hit(family, fault.kind)
        return True

    def _kill_all_of_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        self._kill_family(worker, fault.kind)
        return True

    def _kill_family(self, worker: Worker, kind: str) -> None:
        family = self._family(worker)
        worker.state = "killed"
        worker.signal(signal.SIGKILL, family)
        self._record.hit(family, kind)

    def _kill_slot(self, fault: Fault) -> bool:
        found = self._child(fault, "worker")
        if found is None:
            return False
        worker, slot = found
        worker.signal(signal.SIGKILL, [slot])
        self._record.hit([slot], fault.kind)
        return True

    def _kill_monitor(self, fault: Fault) -> bool:
        """The script itself is alive, and must get another; a make() that grips the interpreter may delay that."""
        found = self._child(fault, "script")
        if found is None:
            return False
        worker, monitor = found
        worker.signal(signal.SIGKILL, [monitor])
        for hit in self._record.hit([worker.pid], f"{fault.kind} {monitor}", deadly=False):
            hit.until = hit.when + 2 * self._suspension
        return True

    # -- suspended ---------------------------------------------------------------------------------------

    def _suspend_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        hits = self._record.hit(self._family(worker), fault.kind, deadly=False)
        # Slots go on meanwhile in the name of a worker that counts as dead.
        self._suspend(worker, [worker.pid], fault.how, hits, goes_on=worker.kind == "worker")
        return True

    def _suspend_all_of_worker(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        family = self._family(worker)
        worker.signal(signal.SIGSTOP, family)
        self._suspend(worker, family, fault.how, self._record.hit(family, fault.kind, deadly=False))
        return True

    def _suspend_slot(self, fault: Fault) -> bool:
        """Its supervisor is alive, and answers for it: no hit."""
        found = self._child(fault, "worker")
        if found is None:
            return False
        worker, slot = found
        self._record.tell(f"{fault.kind}: {slot}")
        worker.signal(signal.SIGSTOP, [slot])
        self._suspend(worker, [slot], fault.how, [])
        return True

    def _suspend(self, worker: Worker, pids: list[int], how: float, hits: list[Hit], goes_on: bool = False) -> None:
        worker.state = "stopped"

        def wake() -> None:
            self._record.tell(f"wake: {pids}")
            worker.signal(signal.SIGCONT, pids)
            for hit in hits:
                hit.woken = time.time()
                hit.until = hit.woken if goes_on else 0.0
            if worker.state == "stopped":
                worker.state = "up"

        self._later.append((time.time() + self._suspension * (1 + how / 2), wake))

    # -- asked to go ---------------------------------------------------------------------------------------

    def _terminate(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        self.ask_to_leave(worker)
        return True

    def ask_to_leave(self, worker: Worker) -> None:
        self._record.tell(f"terminate: {worker.pid}")
        worker.state, worker.told_to_leave = "leaving", time.time()
        worker.signal(signal.SIGTERM)

    def _preempt(self, fault: Fault) -> bool:
        worker = self._worker(fault.whom)
        if worker is None:
            return False
        self.ask_to_leave(worker)

        def kill() -> None:
            if self._pool.workers.get(worker.place) is worker:
                self._kill_family(worker, fault.kind)

        self._later.append((time.time() + fault.how * 0.5, kill))
        return True

    # -- the server ------------------------------------------------------------------------------------------

    def _cut_some(self, fault: Fault) -> bool:
        connections = self._bystander.connections()
        chosen = random.Random(fault.whom).sample(connections, min(len(connections), 1 + int(4 * fault.how)))
        self._record.tell(f"cut {len(chosen)} connections")
        self._record.cuts.append(time.time())
        self._bystander.cut(chosen)
        return bool(chosen)

    def _cut_all(self, _: Fault) -> bool:
        self._record.tell("cut all connections")
        self._record.cuts.append(time.time())
        self._bystander.cut(self._bystander.connections())
        return True

    def _restart_server(self, _: Fault) -> bool:
        down = time.time()
        self._record.tell("restart server")
        self._server.restart()
        self._is_up(down)
        return True

    def _is_up(self, down: float) -> None:
        self._record.outages.append((down, time.time()))
        self._record.tell("the server is up again")

    def _crash_server(self, fault: Fault) -> bool:
        """Somebody dies while the server is down."""
        down = time.time()
        self._record.tell("crash server")
        self._server.kill()
        self._kill_all_of_worker(fault)
        self._server.start()
        self._is_up(down)
        return True
