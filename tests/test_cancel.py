"""Cancelling: scheduled jobs at once, running ones at a safe point or by force; and what others see of them."""

from __future__ import annotations

import decimal
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import has_ended, wait_for
from pipelines import job_counts, rows_of, statements_of
from workloads.lives import (
    Gate,
    forget_all_workers,
    is_postgresql,
    job_of,
    kinds,
    lose,
    populating,
    status_of,
    stuck_in_c,
    worker_rows,
)
from workloads.squares import (
    Bystander,
    CallLog,
    Standing,
    change_jobs,
    insert_square,
    made,
    recording,
    statuses,
)

import djjobs
from djjobs.queue import cancel as cancelling
from djjobs.queue.claim import Claims
from djjobs.queue.keys import Keys
from djjobs.queue.queue import Queue
from djjobs.work.budget import Pace

#: A job that is stopped ends long before this; one that is not would take twice as long.
LONG = 40


@pytest.fixture
def ends(tmp_path: Path) -> CallLog:
    """What happens after make()."""
    return CallLog(tmp_path / "ends")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "grace", 1.0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many jobs are claimed at once follows the time that the first one took; here it is not left to chance."""
    monkeypatch.setattr(Pace, "batch", 6)


@pytest.fixture
def start(standing: Standing, ends: CallLog) -> Callable[..., Any]:
    """Square as if new, with its jobs scheduled and an on_cancel that records what it finds."""

    def on_cancel(self: Any, key: dict[str, Any]) -> None:
        ends.record(key["n"], "rows", len(rows_of(self & key)))

    def start_over(*arguments: Any, **members: Any) -> Any:
        Square = standing.start_over(*arguments, **{"on_cancel": on_cancel, **members})
        Square.schedule_jobs(min_scheduling_interval=0)
        forget_all_workers(Square)
        return Square

    return start_over


def check(self: Any) -> None:
    djjobs.current_job().check_cancelled()


def tell_progress(self: Any) -> None:
    djjobs.current_job().progress(1, 2)


def ask(self: Any) -> None:
    if djjobs.current_job().cancelled:
        raise djjobs.JobCancelled("stopped by itself")


def look_away(self: Any) -> None:
    """No safe point."""


def in_steps(step: Callable[[Any], None], gate: Gate, log: CallLog) -> Callable[..., None]:
    """A make() that has inserted its row and takes many steps, until the gate opens."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        log.record(key["n"], os.getpid())
        while not gate.is_open:
            step(self)
            time.sleep(0.02)

    return make


def inside(log: CallLog, n: int) -> bool:
    return n in log.numbers()


# -- scheduled jobs -------------------------------------------------------------------------------------------------


def test_scheduled_jobs_are_cancelled_at_once(start: Any, log: CallLog, ends: CallLog) -> None:
    Square = start(4, recording(log))
    assert Square.cancel_jobs("n < 3") == 2
    assert statuses(Square) == {1: "cancelled", 2: "cancelled", 3: "scheduled", 4: "scheduled"}
    assert Square.populate(reserve_jobs=True)["success_count"] == 2
    assert log.numbers() == [3, 4]
    assert ends.lines() == []  # nothing of theirs was begun


