"""Runs that others prepare, finish, reopen, cancel or remove at the same moment: each guard of a run's row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from interleaving import Beside, another, claims_of, give_back_slot, just, registration_of, schedule_automatically
from pipelines import rows_of
from workloads.lives import ago, forget_all_workers
from workloads.squares import another_connection, change_jobs, made, rows_by_number, statuses

import djjobs

#: The statements at which the other one comes in between.
FIND_OVER = r"^SELECT run\.run_id, run\.finish FROM"
LOCK_PREPARING = r"^SELECT prepared_time, "
LOCK_FINISHING = r"^SELECT finish_worker, "
CANCEL_RUN = r"^UPDATE \S*~runs\W+ AS run SET cancel_time"
FIND_OPEN = r"^SELECT key_hash FROM \S*~jobs\W"

SOMEBODY = "a" * 36


@pytest.fixture
def start(standing: Any) -> Callable[..., Any]:
    def start_over(count: int, **members: Any) -> Any:
        Square = standing.start_over(count, **members)
        forget_all_workers(Square)
        return Square

    return start_over


class Theirs:
    """Somebody else, who changes a run and its jobs over a connection of their own."""

    def __init__(self, table: Any) -> None:
        self._runs, self.connection = djjobs.runs(table.Number).full_table_name, another_connection()

    def change(self, run: Any, changes: str) -> None:
        self.connection.query(f"UPDATE {self._runs} SET {changes} WHERE run_id = {run.run_id}")

    def __enter__(self) -> Theirs:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def insert_without_run(table: Any, restriction: str) -> None:
    assert schedule_automatically(table, restriction) == 1
    assert None in {row["run_id"] for row in rows_by_number(table).values()}


def row_of(table: Any, run: Any) -> dict[str, Any]:
    (row,) = rows_of(djjobs.runs(table.Number) & {"run_id": run.run_id})
    return row


# -- preparing -----------------------------------------------------------------------------------------------------

#: How the mark to prepare a run is taken from who calls the hook.
TAKEN = {
    "by another worker": f"prepare_worker = '{SOMEBODY}'",
    "by another claim": "prepare_claim = prepare_claim + 1",
    "for another job": f"prepare_job = '{'b' * 32}'",
}


@pytest.mark.parametrize("taken", TAKEN)
def test_what_prepare_run_returns_after_its_mark_was_taken_is_not_stored(start: Any, taken: str) -> None:
    """Nobody alive has the mark then, so it is called again; what counts is what the second call returns."""
    calls: list[int] = []

    def prepare_run(self: Any, run: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            theirs.change(run, TAKEN[taken])
        return len(calls)

    Square = start(1, prepare_run=prepare_run)
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs:
        assert Square.populate(reserve_jobs=True)["success_count"] == 1
    assert (calls, run.details) == ([1, 1], 2)


def test_what_prepare_run_returns_after_another_has_prepared_the_run_is_not_stored(start: Any) -> None:
    def prepare_run(self: Any, run: Any) -> str:
        theirs.change(run, "prepared_time = created, details = '\"theirs\"'")
        return "ours"

    Square = start(1, prepare_run=prepare_run)
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs:
        Square.populate(reserve_jobs=True)
    assert run.details == "theirs"


def test_two_who_want_to_prepare_a_run_do_not_pass_each_other(start: Any) -> None:
    """The run is locked from the look at its mark until the mark is taken."""
    Square = start(1, prepare_run=lambda self, run: "ours")
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs, Beside(theirs.connection, lambda: theirs.change(run, "name = 'm2'")) as beside:
        with just("after", Square, LOCK_PREPARING, beside.start_and_wait):
            assert Square.populate(reserve_jobs=True)["success_count"] == 1
        assert beside.had_to_wait
    assert run.details == "ours"


#: What becomes of the job in whose name a run was being prepared; the mark is dead then.
GONE = {
    "ended": "status = 'error'",
    "with another worker": f"worker_id = '{'b' * 36}'",
    "claimed again": "claim = 8",
    "in another run": "run_id = 42",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("gone", [*GONE, "of another key"])
def test_a_run_whose_preparer_has_lost_its_job_is_prepared_by_the_next(start: Any, gone: str) -> None:
    """Who would take the mark for alive would wait for ever."""
    Square = start(3, prepare_run=lambda self, run: "ours")
    run = Square.schedule_jobs(name="m1")
    hashes = {n: row["key_hash"] for n, row in rows_by_number(Square).items()}
    change_jobs(Square, [1], f"status = 'reserved', worker_id = '{SOMEBODY}', claim = 7")
    job = hashes[3] if gone == "of another key" else hashes[1]
    with Theirs(Square) as theirs:
        theirs.change(run, f"prepare_worker = '{SOMEBODY}', prepare_claim = 7, prepare_job = '{job}'")
    if gone in GONE:
        change_jobs(Square, [1], GONE[gone])
    assert Square.populate("n = 2", reserve_jobs=True)["success_count"] == 1
    assert run.details == "ours"


# -- finishing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "taken", [f"finish_worker = '{SOMEBODY}'", "finish_claim = finish_claim + 1", "finish = 0, ended_time = created"]
)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_what_comes_of_finish_run_after_its_mark_was_taken_is_not_stored(start: Any, taken: str, fails: bool) -> None:
    seen: list[Any] = []

    def finish_run(self: Any, run: Any) -> str:
        theirs.change(run, taken)
        seen.append(row_of(Square, run))
        if fails:
            raise ValueError("too late")
        return "too late"

    Square = start(1, finish_run=finish_run)
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs:
        registration_of(Square, SOMEBODY).beat()
        Square.populate(reserve_jobs=True)
    assert row_of(Square, run) == seen[-1] and len(seen) == 1


def finishing(calls: list[int]) -> Callable[..., None]:
    return lambda self, run: calls.append(run.run_id)


def test_a_run_that_another_begins_to_finish_before_it_is_locked_is_left_to_that_one(start: Any) -> None:
    calls: list[int] = []
    Square = start(1, finish_run=finishing(calls))
    run = Square.schedule_jobs(name="m1")
    registration_of(Square, SOMEBODY).beat()
    with Theirs(Square) as theirs:
        mark = f"finish_worker = '{SOMEBODY}', finish_claim = 1, finish_since = created, finish_tries = 1"
        with just("before", Square, LOCK_FINISHING, lambda: theirs.change(run, mark)):
            Square.populate(reserve_jobs=True)
    assert calls == []
    assert row_of(Square, run)["finish_worker"] == SOMEBODY


@pytest.mark.parametrize("over", ["finish = 0, ended_time = created", "ended_time = created"])
def test_a_run_that_another_has_ended_before_it_is_locked_is_not_finished_again(start: Any, over: str) -> None:
    calls: list[int] = []
    Square = start(1, finish_run=finishing(calls))
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs, just("before", Square, LOCK_FINISHING, lambda: theirs.change(run, over)):
        Square.populate(reserve_jobs=True)
    assert calls == []


def test_a_run_of_which_a_job_is_put_back_before_it_is_locked_is_not_finished_yet(start: Any) -> None:
    calls: list[int] = []
    Square = start(2, finish_run=finishing(calls), keep_completed=True)
    run = Square.schedule_jobs(name="m1")
    change_jobs(Square, [2], "status = 'error'")
    with another(Square) as theirs:
        with just("before", Square, LOCK_FINISHING, lambda: theirs.retry_jobs("n = 2")):
            Square.populate("n = 1", reserve_jobs=True)
        assert (calls, run.state) == ([], "running")
    Square.populate(reserve_jobs=True)
    assert (calls, run.state) == ([run.run_id], "done")


def test_two_who_want_to_finish_a_run_do_not_pass_each_other(start: Any) -> None:
    Square = start(1, finish_run=finishing([]))
    run = Square.schedule_jobs(name="m1")
    with Theirs(Square) as theirs, Beside(theirs.connection, lambda: theirs.change(run, "name = 'm2'")) as beside:
        with just("after", Square, LOCK_FINISHING, beside.start_and_wait):
            Square.populate(reserve_jobs=True)
        assert beside.had_to_wait
    assert run.state == "done"


def test_a_transaction_that_finish_run_leaves_open_does_not_keep_others_from_the_run(start: Any) -> None:
    """What it has done there is undone before it is tried again."""
    calls: list[int] = []

    def finish_run(self: Any, run: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            self.connection.start_transaction()
            self.insert1({"n": 2, "square": 0}, allow_direct_insert=True)
            raise ValueError("in the middle")

    Square = start(2, finish_run=finish_run)
    run = Square.schedule_jobs("n = 1", name="m1")
    Square.populate("n = 1", reserve_jobs=True)
    assert (calls, run.state, made(Square())) == ([1, 1], "done", [1])


def test_a_slot_that_has_died_leaves_the_runs_of_others_alone(start: Any) -> None:
    """Only what it was finishing itself, and what nobody has ended since, is for others to finish."""
    Square = start(4, finish_run=finishing([]))
    runs = {n: Square.schedule_jobs(f"n = {n}", name=f"m{n}") for n in (1, 2, 3, 4)}
    marks = {
        1: f"finish_worker = '{SOMEBODY}', finish_claim = 1",
        2: f"finish_worker = '{SOMEBODY}', finish_claim = {2**40 + 1}",
        3: f"finish_worker = '{'b' * 36}', finish_claim = 1",
        4: f"finish_worker = '{SOMEBODY}', finish_claim = 1, ended_time = created",
    }
    with Theirs(Square) as theirs:
        for n, mark in marks.items():
            theirs.change(runs[n], f"{mark}, finish_since = created")
    before = {n: row_of(Square, run) for n, run in runs.items()}
    give_back_slot(Square, SOMEBODY)
    after = {n: row_of(Square, run) for n, run in runs.items()}
    assert after[1]["finish_worker"] is None
    assert {n: after[n] for n in (2, 3, 4)} == {n: before[n] for n in (2, 3, 4)}


# -- the end of a run without hooks --------------------------------------------------------------------------------


def test_a_run_of_which_a_job_is_put_back_before_its_end_is_noted_has_not_ended(start: Any) -> None:
    Square = start(2, keep_completed=True)
    run = Square.schedule_jobs(name="m1")
    change_jobs(Square, [2], "status = 'error'")
    with another(Square) as theirs, just("after", Square, FIND_OVER, lambda: theirs.retry_jobs("n = 2")):
        Square.populate("n = 1", reserve_jobs=True)
    assert (run.ended, run.state) == (None, "running")


def test_the_end_of_a_run_is_noted_once(start: Any) -> None:
    """Who comes second does not change when it was."""
    Square = start(1)
    run = Square.schedule_jobs(name="m1")
    with (
        Theirs(Square) as theirs,
        just("after", Square.Number.connection, FIND_OVER, lambda: theirs.change(run, "ended_time = '2001-01-01'")),
    ):
        Square.populate(reserve_jobs=True)
    assert run.ended.year == 2001


def test_a_retry_opens_the_runs_again_whose_jobs_it_puts_back_and_no_others(start: Any) -> None:
    Square = start(3, keep_completed=True)
    runs = {n: Square.schedule_jobs(f"n = {n}", name=f"m{n}") for n in (1, 2, 3)}
    change_jobs(Square, [1, 2], "status = 'error'")
    change_jobs(Square, [3], "status = 'success'")
    with Theirs(Square) as theirs:
        for run in runs.values():
            theirs.change(run, "ended_time = created")
    assert Square.retry_jobs("n <> 2") == 1
    assert {n: run.ended is None for n, run in runs.items()} == {1: True, 2: False, 3: False}


@pytest.mark.parametrize("hook", [True, False], ids=["finish_run", "no hook"])
def test_jobs_that_are_in_no_run_keep_no_run_from_its_end(start: Any, hook: bool) -> None:
    """Events put such jobs there at any moment."""
    calls: list[int] = []
    Square = start(2, **({"finish_run": finishing(calls)} if hook else {}))
    run = Square.schedule_jobs("n = 1", name="m1")
    change_jobs(Square, [1], "status = 'error'")
    insert_without_run(Square, "n = 2")
    if hook:
        Square.populate("n = 7", reserve_jobs=True)
        assert calls == [run.run_id]
    else:
        Square.cleanup_jobs()
    assert run.ended is not None


def test_jobs_that_are_in_no_run_keep_no_old_run_from_being_removed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "retention", 3600)
    Square = start(2)
    run = Square.schedule_jobs("n = 1", name="m1")
    Square.populate(reserve_jobs=True, schedule_jobs=False)
    insert_without_run(Square, "n = 2")
    with Theirs(Square) as theirs:
        theirs.change(run, "ended_time = '2001-01-01'")
    assert Square.cleanup_jobs()["runs"] == 1


# -- clean-up of runs ----------------------------------------------------------------------------------------------


def test_a_clean_up_ends_no_run_that_waits_has_ended_or_is_to_be_finished(start: Any) -> None:
    Square = start(4, finish_run=finishing([]))
    over, unfinished, ended, waiting = (Square.schedule_jobs(f"n = {n}", name=f"m{n}") for n in (1, 2, 3, 4))
    change_jobs(Square, [1, 2, 3], "status = 'success'")
    with Theirs(Square) as theirs:
        theirs.change(ended, f"ended_time = {ago(theirs.connection, 60)}")
        for run in (over, ended, waiting):
            theirs.change(run, "finish = 0")
    before = row_of(Square, ended)
    Square.cleanup_jobs()
    assert over.ended is not None
    assert (unfinished.ended, waiting.ended) == (None, None)
    assert row_of(Square, ended) == before


def test_a_run_that_is_reopened_before_it_is_removed_stays(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "retention", 3600)
    Square = start(2)
    runs = [Square.schedule_jobs(f"n = {n}", name=f"m{n}") for n in (1, 2)]
    Square.populate(reserve_jobs=True)
    with Theirs(Square) as theirs:
        for run in runs:
            theirs.change(run, "ended_time = '2001-01-01'")
        reopen = r"^DELETE FROM \S*~runs\W"
        with just("before", Square, reopen, lambda: theirs.change(runs[0], "ended_time = NULL")):
            assert Square.cleanup_jobs()["runs"] == 1
    assert {row["name"] for row in rows_of(djjobs.runs(Square.Number))} == {"m1"}


# -- calling a run off ---------------------------------------------------------------------------------------------


def test_a_run_that_is_over_before_it_is_called_off_is_not_called_off(start: Any) -> None:
    Square = start(1, keep_completed=True)
    run = Square.schedule_jobs(name="m1")
    with another(Square, keep_completed=True) as theirs:

        def work() -> None:
            theirs.populate(reserve_jobs=True)

        with just("before", Square, CANCEL_RUN, work), pytest.raises(djjobs.JobNotCancellable):
            run.cancel()
    assert (run.state, row_of(Square, run)["cancel_time"]) == ("done", None)


def test_a_run_is_called_off_once(start: Any) -> None:
    """Who comes second does not change when it was."""
    Square = start(1)
    run = Square.schedule_jobs(name="m1")
    with (
        Theirs(Square) as theirs,
        just("before", Square.Number.connection, CANCEL_RUN, lambda: theirs.change(run, "cancel_time = '2001-01-01'")),
    ):
        assert run.cancel() == 1
    assert row_of(Square, run)["cancel_time"].year == 2001


def test_a_job_that_leaves_a_run_before_that_is_called_off_is_not_called_off_with_it(start: Any) -> None:
    """It was found in the run, and somebody has scheduled it anew, into a run of their own, since then."""
    Square = start(3)
    run = Square.schedule_jobs(name="m1")
    claims_of(Square, "n = 3").take(1)

    def leave() -> None:
        change_jobs(theirs, [1, 3], "run_id = 42")

    with another(Square) as theirs, just("after", Square, FIND_OPEN, leave):
        assert run.cancel() == 1
    assert statuses(Square) == {1: "scheduled", 2: "cancelled", 3: "reserved"}
    assert rows_by_number(Square)[3]["cancel_request"] == ""


def test_a_run_that_some_jobs_leave_goes_on(start: Any) -> None:
    """It ends when all have left it."""
    Square = start(2)
    old = Square.schedule_jobs(name="m1")
    change_jobs(Square, [1, 2], "status = 'error'")
    Square.schedule_jobs("n = 1", force=True, name="m2", min_scheduling_interval=0)
    assert (row_of(Square, old)["total"], old.ended) == (1, None)
    Square.schedule_jobs("n = 2", force=True, name="m3", min_scheduling_interval=0)
    assert row_of(Square, old)["total"] == 0 and old.ended is not None
