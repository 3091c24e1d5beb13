"""No live worker's job is taken, whatever the server does: locks, read-only spells, stalls, clocks that jump.

And those of the dead come back all the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import datajoint as dj
import psutil
import pytest
from helpers import wait_for
from interleaving import Beside, another, queue_of, registration_of
from workloads.lives import (
    Gate,
    ago,
    forget_all_workers,
    is_postgresql,
    job_of,
    kill_tree,
    kinds,
    lose,
    note_sighting,
    populating,
    status_of,
    worker_rows,
)
from workloads.squares import CallLog, Standing, insert_square, statuses

import djjobs
from djjobs.queue.judge import Judge

LEASE, HEARTBEAT = 2.0, 0.4
#: For a busy machine of two cores.
SLACK = 10.0


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "lease", LEASE)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", HEARTBEAT)


# -- a server that somebody troubles ---------------------------------------------------------------------------------


class Trouble:
    """A server of its own with a Square, and what can happen to it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.connection = self.connect()
        self._standing = Standing(dj.Schema("djjobs_test_trouble", connection=self.connection))

    def connect(self) -> Any:
        where = {name: self._server.settings[f"database.{name}"] for name in ("host", "port", "user", "password")}
        return dj.Connection(**where, use_tls=self._server.settings["database.use_tls"])

    def start(self, count: int, log: CallLog, gate: Gate) -> Any:
        """Square over so many numbers; each make() waits at the gate."""

        def make(self: Any, key: dict[str, Any]) -> None:
            log.record(key["n"], os.getpid())
            gate.wait()
            insert_square(self, key)

        self.Square = self._standing.start_over(count, make, keep_completed=True)
        self.Square.schedule_jobs(min_scheduling_interval=0)
        forget_all_workers(self.Square)
        return self.Square

    @contextmanager
    def at_work(self, count: int, log: CallLog, gate: Gate) -> Iterator[Any]:
        """So many workers, each in a make() of its own. They judge each other."""
        with populating(self.start(count, log, gate), count, max_calls=1) as children:
            wait_for(lambda: len(log.lines()) == count)
            self.hear_all(count)
            yield children

    def hear_all(self, beats: int) -> None:
        """Wait until every worker has sent so many more heartbeats."""
        before = self.beats()
        wait_for(lambda: all(self.beats()[id_] >= count + beats for id_, count in before.items()), timeout=60)

    def beats(self) -> dict[str, int]:
        return {row["worker_id"]: row["beats"] for row in worker_rows(self.Square)}

    def jump(self, seconds: int) -> None:
        self._server.clock.jump(seconds)

    # -- faults: each lasts as long as its context

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """As by a dump: `~workers` can be read, but not written."""
        name = djjobs.workers(self.Square.Number).full_table_name
        with closing(self.connect()) as stranger:
            if is_postgresql(stranger):
                stranger.query("BEGIN")
                stranger.query(f"LOCK TABLE {name} IN SHARE MODE")
            else:
                stranger.query(f"LOCK TABLES {name} READ")
            yield
            stranger.query("COMMIT" if is_postgresql(stranger) else "UNLOCK TABLES")

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written at all."""
        with closing(self.connect()) as stranger:
            if is_postgresql(stranger):
                stranger.query("SET default_transaction_read_only = off")
                begin = ["ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"]
                end = ["ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"]
            elif "MariaDB" in stranger.query("SELECT VERSION()").fetchone()[0]:
                # an administrator may write to a MariaDB that is read-only
                begin, end = ["FLUSH TABLES WITH READ LOCK"], ["UNLOCK TABLES"]
            else:
                begin, end = ["SET GLOBAL super_read_only = 1"], ["SET GLOBAL super_read_only = 0, read_only = 0"]
            for statement in begin:
                stranger.query(statement)
            yield
            for statement in end:
                stranger.query(statement)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """The server is there and does not answer."""
        server = psutil.Process(self._server.pid)
        family = [server, *server.children(recursive=True)]
        for process in family:
            process.suspend()
        yield
        for process in reversed(family):
            process.resume()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server has crashed."""
        self._server.kill()
        yield
        self._server.start()
        self.connection.connect()


@pytest.fixture(scope="module")
def trouble(clocked_server: Any) -> Iterator[Trouble]:
    trouble = Trouble(clocked_server)
    yield trouble
    trouble.connection.close()


FAULTS = ("write_lock", "read_only", "stall", "away")