def test_a_job_that_is_claimed_just_then_does_not_escape(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claimed after the running jobs were asked to stop, and before the scheduled ones are cancelled."""
    Square = start(3)
    table = Square()
    queue = Queue.of(table.connection, table.database)
    claims = Claims(queue, Keys(table, ("n = 2",), queue.engine))
    change = cancelling._Cancellation._to

    def claim_first(self: Any, changes: str, status: str, *arguments: Any, **options: Any) -> int:
        if status == "scheduled":
            claims.take(1)
        return change(self, changes, status, *arguments, **options)

    monkeypatch.setattr(cancelling._Cancellation, "_to", claim_first)
    assert Square.cancel_jobs() == 3
    assert (status_of(Square, 1), status_of(Square, 2), status_of(Square, 3)) == ("cancelled", "reserved", "cancelled")
    assert job_of(Square, 2)["cancel_request"] == "cancel"


def test_a_job_that_waits_for_its_next_try_is_cancelled_at_once(start: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError("no square")

    Square = start(1, make, max_attempts=3, backoff=3600)
    Square.populate(reserve_jobs=True)
    assert Square.cancel_jobs() == 1
    row = job_of(Square, 1)
    assert (row["status"], kinds(row)) == ("cancelled", ["error"])


@pytest.mark.parametrize("force", [False, True])
def test_cancelled_jobs_stay_so_until_somebody_retries_them(start: Any, force: bool) -> None:
    Square = start(2)
    Square.cancel_jobs({"n": 1})
    for _ in range(2):
        Square.populate(reserve_jobs=True)
        Square.schedule_jobs(min_scheduling_interval=0)
        Square.cleanup_jobs()
    assert statuses(Square) == {1: "cancelled"}
    if force:
        assert int(Square.schedule_jobs(force=True, min_scheduling_interval=0)) == 1
    else:
        assert Square.retry_jobs({"n": 1}) == 1
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
    assert made(Square()) == [1, 2]


# -- jobs that are over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["error", "success", "ignore"])
@pytest.mark.parametrize("force", [False, True])
def test_a_job_that_is_over_cannot_be_cancelled(start: Any, status: str, force: bool) -> None:
    Square = start(2)
    change_jobs(Square, [1], f"status='{status}'")
    before = job_of(Square, 1)
    with pytest.raises(djjobs.JobNotCancellable, match=rf"Square.*{status}"):
        Square.cancel_jobs({"n": 1}, force=force)
    assert job_of(Square, 1) == before


def test_a_job_that_is_done_and_gone_cannot_be_cancelled(start: Any) -> None:
    Square = start(2)
    Square.populate(reserve_jobs=True, max_calls=1)
    with pytest.raises(djjobs.JobNotCancellable, match="Square"):
        Square.cancel_jobs({"n": 1})


def test_an_already_cancelled_job_is_no_error(start: Any) -> None:
    Square = start(3)
    assert Square.cancel_jobs({"n": 1}) == 1
    assert Square.cancel_jobs({"n": 1}) == 0
    assert Square.cancel_jobs({"n": 1}, force=True) == 0
    assert Square.cancel_jobs() == 2
    assert Square.cancel_jobs() == 0


def test_of_jobs_that_are_over_and_jobs_that_are_not_the_latter_are_cancelled(start: Any) -> None:
    Square = start(3)
    change_jobs(Square, [1], "status='error'")
    assert Square.cancel_jobs() == 2
    assert statuses(Square) == {1: "error", 2: "cancelled", 3: "cancelled"}


# -- running jobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [check, tell_progress, ask])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_running_job_stops_at_its_next_safe_point(
    start: Any, step: Any, processes: int, gate: Gate, log: CallLog, ends: CallLog
) -> None:
    """Asked from another process; the gate stays shut, so only the request can end the first job."""
    Square = start(1, in_steps(step, gate, log))
    with populating(Square, processes=processes) as (child,):
        wait_for(lambda: inside(log, 1))
        assert Square.cancel_jobs({"n": 1}) == 1
        Square.cancel_jobs({"n": 1})  # once more does no harm
        assert child.result(LONG) == {"success_count": 0, "error_list": []}
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["cancel_request"], row["progress"]) == ("cancelled", 0, "", None)
    assert made(Square()) == []
    assert ends.lines() == [["1", "rows", "0"]]


def test_a_running_job_that_never_looks_is_rolled_back_before_the_commit(
    start: Any, gate: Gate, log: CallLog, ends: CallLog
) -> None:
    Square = start(2, in_steps(look_away, gate, log))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        assert Square.cancel_jobs({"n": 1}) == 1
        assert (status_of(Square, 1), job_of(Square, 1)["cancel_request"]) == ("reserved", "cancel")
        gate.open()
        assert child.result(LONG) == {"success_count": 1, "error_list": []}
    assert (statuses(Square), made(Square())) == ({1: "cancelled"}, [2])
    assert ends.lines() == [["1", "rows", "0"]]
    assert Square.retry_jobs() == 1
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


def test_a_short_job_too_is_rolled_back_before_the_commit(start: Any) -> None:
    """It is over before anybody could have told it."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        with Bystander(Square) as bystander:
            bystander.change(key["n"], "cancel_request = 'cancel'")

    Square = start(2, make, keep_completed=True)
    assert Square.populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}
    assert (statuses(Square), made(Square())) == ({1: "cancelled", 2: "cancelled"}, [])


def test_the_job_after_a_cancelled_one_is_not_hit(start: Any, gate: Gate, log: CallLog) -> None:
    Square = start(3, in_steps(check, gate, log))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs({"n": 1}, force=True)
        wait_for(lambda: inside(log, 2))
        gate.open()
        assert child.result(LONG) == {"success_count": 2, "error_list": []}
    assert (statuses(Square), made(Square())) == ({1: "cancelled"}, [2, 3])


