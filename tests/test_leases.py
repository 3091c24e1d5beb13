"""A claim lives as long as its worker: the jobs of the dead come back, those of the living are never taken."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datajoint as dj
import psutil
import pytest
from helpers import has_ended, wait_for
from pipelines import forked, in_processes, job_counts, rows_of
from workloads.lives import (
    Gate,
    PlainUser,
    ago,
    cut,
    cut_all_but,
    forget_all_workers,
    hold_the_interpreter,
    job_of,
    kill_tree,
    kinds,
    lose,
    monitor_of,
    note_sighting,
    other_connections,
    own_number,
    populating,
    status_of,
    worker_rows,
)
from workloads.squares import (
    CallLog,
    Standing,
    another_connection,
    change_jobs,
    insert_square,
    made,
    recording,
    rows_by_number,
    statuses,
)

import djjobs
from djjobs.queue.identity import Claimant
from djjobs.queue.queue import Queue
from djjobs.queue.table_queue import TableQueue
from djjobs.work.budget import Pace
from djjobs.work.monitor import Monitor
from djjobs.work.shared_memory import SharedMemory

#: What a busy machine of two cores may add to everything that has a bound.
SLACK = 10.0


@pytest.fixture
def start(standing: Standing) -> Callable[..., Any]:
    """Square as if new, and nobody at work."""

    def start_over(*arguments: Any, **members: Any) -> Any:
        Square = standing.start_over(*arguments, **members)
        Square.schedule_jobs(min_scheduling_interval=0)
        forget_all_workers(Square)
        return Square

    return start_over


@pytest.fixture(autouse=True)
def leases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Short leases, here and in the processes to come; a test may choose others."""

    def set_both(lease: float, heartbeat: float) -> None:
        monkeypatch.setattr(djjobs.settings, "lease", lease)
        monkeypatch.setattr(djjobs.settings, "heartbeat_interval", heartbeat)

    set_both(3, 0.5)
    return set_both


def waiting_at(gate: Gate, log: CallLog, numbers: set[int]) -> Callable[..., None]:
    """A make() that waits at the gate with these numbers."""

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"], os.getpid())
        if key["n"] in numbers:
            gate.wait()
        insert_square(self, key)

    return make


def inside(log: CallLog, n: int) -> bool:
    return n in log.numbers()


# -- a worker that is killed ----------------------------------------------------------------------------------


