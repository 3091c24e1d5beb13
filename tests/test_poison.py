"""Jobs that do to their process what they should not: each costs itself an attempt, and nothing else anything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datajoint as dj
import psutil
import pytest
from helpers import has_ended, wait_for
from pipelines import job_counts
from workloads.lives import kinds, populating
from workloads.squares import CallLog, insert_square, made, recording, rows_by_number, statuses

import djjobs
from djjobs.worker import WorkerOptions, run_worker


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here waits for a lease: what comes back comes back by who supervises it."""
    monkeypatch.setattr(djjobs.settings, "lease", 60)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.5)


def poisoned(n: int, act: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., None]:
    """A make() that does this for one number, with its row inserted."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == n:
            act(self, key)

    return make


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Have whoever does not end in time ended, and fail."""
    alarm = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
    alarm.start()
    try:
        yield
        assert alarm.is_alive(), f"it took longer than {seconds} s"
    finally:
        alarm.cancel()


def in_slots(Square: Any, processes: int = 2, **words: Any) -> Any:
    with within(40):
        return Square.populate(reserve_jobs=True, processes=processes, suppress_errors=True, **words)


def drain(Square: Any, **options: Any) -> int:
    """A worker whose supervisor is this process, until there is nothing left to do."""
    try:
        with within(40):
            return run_worker((Square,), WorkerOptions(drain=True, **options))
    finally:
        if not Square.Number.connection.is_connected:
            Square.Number.connection.connect()


# -- what make() raises -------------------------------------------------------------------------------------------


class Odd(BaseException):
    """Not an error, not an exit."""


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError("gone"), GeneratorExit(), SystemExit(3), KeyboardInterrupt(), Odd("poison")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("parts", [1, 3], ids=["make", "three parts"])
def test_whatever_make_raises_counts_an_attempt_and_the_worker_goes_on(
    start: Any, log: CallLog, error: BaseException, parts: int
) -> None:
    def make_compute(self: Any, key: dict[str, Any], n: int) -> tuple[int]:
        log.record(n)
        if n == 1:
            raise error
        return (n**2,)

    if parts == 1:
        members: dict[str, Any] = {"make": recording(log, poisoned(1, lambda *_: raises(error)))}
    else:
        members = {
            "make": dj.Computed.make,
            "make_fetch": lambda self, key: (key["n"],),
            "make_compute": make_compute,
            "make_insert": lambda self, key, square: self.insert1({**key, "square": square}),
        }
    Square = start(3, **members)
    assert drain(Square) == 1
    assert made(Square()) == [2, 3]
    row = rows_by_number(Square)[1]
    assert (row["status"], row["attempt"], row["worker_id"] is None) == ("error", 1, False)
    assert row["error_message"].startswith(type(error).__name__)
    assert log.numbers().count(1) == 1


def raises(error: BaseException) -> None:
    raise error


def test_whatever_a_hook_raises_is_its_error_and_is_not_tried_for_ever(start: Any, log: CallLog) -> None:
    def finish_run(self: Any, run: Any) -> None:
        log.record(0)
        raise asyncio.CancelledError("gone")

    Square = start(2, finish_run=finish_run)
    run = Square.schedule_jobs()
    assert drain(Square) == 0
    assert made(Square()) == [1, 2]
    assert 1 <= len(log.lines()) <= 3
    assert run.error == "CancelledError: gone"