def test_a_make_that_swallows_the_request_is_rolled_back(start: Any, gate: Gate, log: CallLog, ends: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        log.record(key["n"])
        try:
            while not gate.is_open:
                djjobs.current_job().check_cancelled()
                time.sleep(0.02)
        except Exception:
            log.record(-1)

    Square = start(1, make)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs()
        assert child.result(LONG) == {"success_count": 0, "error_list": []}
    assert inside(log, -1)
    assert (statuses(Square), made(Square()), ends.lines()) == ({1: "cancelled"}, [], [["1", "rows", "0"]])


def test_a_make_that_turns_the_request_into_an_error_of_its_own_is_cancelled_all_the_same(
    start: Any, gate: Gate, log: CallLog, ends: CallLog
) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        log.record(key["n"])
        try:
            while not gate.is_open:
                djjobs.current_job().check_cancelled()
                time.sleep(0.02)
        except Exception as error:
            raise RuntimeError("the lab's own words") from error

    Square = start(1, make)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs()
        assert child.result(LONG) == {"success_count": 0, "error_list": []}
    assert (statuses(Square), made(Square()), ends.lines()) == ({1: "cancelled"}, [], [["1", "rows", "0"]])


# -- on_cancel --------------------------------------------------------------------------------------------------------


def test_an_error_of_on_cancel_is_only_logged(start: Any, gate: Gate, log: CallLog, tmp_path: Path) -> None:
    def on_cancel(self: Any, key: dict[str, Any]) -> None:
        log.record(-1)
        raise RuntimeError("cannot clean up")

    Square = start(2, in_steps(check, gate, log), on_cancel=on_cancel)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs({"n": 1})
        wait_for(lambda: inside(log, 2))
        gate.open()
        assert child.result(LONG) == {"success_count": 1, "error_list": []}
    assert log.numbers().count(-1) == 1
    assert (statuses(Square), made(Square())) == ({1: "cancelled"}, [2])


def test_on_cancel_may_write_to_the_database(start: Any, gate: Gate, log: CallLog) -> None:
    def on_cancel(self: Any, key: dict[str, Any]) -> None:
        Square.Number.insert1({"n": 100 + key["n"]})

    Square = start(1, in_steps(check, gate, log), on_cancel=on_cancel)
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs()
        child.result(LONG)
    assert made(Square.Number()) == [1, 101]


# -- by force ------------------------------------------------------------------------------------------------------


def sleep_in_python(self: Any) -> None:
    time.sleep(2 * LONG)


def sleep_on_the_server(self: Any) -> None:
    name = "pg_sleep" if is_postgresql(self.connection) else "SLEEP"
    self.connection.query(f"SELECT {name}({2 * LONG})")


def sleeping(stall: Callable[[Any], None], log: CallLog) -> Callable[..., None]:
    """A make() that sleeps with 1, having inserted its row."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        log.record(key["n"], os.getpid())
        if key["n"] == 1:
            stall(self)

    return make


@pytest.mark.parametrize("stall", [sleep_in_python, sleep_on_the_server])
@pytest.mark.parametrize("processes", [1, 2])
def test_force_interrupts_at_once(start: Any, stall: Any, processes: int, log: CallLog, ends: CallLog) -> None:
    Square = start(3, sleeping(stall, log))
    with populating(Square, processes=processes) as (child,):
        wait_for(lambda: inside(log, 1))
        assert Square.cancel_jobs({"n": 1}, force=True) == 1
        assert child.result(LONG) == {"success_count": 2, "error_list": []}
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["cancel_request"]) == ("cancelled", 0, "")
    assert made(Square()) == [2, 3]
    assert ends.lines() == [["1", "rows", "0"]]


def test_force_after_a_request_that_was_not_heard(start: Any, gate: Gate, log: CallLog) -> None:
    Square = start(1, in_steps(look_away, gate, log))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        assert Square.cancel_jobs() == 1
        assert Square.cancel_jobs(force=True) == 1
        assert child.result(LONG) == {"success_count": 0, "error_list": []}
    assert statuses(Square) == {1: "cancelled"}


def test_a_polite_request_does_not_weaken_a_forceful_one(start: Any, gate: Gate, log: CallLog) -> None:
    Square = start(1, in_steps(look_away, gate, log))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs(force=True)
        Square.cancel_jobs()
        assert child.result(LONG) == {"success_count": 0, "error_list": []}
    assert statuses(Square) == {1: "cancelled"}


def test_force_kills_a_slot_that_does_not_yield_and_its_clean_up_is_done(
    start: Any, log: CallLog, ends: CallLog
) -> None:
    Square = start(5, sleeping(lambda self: stuck_in_c(2 * LONG), log))
    with populating(Square, processes=2) as (child,):
        wait_for(lambda: inside(log, 1))
        slot = psutil.Process(int(next(words[1] for words in log.lines() if words[0] == "1")))
        assert Square.cancel_jobs({"n": 1}, force=True) == 1
        assert child.result(LONG) == {"success_count": 4, "error_list": []}
        assert has_ended(slot)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["cancel_request"]) == ("cancelled", 0, "")
    assert made(Square()) == [2, 3, 4, 5]
    assert ends.lines() == [["1", "rows", "0"]]


# -- jobs that are claimed and not begun ---------------------------------------------------------------------------


def batch(gate: Gate, log: CallLog, last: Callable[[Any], None]) -> Callable[..., None]:
    """A make() whose second job waits at the gate, while those after it are claimed and not begun.

    It tells how far it is all the time: what others see of that shows when its monitor has looked.
    """

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        log.record(key["n"])
        step = 0
        while key["n"] == 2 and not gate.is_open:
            djjobs.current_job().progress(step)
            step += 1
            time.sleep(0.02)
        if key["n"] == 3:
            last(self)
            log.record(-3)

    return make


def published(Square: Any) -> Any:
    return (job_of(Square, 2)["progress"] or {}).get("done")


def wait_for_a_look(Square: Any) -> None:
    """Until the monitor has looked for requests, from beginning to end."""
    for _ in range(2):
        seen = published(Square)
        wait_for(lambda seen=seen: published(Square) != seen)


@pytest.mark.parametrize("force", [False, True], ids=["ask", "force"])
@pytest.mark.parametrize("look", [True, False], ids=["noticed before", "noticed after"])
def test_a_job_that_is_claimed_and_not_begun_is_cancelled(
    start: Any, batches: None, gate: Gate, log: CallLog, force: bool, look: bool
) -> None:
    """Whether its monitor hears of it before the job begins or after, it does not run to its end."""

    def last(self: Any) -> None:
        deadline = time.monotonic() + LONG / 2
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if not force:
                djjobs.current_job().check_cancelled()

    Square = start(6, batch(gate, log, last))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 2))
        assert status_of(Square, 3) == "reserved"
        wait_for(lambda: published(Square) is not None)
        assert Square.cancel_jobs({"n": 3}, force=force) == 1
        if look:
            wait_for_a_look(Square)
        gate.open()
        assert child.result(LONG) == {"success_count": 5, "error_list": []}
    assert (statuses(Square), made(Square())) == ({3: "cancelled"}, [1, 2, 4, 5, 6])
    assert not inside(log, -3)


def test_all_jobs_of_a_batch_can_be_cancelled_at_once(start: Any, batches: None, gate: Gate, log: CallLog) -> None:
    Square = start(6, batch(gate, log, look_away))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 2))
        assert Square.cancel_jobs() == 5
        assert child.result(LONG) == {"success_count": 1, "error_list": []}
    assert statuses(Square) == {n: "cancelled" for n in range(2, 7)}
    assert made(Square()) == [1]


# -- workers that end meanwhile ------------------------------------------------------------------------------------


def test_the_job_of_a_dead_worker_is_cancelled_when_it_is_recovered(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "lease", 2.0)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.5)
    Square = start(2)
    lose(Square, [1])
    assert Square.cancel_jobs({"n": 1}) == 1
    wait_for(lambda: Square.cleanup_jobs()["recovered"] == 1)
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["cancel_request"]) == ("cancelled", 0, "")
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
    assert Square.retry_jobs() == 1
    assert Square.populate(reserve_jobs=True)["success_count"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_job_whose_worker_ends_before_it_hears_of_the_request_is_cancelled(
    start: Any, gate: Gate, log: CallLog, number: int
) -> None:
    Square = start(1, in_steps(look_away, gate, log))
    with populating(Square) as (child,):
        wait_for(lambda: inside(log, 1))
        Square.cancel_jobs()
        os.kill(child.process.pid, number)
        wait_for(lambda: status_of(Square, 1) != "reserved")
        wait_for(lambda: not worker_rows(Square))
    row = job_of(Square, 1)
    assert (row["status"], row["attempt"], row["cancel_request"]) == ("cancelled", 0, "")


# -- what make() can ask, and what others see ----------------------------------------------------------------------


def test_outside_make_there_is_no_current_job(start: Any) -> None:
    with pytest.raises(djjobs.DjJobsError, match=r"current_job\(\) works inside make\(\)"):
        djjobs.current_job()
    Square = start(1, lambda self, key: (djjobs.current_job().check_cancelled(), insert_square(self, key)))
    with pytest.raises(djjobs.DjJobsError, match=r"populate\(reserve_jobs=True\)"):
        Square.populate()
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
    with pytest.raises(djjobs.DjJobsError):
        djjobs.current_job()


def test_progress_is_seen_by_others_while_make_runs(start: Any, gate: Gate, log: CallLog, tmp_path: Path) -> None:
    """Two jobs say the very same; each is seen in its own row, and gone when the job is."""
    gates = {1: gate, 2: Gate(tmp_path / "second")}

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        djjobs.current_job().progress(3, 8, "filtering \u03b1")
        log.record(key["n"])
        gates[key["n"]].wait()

    Square = start(2, make, keep_completed=True)
    expected = {"done": 3, "total": 8, "note": "filtering \u03b1"}
    with populating(Square) as (child,):
        for n in (1, 2):
            wait_for(lambda n=n: inside(log, n))
            wait_for(lambda n=n: job_of(Square, n)["progress"] == expected, timeout=15)
            assert status_of(Square, n) == "reserved"
            gates[n].open()
        assert child.result()["success_count"] == 2
    assert [job_of(Square, n)["progress"] for n in (1, 2)] == [None, None]


def test_progress_of_slots_is_seen_by_others(start: Any, gate: Gate, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        djjobs.current_job().progress(key["n"])
        gate.wait()
        insert_square(self, key)

    Square = start(2, make)
    with populating(Square, processes=2) as (child,):
        wait_for(lambda: [(job_of(Square, n)["progress"] or {}).get("done") for n in (1, 2)] == [1, 2])
        gate.open()
        assert child.result()["success_count"] == 2
    assert job_counts(Square) == {}


NOTES = {
    "too long": "x" * 100_000,
    "half characters": "\ud800" * 5_000,
    "NUL": "a\0b\u0000",
    "many scripts": "\u03b1\N{SNOWMAN}\N{GRINNING FACE}" * 1_000,
    "no text": 7,
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_no_note_can_stop_a_progress_or_a_heartbeat(start: Any, gate: Gate, note: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        djjobs.current_job().progress(1, 2, note)
        gate.wait()
        insert_square(self, key)

    Square = start(1, make)
    with populating(Square) as (child,):
        told = wait_for(lambda: job_of(Square, 1).get("progress"), timeout=15)
        assert (told["done"], told["total"]) == (1, 2)
        assert told["note"][:3] == {"NUL": "a\\0", "half characters": "\\ud"}.get(
            next(name for name in NOTES if NOTES[name] is note), str(note)[:3]
        )
        gate.open()
        assert child.result()["success_count"] == 1


NUMBERS = [0, 0.5, 10**12, 10**400 // 10**100, True, np.int64(7), np.float32(0.5), np.uint8(3), decimal.Decimal("0.1")]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_progress_takes_every_number(start: Any, value: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        job = djjobs.current_job()
        job.progress(value, value)
        assert json.loads(job._memory.read_progress())["done"] == pytest.approx(float(value))
        insert_square(self, key)

    assert start(1, make).populate(reserve_jobs=True)["success_count"] == 1


@pytest.mark.parametrize(
    "value", [float("nan"), np.nan, float("inf"), "half", None, 10**400, 1j], ids=lambda value: f"{value!r:.9}"
)
def test_progress_refuses_what_is_no_number_clearly(start: Any, value: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        djjobs.current_job().progress(value)

    with pytest.raises(djjobs.DjJobsError, match=r"progress\(\) takes .*numbers; done was"):
        start(1, make).populate(reserve_jobs=True)


@pytest.mark.parametrize("value", [0, 0.5, 10**12])
def test_progress_takes_any_number_and_asks_nothing_of_the_connection(
    start: Any, standing: Standing, value: float
) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        for _ in range(10_000):
            djjobs.current_job().progress(value, None)
        insert_square(self, key)

    with statements_of(standing.schema.connection) as statements:
        assert start(1, make).populate(reserve_jobs=True)["success_count"] == 1
    assert len(statements) < 1000