def test_the_job_of_a_killed_populate_comes_back_at_once_and_what_it_had_not_begun_unharmed(
    start: Any, log: CallLog, gate: Gate, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is an hour; nobody has to wait for it, because the monitor beside the process sees it die."""
    leases(3600, 10)
    Square = start(8, waiting_at(gate, log, {2}), priority=7)
    change_jobs(Square, [2], "job_group='m2', run_id=42")
    # how many are claimed at once follows the time that the first job took, which is chance
    monkeypatch.setattr(Pace, "batch", 4)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 2))
        assert len(worker_rows(Square)) == 1
        claimed = {n for n, status in statuses(Square).items() if status == "reserved"}
        os.kill(child.process.pid, signal.SIGKILL)
        wait_for(lambda: set(statuses(Square).values()) == {"scheduled"}, timeout=20)
        wait_for(lambda: not worker_rows(Square))
    assert claimed == {2, 3, 4}
    rows = rows_by_number(Square)
    assert set(rows) == set(range(2, 9))
    assert {n: row["attempt"] for n, row in rows.items()} == {2: 1} | {n: 0 for n in range(3, 9)}
    row = rows[2]
    assert (row["priority"], row["job_group"], row["run_id"]) == (7, "m2", 42)
    assert (row["worker_id"], row["cancel_request"], row["progress"]) == (None, "", None)
    assert kinds(row) == ["crash"]
    assert str(child.process.pid) in row["attempts"][0]["message"]
    gate.open()
    calls = len(log.lines())
    assert Square.populate(reserve_jobs=True)["success_count"] == 7
    assert made(Square()) == list(range(1, 9))
    assert log.numbers()[calls] == 2  # before the new work


def die(child: Any) -> None:
    """The whole node goes: populate and monitor in one moment."""
    kill_tree(child.process.pid)
    child.process.join()


@pytest.fixture
def orphaned(start: Any, log: CallLog, gate: Gate) -> Any:
    """Square, whose job 1 was running on a node that has just gone; job 2 has not been begun.

    Its worker is taken for alive until somebody lets its lease of three seconds run.
    """
    Square = start(2, waiting_at(gate, log, {1}))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        die(child)
    assert status_of(Square, 1) == "reserved"
    set_lease(Square, 3600)
    gate.open()
    return Square


def set_lease(Square: Any, lease: float) -> None:
    Square.Number.connection.query(f"UPDATE {djjobs.workers(Square).full_table_name} SET lease = {lease}")


def test_the_next_populate_recovers_the_job_of_a_node_that_has_gone(orphaned: Any, log: CallLog) -> None:
    set_lease(orphaned, 3)
    started = time.monotonic()
    wait_for(lambda: orphaned.populate(reserve_jobs=True, max_calls=1)["success_count"] and inside_again(log, 1))
    assert time.monotonic() - started < 3 + 0.5 + SLACK
    orphaned.populate(reserve_jobs=True)
    assert made(orphaned()) == [1, 2]
    assert job_counts(orphaned) == {}


def inside_again(log: CallLog, n: int) -> bool:
    return log.numbers().count(n) == 2


def test_cleanup_recovers_the_job_of_a_node_that_has_gone_and_counts_it(orphaned: Any) -> None:
    assert orphaned.cleanup_jobs()["recovered"] == 0  # it may still live
    (worker,) = worker_rows(orphaned)
    set_lease(orphaned, 3)
    wait_for(lambda: orphaned.cleanup_jobs()["recovered"] == 1, timeout=3 + 0.5 + SLACK)
    assert orphaned.cleanup_jobs()["recovered"] == 0
    row = job_of(orphaned, 1)
    assert (row["status"], row["attempt"], row["worker_id"], kinds(row)) == ("scheduled", 1, None, ["crash"])
    assert row["turn"] < job_of(orphaned, 2)["turn"]
    assert (row["attempts"][0]["host"], row["attempts"][0]["pid"]) == (worker["host"], worker["pid"])
    (dead,) = worker_rows(orphaned)
    assert (dead["worker_id"], dead["state"]) == (worker["worker_id"], "dead")


def test_a_worker_that_is_busy_recovers_the_jobs_of_another_one(
    orphaned: Any, log: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its monitor does that, while make() runs."""
    busy = Gate(tmp_path / "busy")
    monkeypatch.setattr(orphaned, "make", waiting_at(busy, log, {2}))
    with populating(orphaned) as (child,):
        wait_for(lambda: inside(log, 2))
        set_lease(orphaned, 3)
        wait_for(lambda: status_of(orphaned, 1) == "scheduled", timeout=3 + 0.5 + SLACK)
        assert (status_of(orphaned, 2), job_of(orphaned, 1)["attempt"]) == ("reserved", 1)
        busy.open()
        assert child.result()["success_count"] == 2
    assert made(orphaned()) == [1, 2]


def test_only_one_of_many_recoverers_recovers_a_job(start: Any, standing: Standing) -> None:
    Square = start(12)
    lose(Square, range(1, 13))

    def recover_all(_: int) -> int:
        recovered = 0
        while job_counts(Square).get("reserved"):
            recovered += Square.cleanup_jobs()["recovered"]
        return recovered

    assert sum(in_processes(standing.schema, 4, recover_all)) == 12
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("scheduled", 1)}


def test_a_recovery_keeps_to_its_table_and_to_the_dead(start: Any) -> None:
    Square = start(4)
    lose(Square, [1])
    lose(Square, [2], lease=60)
    change_jobs(Square, [3], "status='reserved', worker_id=NULL, timestamp='2001-01-01'")  # of DataJoint's own
    before = rows_by_number(Square)
    assert Square.cleanup_jobs()["recovered"] == 1
    after = rows_by_number(Square)
    assert after[1]["status"] == "scheduled"
    assert {n: after[n] for n in (2, 3, 4)} == {n: before[n] for n in (2, 3, 4)}


def test_a_restricted_clean_up_recovers_only_what_it_was_asked_about(start: Any) -> None:
    Square = start(3)
    lose(Square, [1, 2])
    assert Square.cleanup_jobs("n = 1")["recovered"] == 1
    assert statuses(Square) == {1: "scheduled", 2: "reserved", 3: "scheduled"}