def test_an_on_cancel_that_raises_anything_ends_no_populate(start: Any, log: CallLog) -> None:
    def act(self: Any, key: dict[str, Any]) -> None:
        raise djjobs.JobCancelled("by itself")

    def on_cancel(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        raise asyncio.CancelledError("gone")

    Square = start(3, poisoned(1, act), on_cancel=on_cancel)
    assert Square.populate(reserve_jobs=True) == {"success_count": 2, "error_list": []}
    assert log.numbers() == [1]
    assert made(Square()) == [2, 3]
    assert statuses(Square) == {1: "cancelled"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_make_that_signals_its_own_process_is_an_error_and_populate_returns(
    start: Any, log: CallLog, number: int
) -> None:
    def act(self: Any, key: dict[str, Any]) -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    Square = start(6, recording(log, poisoned(1, act)))
    began = time.monotonic()
    result = in_slots(Square)
    assert time.monotonic() - began < 10
    assert result["success_count"] == 5
    ((key, message),) = result["error_list"]
    assert key == {"n": 1}
    assert message.startswith("JobSignalled: The process")
    assert made(Square()) == [2, 3, 4, 5, 6]
    assert [(n, row["status"], kinds(row)) for n, row in rows_by_number(Square).items()] == [(1, "error", ["error"])]
    assert log.numbers().count(1) == 1


def test_a_signal_that_make_does_not_wait_for_harms_no_other_job(start: Any) -> None:
    Square = start(4, poisoned(1, lambda *_: os.kill(os.getpid(), signal.SIGTERM)))
    assert in_slots(Square, processes=2) == {"success_count": 4, "error_list": []}
    assert job_counts(Square) == {}


def test_a_slot_that_somebody_else_signals_counts_an_attempt_and_its_worker_goes_on(start: Any, log: CallLog) -> None:
    Square = start(2, recording(log, lambda *_: time.sleep(30)))
    with populating(Square, processes=2, suppress_errors=True) as (child,):
        wait_for(lambda: len(log.lines()) == 2)
        for _, pid in log.lines():
            os.kill(int(pid), signal.SIGTERM)
        result = child.result(20)
    assert (result["success_count"], len(result["error_list"])) == (0, 2)
    assert {n: (row["status"], row["attempt"]) for n, row in rows_by_number(Square).items()} == {
        n: ("error", 1) for n in (1, 2)
    }


# -- errors that only a slot knows --------------------------------------------------------------------------------


def raise_of_own(folder: Path) -> Callable[..., None]:
    """Raise an exception of a module that only this process finds."""
    folder.mkdir()
    (folder / "lab_errors.py").write_text("class Dry(Exception):\n    pass\n")

    def act(self: Any, key: dict[str, Any]) -> None:
        sys.path.insert(0, str(folder))
        import lab_errors

        raise lab_errors.Dry("no water")

    return act


def test_an_exception_that_only_the_slot_can_import_comes_as_words(start: Any, tmp_path: Path) -> None:
    Square = start(4, poisoned(1, raise_of_own(tmp_path / "lab")))
    result = in_slots(Square, return_exception_objects=True)
    ((_, error),) = result["error_list"]
    assert (type(error), str(error)) == (djjobs.DjJobsError, "Dry: no water")
    assert result["success_count"] == 3
    assert rows_by_number(Square)[1]["error_message"] == "Dry: no water"


def test_a_worker_goes_on_after_an_exception_that_only_its_slot_can_import(start: Any, tmp_path: Path) -> None:
    Square = start(4, poisoned(1, raise_of_own(tmp_path / "lab")))
    assert drain(Square) == 1
    assert made(Square()) == [2, 3, 4]
    assert statuses(Square) == {1: "error"}


class Hostile(Exception):
    """One that does harm where it is read again."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def test_an_exception_that_would_end_whoever_reads_it_ends_no_worker(start: Any) -> None:
    Square = start(3, poisoned(1, lambda *_: raises(Hostile("boo"))), max_attempts=1)
    assert drain(Square) == 1
    assert made(Square()) == [2, 3]
    assert statuses(Square) == {1: "error"}


def test_a_log_record_with_what_only_the_slot_knows_harms_nobody(start: Any, tmp_path: Path) -> None:
    def act(self: Any, key: dict[str, Any]) -> None:
        import logging

        class Local:
            def __str__(self) -> str:
                return "a local thing"

        logging.getLogger("djjobs.lab").warning("careful with %s", Local(), extra={"thing": Local()})

    Square = start(3, poisoned(1, act))
    assert in_slots(Square) == {"success_count": 3, "error_list": []}


# -- forks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
@pytest.mark.parametrize("processes", [1, 2])
def test_of_a_fork_inside_make_only_the_parent_goes_on(start: Any, log: CallLog, how: str, processes: int) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        pid = os.fork()
        log.record(pid)
        if pid == 0 and how == "raise":
            raise ValueError("in the twin")
        if pid == 0 and how == "exit":
            sys.exit(1)
        insert_square(self, key) if pid else None

    Square = start(4, make)
    with within(40):
        result = Square.populate(reserve_jobs=True, processes=processes)
    assert result == {"success_count": 4, "error_list": []}
    assert made(Square()) == [1, 2, 3, 4]
    assert job_counts(Square) == {}
    assert len(log.lines()) == 8, "each make() was called once, and came back twice"
    assert Square.Number.connection.query("SELECT 41 + 1").fetchone()[0] == 42
    twins = [psutil.Process(pid) for pid in log.numbers() if pid and psutil.pid_exists(pid)]
    wait_for(lambda: all(has_ended(twin) for twin in twins))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_twin_cannot_speak_on_the_connection_of_its_make(start: Any, log: CallLog, processes: int) -> None:
    """Else one of both would wait for ever for an answer that the other has read."""

    def make(self: Any, key: dict[str, Any]) -> None:
        pid = os.fork()
        for _ in range(20):
            self.connection.query("SELECT 1").fetchone()
        log.record(pid)
        insert_square(self, key)

    Square = start(4, make)
    with within(40):
        result = Square.populate(reserve_jobs=True, processes=processes)
    assert result == {"success_count": 4, "error_list": []}
    assert made(Square()) == [1, 2, 3, 4]
    assert 0 not in log.numbers(), "no twin got so far"


def test_a_twin_that_never_comes_back_does_not_outlive_its_worker(start: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        log.record(pid)
        insert_square(self, key)

    Square = start(2, make)
    assert in_slots(Square)["success_count"] == 2
    twins = [psutil.Process(pid) for pid in log.numbers() if psutil.pid_exists(pid)]
    wait_for(lambda: all(has_ended(twin) for twin in twins), timeout=10)


# -- transactions -------------------------------------------------------------------------------------------------


def in_transaction(self: Any, key: dict[str, Any]) -> None:
    with self.connection.transaction:
        pass


CALLS = {
    "commit_transaction": lambda self, key: self.connection.commit_transaction(),
    "connection.transaction": in_transaction,
    "start_transaction": lambda self, key: self.connection.start_transaction(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_make_that_ends_its_own_transaction_is_told_so(start: Any, call: str, processes: int) -> None:
    Square = start(3, poisoned(2, CALLS[call]))
    result = Square.populate(reserve_jobs=True, suppress_errors=True, processes=processes)
    assert result["success_count"] == 2
    ((key, message),) = result["error_list"]
    assert key == {"n": 2}
    assert message.startswith("DjJobsError: make() of Square called connection.")
    assert call in message
    assert made(Square()) == [1, 3], "nothing was committed"
    assert statuses(Square) == {2: "error"}


def test_the_insert_of_a_three_part_make_must_not_commit_either_but_its_computation_may(
    start: Any, log: CallLog
) -> None:
    """make_compute runs before DataJoint begins its transaction, as natively; what it commits is its own."""

    def make_compute(self: Any, key: dict[str, Any], n: int) -> tuple[int]:
        with self.connection.transaction:
            log.record(n)
        return (n**2,)

    def make_insert(self: Any, key: dict[str, Any], square: int) -> None:
        self.insert1({**key, "square": square})
        if key["n"] == 2:
            self.connection.commit_transaction()

    parts = {"make_fetch": lambda self, key: (key["n"],), "make_compute": make_compute, "make_insert": make_insert}
    Square = start(3, dj.Computed.make, **parts)
    result = Square.populate(reserve_jobs=True, suppress_errors=True)
    assert result["success_count"] == 2
    assert "commit_transaction" in result["error_list"][0][1]
    assert made(Square()) == [1, 3]
    assert statuses(Square) == {2: "error"}
    assert log.numbers() == [1, 2, 3]


# -- threads ------------------------------------------------------------------------------------------------------


def leave_a_thread(self: Any, key: dict[str, Any]) -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()


def test_a_thread_that_make_has_left_keeps_no_slot_from_ending(start: Any, log: CallLog) -> None:
    Square = start(5, recording(log, poisoned(1, leave_a_thread)))
    assert in_slots(Square)["success_count"] == 5
    Square = start(5, recording(log, poisoned(1, leave_a_thread)))
    assert drain(Square, max_jobs_per_process=1) == 0
    assert made(Square()) == [1, 2, 3, 4, 5]
    assert len({pid for _, pid in log.lines()[5:]}) == 5


def test_a_parent_whose_slots_close_their_pipes_uses_no_processor_and_ends(start: Any) -> None:
    """As make() does that turns its process into a daemon."""

    def act(self: Any, key: dict[str, Any]) -> None:
        os.closerange(3, 1024)
        time.sleep(600)

    Square = start(2, poisoned(1, act), max_attempts=1)
    before = sum(psutil.Process().cpu_times()[:2])
    result = in_slots(Square)
    used = sum(psutil.Process().cpu_times()[:2]) - before
    assert [key for key, _ in result["error_list"]] == [{"n": 1}]
    assert made(Square()) == [2]
    assert used < 1.5


def test_an_idle_parent_uses_no_processor(start: Any, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        leave_a_thread(self, key)
        log.record(key["n"])
        time.sleep(0 if key["n"] == 1 else 600)

    Square = start(2, make)
    with populating(Square, processes=2) as (child,):
        wait_for(lambda: sorted(log.numbers()) == [1, 2])
        parent = psutil.Process(child.process.pid)
        wait_for(lambda: len(slots_of(parent)) == 1)
        before, began = parent.cpu_times(), time.monotonic()
        time.sleep(2)
        after, took = parent.cpu_times(), time.monotonic() - began
    assert (after.user + after.system - before.user - before.system) / took < 0.25


def slots_of(parent: psutil.Process) -> list[psutil.Process]:
    return [child for child in parent.children() if not has_ended(child)]


# -- texts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_with_a_text_of_a_hundred_megabytes_is_an_error_like_others(start: Any, processes: int) -> None:
    Square = start(3, poisoned(1, lambda *_: raises(ValueError("x" * 100_000_000))))
    with within(60):
        result = Square.populate(reserve_jobs=True, processes=processes, suppress_errors=True)
    assert result["success_count"] == 2
    row = rows_by_number(Square)[1]
    assert (row["status"], row["attempt"]) == ("error", 1)
    assert row["error_message"].startswith("ValueError: xxx")
    assert len(row["error_message"]) <= 2047
    assert "raise error" in row["error_stack"]
    assert len(row["error_stack"]) < 2**19


def test_an_error_that_cannot_tell_its_message_is_an_error_still(start: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    Square = start(2, poisoned(1, lambda *_: raises(Mute())))
    assert drain(Square) == 1
    assert statuses(Square) == {1: "error"}


# -- in an interpreter of its own ---------------------------------------------------------------------------------


def test_a_script_whose_jobs_leave_threads_and_processes_ends(start: Any, tmp_path: Path) -> None:
    Square = start(3)
    Square.schedule_jobs()
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import subprocess, threading, time
            import datajoint as dj
            from workloads.squares import insert_square, squares

            def make(self, key):
                threading.Thread(target=time.sleep, args=(600,)).start()
                print(subprocess.Popen(["sleep", "611"]).pid, flush=True)
                insert_square(self, key)

            print(squares(dj.Schema({Square.database!r}), 0, make).populate(reserve_jobs=True, processes=2))
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "'success_count': 3" in run.stdout
    for pid in map(int, run.stdout.split()[:3]):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            wait_for(lambda process=process: has_ended(process))
