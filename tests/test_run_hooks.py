"""prepare_run before the first job of a run and finish_run after the last: once each, whoever works or dies."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from helpers import wait_for
from pipelines import Child, forked, in_processes, rows_of, statements_of
from workloads.lives import Gate, forget_all_workers, kill_tree, note_sighting, populating
from workloads.squares import (
    CallLog,
    Standing,
    another_connection,
    change_jobs,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

import djjobs
from djjobs.run.run import Run
from djjobs.run.state import Progress
from djjobs.worker import WorkerOptions, run_worker

#: A time-out that a busy machine keeps.
PATIENCE = 60


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in the processes to come. Other tests have a lease that does not end while they last."""
    monkeypatch.setattr(djjobs.settings, "lease", 3)
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.4)


class Hooks:
    """Hooks that record each call; the first call of the `stuck` one waits at the gate."""

    def __init__(self, log: CallLog, gate: Gate, stuck: str = "") -> None:
        self._log, self._gate, self._stuck = log, gate, stuck

    def calls(self, name: str) -> list[int]:
        """The processes that called a hook, or make()."""
        return [int(words[1]) for words in self._log.lines() if words[0] == name]

    def make(self, table: Any, key: dict[str, Any]) -> None:
        run = djjobs.current_job().run
        self._log.record("make", os.getpid(), key["n"], run.details["by"])
        insert_square(table, key)

    def prepare_run(self, table: Any, run: Run) -> dict[str, int]:
        return {"by": self._call("prepare_run")}

    def finish_run(self, table: Any, run: Run) -> dict[str, Any]:
        return {"by": self._call("finish_run"), "squares": len(table), "details": run.details}

    def _call(self, name: str) -> int:
        self._log.record(name, os.getpid())
        if self._stuck == name and len(self.calls(name)) == 1:
            self._gate.wait(600)
        return os.getpid()

    def members(self) -> dict[str, Any]:
        """For the class of a table."""
        return {
            "make": lambda table, key: self.make(table, key),
            "prepare_run": lambda table, run: self.prepare_run(table, run),
            "finish_run": lambda table, run: self.finish_run(table, run),
        }

    def details_seen(self) -> set[int]:
        return {int(words[3]) for words in self._log.lines() if words[0] == "make"}


@pytest.fixture
def start(standing: Standing) -> Callable[..., Any]:
    def start_over(count: int, **members: Any) -> Any:
        Square = standing.start_over(count, **members)
        forget_all_workers(Square)
        return Square

    return start_over


def row_of(run: Run) -> dict[str, Any]:
    (row,) = rows_of(djjobs.runs(run._queue.jobs) & {"run_id": run.run_id})
    return row


@contextmanager
def a_worker(Square: Any, **options: Any) -> Iterator[Child]:
    """`djjobs worker` in a process of its own; what it starts is gone afterwards."""
    options = {"processes": 3, "drain": True, **options}
    with forked(Square.Number, 1, lambda _: run_worker((Square,), WorkerOptions(**options))) as (child,):
        try:
            yield child
        finally:
            kill_tree(child.process.pid)


# -- once, whoever works ---------------------------------------------------------------------------------------


def work_in_eight_populates(Square: Any) -> None:
    in_processes(Square.Number, 8, lambda _: Square.populate(reserve_jobs=True))


def work_in_eight_slots(Square: Any) -> None:
    Square.populate(reserve_jobs=True, processes=8)


def work_in_a_worker(Square: Any) -> None:
    with a_worker(Square, processes=8) as child:
        assert child.result() == 0