def test_a_job_that_datajoint_itself_reserved_is_never_touched(start: Any) -> None:
    """It has no worker: nobody knows whether who reserved it lives."""
    Square = start(2)
    change_jobs(Square, [1], "status='reserved', worker_id=NULL, timestamp='2001-01-01'")
    lose(Square, [2], lease=60)
    before = job_of(Square, 1)
    Square.cleanup_jobs()
    Square.populate(reserve_jobs=True)
    assert Square.cancel_jobs() == 1
    assert job_of(Square, 1) == before


def test_a_claim_whose_worker_never_registered_comes_back_after_the_lease(start: Any, leases: Any) -> None:
    leases(30, 0.5)
    Square = start(2)
    silent, seen_just_now = lose(Square, [1]), lose(Square, [2])
    forget_all_workers(Square)
    note_sighting(Square, silent, 60)
    note_sighting(Square, seen_just_now, 0)
    assert Square.cleanup_jobs()["recovered"] == 1
    assert statuses(Square) == {1: "scheduled", 2: "reserved"}


def test_a_worker_is_judged_by_its_own_lease(start: Any) -> None:
    """Whoever recovers may have another setting."""
    Square = start(3)
    lose(Square, [1], lease=600)
    lose(Square, [2], lease=1)
    assert Square.cleanup_jobs()["recovered"] == 1
    assert statuses(Square) == {1: "reserved", 2: "scheduled", 3: "scheduled"}


# -- a job that kills its worker ------------------------------------------------------------------------------


def crash(Square: Any) -> None:
    """One populate that does not survive."""
    with populating(Square) as (child,):
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGKILL
        wait_for(lambda: job_counts(Square).get("reserved", 0) == 0)


def kill_the_worker(self: Any, key: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_max_attempts_crashes_a_job_is_an_error_that_tells_of_each(start: Any) -> None:
    Square = start(1, kill_the_worker, max_attempts=2)
    crash(Square)
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("scheduled", 1)
    crash(Square)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("error", 2, ["crash", "crash"])
    assert [attempt["attempt"] for attempt in row["attempts"]] == [1, 2]
    assert len({attempt["pid"] for attempt in row["attempts"]}) == 2
    for attempt in row["attempts"]:
        assert attempt["message"].startswith("WorkerDied")
        assert attempt["host"]
        datetime.datetime.fromisoformat(attempt["time"])
    assert row["error_message"] == row["attempts"][-1]["message"]
    assert Square.populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}


def test_a_table_without_max_attempts_survives_some_crashes(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of its code stays one at once, but a node that goes is not the job's fault."""
    monkeypatch.setattr(djjobs.settings, "max_crashes", 3)
    Square = start(1)
    for crashes, status in ((1, "scheduled"), (2, "scheduled"), (3, "error")):
        lose(Square, [1])
        assert Square.cleanup_jobs()["recovered"] == 1
        assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == (status, crashes)
    assert Square.retry_jobs() == 1
    lose(Square, [1])
    Square.cleanup_jobs()
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("scheduled", 1, ["crash"] * 4)


def test_as_many_crashes_as_a_table_allows(start: Any) -> None:
    Square = start(1, max_attempts=14)
    seen = []
    for _ in range(14):
        lose(Square, [1])
        Square.cleanup_jobs()
        seen.append(status_of(Square, 1))
    assert seen == ["scheduled"] * 13 + ["error"]


def test_errors_and_crashes_together_are_no_more_than_max_attempts(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError("no square")

    Square = start(1, make, max_attempts=3, backoff=3600)
    for attempt in (1, 2):
        Square.populate(reserve_jobs=True)
        assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("scheduled", attempt)
        change_jobs(Square, [1], f"due_time={ago(Square.Number.connection, 60)}")
    lose(Square, [1])
    Square.cleanup_jobs()
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], kinds(row)) == ("error", 3, ["error", "error", "crash"])


@pytest.mark.parametrize("keep", [False, True], ids=["forget", "keep"])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_a_lost_job_whose_result_is_there_is_done(start: Any, log: CallLog, keep: bool, most: int | None) -> None:
    Square = start(2, recording(log), keep_completed=keep, max_attempts=most)
    lose(Square, [1])
    Square.populate({"n": 1})  # by DataJoint's own hand
    assert log.numbers() == [1]
    assert Square.cleanup_jobs()["recovered"] == 1
    assert status_of(Square, 1) == ("success" if keep else None)
    Square.populate(reserve_jobs=True)
    assert sorted(log.numbers()) == [1, 2]
    assert job_counts(Square) == ({"success": 2} if keep else {})


