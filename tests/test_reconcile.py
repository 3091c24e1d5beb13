"""What the table says a worker has, and what its slots hold; and monitors that are killed when nobody can help them."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
from helpers import has_ended, wait_for
from interleaving import job_locked
from pipelines import rows_of
from plans import plan
from workloads.lives import job_of, kill_tree, populating, stuck_in_c, worker_rows
from workloads.squares import CallLog, insert_square, made, rows_by_number

import djjobs
from djjobs.queue.identity import Claimant
from djjobs.queue.table_queue import TableQueue
from djjobs.work.monitor import Monitor
from djjobs.work.shared_memory import SharedMemory


class LoneSlot:
    """A slot that claims jobs, and the monitor of its worker."""

    def __init__(self, table: Any, number: int = 1) -> None:
        self.number, self.memory = number, SharedMemory()
        self._jobs, claimant = TableQueue.of(table()), Claimant()
        self.claimant = claimant.for_slot(number)
        self.claims = self._jobs.claims(claimant=self.claimant)
        self.monitor = Monitor(claimant, [self._jobs], 1)
        self.asked: list[Any] = []

    def ask(self, request: Any) -> None:
        self.asked.append(request)

    def kill(self) -> None:
        """It is this process."""

    def measure(self) -> None:
        """Nobody wants to know."""

    def __enter__(self) -> LoneSlot:
        self.monitor.register()
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.sign_off()
        self.monitor.db.connection.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.05)
    monkeypatch.setattr(djjobs.settings, "lease", 60.0)


def statuses(table: Any) -> list[str]:
    return [row["status"] for _, row in sorted(rows_by_number(table).items())]


def beats(slot: LoneSlot, times: int = 3) -> None:
    """Let so many heartbeats pass."""
    for _ in range(times):
        heard = worker_rows_time(slot)
        wait_for(lambda heard=heard: slot.monitor.tick([slot]) or worker_rows_time(slot) != heard)


def worker_rows_time(slot: LoneSlot) -> Any:
    queue = slot._jobs.queue
    rows = rows_of(queue.workers & {"worker_id": slot.claimant.worker_id})
    return rows[0]["last_heartbeat"]


def test_a_claim_that_a_living_slot_has_forgotten_goes_back_at_the_next_heartbeat(start: Any, quick: None) -> None:
    Square = start(3)
    TableQueue.of(Square()).schedule()
    with LoneSlot(Square) as slot:
        assert len(slot.claims.take(1)) == 1
        # It goes on with the next claim, though it has not ended the first.
        slot.memory.write_holding(slot.claimant.upcoming)
        assert len(slot.claims.take(1)) == 1
        beats(slot)
        assert statuses(Square) == ["scheduled", "reserved", "scheduled"]
    assert [row["attempt"] for row in rows_by_number(Square).values()] == [0, 0, 0]
    assert statuses(Square) == ["scheduled"] * 3, "a worker that ends leaves nothing behind"


def test_what_a_slot_holds_is_left_to_it(start: Any, quick: None) -> None:
    Square = start(2)
    TableQueue.of(Square()).schedule()
    with LoneSlot(Square) as slot:
        slot.memory.write_holding(slot.claimant.upcoming)
        assert len(slot.claims.take(2)) == 2
        beats(slot)
        assert statuses(Square) == ["reserved"] * 2


def test_what_a_slot_has_left_that_ended_by_itself_goes_back(start: Any, quick: None) -> None:
    Square = start(2)
    TableQueue.of(Square()).schedule()
    with LoneSlot(Square) as slot:
        assert len(slot.claims.take(2)) == 2
        slot.monitor.settler.slot_finished(slot)
        wait_for(lambda: slot.monitor.tick([]) or statuses(Square) == ["scheduled"] * 2)


def test_the_comparison_reads_the_reserved_jobs_only(start: Any, engine: str) -> None:
    Square = start(2000)
    jobs = TableQueue.of(Square())
    jobs.schedule()
    connection = Square.Number.connection
    if engine == "postgresql":
        connection.query(f"ANALYZE {jobs.queue.jobs.full_table_name}")
    parameters = {"tables": (Square.table_name,), "worker": "nobody"}
    steps = plan(connection, engine, jobs.queue.sql(jobs.queue.engine.workers.own_claims), parameters)
    if engine == "postgresql":
        assert not [step for step in steps if step["Node Type"] == "Seq Scan"]
        assert "status" in str([step.get("Index Cond") for step in steps])
    else:
        assert [(step["key"], step["ref"]) for step in steps] == [("claim_in_order", "const,const")]


def test_a_populate_does_not_return_before_the_job_of_a_dead_slot_is_settled(start: Any, log: CallLog) -> None:
    """Its row is locked when the slot dies. All other slots find nothing meanwhile, and end."""

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        if key["n"] == 1 and len(log.lines()) <= 2:
            time.sleep(60)
        insert_square(self, key)

    def successor_has_come_and_gone() -> bool:
        there = {slot.pid for slot in populate.children()}
        seen.update(there)
        return bool(seen - before) and not there

    Square, seen = start(2, make), set[int]()
    with populating(Square, processes=2) as (child,):
        populate = psutil.Process(child.process.pid)
        wait_for(lambda: made(Square) == [2] and len(log.lines()) == 2)
        before = {slot.pid for slot in populate.children()}
        with job_locked(Square, 1):
            psutil.Process(job_of(Square, 1)["pid"]).kill()
            wait_for(successor_has_come_and_gone, every=0.005)
        assert child.result()["success_count"] == 2
    assert made(Square) == [1, 2]


# -- the monitor is killed while nobody can help ----------------------------------------------------------------


@pytest.mark.parametrize("victim", ["monitor", "guard"])
def test_the_lease_is_kept_if_the_monitor_is_killed_while_make_holds_the_interpreter(
    start: Any, log: CallLog, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """No thread of the process can start another one then."""

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        stuck_in_c(8)
        insert_square(self, key)

    lease = 2.0
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.3)
    monkeypatch.setattr(djjobs.settings, "lease", lease)
    Square = start(1, make)
    with populating(Square) as (child,):
        wait_for(lambda: log.lines())
        guard, monitor = wait_for(lambda: pair_below(child))
        (monitor if victim == "monitor" else guard).kill()
        deadline = time.monotonic() + 2 * lease
        while time.monotonic() < deadline:
            heard = worker_rows(Square)[0]["last_heartbeat"]
            wait_for(lambda heard=heard: worker_rows(Square)[0]["last_heartbeat"] > heard, timeout=lease)
            assert job_of(Square, 1)["status"] == "reserved"
        assert child.result()["success_count"] == 1
        wait_for(lambda: has_ended(monitor) and has_ended(guard))
    assert made(Square) == [1]
    assert worker_rows(Square) == []


def pair_below(child: Any) -> tuple[psutil.Process, psutil.Process] | None:
    """The guard of a populate and its monitor, when both are there."""
    found = psutil.Process(child.process.pid).children(recursive=True)
    return (found[0], found[1]) if len(found) == 2 else None


def test_a_populate_that_is_killed_leaves_no_monitor_behind(
    start: Any, log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        time.sleep(60)

    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.3)
    Square = start(1, make)
    with populating(Square) as (child,):
        wait_for(lambda: log.lines())
        pair = wait_for(lambda: pair_below(child))
        try:
            child.process.kill()
            wait_for(lambda: all(has_ended(process) for process in pair))
        finally:
            for process in pair:
                kill_tree(process.pid)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"]) == ("scheduled", 1)