@pytest.mark.parametrize("work", [work_in_eight_populates, work_in_eight_slots, work_in_a_worker])
@pytest.mark.parametrize("keep", [True, False])
def test_each_hook_is_called_once_with_eight_at_work(
    start: Any, log: CallLog, gate: Gate, work: Callable[[Any], None], keep: bool
) -> None:
    hooks = Hooks(log, gate)
    Square = start(60, keep_completed=keep, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    assert run.details is None and run.results is None
    work(Square)
    (preparer,), (finisher,) = hooks.calls("prepare_run"), hooks.calls("finish_run")
    assert len(hooks.calls("make")) == 60
    assert log.lines()[0][0] == "prepare_run" and log.lines()[-1][0] == "finish_run"
    assert hooks.details_seen() == {preparer}
    assert run.details == {"by": preparer}
    assert run.results == {"by": finisher, "squares": 60, "details": {"by": preparer}}
    assert (run.state, run.error, run.progress()) == ("done", "", Progress(60, done=60))


def test_each_run_has_its_own(start: Any) -> None:
    seen: dict[int, Any] = {}

    def make(self: Any, key: dict[str, Any]) -> None:
        seen[key["n"]] = djjobs.current_job().run.details
        insert_square(self, key)

    def finish_run(self: Any, run: Run) -> list[Any]:
        return [run.name, run.state, run.progress().done, len(run.jobs)]

    Square = start(6, make=make, prepare_run=lambda self, run: f"for {run.name}", finish_run=finish_run)
    one = Square.schedule_jobs("n < 3", name="one")
    two = Square.schedule_jobs(name="two")
    Square.populate(reserve_jobs=True, order="random")
    assert seen == {**dict.fromkeys((1, 2), "for one"), **dict.fromkeys((3, 4, 5, 6), "for two")}
    assert (one.results, two.results) == (["one", "running", 2, 0], ["two", "running", 4, 0])


@pytest.mark.parametrize("value", [None, 0, "text \u2713", '"quoted"', [1, {"a": None}], {"x": 1.5}, True])
def test_any_json_comes_back_as_it_was(start: Any, value: Any) -> None:
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        seen.append(djjobs.current_job().run.details)
        insert_square(self, key)

    Square = start(1, make=make, prepare_run=lambda self, run: value, finish_run=lambda self, run: value)
    run = Square.schedule_jobs(name="m1")
    Square.populate(reserve_jobs=True)
    assert (seen, run.details, run.results) == ([value], value, value)
    assert djjobs.Run.of(Square.Number, run.run_id).details == value


def test_a_run_without_jobs_has_no_hooks(start: Any, log: CallLog, gate: Gate) -> None:
    Square = start(0, **Hooks(log, gate).members())
    run = Square.schedule_jobs(name="nothing to do")
    Square.populate(reserve_jobs=True)
    assert (run.state, run.results, log.lines()) == ("done", None, [])


def test_a_cancelled_run_is_finished_too(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate)
    Square = start(3, **{**hooks.members(), "finish_run": lambda self, run: run.state})
    run = Square.schedule_jobs(name="m1")
    Square.populate("n = 1", reserve_jobs=True)
    run.cancel()
    assert (run.state, run.results) == ("cancelled", None)
    Square.populate(reserve_jobs=True)
    assert (run.state, run.results) == ("cancelled", "cancelled")


def test_a_retried_run_is_not_finished_again(start: Any, log: CallLog, gate: Gate) -> None:
    hooks, fails = Hooks(log, gate), [True]

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 2 and fails:
            raise ValueError("no such file")
        hooks.make(self, key)

    Square = start(3, **{**hooks.members(), "make": make})
    run = Square.schedule_jobs(name="m1")
    Square.populate(reserve_jobs=True, suppress_errors=True)
    assert (run.state, run.results["squares"], run.progress().error) == ("done", 2, 1)
    fails.clear()
    Square.retry_jobs()
    assert run.state == "running"
    Square.populate(reserve_jobs=True)
    assert (run.state, run.results["squares"], run.progress()) == ("done", 2, Progress(3, done=3))
    assert (len(hooks.calls("prepare_run")), len(hooks.calls("finish_run"))) == (1, 1)


# -- what it costs -----------------------------------------------------------------------------------------------


def about_runs(Square: Any, count: int) -> int:
    """How many statements of a populate that makes so many rows are about `~runs`."""
    Square.Number.insert([{"n": n} for n in range(1, count + 1)])
    Square.schedule_jobs(min_scheduling_interval=0)
    with statements_of(Square.Number.connection) as statements:
        assert Square.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == count
    return sum("~runs" in sql for sql in statements)


def test_tables_without_hooks_do_not_pay_for_them(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djjobs.run.hooks._LOOK_INTERVAL", 3600)
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0.5)  # nobody looks a second time
    # One of them asks who holds something, for the case that it is dead.
    assert about_runs(start(0), 5) == about_runs(start(0), 60) <= 3


def test_tables_with_hooks_pay_one_statement_a_job_at_most(
    start: Any, log: CallLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djjobs.run.hooks._LOOK_INTERVAL", 3600)
    Square = start(0, **Hooks(log, gate).members())
    assert about_runs(Square, 60) <= 60 + 12


def test_looks_that_take_long_are_followed_by_a_rest_and_no_run_is_forgotten(
    start: Any, log: CallLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djjobs.run.hooks._LOOK_INTERVAL", 0)
    monkeypatch.setattr("djjobs.run.hooks._QUICK", 0)
    monkeypatch.setattr("djjobs.run.hooks._REST", 1e6)
    hooks = Hooks(log, gate)
    Square = start(0, **hooks.members())
    assert about_runs(Square, 60) <= 2 + 12
    assert len(hooks.calls("finish_run")) == 1


# -- preparing ------------------------------------------------------------------------------------------------------


def test_an_error_is_the_jobs_and_the_next_one_tries_again(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate)

    def prepare_run(self: Any, run: Run) -> Any:
        djjobs.current_job().run  # to have looked at the run changes nothing
        if len(hooks.calls("prepare_run")) < 2:
            log.record("prepare_run", os.getpid())
            raise OSError("the disk is full")
        return hooks.prepare_run(self, run)

    Square = start(4, **{**hooks.members(), "prepare_run": prepare_run})
    run = Square.schedule_jobs(name="m1")
    result = Square.populate(reserve_jobs=True, suppress_errors=True)
    assert result["success_count"] == 2
    assert [message for _, message in result["error_list"]] == ["OSError: the disk is full"] * 2
    assert statuses(Square) == {1: "error", 2: "error"}
    assert "prepare_run" in rows_by_number(Square)[1]["error_stack"]
    assert len(hooks.calls("prepare_run")) == 3 and run.details == {"by": os.getpid()}
    assert run.results["squares"] == 2


def test_a_retry_policy_holds_for_preparing_too(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate)

    def prepare_run(self: Any, run: Run) -> Any:
        if djjobs.current_job().attempt == 1:
            raise OSError("the disk is full")
        return hooks.prepare_run(self, run)

    Square = start(1, **{**hooks.members(), "prepare_run": prepare_run}, max_attempts=2, backoff=0)
    run = Square.schedule_jobs(name="m1")
    assert Square.populate(reserve_jobs=True)["success_count"] == 1
    assert run.state == "done"


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), {"key": object()}, "nul \0", "half \ud800"])
@pytest.mark.parametrize("hook", ["prepare_run", "finish_run"])
def test_what_is_no_json_is_one_clear_error(start: Any, value: Any, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djjobs.run.hooks._PAUSE", 0)
    Square = start(1, **{hook: lambda self, run: value})
    run = Square.schedule_jobs(name="m1")
    words = f"{hook} of Square returned what is not JSON"
    if hook == "prepare_run":
        with pytest.raises(djjobs.DjJobsError, match=words):
            Square.populate(reserve_jobs=True)
        assert (statuses(Square), run.details) == ({1: "error"}, None)
    else:
        Square.populate(reserve_jobs=True)
        assert run.state == "done" and run.results is None and words in run.error
        assert words in djjobs.runs(Square.Number).status()["finish_error"].iloc[0]


def test_who_waits_for_another_to_prepare_gives_its_job_back_when_stopped(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate, "prepare_run")
    Square = start(2, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with populating(Square, 2) as children:
        wait_for(lambda: run.progress().reserved == 2 and hooks.calls("prepare_run"))
        (waiting,) = (child for child in children if child.process.pid not in hooks.calls("prepare_run"))
        os.kill(waiting.process.pid, signal.SIGTERM)
        waiting.process.join(PATIENCE)
        assert sorted(statuses(Square).values()) == ["reserved", "scheduled"]
        assert {row["attempt"] for row in rows_by_number(Square).values()} == {0}
        gate.open()
        run.wait(timeout=PATIENCE)
    assert len(hooks.calls("prepare_run")) == 1 and made(Square()) == [1, 2]


def test_who_waits_can_be_cancelled(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate, "prepare_run")
    Square = start(2, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with populating(Square, 2) as children:
        wait_for(lambda: run.progress().reserved == 2 and hooks.calls("prepare_run"))
        assert run.cancel() == 2
        wait_for(lambda: run.progress().cancelled == 1)
        gate.open()
        run.wait(timeout=PATIENCE)
        assert [child.result()["success_count"] for child in children] == [0, 0]
    assert (run.state, made(Square())) == ("cancelled", [])


def test_to_wait_for_others_is_no_part_of_the_time_that_make_may_take(start: Any, log: CallLog) -> None:
    """Two prepare the run one after the other, so that the third waits for longer than make() may take."""

    def prepare_run(self: Any, run: Run) -> None:
        log.record("prepare_run", os.getpid())
        time.sleep(2)
        if len(log.lines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Square = start(3, prepare_run=prepare_run, timeout=3.5)
    run = Square.schedule_jobs(name="m1")
    with populating(Square, 3) as children:
        for child in children:
            child.process.join(PATIENCE)
    assert len(log.lines()) == 2
    Square.populate(reserve_jobs=True)
    assert (run.state, run.progress()) == ("done", Progress(3, done=3))


# -- dying ------------------------------------------------------------------------------------------------------------


def kill_it(child: Child, victim: int) -> None:
    """The process alone, as for want of memory; whoever keeps watch over it sees that."""
    os.kill(victim, signal.SIGKILL)


def kill_all(child: Child, victim: int) -> None:
    """With everybody who could have noticed, as when a node loses its power."""
    kill_tree(child.process.pid)


@pytest.fixture(params=[kill_it, kill_all])
def kill(request: pytest.FixtureRequest) -> Callable[[Child, int], None]:
    if request.param is kill_all:
        request.getfixturevalue("short_lease")
    return request.param


@pytest.mark.parametrize("hook", ["prepare_run", "finish_run"])
def test_when_a_populate_dies_in_a_hook_another_calls_it(
    start: Any, log: CallLog, gate: Gate, hook: str, kill: Callable[[Child, int], None]
) -> None:
    hooks = Hooks(log, gate, hook)
    Square = start(12, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with populating(Square, 3) as children:
        (first,) = wait_for(lambda: hooks.calls(hook))
        (child,) = (child for child in children if child.process.pid == first)
        kill(child, first)
        child.process.join(PATIENCE)
        for other in children:
            if other is not child:
                other.process.join(PATIENCE)
    # A populate ends when there is nothing to do; whoever comes next sees to what is left.
    wait_for(lambda: Square.populate(reserve_jobs=True, suppress_errors=True) and run.state == "done", every=0.5)
    check_second_call(Square, run, hooks, hook, first)


@pytest.mark.parametrize("hook", ["prepare_run", "finish_run"])
def test_when_a_slot_of_a_worker_dies_in_a_hook_another_calls_it(
    start: Any, log: CallLog, gate: Gate, hook: str, kill: Callable[[Child, int], None]
) -> None:
    hooks = Hooks(log, gate, hook)
    Square = start(12, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with a_worker(Square, drain=False) as one, a_worker(Square, drain=False, idle_timeout=600) as two:
        (first,) = wait_for(lambda: hooks.calls(hook))
        victims = [child for child in (one, two) if first in descendants(child)]
        kill(victims[0], first)
        run.wait(timeout=PATIENCE)
    check_second_call(Square, run, hooks, hook, first)


def descendants(child: Child) -> set[int]:
    return {process.pid for process in psutil.Process(child.process.pid).children(recursive=True)}


def check_second_call(Square: Any, run: Run, hooks: Hooks, hook: str, first: int) -> None:
    calls = hooks.calls(hook)
    assert len(calls) == 2 and calls[0] == first != calls[1]
    other = "finish_run" if hook == "prepare_run" else "prepare_run"
    assert len(hooks.calls(other)) == 1
    assert run.details == {"by": hooks.calls("prepare_run")[-1]}
    assert hooks.details_seen() == {run.details["by"]}
    assert run.results == {"by": hooks.calls("finish_run")[-1], "squares": 12, "details": run.details}
    assert made(Square()) == list(range(1, 13)) and run.state == "done"


def test_a_mark_that_was_taken_over_stores_nothing(start: Any) -> None:
    """As when a worker is suspended in the hook for longer than its lease."""
    theirs = another_connection()

    def finish_run(self: Any, run: Run) -> str:
        theirs.query(f"UPDATE {runs} SET finish_worker = '{'x' * 36}' WHERE run_id = {run.run_id}")
        return "too late"

    def prepare_run(self: Any, run: Run) -> str:
        theirs.query(
            f"UPDATE {runs} SET details = '\"theirs\"', prepared_time = created, prepare_claim = 1 "
            f"WHERE run_id = {run.run_id}"
        )
        return "too late"

    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        seen.append(djjobs.current_job().run.details)
        insert_square(self, key)

    Square = start(2, make=make, prepare_run=prepare_run, finish_run=finish_run)
    runs = djjobs.runs(Square.Number).full_table_name
    run = Square.schedule_jobs(name="m1")
    Square.populate(reserve_jobs=True)
    theirs.close()
    assert seen == ["theirs", "theirs"] and run.details == "theirs"
    assert (run.results, run.state) == (None, "running")


def test_a_run_whose_last_job_ended_unseen_is_finished_by_the_next_who_comes(
    start: Any, log: CallLog, gate: Gate
) -> None:
    """As when a process dies between its commit and the look at the run."""
    hooks = Hooks(log, gate)
    Square = start(3, **hooks.members())
    run = Square.schedule_jobs("n < 3", min_scheduling_interval=0)
    change_jobs(Square, [1, 2], "status = 'success'")
    assert (run.state, run.progress()) == ("running", Progress(2, done=2))
    Square.populate("n = 7", reserve_jobs=True)
    assert (run.state, len(hooks.calls("finish_run"))) == ("done", 1)


def test_a_busy_worker_sees_to_it_too(start: Any, log: CallLog, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djjobs.run.hooks._LOOK_INTERVAL", 0)
    monkeypatch.setattr("djjobs.run.hooks._QUICK", 3600)  # no look is called long, and followed by a rest
    finished: list[tuple[str, int]] = []
    Square = start(8, finish_run=lambda self, run: finished.append((run.name, len(self))))
    Square.schedule_jobs("n < 3", name="left")
    change_jobs(Square, [1, 2], "status = 'success'")
    Square.schedule_jobs("n > 2", name="mine")
    Square.populate(reserve_jobs=True, schedule_jobs=False)
    assert finished == [("left", 1), ("mine", 6)]


def test_a_run_whose_last_job_kills_its_slot_is_finished(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate)

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        hooks.make(self, key)

    Square = start(3, **{**hooks.members(), "make": make}, max_attempts=1)
    run = Square.schedule_jobs(name="m1")
    with a_worker(Square, processes=1) as child:
        assert child.result() == 1
    assert (run.state, run.results["squares"], run.progress()) == ("done", 2, Progress(3, done=2, error=1))


# -- finishing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2, 3, 5])
def test_finishing_is_tried_three_times(
    start: Any, log: CallLog, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("djjobs.run.hooks._PAUSE", 0)

    def finish_run(self: Any, run: Run) -> str:
        log.record("finish_run", os.getpid())
        self.Number.connection.query("SELECT 1")
        if len(log.lines()) <= failures:
            raise OSError("the disk is full")
        return "fine"

    Square = start(2, finish_run=finish_run)
    run = Square.schedule_jobs(name="m1")
    assert Square.populate(reserve_jobs=True)["success_count"] == 2
    assert run.state == "done" and "the disk is full" in caplog.text
    assert len(log.lines()) == min(failures + 1, 3)
    assert (run.results, run.error) == (("fine", "") if failures < 3 else (None, "OSError: the disk is full"))
    Square.populate(reserve_jobs=True)
    assert len(log.lines()) == min(failures + 1, 3)


def test_a_finish_that_kills_its_workers_comes_to_an_end(
    start: Any, log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_run(self: Any, run: Run) -> None:
        log.record("finish_run", os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    Square = start(2, finish_run=finish_run)
    run = Square.schedule_jobs(name="m1")
    with a_worker(Square, processes=1) as child:
        child.result()
    assert (run.state, len(log.lines())) == ("done", 3)
    assert "lost its worker" in run.error


def test_a_stop_leaves_the_finish_to_others_and_counts_no_try(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate, "finish_run")
    Square = start(2, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with populating(Square) as (child,):
        wait_for(lambda: hooks.calls("finish_run"))
        os.kill(child.process.pid, signal.SIGTERM)
        child.process.join(PATIENCE)
    row = row_of(run)
    assert (row["finish"], row["finish_worker"], row["finish_tries"], run.state) == (1, None, 0, "running")
    Square.populate(reserve_jobs=True)
    assert (run.state, len(hooks.calls("finish_run"))) == ("done", 2)


@pytest.mark.usefixtures("short_lease")
def test_a_finish_that_takes_longer_than_the_lease_is_not_taken_over(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate, "finish_run")
    Square = start(2, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    with populating(Square) as (child,):
        began = wait_for(lambda: hooks.calls("finish_run")) and time.monotonic()
        while time.monotonic() < began + 2 * djjobs.settings.lease:
            Square.populate(reserve_jobs=True)
            time.sleep(0.2)
        assert run.state == "running"
        gate.open()
        child.result()
    assert (run.state, hooks.calls("finish_run")) == ("done", [child.process.pid])


@pytest.mark.usefixtures("short_lease")
def test_a_worker_that_is_not_in_the_list_gets_its_lease(start: Any, log: CallLog, gate: Gate) -> None:
    hooks = Hooks(log, gate)
    Square = start(1, **hooks.members())
    run = Square.schedule_jobs(name="m1")
    change_jobs(Square, [1], "status = 'success'")
    runs = djjobs.runs(Square.Number).full_table_name
    mark = f"finish_worker = '{'x' * 36}', finish_claim = 1"
    Square.Number.connection.query(f"UPDATE {runs} SET {mark} WHERE run_id = {run.run_id}")
    for since, calls in ((0, 0), (3600, 1)):
        note_sighting(Square, "x" * 36, since)
        Square.populate(reserve_jobs=True)
        assert len(hooks.calls("finish_run")) == calls
    assert run.state == "done"


def test_a_hook_that_the_table_no_longer_has_is_not_waited_for_for_ever(start: Any) -> None:
    Square = start(1, finish_run=lambda self, run: "never")
    run = Square.schedule_jobs(name="m1")
    change_jobs(Square, [1], "status = 'success'")
    del Square.finish_run
    Square.populate(reserve_jobs=True)
    assert run.state == "running"
    Square.cleanup_jobs()
    assert (run.state, run.results) == ("done", None)


@pytest.mark.parametrize("hook", [True, False])
def test_a_worker_tells_when_a_run_ends(start: Any, caplog: pytest.LogCaptureFixture, hook: bool) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 2:
            raise ValueError("no such file")
        insert_square(self, key)

    Square = start(3, make=make, **({"finish_run": lambda self, run: 1} if hook else {}))
    run = Square.schedule_jobs(name="m1")
    with caplog.at_level(logging.INFO, logger="djjobs"):
        run_worker((Square,), WorkerOptions(processes=2, drain=True))
    Square.Number.connection.connect()
    told = [record.getMessage() for record in caplog.records if "Run " in record.getMessage()]
    assert told == [f"Run {run.run_id} (m1) of Square is done: 3 of 3 jobs over, 1 failed."]