@pytest.mark.parametrize("key", ['{"n": "one"}', '{"m": 1}'])
def test_a_lost_job_whose_key_does_not_fit_is_not_done_and_keeps_no_other_from_coming_back(
    start: Any, key: str
) -> None:
    Square = start(3)
    lose(Square, [1, 2])
    Square.populate({"n": 3})
    column = Queue.of(Square.Number.connection, Square.database).engine.dialect.key
    change_jobs(Square, [1], f"{column} = '{key}'")
    assert Square.cleanup_jobs()["recovered"] == 2
    assert job_counts(Square) == {"scheduled": 3}
    assert sorted(row["attempt"] for row in rows_of(Square.jobs)) == [0, 1, 1]


# -- a worker that lives ----------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_a_job_much_longer_than_the_lease_is_never_taken_from_a_live_worker(
    start: Any, server: Any, log: CallLog, leases: Any, standing: Standing
) -> None:
    """Three workers of a user who cannot see connections, while others try all the time to recover their jobs.

    The first computes in Python, the second holds the interpreter all the time, the third loses its connection.
    """
    lease = 2.0
    length = 4 * lease
    leases(lease, 0.4)

    def make(self: Any, key: dict[str, Any]) -> None:
        first_time = key["n"] not in log.numbers()
        log.record(key["n"], os.getpid())
        if key["n"] == 2:
            hold_the_interpreter(length)
        elif key["n"] == 3 and first_time:
            cut(own_number(self.connection))
            self.connection.query("SELECT 1")
            raise AssertionError("the connection was not lost")
        else:
            time.sleep(length)
        insert_square(self, key)

    Square = start(3, make, keep_completed=True)
    recovered = []
    with PlainUser(server.settings, Square, make) as plain:
        assert plain.sees_connections() == 0

        def work(number: int) -> Any:
            if number < 3:
                plain.connection.connect()
                return plain.Square.populate({"n": number + 1}, reserve_jobs=True, schedule_jobs=False)
            return None

        plain.connection.close()
        with forked(standing.schema, 3, work) as children:
            try:
                plain.connection.connect()
                wait_for(lambda: sorted(log.numbers()) == [1, 2, 3, 3])
                while job_counts(Square).get("reserved"):
                    recovered += [Square.cleanup_jobs()["recovered"], plain.Square.cleanup_jobs()["recovered"]]
                    assert Square.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 0
                results = [child.result() for child in children]
            finally:
                for child in children:
                    kill_tree(child.process.pid)
    assert [result["success_count"] for result in results] == [1, 1, 1]
    assert sum(recovered) == 0
    assert len(recovered) > 20
    assert sorted(log.numbers()) == [1, 2, 3, 3]
    for row in rows_by_number(Square).values():
        assert (row["status"], row["attempt"]) == ("success", 0)
        assert row["run_duration"] > length


@pytest.mark.quiet
def test_a_slot_that_holds_the_interpreter_is_kept_alive_by_its_parent(
    start: Any, standing: Standing, log: CallLog, leases: Any
) -> None:
    leases(2, 0.4)

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        hold_the_interpreter(5)
        insert_square(self, key)

    Square = start(2, make, keep_completed=True)
    with populating(Square, processes=2) as (child,):
        wait_for(lambda: len(log.lines()) == 2)
        while job_counts(Square).get("reserved"):
            assert Square.cleanup_jobs()["recovered"] == 0
        assert child.result()["success_count"] == 2
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("success", 0)}


def test_a_worker_whose_connections_are_all_cut_keeps_its_job(
    start: Any, log: CallLog, gate: Gate, leases: Any
) -> None:
    """Its own, which its transaction does not survive, and its monitor's."""
    lease = 4
    leases(lease, 0.5)
    Square = start(1, waiting_at(gate, log, {1}), keep_completed=True)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        (worker,) = worker_rows(Square)
        for _ in range(2):
            assert cut_all_but(Square.Number.connection) >= 1
            heard = worker_rows(Square)[0]["last_heartbeat"]
            wait_for(lambda heard=heard: worker_rows(Square)[0]["last_heartbeat"] > heard, timeout=lease)
        deadline = time.monotonic() + 1.5 * lease
        while time.monotonic() < deadline:
            assert Square.cleanup_jobs()["recovered"] == 0
            time.sleep(0.1)
        gate.open()
        assert child.result()["success_count"] == 1
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["worker_id"]) == ("success", 0, worker["worker_id"])


