"""However a slot ends, its claims are settled, and what make() has started ends with it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import has_ended, wait_for
from pipelines import job_counts
from test_worker import Lab, Worker, lab, policy, standing, working  # noqa: F401 - lab and standing are fixtures
from workloads.lives import kinds
from workloads.squares import (
    Standing,
    another_connection,
    insert_square,
    made,
    rows_by_number,
    standing_schema,
    statuses,
)

import djjobs
from djjobs.work import execute

#: A worker that is told at once, and takes nobody for dead meanwhile.
PATIENT = {"DJJOBS_LEASE": "60", "DJJOBS_HEARTBEAT_INTERVAL": "0.5", "DJJOBS_GRACE": "2"}


@pytest.fixture(scope="module")
def squares_standing(server: Any) -> Iterator[Standing]:
    with standing_schema() as squares:
        yield squares


@pytest.fixture
def start(squares_standing: Standing) -> Callable[..., Any]:
    return squares_standing.start_over


# -- claims that cannot be settled in the usual way ---------------------------------------------------------------


def fail_at(n: int, before: Callable[[Any], None] = lambda _table: None) -> Callable[..., None]:
    """A make() that fails for one number, after this was done."""

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == n:
            before(self)
            raise ValueError(f"no {n}")
        insert_square(self, key)

    return make


@contextmanager
def statements_time_out(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New connections do not wait long for what others have locked."""
    admin = another_connection()
    if engine == "postgresql":
        monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=300")
        yield
    else:
        (before,) = admin.query("SELECT @@GLOBAL.innodb_lock_wait_timeout").fetchone()
        admin.query("SET GLOBAL innodb_lock_wait_timeout = 1")
        try:
            yield
        finally:
            admin.query(f"SET GLOBAL innodb_lock_wait_timeout = {before}")
    admin.close()


