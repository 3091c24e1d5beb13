"""The doing of faults: what happens to the workers and to their server."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

from chaos.plan import JUMPS, NEED_THE_SERVER, SPELLS, Fault
from chaos.record import Hit, Record
from chaos.server import Bystander
from chaos.spells import Spells
from chaos.workers import Worker, WorkerPool

#: By how many seconds the server's clock jumps.
JUMP = 300


class Mayhem:
    """Does what the plan says.

    Parameters
    ----------
    suspension : float
        How long a process is suspended, at least; longer than the lease.
    """

    def __init__(
        self,
        server: Any,
        bystander: Bystander,
        pool: WorkerPool,
        record: Record,
        spells: Spells,
        suspension: float,
    ) -> None:
        self._server, self._bystander, self._pool, self._record = server, bystander, pool, record
        self._spells, self._suspension = spells, suspension
        self._later: list[tuple[float, Callable[[], None]]] = []

    def can(self, fault: Fault) -> bool:
        """Whether a fault may happen now: only one thing at a time happens to the server."""
        if fault.kind == "lock tables" and self._record.clock_is_off:
            return False
        return not (self._record.in_spell and fault.kind in NEED_THE_SERVER)

    def do(self, fault: Fault) -> None:
        """Let a fault happen; it falls through if there is nobody it could happen to."""
        if fault.kind in SPELLS:
            self._spells.begin(fault.kind, fault.whom, fault.how)
            return
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
            **dict.fromkeys(JUMPS, self._set_clock),
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
        return not self._later and not self._record.in_spell

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
        self._record.hit(sorted({*family, *worker.all_children}), fault.kind)
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
        # A slot that ended before may have left a claim that its worker had still to settle.
        self._record.hit(sorted({*family, *worker.all_children}), kind)

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
        # A populate with slots has no monitor of that kind; then it is a slot that dies.
        for hit in self._record.hit([worker.pid, monitor], fault.kind, deadly=False):
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
        self._record.note_cut(len(chosen))
        self._bystander.cut(chosen)
        return bool(chosen)

    def _cut_all(self, _: Fault) -> bool:
        connections = self._bystander.connections()
        self._record.note_cut(len(connections))
        self._bystander.cut(connections)
        return True

    def _restart_server(self, fault: Fault) -> bool:
        spell = self._record.begin(fault.kind)
        self._server.restart()
        self._record.end(spell)
        return True

    def _crash_server(self, fault: Fault) -> bool:
        """Somebody dies while the server is down."""
        spell = self._record.begin(fault.kind)
        self._server.kill()
        self._kill_all_of_worker(fault)
        self._server.start()
        self._record.end(spell)
        return True

    def _set_clock(self, fault: Fault) -> bool:
        """It is right again after a while, in which almost anything else may happen, too.

        PostgreSQL measures its own waiting for locks by this clock. If it is set back meanwhile, neither `lock_timeout`
        nor the search for deadlocks comes in time, so tables are locked only while the clock stays as it is.
        """
        if not hasattr(self._server, "clock") or self._record.clock_is_off:
            return False
        seconds = JUMP if fault.kind == "clock forward" else -JUMP
        self._jump(seconds)
        self._later.append((time.time() + self._suspension * (1 + fault.how), lambda: self._jump(-seconds)))
        return True

    def _jump(self, seconds: int) -> None:
        self._server.clock.jump(seconds)
        self._record.clock_jumped(self._server.clock.offset)