def test_what_strangers_keep_locked_does_not_keep_a_worker_from_beating(
    server: Any, start: Any, log: CallLog, gate: Gate, leases: Any
) -> None:
    """One of two slots is killed, while somebody who is suspended keeps another claim of the same table locked."""
    lease = 8
    leases(lease, 0.4)
    Square = start(300, waiting_at(gate, log, {1, 2}), keep_completed=True)
    # Claims are few among many jobs, so MySQL finds them by their index.
    change_jobs(Square, range(4, 301), "status='ignore'")
    lose(Square, [3], silent_for=0, lease=1000)
    with populating(Square, processes=2) as (child,), closing(connection_to(server)) as stranger:
        wait_for(lambda: inside(log, 1) and inside(log, 2))
        with stranger.transaction:
            this = f"table_name = '{Square.table_name}' AND key_hash = '{job_of(Square, 3)['key_hash']}'"
            stranger.query(f"SELECT * FROM {Square.jobs.full_table_name} WHERE {this} FOR UPDATE").fetchall()
            os.kill(next(int(pid) for n, pid in log.lines() if n == "2"), signal.SIGKILL)
            wait_for(lambda: log.numbers().count(2) == 2)
            for _ in range(3):
                heard = heartbeat_of(Square, child.process.pid)
                wait_for(lambda heard=heard: heartbeat_of(Square, child.process.pid) > heard, timeout=lease)
            gate.open()
            assert child.result()["success_count"] == 2
        assert [row["pid"] for row in worker_rows(Square)] == [4711]
    assert [job_of(Square, n)["attempt"] for n in (1, 2, 3)] == [0, 1, 0]


def heartbeat_of(Square: Any, pid: int) -> datetime.datetime:
    return next(worker["last_heartbeat"] for worker in worker_rows(Square) if worker["pid"] == pid)


class LoneSlot:
    """A slot that claims jobs, begins none and is gone, and the monitor of its worker."""

    number = 1

    def __init__(self, Square: Any) -> None:
        self.memory = SharedMemory()
        jobs, claimant = TableQueue.of(Square()), Claimant()
        self.claims = jobs.claims(claimant=claimant.for_slot(self.number))
        self.monitor: Any = Monitor(claimant, [jobs], 1)

    def __enter__(self) -> LoneSlot:
        self.monitor.register()
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.sign_off()
        self.monitor.db.connection.close()


def test_a_claim_that_turns_up_after_its_slot_was_settled_goes_back_unharmed(start: Any, leases: Any) -> None:
    """The server was still at the commit that the slot had sent."""
    leases(60, 0.5)
    Square = start(2)
    with LoneSlot(Square) as slot:
        assert slot.monitor.settler.slot_died(slot, "it was killed.").released == 0
        assert len(slot.claims.take(2)) == 2

        def is_back() -> bool:
            slot.monitor.tick([])
            return job_counts(Square) == {"scheduled": 2}

        wait_for(is_back)
    assert [row["attempt"] for row in rows_by_number(Square).values()] == [0, 0]
    assert worker_rows(Square) == []


@pytest.mark.parametrize("reconnected", [False, True])
def test_claims_that_are_locked_when_their_slot_goes_are_given_back_when_they_are_free(
    server: Any, start: Any, reconnected: bool
) -> None:
    """The monitor does not wait for them: it has more to do."""
    Square = start(2)
    with closing(connection_to(server)) as stranger, LoneSlot(Square) as slot:
        if reconnected:
            slot.monitor.db.start_afresh()
        assert len(slot.claims.take(2)) == 2
        with stranger.transaction:
            stranger.query(f"SELECT * FROM {Square.jobs.full_table_name} FOR UPDATE").fetchall()
            slot.monitor.settler.slot_ended(slot)
            assert job_counts(Square) == {"reserved": 2}
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("scheduled", 0)}
    assert worker_rows(Square) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_that_leaves_just_after_its_connections_were_cut_signs_off(
    start: Any, log: CallLog, gate: Gate, leases: Any, processes: int
) -> None:
    """Nobody has used the monitor's connection in between: a heartbeat is far, and the jobs are short."""
    leases(60, 20)
    Square = start(2, waiting_at(gate, log, {1, 2}), keep_completed=True)
    with populating(Square, processes=processes) as (child,):
        wait_for(lambda: len(log.lines()) == processes)
        assert cut_all_but(Square.Number.connection) >= processes
        gate.open()
        assert child.result()["success_count"] == 2
    assert worker_rows(Square) == []
    assert {(row["status"], row["attempt"]) for row in rows_by_number(Square).values()} == {("success", 0)}