@pytest.mark.parametrize("fault", FAULTS)
def test_workers_that_judge_each_other_keep_their_jobs_when_nobody_can_write(
    trouble: Trouble, log: CallLog, gate: Gate, fault: str
) -> None:
    """For longer than a lease."""
    with trouble.at_work(2, log, gate) as children:
        workers = trouble.beats()
        with getattr(trouble, fault)():
            time.sleep(1.5 * LEASE)
        trouble.hear_all(round(1.5 * LEASE / HEARTBEAT))
        rows = [job_of(trouble.Square, n) for n in (1, 2)]
        assert {(row["status"], row["attempt"]) for row in rows} == {("reserved", 0)}
        assert {row["worker_id"] for row in rows} == workers.keys() == trouble.beats().keys()
        gate.open()
        assert [child.result()["success_count"] for child in children] == [1, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_who_comes_by_once_takes_nobody_for_dead_who_could_not_be_heard(
    trouble: Trouble, log: CallLog, gate: Gate, fault: str
) -> None:
    """It saw a worker before the trouble began, and looks again just when it ends."""
    with trouble.at_work(1, log, gate) as (child,):
        (worker,) = trouble.beats()
        visit = Visit(trouble, trouble.connect() if fault != "away" else None)
        note_sighting(trouble.Square, worker, 60)
        with getattr(trouble, fault)():
            if fault == "write_lock":
                # Nobody is heard from here on.
                note_sighting(trouble.Square, worker, 60)
            time.sleep(1.5 * LEASE)
            if fault in ("write_lock", "stall"):
                visit.start()
            if fault == "write_lock":
                # It can look meanwhile, and look again.
                time.sleep(3 * HEARTBEAT)
        if fault not in ("write_lock", "stall"):
            visit.start()
        assert visit.recovered() == 0
        gate.open()
        assert child.result()["success_count"] == 1
    assert job_of(trouble.Square, 1)["attempt"] == 0


class Visit(threading.Thread):
    """Somebody else who cleans up, over a connection that was there before, or a new one."""

    def __init__(self, trouble: Trouble, connection: Any) -> None:
        super().__init__()
        self._trouble, self._connection = trouble, connection
        self._recovered: list[int] = []

    def run(self) -> None:
        with another(self._trouble.Square, self._connection or self._trouble.connect()) as theirs:
            self._recovered.append(theirs.cleanup_jobs()["recovered"])

    def recovered(self) -> int:
        """How many jobs it has put back."""
        self.join()
        (count,) = self._recovered
        return count


@pytest.mark.parametrize("seconds", [300, -300])
def test_nobody_loses_a_job_when_the_clock_of_the_server_jumps(
    trouble: Trouble, log: CallLog, gate: Gate, seconds: int
) -> None:
    with trouble.at_work(2, log, gate) as children:
        workers = trouble.beats().keys()
        for _ in range(6):
            assert trouble.Square.cleanup_jobs()["recovered"] == 0
            trouble.jump(seconds)
            assert trouble.Square.cleanup_jobs()["recovered"] == 0
            trouble.hear_all(1)
        assert {(row["worker_id"], row["state"]) for row in worker_rows(trouble.Square)} == {
            (worker, "working") for worker in workers
        }
        assert {job_of(trouble.Square, n)["attempt"] for n in (1, 2)} == {0}
        gate.open()
        assert [child.result()["success_count"] for child in children] == [1, 1]


@pytest.mark.quiet
@pytest.mark.parametrize("seconds", [300, -300])
def test_the_dead_are_recovered_in_time_when_the_clock_of_the_server_jumps(
    trouble: Trouble, log: CallLog, gate: Gate, seconds: int
) -> None:
    with trouble.at_work(2, log, gate) as (victim, child):
        (n,) = (int(n) for n, pid in log.lines() if int(pid) == victim.process.pid)
        kill_tree(victim.process.pid)
        trouble.jump(seconds)
        died = time.monotonic()
        wait_for(lambda: status_of(trouble.Square, n) == "scheduled", timeout=LEASE + HEARTBEAT + SLACK)
        assert time.monotonic() - died > LEASE - HEARTBEAT
        assert kinds(job_of(trouble.Square, n)) == ["crash"]
        gate.open()
        assert child.result()["success_count"] == 1


def test_who_comes_by_a_lease_after_another_recovers_the_dead_also_after_a_jump_back(
    trouble: Trouble, log: CallLog, gate: Gate
) -> None:
    with trouble.at_work(1, log, gate) as (child,):
        kill_tree(child.process.pid)
        trouble.jump(-300)
        gate.open()
        first = time.monotonic()
        assert trouble.Square.cleanup_jobs()["recovered"] == 0
        wait_for(lambda: trouble.Square.cleanup_jobs()["recovered"] == 1, timeout=LEASE + HEARTBEAT + SLACK)
        assert time.monotonic() - first >= LEASE
        assert trouble.Square.populate(reserve_jobs=True)["success_count"] == 1


# -- how it is judged --------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(start: Any) -> Callable[..., Any]:
    """Gives Square with so many scheduled jobs, where nobody is at work."""

    def start_over(count: int = 2, **members: Any) -> Any:
        Square = start(count, **members)
        Square.schedule_jobs(min_scheduling_interval=0)
        forget_all_workers(Square)
        return Square

    return start_over


def judge_of(Square: Any) -> Judge:
    return Judge(queue_of(Square), [Square.table_name])


def look(judge: Judge) -> set[str]:
    """A heartbeat of the judge gets through, and it looks around."""
    judge.heard()
    return set(judge.find_dead())


@pytest.mark.parametrize("has_row", [True, False])
def test_a_judge_watches_for_a_whole_lease_of_the_worker(waiting: Any, has_row: bool) -> None:
    """However long ago the worker was heard by the clock of the server."""
    Square = waiting()
    dead = lose(Square, [1], silent_for=3600, lease=LEASE)
    if not has_row:
        forget_all_workers(Square)
    judge, began = judge_of(Square), time.monotonic()
    assert look(judge) == set()
    wait_for(lambda: look(judge) == {dead})
    assert time.monotonic() - began >= LEASE


def test_a_judge_whose_own_heartbeats_did_not_get_through_begins_anew(waiting: Any) -> None:
    """A worker with a short lease is as safe from a judge with a long one."""
    Square = waiting()
    worker = lose(Square, [1], lease=1)
    judge = judge_of(Square)
    look(judge)
    time.sleep(1.2)
    gap_ended = time.monotonic()
    assert look(judge) == set()
    wait_for(lambda: look(judge) == {worker})
    assert time.monotonic() - gap_ended >= 1


def test_a_judge_is_called_in_time_for_the_shortest_lease_and_when_a_lease_is_over(waiting: Any) -> None:
    Square = waiting()
    judge = judge_of(Square)
    lose(Square, [1], lease=0.8)
    now = time.monotonic()
    look(judge)
    assert now < judge.due() <= time.monotonic() + 0.2
    wait_for(lambda: look(judge))
    assert judge.due() > now + 3600, "the dead are looked at with every heartbeat anyway"


def test_a_worker_whose_row_is_locked_cannot_be_heard_and_is_not_judged(waiting: Any) -> None:
    Square = waiting()
    worker = lose(Square, [1], lease=1)
    with another(Square) as theirs:
        connection, rows = theirs.Number.connection, djjobs.workers(Square.Number).full_table_name
        judge = judge_of(Square)
        with connection.transaction:
            connection.query(f"SELECT * FROM {rows} WHERE worker_id = '{worker}' FOR UPDATE").fetchall()
            assert Square.cleanup_jobs()["recovered"] == 0
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                assert look(judge) == set()
        unlocked = time.monotonic()
        wait_for(lambda: look(judge) == {worker})
        assert time.monotonic() - unlocked >= 0.5, "it had the time to be heard"
    assert Square.cleanup_jobs()["recovered"] == 1


def test_who_comes_by_first_leaves_a_mark_whatever_the_clock_says(waiting: Any) -> None:
    Square = waiting()
    worker = lose(Square, [1], silent_for=3600)
    note_sighting(Square, worker, 0)
    assert Square.cleanup_jobs()["recovered"] == 0
    assert Square.populate("n = 2", reserve_jobs=True)["success_count"] == 1
    assert statuses(Square) == {1: "reserved"}
    wait_for(lambda: Square.cleanup_jobs()["recovered"] == 1)


def test_a_worker_that_is_heard_while_somebody_waits_for_it_keeps_its_job(waiting: Any) -> None:
    Square = waiting()
    worker, gone = lose(Square, [1], lease=1), lose(Square, [2], lease=1)
    with another(Square) as theirs:
        beat = registration_of(theirs, worker).beat
        queue, tables = queue_of(Square), [Square.table_name]
        dead = djjobs.queue.judge.find_dead_at_once(queue, tables, sleep=lambda _: beat())
    assert set(dead) == {gone}


def test_marks_of_another_machine_say_nothing_about_the_time_here(
    waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Square = waiting()
    lose(Square, [1])
    monkeypatch.setattr("djjobs.queue.judge.this_boot", lambda: "f" * 36)
    assert Square.cleanup_jobs()["recovered"] == 0
    wait_for(lambda: Square.cleanup_jobs()["recovered"] == 1)


@pytest.mark.parametrize("what", ["row", "table"])
def test_a_heartbeat_that_had_to_wait_has_the_time_at_which_it_was_written(waiting: Any, what: str) -> None:
    Square = waiting()
    worker = lose(Square, [1], lease=600)
    rows = djjobs.workers(Square.Number).full_table_name
    with another(Square) as theirs, another(Square) as onlooker:
        holder = Square.Number.connection
        pg = is_postgresql(holder)
        if what == "row":
            take = ["BEGIN", f"SELECT * FROM {rows} WHERE worker_id = '{worker}' FOR UPDATE"]
        else:
            take = ["BEGIN", f"LOCK TABLE {rows}"] if pg else [f"LOCK TABLES {rows} WRITE"]
        for statement in take:
            holder.query(statement)
        with Beside(theirs.Number.connection, registration_of(theirs, worker).beat) as waiter:
            waiter.start_and_wait()
            assert waiter.had_to_wait
            time.sleep(0.3)
            (before,) = onlooker.Number.connection.query(f"SELECT {ago(holder, 0)}").fetchone()
            holder.query("UNLOCK TABLES" if what == "table" and not pg else "COMMIT")
            waiter.result()
    (row,) = worker_rows(Square)
    assert (row["last_heartbeat"] >= before, row["beats"]) == (True, 1)