class LockedRow:
    """Somebody who keeps the rows of running jobs locked for a while, once make() asks for it."""

    def __init__(self, engine: str, folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._folder, self._seconds, self._monkeypatch = engine, folder, seconds, monkeypatch

    def make(self, table: Any, key: dict[str, Any]) -> None:
        if key["n"] == 2:
            (self._folder / "lock").touch()
            wait_for((self._folder / "locked").exists)
            raise ValueError("no 2")
        insert_square(table, key)

    def populate(self, Square: Any, **words: Any) -> Any:
        """A populate on connections whose statements do not wait long."""
        with statements_time_out(self._engine, self._monkeypatch):
            Square.schedule_jobs()
            start_afresh(Square)
            thread = threading.Thread(target=self._hold, args=(Square.jobs.full_table_name,))
            thread.start()
            try:
                return Square.populate(reserve_jobs=True, **words)
            finally:
                thread.join()
                self._monkeypatch.undo()
                start_afresh(Square)

    def _hold(self, jobs: str) -> None:
        wait_for((self._folder / "lock").exists)
        locker = another_connection()
        locker.query("BEGIN")
        locker.query(f"SELECT 1 FROM {jobs} WHERE status = 'reserved' FOR UPDATE")
        (self._folder / "locked").touch()
        time.sleep(self._seconds)
        locker.query("ROLLBACK")
        locker.close()


def start_afresh(Square: Any) -> None:
    Square.Number.connection.close()
    Square.Number.connection.connect()


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_recorded_though_the_row_of_its_job_was_locked_for_longer_than_statements_may_take(
    start: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    row = LockedRow(engine, tmp_path, 2.0, monkeypatch)
    Square = start(2, lambda self, key: row.make(self, key))
    result = row.populate(Square, processes=processes, suppress_errors=True)
    assert result == {"success_count": 1, "error_list": [({"n": 2}, "ValueError: no 2")]}
    job = rows_by_number(Square)[2]
    assert (job["status"], job["attempt"], kinds(job)) == ("error", 1, ["error"])


@pytest.fixture(autouse=True)
def lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_LAB_FOLDER", str(tmp_path))


def break_connection(table: Any) -> None:
    """What a make() may do to a connection that is not its own."""

    def query(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken by make()")

    table.connection.query = query


@pytest.mark.parametrize("at", [1, 5])
def test_a_slot_that_can_record_nothing_dies_and_its_supervisor_settles_what_it_had(
    start: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The begun job counts an attempt; those that were claimed with it go back and are run by others."""
    monkeypatch.setattr(execute, "_LONGEST_PAUSE", 0.05)
    Square = start(12, fail_at(at, break_connection), max_attempts=1)
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    ((key, message),) = result["error_list"]
    assert key == {"n": at}
    assert "WorkerDied" in message
    assert "broken by make()" in message, "its last words say why"
    assert made(Square()) == [n for n in range(1, 13) if n != at]
    assert {n: (row["status"], kinds(row)) for n, row in rows_by_number(Square).items()} == {at: ("error", ["crash"])}


def test_a_populate_that_can_record_nothing_leaves_no_claim_behind(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It settles what it has left as its monitor would if it had died."""
    monkeypatch.setattr(execute, "_LONGEST_PAUSE", 0.01)

    def break_half(table: Any) -> None:
        query = table.connection.query

        def half(sql: str, *arguments: Any, **options: Any) -> Any:
            if "FOR UPDATE" in sql and "SKIP LOCKED" not in sql:
                raise RuntimeError("broken by make()")
            return query(sql, *arguments, **options)

        table.connection.query = half

    Square = start(4, fail_at(2, break_half))
    try:
        with pytest.raises(djjobs.DjJobsError, match=r"The end of {'n': 2} of Square could not be .*ValueError: no 2"):
            Square.populate(reserve_jobs=True)
    finally:
        del Square.Number.connection.query
    rows = {n: (job["status"], job["attempt"], kinds(job)) for n, job in rows_by_number(Square).items()}
    assert rows == {2: ("scheduled", 1, ["crash"]), 3: ("scheduled", 0, []), 4: ("scheduled", 0, [])}


@pytest.mark.only(engines=["mysql"])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_recorded_after_a_read_only_spell(start: Any, processes: int) -> None:
    admin = another_connection()
    folder = Path(os.environ["WORKER_LAB_FOLDER"])

    def make(self: Any, key: dict[str, Any]) -> None:
        (folder / "failing").touch()
        wait_for((folder / "read-only").exists)
        raise ValueError("no")

    def spell() -> None:
        wait_for((folder / "failing").exists)
        admin.query("SET GLOBAL super_read_only = 1")
        (folder / "read-only").touch()
        time.sleep(3)
        admin.query("SET GLOBAL super_read_only = 0, GLOBAL read_only = 0")

    Square = start(1, make)
    thread = threading.Thread(target=spell)
    thread.start()
    try:
        result = Square.populate(reserve_jobs=True, processes=processes, suppress_errors=True)
    finally:
        thread.join()
        admin.close()
    assert result["error_list"] == [({"n": 1}, "ValueError: no")]
    row = rows_by_number(Square)[1]
    assert (row["status"], row["attempt"]) == ("error", 1)


@pytest.mark.only(engines=["mysql", "mariadb"])
def test_an_error_is_recorded_in_short_where_the_server_takes_little_at_once(start: Any) -> None:
    """A server may take less than what is kept of a stack trace."""
    admin = another_connection()
    (before,) = admin.query("SELECT @@GLOBAL.max_allowed_packet").fetchone()
    admin.query("SET GLOBAL max_allowed_packet = 65536")
    try:
        Square = start(2, fail_at(2, lambda _table: exec("raise ValueError('x' * 1_000_000)")))
        Square.schedule_jobs()
        start_afresh(Square)
        result = Square.populate(reserve_jobs=True, suppress_errors=True)
    finally:
        admin.query(f"SET GLOBAL max_allowed_packet = {before}")
        admin.close()
    start_afresh(Square)
    assert result["success_count"] == 1
    row = rows_by_number(Square)[2]
    assert (row["status"], row["attempt"]) == ("error", 1)
    assert row["error_message"].startswith("ValueError: xxx")


def test_a_claim_that_cannot_be_given_back_after_a_stop_is_given_back_by_the_supervisor(start: Any) -> None:
    folder = Path(os.environ["WORKER_LAB_FOLDER"])

    def make(self: Any, key: dict[str, Any]) -> None:
        break_connection(self)
        self.connection.close = self.connection.connect = self.connection.query
        (folder / "broken").touch()
        time.sleep(60)

    def stop() -> None:
        wait_for((folder / "broken").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    Square = start(2, make)
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit):
        Square.populate(reserve_jobs=True, processes=2)
    thread.join()
    assert statuses(Square) == {1: "scheduled", 2: "scheduled"}
    assert {row["attempt"] for row in rows_by_number(Square).values()} == {0}


# -- signals to all ---------------------------------------------------------------------------------------------------


def each(worker: Worker, number: int) -> None:
    """As a cluster does that signals every process of a job."""
    for pid in worker.processes():
        os.kill(pid, number)


@pytest.mark.parametrize("send", [Worker.send_all, each], ids=["the group", "each process"])
def test_a_signal_to_all_processes_of_a_worker_gives_jobs_their_grace(
    lab: Lab,  # noqa: F811
    send: Any,
) -> None:
    lab.add("gate", "sleep 60")
    with working(lab, "--processes", "2", "--grace", "3", **PATIENT) as worker:
        wait_for(lambda: lab.has_begun(1, 2))
        send(worker, signal.SIGTERM)
        wait_for(lambda: "3 s to end" in worker.log)
        time.sleep(1)
        lab.open(1)
        assert worker.end() == 0
    assert made(lab.First()) == [1]
    assert {n: (row["status"], row["attempt"]) for n, row in rows_by_number(lab.First).items()} == {2: ("scheduled", 0)}


def test_a_worker_that_is_suspended_in_a_terminal_takes_its_slots_along(lab: Lab) -> None:  # noqa: F811
    lab.add("gate")
    with working(lab, **PATIENT) as worker:
        wait_for(lambda: lab.has_begun(1))
        family = [psutil.Process(pid) for pid in worker.processes()]
        worker.send(signal.SIGTSTP)
        wait_for(lambda: all(process.status() == psutil.STATUS_STOPPED for process in family))
        worker.send(signal.SIGCONT)
        wait_for(lambda: all(process.status() != psutil.STATUS_STOPPED for process in family))
        lab.open(1)
        wait_for(lambda: made(lab.First()) == [1])
        worker.send(signal.SIGTERM)
        assert worker.end() == 0


# -- what make() has started ---------------------------------------------------------------------------------------


def process_in(path: Path) -> psutil.Process:
    return psutil.Process(int(path.read_text()))


@pytest.mark.parametrize("how", ["timeout", "cancel", "kill", "stuck", "stop"])
def test_what_make_has_started_ends_with_it_and_what_it_has_detached_does_not(lab: Lab, how: str) -> None:  # noqa: F811
    lab.add("spawn stick" if how == "stuck" else "spawn sleep 600", "")
    timeout = {"timeout": 1.5} if how in ("timeout", "stuck") else {}
    with working(lab, "--grace", "0.5", **policy(max_attempts=1, **timeout), **PATIENT) as worker:
        wait_for((lab.folder / "spawned-1").exists)
        left, detached = process_in(lab.folder / "left-1"), process_in(lab.folder / "detached-1")
        try:
            assert not has_ended(left)
            if how == "cancel":
                lab.First.cancel_jobs({"n": 1}, force=True)
            elif how == "kill":
                os.kill(lab.calls[0].pid, signal.SIGKILL)
            elif how == "stop":
                worker.send(signal.SIGTERM)
            wait_for(lambda: has_ended(left), timeout=15)
            if how != "stop":
                wait_for(lambda: made(lab.First()) == [2])
                worker.send(signal.SIGTERM)
            assert worker.end() == (0 if how in ("cancel", "stop") else 1)
            assert not has_ended(detached)
        finally:
            detached.kill()
    expected = {"cancel": "cancelled", "stop": "scheduled"}.get(how, "error")
    assert statuses(lab.First)[1] == expected


# -- what slots print -------------------------------------------------------------------------------------------------


def test_of_a_progress_bar_its_last_state_is_logged_and_a_long_line_comes_in_pieces(lab: Lab) -> None:  # noqa: F811
    lab.add("bar")
    with working(lab, "--drain") as worker:
        assert worker.end() == 0
    assert "100 %" in worker.log
    assert "50 %" not in worker.log
    assert sum(len(line) for line in re.findall("x{100,}", worker.log)) == 100_000
    assert max(map(len, worker.log.splitlines())) < 9000
    assert "xthe end" in worker.log


def test_eighty_megabytes_without_an_end_of_line_hold_no_worker_up(start: Any, capfd: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        for _ in range(80):
            os.write(1, b"." * 2**20)
        insert_square(self, key)

    Square = start(1, make)
    began = time.monotonic()
    assert Square.populate(reserve_jobs=True, processes=2)["success_count"] == 1
    assert time.monotonic() - began < 10
    assert capfd.readouterr().out.count(".") == 80 * 2**20
    assert job_counts(Square) == {}