def pids_below(child: Any) -> list[int]:
    """The processes that a populate has started."""
    return [process.pid for process in psutil.Process(child.process.pid).children()]


def test_a_worker_whose_monitor_was_killed_keeps_its_job(start: Any, log: CallLog, gate: Gate, leases: Any) -> None:
    """The kernel may pick the monitor when memory is short; the populate lives, so its job is its own."""
    lease = 4
    leases(lease, 0.5)
    Square = start(1, waiting_at(gate, log, {1}), keep_completed=True)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        for _ in range(2):
            killed = monitor_of(child)
            killed.kill()
            wait_for(lambda killed=killed: [pid for pid in pids_below(child) if pid != killed.pid])
            assert killed.pid not in pids_below(child)
        deadline = time.monotonic() + 1.5 * lease
        while time.monotonic() < deadline:
            assert Square.cleanup_jobs()["recovered"] == 0
            time.sleep(0.1)
        gate.open()
        assert child.result()["success_count"] == 1
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("success", 0)


def connection_to(server: Any) -> Any:
    where = {name: server.settings[f"database.{name}"] for name in ("host", "port", "user", "password")}
    return dj.Connection(**where, use_tls=server.settings["database.use_tls"])


# -- a worker that sleeps ---------------------------------------------------------------------------------------


def sleeps_before(gate: Gate, log: CallLog) -> Callable[..., None]:
    """A make() that has inserted its row, with its process number as square, and waits before the commit."""

    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"], os.getpid())
        if not gate.is_open:
            gate.wait()
        self.insert1({**key, "square": os.getpid()})

    return make


@pytest.mark.parametrize("suppress", [False, True], ids=["raise errors", "suppress errors"])
def test_a_worker_that_wakes_up_after_its_job_was_given_away_gets_lease_lost(
    start: Any, log: CallLog, gate: Gate, suppress: bool
) -> None:
    Square = start(1, sleeps_before(gate, log), keep_completed=True)
    with populating(Square, suppress_errors=suppress) as (child,):
        wait_for(lambda: inside(log, 1))
        monitor = monitor_of(child)
        os.kill(child.process.pid, signal.SIGSTOP)
        gate.open()
        wait_for(lambda: Square.populate(reserve_jobs=True)["success_count"] == 1, timeout=3 + 0.5 + SLACK)
        before = job_of(Square, 1)
        assert (before["status"], before["attempt"]) == ("success", 1)
        os.kill(child.process.pid, signal.SIGCONT)
        if suppress:
            result = child.result()
            assert result["success_count"] == 0
            ((key, message),) = result["error_list"]
            assert key == {"n": 1}
            assert message.startswith("LeaseLost") and "Square" in message
        else:
            with pytest.raises(AssertionError, match=r"LeaseLost: .*\{'n': 1\}.*Square"):
                child.result()
        wait_for(lambda: has_ended(monitor))
    assert job_of(Square, 1) == before
    assert [row["square"] for row in rows_of(Square())] == [os.getpid()]


def test_a_worker_that_wakes_up_in_time_goes_on(start: Any, log: CallLog, gate: Gate, leases: Any) -> None:
    leases(30, 0.5)
    Square = start(1, sleeps_before(gate, log), keep_completed=True)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        os.kill(child.process.pid, signal.SIGSTOP)
        gate.open()
        heard = worker_rows(Square)[0]["last_heartbeat"]
        assert Square.cleanup_jobs()["recovered"] == 0
        os.kill(child.process.pid, signal.SIGCONT)
        assert child.result()["success_count"] == 1
        assert heard
    assert (status_of(Square, 1), job_of(Square, 1)["attempt"]) == ("success", 0)


