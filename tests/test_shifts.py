"""Shifts: processes with short jobs that share busy processors. Who waits holds nothing, and nobody waits in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import wait_for
from pipelines import job_counts
from workloads.squares import Bystander, CallLog, Standing, insert_square, made, recording

import djjobs
from djjobs import worker
from djjobs.interrupt import Stop
from djjobs.work import shifts
from djjobs.work.budget import Pace
from djjobs.work.shifts import Shifts

#: Longer than any test lasts.
FOREVER = 1000.0


@pytest.fixture
def squares(standing: Standing) -> Callable[..., Any]:
    return standing.start_over


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[shifts._Board]:
    """A busy processor with a single place, as a bystander sees it."""
    monkeypatch.setattr(shifts, "_BOARD", tmp_path)
    monkeypatch.setattr(shifts, "_PLACES", 1)
    monkeypatch.setattr(shifts, "_SHORT", FOREVER)  # as long as a job may take on a busy machine
    monkeypatch.setattr(shifts, "_KEPT", FOREVER)
    monkeypatch.setattr(shifts._Processors, "idle", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    board = shifts._Board({0})
    yield board
    board.close()


def pace_of_jobs() -> Pace:
    """Of somebody who has had a job already."""
    pace = Pace()
    with pace.timing():
        pass
    return pace


def never_waits() -> bool:
    """As `unless`: it is asked of who would wait."""
    raise AssertionError("it had to wait")


def go(process: Shifts, pace: Pace | None = None) -> None:
    """Let it go on; it must not have to wait."""
    process.wait(pace or pace_of_jobs(), Stop(), unless=never_waits)


@contextmanager
def waiting(process: Shifts, board: shifts._Board, unless: Callable[[], bool] = lambda: False) -> Iterator[Any]:
    """Let it wait, in a thread; afterwards it must not wait any more."""
    thread = threading.Thread(target=process.wait, args=(pace_of_jobs(), Stop(), unless), daemon=True)
    thread.start()
    wait_for(board.has_waiters)
    assert thread.is_alive()
    yield thread
    thread.join(30)
    assert not thread.is_alive(), "it still waits"


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread; what fails there fails here."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if failed:
            raise failed[0]


# -- who waits, and until when ---------------------------------------------------------------------------------


def test_who_comes_second_waits_until_the_first_one_leaves(board: shifts._Board) -> None:
    with Shifts() as first, Shifts() as second:
        go(first)
        with waiting(second, board):
            first.leave()
        assert board.free_place() is None, "the second one has no place"
    assert board.free_place() is not None


def test_who_has_ended_has_left(board: shifts._Board) -> None:
    with Shifts() as second:
        with Shifts() as first:
            go(first)
        go(second)


def test_a_shift_goes_on_while_nobody_waits_and_ends_when_somebody_does(
    board: shifts._Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "_SHIFT", 0.0)
    with Shifts() as first, Shifts() as second:
        go(first)
        go(first)
        has_had_its_shift = threading.Event()

        def go_on_and_on() -> None:
            while not has_had_its_shift.is_set():
                first.wait(pace_of_jobs(), Stop(), unless=has_had_its_shift.is_set)

        with waiting(second, board), meanwhile(go_on_and_on):
            try:
                wait_for(lambda: second._place is not None)
            finally:
                has_had_its_shift.set()


def test_a_shift_is_not_cut_short(board: shifts._Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "_SHIFT", FOREVER)
    with Shifts() as first, Shifts() as second:
        go(first)
        with waiting(second, board):
            go(first)
            first.leave()


def test_the_place_of_who_is_not_heard_of_is_free_after_a_while(
    board: shifts._Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "_KEPT", 0.5)
    with Shifts() as second:
        board.keep(1)
        second.wait(pace_of_jobs(), Stop(), unless=lambda: False)
        assert board.free_place() is None, "the second one has no place"


def test_a_time_of_another_clock_keeps_nobody_waiting(board: shifts._Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.keep(1)
    monkeypatch.setattr(shifts, "_KEPT", 2.0)
    with Shifts() as process:
        go(process)


def test_there_is_nothing_to_wait_for_any_more(board: shifts._Board) -> None:
    over = threading.Event()
    board.keep(1)
    with Shifts() as process, waiting(process, board, unless=over.is_set):
        over.set()


def test_idle_processors_let_everybody_go_ahead(board: shifts._Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.keep(1)
    with Shifts() as late, Shifts() as process:
        with waiting(late, board):
            monkeypatch.setattr(shifts._Processors, "idle", 1.0)
        go(process)


def test_long_jobs_and_unknown_ones_do_not_wait(board: shifts._Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with Shifts() as first, Shifts() as second:
        go(first)
        go(second, Pace())
        monkeypatch.setattr(shifts, "_SHORT", 0.0)
        go(second)
        # Who has long jobs needs no place.
        go(first)
        assert board.free_place() is not None


def test_shifts_can_be_left_out(board: shifts._Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.keep(1)
    monkeypatch.setattr(djjobs.settings, "work_in_shifts", False)
    with Shifts() as process:
        go(process)


def test_without_shared_memory_nobody_waits(
    board: shifts._Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.keep(1)
    with Shifts() as process:
        monkeypatch.setattr(process._board, "_file", os.open("/dev/full", os.O_RDWR))
        process.wait(pace_of_jobs(), Stop(), unless=lambda: False)
        go(process)
    monkeypatch.setattr(shifts, "_BOARD", tmp_path / "nowhere")
    with Shifts() as process:
        go(process)


# -- the processors --------------------------------------------------------------------------------------------


def test_busy_processors_are_seen() -> None:
    mine = os.sched_getaffinity(0)
    processors = shifts._Processors(mine)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in mine]
    try:
        wait_for(lambda: processors.idle < shifts._LITTLE)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_only_the_processors_count_that_one_may_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    before = "cpu 0 0 0 0\ncpu0 10 0 10 100 5 0 0 0 9 9\ncpu1 10 0 10 100 5 0 0 0 9 9\nintr 1 2 3\n"
    after = "cpu 0 0 0 0\ncpu0 15 0 15 125 10 0 0 0 9 9\ncpu1 60 0 60 100 5 0 0 0 9 9\nintr 1 2 3\n"
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(shifts, "_SAMPLE", 0.0)
    seen = []
    for numbers in ({0}, {1}, {0, 1}):
        stat.write_text(before)
        processors = shifts._Processors(numbers)
        stat.write_text(after)
        seen.append(processors.idle)
    assert seen == pytest.approx([30 / 40, 0 / 100, 30 / 140])


# -- those who work --------------------------------------------------------------------------------------------


@pytest.fixture
def batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "batch", 4)


def populate(table: Any) -> None:
    assert table.populate(reserve_jobs=True)["success_count"] == 10


def drain(table: Any) -> None:
    assert worker.run_worker((table,), worker.WorkerOptions(drain=True)) == 0
    table.connection.connect()


@pytest.mark.parametrize("work", [populate, drain], ids=["populate", "worker"])
def test_who_waits_holds_no_job(squares: Any, board: shifts._Board, batches_of_four: None, work: Any) -> None:
    Square = squares(10)
    seen = []

    def look() -> None:
        wait_for(board.has_waiters)
        jobs = f"SELECT status, COUNT(*) FROM {Square.jobs.full_table_name} GROUP BY status"
        seen.append(dict(bystander.connection.query(jobs).fetchall()))
        board.give_back(1)

    board.keep(1)
    with Bystander(Square) as bystander, meanwhile(look):
        work(Square)
    assert seen == [{"scheduled": 6}]
    assert made(Square()) == list(range(1, 11))
    assert board.free_place() is not None


def test_a_worker_that_rests_has_no_place(squares: Any, board: shifts._Board, batches_of_four: None) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        assert key["n"] < 9 or board.free_place() is None, "it works without a place"
        insert_square(self, key)

    Square = squares(10, make)
    target = Square().full_table_name

    def end() -> None:
        try:
            wait_for(lambda: bystander.connection.query(f"SELECT COUNT(*) FROM {target}").fetchone()[0] == 10)
            wait_for(lambda: board.free_place() is not None)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with Bystander(Square) as bystander, meanwhile(end):
        assert worker.run_worker((Square,), worker.WorkerOptions()) == 0


@pytest.mark.parametrize("arguments", [{"max_calls": 4}, {"limit": 4}], ids=str)
def test_who_may_run_no_more_jobs_does_not_wait(
    squares: Any, board: shifts._Board, batches_of_four: None, arguments: dict[str, int]
) -> None:
    Square = squares(10)
    board.keep(1)
    assert Square.populate(reserve_jobs=True, **arguments)["success_count"] == 4
    assert not board.has_waiters()


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_the_wait(
    squares: Any, board: shifts._Board, batches_of_four: None, number: int, raised: type
) -> None:
    Square = squares(10)

    def end() -> None:
        wait_for(board.has_waiters)
        os.kill(os.getpid(), number)

    board.keep(1)
    with meanwhile(end), pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert made(Square()) == [1, 2, 3, 4]
    assert job_counts(Square) == {"scheduled": 6}


def test_processes_that_work_in_shifts_make_every_job_once(
    squares: Any, board: shifts._Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shifts, "_SHIFT", 0.1)
    log = CallLog(tmp_path / "calls")
    Square = squares(200, recording(log))
    assert Square.populate(reserve_jobs=True, processes=3)["success_count"] == 200
    assert sorted(log.numbers()) == list(range(1, 201))
    assert board.free_place() is not None


def test_an_error_ends_the_wait_of_the_other_processes(squares: Any, board: shifts._Board, tmp_path: Path) -> None:
    other_waits = tmp_path / "waits"

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 1:
            wait_for(board.has_waiters)
            other_waits.touch()
            raise ValueError("no more")
        insert_square(self, key)

    Square = squares(200, make)
    board.keep(1)
    with pytest.raises(ValueError, match="no more"):
        Square.populate(reserve_jobs=True, processes=2)
    assert other_waits.exists()
    assert job_counts(Square)["error"] == 1
    assert "reserved" not in job_counts(Square)
