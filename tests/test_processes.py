"""populate(processes=N): children that claim for themselves, and how their ends are met."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datajoint as dj
import fork_server
import psutil
import pytest
from helpers import has_ended, wait_for
from pipelines import job_counts, rows_of
from workloads.squares import (
    CallLog,
    Standing,
    another_connection,
    insert_square,
    made,
    recording,
    rows_by_number,
    squares,
    statuses,
)

import djjobs

TESTS = Path(__file__).parent


def failing_for(*numbers: int, error: Callable[[int], Exception] = ValueError) -> Callable[..., None]:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] in numbers:
            raise error(key["n"])

    return make


# -- work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["original", "reverse", "random"])
def test_children_do_the_work_and_the_parent_adds_it_up(start: Any, log: CallLog, order: str) -> None:
    Square = start(30, recording(log))
    result = Square.populate(reserve_jobs=True, processes=3, order=order)
    assert result == {"success_count": 30, "error_list": []}
    assert made(Square()) == sorted(log.numbers()) == list(range(1, 31))
    assert str(os.getpid()) not in {pid for _, pid in log.lines()}
    assert job_counts(Square) == {}


def test_no_process_is_left_and_the_connection_works_afterwards(start: Any) -> None:
    before = set(psutil.Process().children())
    Square = start(10)
    Square.populate(reserve_jobs=True, processes=2)
    assert set(psutil.Process().children()) <= before
    Square.Number.insert1({"n": 99})
    connection = Square.Number.connection
    current = "SELECT pg_backend_pid()" if "`" not in Square.full_table_name else "SELECT CONNECTION_ID()"
    assert connection.connection_id == connection.query(current).fetchone()[0]
    Square.schedule_jobs(min_scheduling_interval=0)
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


def test_each_child_has_a_connection_of_its_own_and_claims_in_the_name_of_one_worker(start: Any) -> None:
    """Two jobs that wait for each other can only be done side by side."""
    both = multiprocessing.get_context("fork").Barrier(2)

    def make(self: Any, key: dict[str, Any]) -> None:
        both.wait(60)
        insert_square(self, key)

    Square = start(2, make, keep_completed=True)
    assert Square.populate(reserve_jobs=True, processes=2)["success_count"] == 2
    rows = rows_of(Square.jobs)
    for column in ("pid", "connection_id", "claim"):
        assert len({row[column] for row in rows}) == 2
    assert len({row["worker_id"] for row in rows}) == 1


def test_none_is_one_process_a_core(start: Any, log: CallLog) -> None:
    Square = start(20, recording(log))
    assert Square.populate(reserve_jobs=True, processes=None)["success_count"] == 20
    in_this_process = str(os.getpid()) in {pid for _, pid in log.lines()}
    assert in_this_process == (multiprocessing.cpu_count() == 1)


@pytest.mark.parametrize("words", [{"max_calls": 7}, {"limit": 7}], ids=["max_calls", "limit"])
def test_the_children_share_max_calls_and_limit(start: Any, log: CallLog, words: dict[str, int]) -> None:
    Square = start(20, recording(log))
    assert Square.populate(reserve_jobs=True, processes=3, **words)["success_count"] == 7
    assert len(log.lines()) == 7
    assert job_counts(Square) == {"scheduled": 13}


def test_restrictions_and_keywords_reach_the_children(start: Any) -> None:
    def make(self: Any, key: dict[str, Any], gain: int) -> None:
        self.insert1({**key, "square": gain})

    Square = start(8, make, keep_completed=True)
    Square.populate("n > 4", reserve_jobs=True, processes=2, make_kwargs={"gain": 3})
    assert made(Square()) == [5, 6, 7, 8]
    assert {row["square"] for row in rows_of(Square())} == {3}
    assert job_counts(Square) == {"success": 4}


def test_make_may_start_a_pool_of_its_own(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            total = sum(pool.map(abs, [-1] * key["n"]))
        self.insert1({**key, "square": total**2})

    Square = start(4, make)
    assert Square.populate(reserve_jobs=True, processes=2)["success_count"] == 4
    assert sorted(row["square"] for row in rows_of(Square())) == [1, 4, 9, 16]


def test_classes_of_a_notebook_work_in_children(schema: Any) -> None:
    command = [sys.executable, "workloads/notebook.py", schema.database]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["success_count"] == 5
    assert result["errors"] == [[{"recording": 3}, "Flat", "nothing on it"]]
    table = djjobs.jobs(schema).full_table_name.replace("~jobs", "__spectrum")
    rows = schema.connection.query(f"SELECT recording, pid FROM {table}").fetchall()
    assert sorted(recording for recording, _ in rows) == [0, 1, 2, 4, 5]
    assert result["parent"] not in {pid for _, pid in rows}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_thread_with_a_connection_of_its_own_can_populate(
    start: Any, standing: Standing, log: CallLog, processes: int
) -> None:
    Square = start(12)
    Square.jobs
    results: list[Any] = []

    def in_thread() -> None:
        connection = another_connection()
        Mine = squares(dj.Schema(standing.schema.database, connection=connection), 0, recording(log))
        results.append(Mine.populate(reserve_jobs=True, processes=processes))
        connection.close()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert results == [{"success_count": 12, "error_list": []}]
    assert made(Square()) == sorted(log.numbers()) == list(range(1, 13))


def test_two_threads_populate_side_by_side(start: Any, standing: Standing, log: CallLog) -> None:
    Square = start(60)
    Square.schedule_jobs()
    results: list[Any] = []

    def in_thread() -> None:
        connection = another_connection()
        Mine = squares(dj.Schema(standing.schema.database, connection=connection), 0, recording(log))
        results.append(Mine.populate(reserve_jobs=True)["success_count"])
        connection.close()

    threads = [threading.Thread(target=in_thread) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == 60
    assert sorted(log.numbers()) == list(range(1, 61))


def test_the_bar_shows_what_children_do(start: Any, capfd: Any) -> None:
    Square = start(9, failing_for(2, 4))
    Square.populate(reserve_jobs=True, processes=2, suppress_errors=True, display_progress=True)
    bar = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "9/9" in bar
    assert "errors=2" in bar


# -- errors -------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    """An error that holds what cannot be sent to another process."""

    def __init__(self, n: int) -> None:
        super().__init__(f"held by a lock at {n}")
        self.lock = threading.Lock()


class Choosy(Exception):
    """An error that pickles, but cannot be made again from its arguments."""

    def __init__(self, n: int, unit: str) -> None:
        super().__init__(f"{n} {unit}")


def test_errors_of_children_come_back_as_text(start: Any) -> None:
    Square = start(12, failing_for(3, 7))
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    assert result["success_count"] == 10
    assert sorted(result["error_list"], key=str) == [({"n": 3}, "ValueError: 3"), ({"n": 7}, "ValueError: 7")]
    assert statuses(Square) == {3: "error", 7: "error"}


def test_errors_of_children_come_back_as_exceptions(start: Any) -> None:
    Square = start(6, failing_for(3))
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True, return_exception_objects=True)
    ((key, error),) = result["error_list"]
    assert (key, type(error), error.args) == ({"n": 3}, ValueError, (3,))


def test_an_error_of_a_child_is_raised_here(start: Any) -> None:
    Square = start(40, failing_for(3, error=lambda n: ZeroDivisionError(f"at {n}")))
    with pytest.raises(ZeroDivisionError, match="at 3"):
        Square.populate(reserve_jobs=True, processes=2)
    counts = job_counts(Square)
    assert counts.pop("error") == 1
    assert set(counts) <= {"scheduled"}
    assert len(made(Square())) + counts.get("scheduled", 0) == 39


ERRORS = {"unpicklable": Unpicklable, "choosy": lambda n: Choosy(n, "mV")}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_that_cannot_travel_comes_back_in_words(start: Any, error: Any) -> None:
    Square = start(6, failing_for(3, error=error))
    expected = error(3)
    described = f"{type(expected).__name__}: {expected}"
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True, return_exception_objects=True)
    ((key, returned),) = result["error_list"]
    assert (key, type(returned)) == ({"n": 3}, djjobs.DjJobsError)
    assert described in str(returned)
    assert result["success_count"] == 5
    (row,) = rows_of(Square.jobs.errors)
    assert row["error_message"] == described


def test_the_text_of_an_error_that_cannot_travel_is_its_own(start: Any) -> None:
    Square = start(3, failing_for(3, error=Unpicklable))
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    assert result["error_list"] == [({"n": 3}, "Unpicklable: held by a lock at 3")]


def test_an_error_that_cannot_travel_is_raised_in_words(start: Any) -> None:
    Square = start(6, failing_for(3, error=Unpicklable))
    with pytest.raises(djjobs.DjJobsError, match="Unpicklable: held by a lock at 3"):
        Square.populate(reserve_jobs=True, processes=2)
    assert "reserved" not in job_counts(Square)


# -- violent ends ---------------------------------------------------------------------------------------------


def test_a_child_that_is_killed_is_reported_and_the_others_finish(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        insert_square(self, key)

    Square = start(12, make)
    result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    ((key, message),) = result["error_list"]
    assert key == {"n": 1}
    assert re.match(r"WorkerDied: the process \d+ was ended by SIGKILL", message)
    assert made(Square()) == list(range(2, 13))
    row = rows_by_number(Square)[1]
    assert (row["status"], row["attempt"], row["error_message"]) == ("error", 3, message)
    assert [attempt["kind"] for attempt in row["attempts"]] == ["crash"] * 3
    assert Square.Number.connection.query("SELECT 41 + 1").fetchone()[0] == 42


def sleep_detached(is_detached: Any) -> None:
    os.setsid()
    is_detached.set()
    time.sleep(600)


def test_a_child_that_is_killed_is_reported_even_if_a_process_it_detached_lives_on(start: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 1:
            context = multiprocessing.get_context("fork")
            is_detached = context.Event()
            survivor = context.Process(target=sleep_detached, args=(is_detached,))
            survivor.start()
            is_detached.wait()
            log.record(survivor.pid)
            os.kill(os.getpid(), signal.SIGKILL)
        insert_square(self, key)

    def end_survivors() -> None:
        for pid in log.numbers():
            os.kill(pid, signal.SIGKILL)

    Square = start(12, make)
    helped = []
    helper = threading.Timer(20, lambda: (helped.append("the survivor had to be ended"), end_survivors()))
    helper.start()
    try:
        result = Square.populate(reserve_jobs=True, processes=2, suppress_errors=True)
    finally:
        helper.cancel()
        helper.join()
        if not helped:
            end_survivors()
    assert not helped
    assert [key for key, _ in result["error_list"]] == [{"n": 1}]
    assert made(Square()) == list(range(2, 13))


def test_a_child_that_exits_by_itself_is_reported(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        print("about to leave", flush=True)
        os._exit(7)

    Square = start(4, make)
    with pytest.raises(djjobs.DjJobsError, match=r"exit code 7(.|\n)*about to leave"):
        Square.populate(reserve_jobs=True, processes=2)


@contextmanager
def endless(Square: Any, log_path: Path, processes: int) -> Iterator[Any]:
    """A worker that is a process of its own, each of whose children is inside make()."""
    command = ["-m", "workloads.endless", Square.database, str(log_path), str(processes)]
    said = log_path.with_name("said")
    with said.open("w") as errors, fork_server.start(command, cwd=TESTS, stderr=errors) as worker:
        try:
            wait_for(lambda: len(CallLog(log_path).lines()) == processes or worker.poll() is not None, timeout=60)
            assert worker.poll() is None, said.read_text()
            yield worker
        finally:
            worker.kill()


def test_children_end_when_their_parent_is_killed(start: Any, tmp_path: Path) -> None:
    Square = start(5)
    Square.jobs
    with endless(Square, tmp_path / "calls", 3) as worker:
        children = [psutil.Process(int(pid)) for _, pid in CallLog(tmp_path / "calls").lines()]
        assert len(children) == 3
        assert all(child.ppid() == worker.pid for child in children)
        assert job_counts(Square) == {"reserved": 3, "scheduled": 2}
        worker.kill()
        worker.wait()
        wait_for(lambda: all(has_ended(child) for child in children))
    assert job_counts(Square) == {"scheduled": 5}
    assert {row["attempt"] for row in rows_of(Square.jobs)} == {0}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, "SystemExit"), (signal.SIGINT, "KeyboardInterrupt")],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_worker_that_is_told_to_stop_gives_its_jobs_back(
    start: Any, tmp_path: Path, processes: int, number: int, raised: str
) -> None:
    Square = start(4)
    Square.jobs
    with endless(Square, tmp_path / "calls", processes) as worker:
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.send_signal(number)
        worker.wait(60)
    ends = CallLog(tmp_path / "calls").lines()[processes:]
    assert ends == [["raised", raised], ["reserved", "0"]]
    assert all(has_ended(child) for child in children)
    assert job_counts(Square) == {"scheduled": 4}
    assert {row["attempt"] for row in rows_of(Square.jobs)} == {0}


def test_a_ctrl_c_in_a_terminal_gives_all_jobs_back(start: Any, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the children too, just when their parent tells them to stop."""
    Square = start(8)
    Square.jobs
    with endless(Square, tmp_path / "calls", 5) as worker:
        for process in [psutil.Process(worker.pid), *psutil.Process(worker.pid).children()]:
            with suppress(psutil.NoSuchProcess):  # its parent was faster
                process.send_signal(signal.SIGINT)
        worker.wait(20)
    assert CallLog(tmp_path / "calls").lines()[5:] == [["raised", "KeyboardInterrupt"], ["reserved", "0"]]
    assert job_counts(Square) == {"scheduled": 8}


def test_a_thread_that_reads_the_standard_input_is_in_nobodys_way(start: Any) -> None:
    """Its lock is held in a forked child for ever, and multiprocessing would wait for it."""
    Square = start(4)
    reader, writer = os.pipe()
    before, sys.stdin = sys.stdin, open(reader)  # noqa: SIM115 - closed below
    try:
        listening = threading.Thread(target=sys.stdin.read, daemon=True)
        listening.start()
        assert Square.populate(reserve_jobs=True, processes=2)["success_count"] == 4
        assert listening.is_alive()
    finally:
        os.close(writer)
        listening.join()
        sys.stdin.close()
        sys.stdin = before