def test_a_sleeper_that_was_just_committing_keeps_its_job_from_being_done_twice(
    start: Any, log: CallLog, gate: Gate, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction holds the job's row: whoever recovers does not wait for it, and does not take it."""
    leases(2, 0.4)
    commit = dj.Connection.commit_transaction

    def commit_later(connection: Any) -> None:
        log.record(-1)
        gate.wait()
        commit(connection)

    Square = start(1, recording(log), keep_completed=True)
    with monkeypatch.context() as patch:
        patch.setattr(dj.Connection, "commit_transaction", commit_later)
        context = populating(Square)
        (child,) = context.__enter__()
    try:
        wait_for(lambda: -1 in log.numbers())
        os.kill(child.process.pid, signal.SIGSTOP)
        (worker,) = worker_rows(Square)
        note_sighting(Square, worker["worker_id"], 60)
        assert Square.cleanup_jobs()["recovered"] == 0
        assert Square.populate(reserve_jobs=True)["success_count"] == 0
        gate.open()
        os.kill(child.process.pid, signal.SIGCONT)
        assert child.result()["success_count"] == 1
    finally:
        context.__exit__(None, None, None)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["worker_id"]) == ("success", 0, worker["worker_id"])


# -- ~workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_appears_beats_and_goes(start: Any, log: CallLog, gate: Gate, leases: Any, processes: int) -> None:
    leases(5, 0.3)
    Square = start(3, waiting_at(gate, log, {1, 2, 3}))
    with populating(Square, processes=processes) as (child,):
        wait_for(lambda: len(log.lines()) == processes)
        (worker,) = wait_for(lambda: worker_rows(Square))
        wait_for(lambda: worker_rows(Square)[0]["last_heartbeat"] > worker["last_heartbeat"])
        assert (worker["pid"], worker["slots"], worker["state"]) == (child.process.pid, processes, "working")
        assert worker["tables"] == [Square.table_name]
        assert (worker["lease"], worker["host"] != "", worker["user"] != "") == (5, True, True)
        assert worker_rows(Square)[0]["started"] == worker["started"]
        reserved = [row for row in rows_by_number(Square).values() if row["status"] == "reserved"]
        assert {row["worker_id"] for row in reserved} == {worker["worker_id"]}
        gate.open()
        assert child.result()["success_count"] == 3
    assert worker_rows(Square) == []


def test_short_jobs_take_one_connection_and_a_long_one_a_second(
    start: Any, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor has no use for one while the next heartbeat is far."""
    leases(180, 60)
    monkeypatch.setattr(djjobs.work.monitor_process, "LOOK_INTERVAL", 3.0)
    more: list[set[int]] = []

    def make(self: Any, key: dict[str, Any]) -> None:
        before = set(other_connections(onlooker))
        if key["n"] == 3:
            wait_for(lambda: set(other_connections(onlooker)) - before)
        else:
            time.sleep(0.6)
        more.append(set(other_connections(onlooker)) - before)
        insert_square(self, key)

    Square = start(3, make)
    with closing(another_connection()) as onlooker:
        assert Square.populate(reserve_jobs=True)["success_count"] == 3
    assert [len(new) for new in more] == [0, 0, 1]


def test_a_populate_with_nothing_to_do_is_no_worker(start: Any) -> None:
    Square = start(0)
    assert Square.populate(reserve_jobs=True)["success_count"] == 0
    assert worker_rows(Square) == []


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("lease", "heartbeat"), [(5, 5), (5, 9)])
def test_a_lease_that_is_no_longer_than_the_heartbeat_is_refused(
    start: Any, log: CallLog, monkeypatch: pytest.MonkeyPatch, lease: float, heartbeat: float, processes: int
) -> None:
    Square = start(2, recording(log))
    monkeypatch.setattr(djjobs.settings, "lease", lease)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", heartbeat)
    with pytest.raises(
        djjobs.DjJobsError, match=rf"lease \({lease} s\).*heartbeat interval \({heartbeat} s\).*DJJOBS_LEASE"
    ):
        Square.populate(reserve_jobs=True, processes=processes)
    assert (log.lines(), job_counts(Square)) == ([], {"scheduled": 2})
