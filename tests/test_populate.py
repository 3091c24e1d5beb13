"""populate(reserve_jobs=True) in one process: what runs, in which order, and what comes of it."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Callable
from typing import Any

import datajoint as dj
import pytest
from pipelines import BIGINT, INT, computed, job_counts, keys_of, manual, redeclared, rows_of, statements_of
from workloads.squares import (
    Bystander,
    Standing,
    change_jobs,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

import djjobs
from djjobs.work.budget import Pace


@pytest.fixture
def squares(standing: Standing) -> Callable[..., Any]:
    return standing.start_over


@pytest.fixture
def calls() -> list[int]:
    """The numbers that `noting` make()s were called for, in their order."""
    return []


@pytest.fixture
def noting(calls: list[int]) -> Callable[..., None]:
    def make(self: Any, key: dict[str, Any], **_: Any) -> None:
        calls.append(key["n"])
        insert_square(self, key)

    return make


def failing_for(*numbers: int, error: Exception | None = None) -> Callable[..., None]:
    """A make() that fails for these numbers."""

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] in numbers:
            raise error or ValueError(f"no square for {key['n']}")

    return make


# -- the arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["class", "instance"])
def test_all_jobs_are_made_and_leave_the_queue(squares: Any, on: str) -> None:
    Square = squares(5)
    table = Square if on == "class" else Square()
    assert table.populate(reserve_jobs=True) == {"success_count": 5, "error_list": []}
    assert [(row["n"], row["square"]) for row in rows_of(Square())] == [(n, n * n) for n in range(1, 6)]
    assert job_counts(Square) == {}


def test_nothing_to_do_is_no_error(squares: Any) -> None:
    assert squares(0).populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}


def test_an_imported_table_works_as_a_computed_one(schema: Any) -> None:
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert([{"n": n} for n in range(3)])
    members = {"definition": "-> Number", "make": lambda self, key: self.insert1(key)}
    Reading = schema(type("Reading", (djjobs.Imported,), members), context={"Number": Number})
    assert Reading.populate(reserve_jobs=True)["success_count"] == 3
    assert made(Reading()) == [0, 1, 2]


def test_without_reserve_jobs_it_is_datajoints_own_populate(squares: Any, noting: Any, calls: list[int]) -> None:
    Square = squares(6, noting)
    with statements_of(Square.Number.connection) as statements:
        assert Square.populate("n > 2", max_calls=3) == {"success_count": 3, "error_list": []}
    assert calls == [3, 4, 5]
    assert not [sql for sql in statements if "~jobs" in sql]


def test_without_reserve_jobs_arguments_reach_datajoint(squares: Any) -> None:
    received = []

    def make(self: Any, key: dict[str, Any], **words: Any) -> None:
        received.append(words)
        raise ValueError("always")

    Square = squares(2, make)
    result = Square.populate(suppress_errors=True, return_exception_objects=True, make_kwargs={"gain": 2})
    assert received == [{"gain": 2}] * 2
    assert [type(error) for _, error in result["error_list"]] == [ValueError] * 2
    assert job_counts(Square) == {}


@pytest.mark.only(datajoint=0)
def test_without_reserve_jobs_0_14_gets_its_keys_and_order(squares: Any, noting: Any, calls: list[int]) -> None:
    Square = squares(6, noting)
    Square.populate(keys=[{"n": 2}, {"n": 5}], order="reverse")
    assert calls == [5, 2]


@pytest.mark.parametrize("words", [{"schedule_jobs": False}, {"refresh": False}])
def test_scheduling_can_be_left_to_others(squares: Any, words: dict[str, Any]) -> None:
    Square = squares(4)
    assert Square.populate(reserve_jobs=True, **words)["success_count"] == 0
    assert job_counts(Square) == {}
    Square.schedule_jobs("n < 3")
    assert Square.populate(reserve_jobs=True, **words)["success_count"] == 2
    assert made(Square()) == [1, 2]


@pytest.mark.only(datajoint=2)
def test_auto_refresh_of_datajoint_2_is_heeded(squares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Square = squares(4)
    monkeypatch.setattr(dj.config.jobs, "auto_refresh", False)
    assert Square.populate(reserve_jobs=True)["success_count"] == 0
    assert Square.populate(reserve_jobs=True, refresh=True)["success_count"] == 4


def test_make_gets_the_make_kwargs(squares: Any) -> None:
    def make(self: Any, key: dict[str, Any], gain: int = 1) -> None:
        self.insert1({**key, "square": gain * key["n"] ** 2})

    Square = squares(2, make)
    Square.populate(reserve_jobs=True, make_kwargs={"gain": 10})
    assert [row["square"] for row in rows_of(Square())] == [10, 40]


# -- the order ----------------------------------------------------------------------------------------


def test_the_original_order_is_the_order_of_keys_as_scheduled(squares: Any, noting: Any, calls: list[int]) -> None:
    Square = squares(0, noting)
    Square.Number.insert([{"n": n} for n in (7, 300, 20, 1, 50, 4)])
    Square.schedule_jobs("n in (20, 7, 50)", min_scheduling_interval=0)
    Square.schedule_jobs(min_scheduling_interval=0)
    Square.populate(reserve_jobs=True)
    assert calls == [7, 20, 50, 1, 4, 300]


def test_reverse_begins_with_the_last(squares: Any, noting: Any, calls: list[int]) -> None:
    Square = squares(60, noting)
    Square.populate(reserve_jobs=True, order="reverse")
    assert calls == list(range(60, 0, -1))


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_random_is_another_order_each_time(
    squares: Any, noting: Any, calls: list[int], restrictions: tuple[str, ...]
) -> None:
    Square = squares(150, noting)
    orders = []
    for _ in range(2):
        calls.clear()
        Square.schedule_jobs(min_scheduling_interval=0)
        Square.populate(*restrictions, reserve_jobs=True, order="random")
        assert sorted(calls) == list(range(1, 151))
        orders.append(tuple(calls))
        Square().delete_quick()
    assert len({*orders, tuple(range(1, 151)), tuple(range(150, 0, -1))}) == 4


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
@pytest.mark.parametrize("order", ["original", "reverse", "random"])
def test_urgent_jobs_go_first_in_every_order(
    squares: Any, noting: Any, calls: list[int], order: str, restrictions: tuple[str, ...]
) -> None:
    Square = squares(12, noting)
    for some, priority in (("n < 5", 9), ("n between 5 and 8", 0), ("n > 8", 5)):
        Square.schedule_jobs(some, priority=priority, min_scheduling_interval=0)
    Square.populate(*restrictions, reserve_jobs=True, order=order)
    groups = [calls[:4], calls[4:8], calls[8:]]
    expected = [[5, 6, 7, 8], [9, 10, 11, 12], [1, 2, 3, 4]]
    assert [sorted(group) for group in groups] == expected
    if order != "random":
        assert groups == [group if order == "original" else group[::-1] for group in expected]


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_a_worker_can_take_urgent_jobs_only(squares: Any, restrictions: tuple[str, ...]) -> None:
    Square = squares(6)
    for n, priority in ((1, 0), (2, 3), (3, 4), (4, 200)):
        Square.schedule_jobs({"n": n}, priority=priority, min_scheduling_interval=0)
    Square.populate(*restrictions, reserve_jobs=True, priority=3, schedule_jobs=False)
    assert made(Square()) == [1, 2]
    assert statuses(Square) == {3: "scheduled", 4: "scheduled"}


def test_new_jobs_get_the_priority_that_populate_was_given(squares: Any) -> None:
    Square = squares(3)
    Square.populate(reserve_jobs=True, priority=3, max_calls=1)
    assert {row["priority"] for row in rows_of(Square.jobs)} == {3}


# -- what runs, and what is left alone -----------------------------------------------------------------


def everything_there_is(squares: Any, make: Any = insert_square) -> Any:
    """Square with jobs of all kinds: 1 to 4 and 11 to 14 scheduled, of the rest one of each status."""
    Square = squares(14, make)
    Square.schedule_jobs()
    change_jobs(Square, [5], "status = 'error', error_message = 'old', attempt = 1")
    change_jobs(Square, [6], "status = 'ignore'")
    change_jobs(Square, [7], "status = 'cancelled'")
    change_jobs(Square, [8], "status = 'success', run_duration = 2.5")
    change_jobs(Square, [9, 10], f"status = 'reserved', worker_id = '{'w' * 36}', claim = 7")
    return Square


def test_only_scheduled_jobs_run(squares: Any) -> None:
    Square = everything_there_is(squares)
    before = rows_by_number(Square)
    assert Square.populate(reserve_jobs=True)["success_count"] == 8
    assert made(Square()) == [1, 2, 3, 4, 11, 12, 13, 14]
    assert rows_by_number(Square) == {n: before[n] for n in range(5, 11)}


CHOICES = {
    "text": ("n in (2, 5, 6, 7, 8, 9, 12)",),
    "dicts": ([{"n": n} for n in (2, 5, 6, 7, 8, 9, 12)],),
    "several": ("n > 1", "n < 13", "n not in (3, 4, 11)"),
    "not": (dj.Not("n in (1, 3, 4, 11, 13, 14)"),),
}


@pytest.mark.parametrize("restrictions", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("order", ["original", "random"])
def test_a_restricted_populate_touches_no_other_row(squares: Any, restrictions: Any, order: str) -> None:
    Square = everything_there_is(squares)
    before = rows_by_number(Square)
    assert Square.populate(*restrictions, reserve_jobs=True, order=order)["success_count"] == 2
    assert made(Square()) == [2, 12]
    assert rows_by_number(Square) == {n: row for n, row in before.items() if n not in (2, 12)}


def test_a_query_restricts_as_in_datajoint(squares: Any) -> None:
    Square = everything_there_is(squares)
    before = rows_by_number(Square)
    Square.populate(Square.Number & "n between 2 and 8", "n < 4", reserve_jobs=True)
    assert made(Square()) == [2, 3]
    assert rows_by_number(Square) == {n: row for n, row in before.items() if n not in (2, 3)}


def test_a_query_on_the_jobs_chooses_by_them(squares: Any) -> None:
    Square = squares(6)
    Square.schedule_jobs()
    change_jobs(Square, [2, 5], "priority = 1")
    Square.populate(Square.jobs & "priority = 1", reserve_jobs=True)
    assert made(Square()) == [2, 5]


def test_keys_run_exactly_those(squares: Any, noting: Any, calls: list[int]) -> None:
    Square = everything_there_is(squares, noting)
    before = rows_by_number(Square)
    result = Square.populate(keys=[{"n": 12}, {"n": 2}, {"n": 5}, {"n": 9}, {"n": 12}], reserve_jobs=True)
    assert result["success_count"] == 2
    assert sorted(calls) == [2, 12]
    assert rows_by_number(Square) == {n: row for n, row in before.items() if n not in (2, 12)}


def test_no_keys_run_nothing(squares: Any) -> None:
    Square = squares(3)
    assert Square.populate(keys=[], reserve_jobs=True)["success_count"] == 0
    assert job_counts(Square) == {}


def test_keys_and_restrictions_must_both_fit(squares: Any) -> None:
    Square = squares(5)
    Square.populate("n > 2", keys=[{"n": 2}, {"n": 3}, {"n": 9}], reserve_jobs=True)
    assert made(Square()) == [3]


def test_a_restricted_populate_schedules_only_what_it_runs(squares: Any) -> None:
    Square = squares(6)
    Square.populate("n > 4", reserve_jobs=True, max_calls=1)
    assert statuses(Square) == {6: "scheduled"}


def test_another_table_in_the_same_schema_is_left_alone(schema: Any) -> None:
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert([{"n": n} for n in range(3)])
    Here, There = (computed(schema, "-> Number", {"Number": Number}, name) for name in ("Here", "There"))
    There.schedule_jobs()
    before = rows_of(There.jobs)
    Here.populate(reserve_jobs=True)
    assert rows_of(There.jobs) == before
    assert made(Here()) == [0, 1, 2]
    assert made(There()) == []


def test_jobs_that_are_not_due_wait(squares: Any) -> None:
    Square = squares(4)
    Square.schedule_jobs("n < 3", due_time=datetime.timedelta(hours=1), min_scheduling_interval=0)
    Square.populate(reserve_jobs=True)
    assert made(Square()) == [3, 4]
    assert statuses(Square) == {1: "scheduled", 2: "scheduled"}
    change_jobs(Square, [2], "due_time = created_time")
    Square.populate(reserve_jobs=True)
    assert made(Square()) == [2, 3, 4]


# -- limit and max_calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
@pytest.mark.parametrize("order", ["original", "reverse", "random"])
@pytest.mark.parametrize("word", ["limit", "max_calls"])
def test_jobs_that_others_hold_do_not_count(squares: Any, word: str, order: str, restrictions: tuple[str, ...]) -> None:
    Square = squares(12)
    Square.schedule_jobs()
    held = [1, 2, 3, 10, 11, 12]
    change_jobs(Square, held, f"status = 'reserved', worker_id = '{'w' * 36}', claim = 7")
    result = Square.populate(*restrictions, reserve_jobs=True, order=order, **{word: 4})
    assert result["success_count"] == 4
    assert job_counts(Square) == {"reserved": 6, "scheduled": 2}
    assert Square.populate(*restrictions, reserve_jobs=True, order=order, **{word: 4})["success_count"] == 2


@pytest.mark.parametrize("word", ["limit", "max_calls"])
def test_zero_runs_nothing_and_plenty_runs_all(squares: Any, word: str) -> None:
    Square = squares(3)
    assert Square.populate(reserve_jobs=True, **{word: 0})["success_count"] == 0
    assert job_counts(Square) == {"scheduled": 3}
    assert Square.populate(reserve_jobs=True, **{word: 100})["success_count"] == 3


def test_max_calls_counts_calls_of_make_and_limit_counts_jobs(squares: Any) -> None:
    def with_three_made_already() -> Any:
        Square = squares(9)
        Square.schedule_jobs()
        Square.insert([{"n": n, "square": -1} for n in (1, 2, 3)], allow_direct_insert=True)
        return Square

    Square = with_three_made_already()
    assert Square.populate(reserve_jobs=True, limit=4)["success_count"] == 1
    assert made(Square()) == [1, 2, 3, 4]
    Square = with_three_made_already()
    assert Square.populate(reserve_jobs=True, max_calls=4)["success_count"] == 4
    assert made(Square()) == [1, 2, 3, 4, 5, 6, 7]


def test_a_call_that_fails_counts(squares: Any) -> None:
    Square = squares(6, failing_for(1, 2))
    result = Square.populate(reserve_jobs=True, max_calls=3, suppress_errors=True)
    assert (result["success_count"], len(result["error_list"])) == (1, 2)
    assert job_counts(Square) == {"error": 2, "scheduled": 3}


# -- the kinds of make() --------------------------------------------------------------------------------


def test_a_three_part_make(squares: Any) -> None:
    steps = []

    def make_fetch(self: Any, key: dict[str, Any], gain: int = 1) -> tuple[int, int]:
        steps.append("fetch")
        return (Square.Number & key).fetch1("n"), gain

    def make_compute(self: Any, key: dict[str, Any], n: int, gain: int) -> tuple[int]:
        assert not self.connection.in_transaction
        steps.append("compute")
        return (gain * n**2,)

    def make_insert(self: Any, key: dict[str, Any], square: int) -> None:
        assert self.connection.in_transaction
        steps.append("insert")
        self.insert1({**key, "square": square})

    parts = {"make_fetch": make_fetch, "make_compute": make_compute, "make_insert": make_insert}
    Square = squares(2, dj.Computed.make, **parts)
    result = Square.populate(reserve_jobs=True, make_kwargs={"gain": 10})
    assert result == {"success_count": 2, "error_list": []}
    assert [row["square"] for row in rows_of(Square())] == [10, 40]
    assert steps == ["fetch", "compute", "fetch", "insert"] * 2
    assert job_counts(Square) == {}


def test_a_three_part_make_whose_input_changed_meanwhile_fails(squares: Any) -> None:
    fetched = iter(range(100))
    parts = {
        "make_fetch": lambda self, key: (next(fetched),),
        "make_compute": lambda self, key, value: (value,),
        "make_insert": lambda self, key, value: self.insert1({**key, "square": value}),
    }
    Square = squares(1, dj.Computed.make, **parts)
    with pytest.raises(dj.DataJointError, match="data has changed"):
        Square.populate(reserve_jobs=True)
    assert made(Square()) == []
    assert statuses(Square) == {1: "error"}


def test_the_old_make_tuples(squares: Any) -> None:
    Square = squares(2, None, _make_tuples=insert_square)
    assert Square.populate(reserve_jobs=True)["success_count"] == 2
    assert made(Square()) == [1, 2]


def test_a_table_without_make_says_so(squares: Any) -> None:
    Square = squares(1, dj.Computed.make)
    with pytest.raises(NotImplementedError):
        Square.populate(reserve_jobs=True)
    assert statuses(Square) == {1: "error"}


@pytest.fixture
def digits(schema: Any) -> Any:
    """A table with a part: the digits of a number, from the last one on."""
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert([{"n": n} for n in (1, 23, 456)])

    class Digit(dj.Part):
        definition = f"""
        -> master
        place : {INT}
        ---
        digit : {INT}
        """

    def make(self: Any, key: dict[str, Any]) -> None:
        text = str(key["n"])
        self.insert1({**key, "length": len(text)})
        self.Digit.insert([{**key, "place": place, "digit": int(d)} for place, d in enumerate(text[::-1])])

    definition = f"""
    -> Number
    ---
    length : {INT}
    """
    return computed(schema, definition, {"Number": Number}, "Digits", make=make, Digit=Digit)


def test_parts_are_inserted_with_their_master(digits: Any) -> None:
    assert digits.populate(reserve_jobs=True)["success_count"] == 3
    assert len(digits()) == 3
    assert len(digits.Digit()) == 6


def test_parts_go_with_their_master_when_make_fails(digits: Any) -> None:
    make = digits.make

    def failing(self: Any, key: dict[str, Any]) -> None:
        make(self, key)
        assert key["n"] != 23

    digits.make = failing
    digits.populate(reserve_jobs=True, suppress_errors=True)
    assert made(digits()) == [1, 456]
    assert len(digits.Digit()) == 4


def test_make_may_insert_many_rows_for_a_key(schema: Any) -> None:
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert([{"n": n} for n in (2, 3, 5)])

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key)
        self.insert([{**key, "factor": factor, "multiple": factor * key["n"]} for factor in range(key["n"])])

    definition = f"""
    -> Number
    factor : {INT}
    ---
    multiple : {BIGINT}
    """
    calls: list[dict[str, Any]] = []
    Multiple = computed(schema, definition, {"Number": Number}, "Multiple", make=make)
    assert Multiple.populate(reserve_jobs=True)["success_count"] == 3
    assert calls == [{"n": 2}, {"n": 3}, {"n": 5}]
    assert len(Multiple()) == 10
    assert job_counts(Multiple) == {}
    assert Multiple.schedule_jobs(min_scheduling_interval=0).scheduled == 0


def test_a_coarser_key_source_calls_make_once_for_a_group(schema: Any) -> None:
    Trial = manual(
        schema,
        f"""
        day : {INT}
        trial : {INT}
        """,
        "Trial",
    )
    Trial.insert([{"day": day, "trial": trial} for day in (1, 2) for trial in range(3)])
    calls: list[dict[str, Any]] = []

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key)
        self.insert(keys_of(Trial & key))

    members = {"make": make, "key_source": property(lambda self: dj.U("day") & Trial)}
    Analysis = computed(schema, "-> Trial", {"Trial": Trial}, "Analysis", **members)
    assert Analysis.populate(reserve_jobs=True)["success_count"] == 2
    assert calls == [{"day": 1}, {"day": 2}]
    assert len(Analysis()) == 6


def test_a_make_that_inserts_nothing_counts_as_done(squares: Any) -> None:
    Square = squares(2, lambda self, key: None)
    assert Square.populate(reserve_jobs=True) == {"success_count": 2, "error_list": []}
    assert job_counts(Square) == {}


@pytest.mark.parametrize("keep", [False, True], ids=["go", "kept"])
def test_a_key_that_is_made_already_is_not_made_again(squares: Any, noting: Any, calls: list[int], keep: bool) -> None:
    Square = squares(3, noting, keep_completed=keep)
    Square.schedule_jobs()
    Square.insert1({"n": 2, "square": -1}, allow_direct_insert=True)
    assert Square.populate(reserve_jobs=True) == {"success_count": 2, "error_list": []}
    assert calls == [1, 3]
    assert (Square & {"n": 2}).fetch1("square") == -1
    assert job_counts(Square) == ({"success": 3} if keep else {})


@pytest.mark.only(datajoint=2)
def test_datajoints_own_record_of_a_job_is_written_too(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dj.config.jobs, "add_job_metadata", True)
    Number = manual(schema, f"n : {INT}", "Number")
    Number.insert1({"n": 1})
    Result = computed(schema, "-> Number", {"Number": Number})
    Result.populate(reserve_jobs=True)
    columns = "_job_start_time, _job_duration"
    started, duration = schema.connection.query(f"SELECT {columns} FROM {Result.full_table_name}").fetchone()
    assert started is not None
    assert duration >= 0


# -- completion -----------------------------------------------------------------------------------------


def test_result_and_completion_are_one_transaction(squares: Any) -> None:
    Square = squares(1)
    with statements_of(Square.Number.connection) as statements:
        Square.populate(reserve_jobs=True)
    shortened = [re.sub(r"\s+", " ", sql).strip() for sql in statements]
    at = next(i for i, sql in enumerate(shortened) if re.match(r"(INSERT|REPLACE) INTO \S*__square\b", sql))
    begun = max(i for i in range(at) if re.match(r"START TRANSACTION|BEGIN", shortened[i]))
    ended = min(i for i in range(at, len(shortened)) if re.match(r"COMMIT|ROLLBACK", shortened[i]))
    assert shortened[ended] == "COMMIT"
    completions = [i for i, sql in enumerate(shortened) if re.match(r"DELETE FROM .*~jobs", sql)]
    assert len(completions) == 1
    assert begun < at < completions[0] < ended


CHANGES = {
    "claimed again": "claim = claim + 1",
    "another's": f"worker_id = '{'w' * 36}'",
    "given back": "status = 'scheduled', worker_id = NULL",
    "cancelled": "status = 'cancelled'",
}


@pytest.mark.parametrize("keep", [False, True], ids=["go", "kept"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_worker_that_lost_its_job_commits_nothing(
    squares: Any, changes: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "batch", 4)  # else it depends on how long the first job takes
    left = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 2 and not left:
            bystander.change(2, changes)
            left.append(bystander.row(2))

    Square = squares(3, make, keep_completed=keep)
    with Bystander(Square) as bystander:
        result = Square.populate(reserve_jobs=True, suppress_errors=True, return_exception_objects=True, max_calls=3)
        assert [bystander.row(2)] == left
    ((key, error),) = result["error_list"]
    assert (key, type(error)) == ({"n": 2}, djjobs.LeaseLost)
    assert "Square" in str(error)
    assert made(Square()) == [1, 3]
    assert result["success_count"] == 2


def test_a_worker_whose_job_was_removed_commits_nothing(squares: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        bystander.remove(key["n"])

    Square = squares(1, make)
    with Bystander(Square) as bystander, pytest.raises(djjobs.LeaseLost):
        Square.populate(reserve_jobs=True)
    assert made(Square()) == []
    assert job_counts(Square) == {}


def test_a_three_part_make_that_lost_its_job_commits_nothing(squares: Any) -> None:
    left = []

    def make_compute(self: Any, key: dict[str, Any], n: int) -> tuple[int]:
        bystander.change(n, "claim = claim + 1")
        left.append(bystander.row(n))
        return (n**2,)

    parts = {
        "make_fetch": lambda self, key: (key["n"],),
        "make_compute": make_compute,
        "make_insert": lambda self, key, square: self.insert1({**key, "square": square}),
    }
    Square = squares(1, dj.Computed.make, **parts)
    with Bystander(Square) as bystander:
        with pytest.raises(djjobs.LeaseLost):
            Square.populate(reserve_jobs=True)
        assert [bystander.row(1)] == left
    assert made(Square()) == []


def test_parts_of_a_lost_job_are_not_committed(digits: Any) -> None:
    make = digits.make

    def losing(self: Any, key: dict[str, Any]) -> None:
        make(self, key)
        bystander.remove(key["n"])

    digits.make = losing
    with Bystander(digits) as bystander:
        result = digits.populate(reserve_jobs=True, suppress_errors=True)
    assert [message.split(":")[0] for _, message in result["error_list"]] == ["LeaseLost"] * 3
    assert len(digits()) == len(digits.Digit()) == 0


def test_an_error_of_a_lost_job_is_not_written_into_the_new_owners_row(squares: Any) -> None:
    left = []

    def make(self: Any, key: dict[str, Any]) -> None:
        bystander.change(1, "claim = claim + 1")
        left.append(bystander.row(1))
        raise ValueError("too late to matter")

    Square = squares(1, make)
    with Bystander(Square) as bystander:
        with pytest.raises(djjobs.LeaseLost):
            Square.populate(reserve_jobs=True)
        assert [bystander.row(1)] == left


def test_a_key_made_already_does_not_complete_a_job_that_was_lost(
    squares: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes the second of two claimed jobs while the first one runs."""
    monkeypatch.setattr(Pace, "batch", 4)
    left = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 2:
            bystander.change(3, "claim = claim + 1")
            left.append(bystander.row(3))

    Square = squares(3, make)
    Square.schedule_jobs()
    Square.insert1({"n": 3, "square": -1}, allow_direct_insert=True)
    with Bystander(Square) as bystander:
        result = Square.populate(reserve_jobs=True, suppress_errors=True, return_exception_objects=True)
        assert [bystander.row(3)] == left
    assert [(key, type(error)) for key, error in result["error_list"]] == [({"n": 3}, djjobs.LeaseLost)]


def test_a_lost_connection_inside_make_is_no_error_of_the_job(squares: Any, engine: str) -> None:
    """The server ends the session after the rows were inserted: nothing of it stays, and make() runs again."""
    ended = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if not ended:
            mine = "pg_backend_pid()" if engine == "postgresql" else "CONNECTION_ID()"
            session = self.connection.query(f"SELECT {mine}").fetchone()[0]
            end = "SELECT pg_terminate_backend({})" if engine == "postgresql" else "KILL {}"
            bystander.connection.query(end.format(session))
            ended.append(key["n"])

    Square = squares(3, make)
    with Bystander(Square) as bystander:
        assert Square.populate(reserve_jobs=True) == {"success_count": 3, "error_list": []}
    assert ended == [1]
    assert made(Square()) == [1, 2, 3]
    assert job_counts(Square) == {}


def test_the_connection_commits_as_ever_afterwards(squares: Any) -> None:
    Square = squares(2, failing_for(2))
    Square.populate(reserve_jobs=True, suppress_errors=True)
    connection = Square.Number.connection
    with connection.transaction:
        Square.Number.insert1({"n": 77})
    with Bystander(Square) as bystander:
        (count,) = bystander.connection.query(f"SELECT COUNT(*) FROM {Square.Number.full_table_name}").fetchone()
    assert count == 3


# -- success rows ----------------------------------------------------------------------------------------


def kept(Square: Any) -> None:
    """Check that three finished jobs stayed, with what is to be known about them."""
    rows = rows_of(Square.jobs.completed)
    assert len(rows) == 3
    for row in rows:
        assert row["run_duration"] >= 0
        assert row["run_metadata"]["datajoint"] == dj.__version__
        assert row["run_metadata"]["python"] == platform.python_version()
        assert row["error_message"] == ""
    assert len(Square.jobs & {"run_metadata.python": platform.python_version()}) == 3
    assert len(Square.jobs & {"run_metadata.python": "2.7"}) == 0


def test_a_table_can_keep_its_finished_jobs(squares: Any) -> None:
    Square = squares(3, keep_completed=True)
    assert Square.populate(reserve_jobs=True)["success_count"] == 3
    kept(Square)
    assert made(Square()) == [1, 2, 3]
    assert Square.populate(reserve_jobs=True)["success_count"] == 0


def test_the_settings_can_keep_finished_jobs(squares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "keep_completed", True)
    Square = squares(3)
    Square.populate(reserve_jobs=True)
    kept(Square)


@pytest.mark.only(datajoint=2)
def test_datajoint_2s_own_setting_keeps_finished_jobs(squares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dj.config.jobs, "keep_completed", True)
    Square = squares(3)
    Square.populate(reserve_jobs=True)
    kept(Square)


def test_the_tables_word_goes_before_the_settings(squares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "keep_completed", True)
    Square = squares(3, keep_completed=False)
    Square.populate(reserve_jobs=True)
    assert job_counts(Square) == {}


def test_a_retried_job_that_succeeds_forgets_its_error(squares: Any) -> None:
    failures = [1]

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if failures:
            raise ValueError(failures.pop())

    Square = squares(3, make, keep_completed=True)
    Square.populate(reserve_jobs=True, suppress_errors=True)
    assert Square.retry_jobs() == 1
    Square.populate(reserve_jobs=True)
    kept(Square)
    assert [row["error_stack"] for row in rows_of(Square.jobs)] == [None] * 3


# -- errors -----------------------------------------------------------------------------------------------


def test_errors_are_returned_and_the_rest_goes_on(squares: Any) -> None:
    Square = squares(5, failing_for(2, 4))
    assert Square.populate(reserve_jobs=True, suppress_errors=True) == {
        "success_count": 3,
        "error_list": [({"n": n}, f"ValueError: no square for {n}") for n in (2, 4)],
    }
    assert made(Square()) == [1, 3, 5]
    assert statuses(Square) == {2: "error", 4: "error"}


@pytest.mark.parametrize(
    "before, after, keys, reason",
    [
        (
            "subject : varchar(20)",
            f"subject : varchar(20)\nsession : {INT}",
            [("m1", 1), ("m1", 2)],
            "KeyError: 'session'",
        ),
        ("session : varchar(20)", f"session : {INT}", [(1,), (2,)], "ValueError: invalid literal"),
    ],
)
def test_jobs_that_a_table_of_the_same_name_has_left_are_errors_and_the_rest_goes_on(
    schema: Any, before: str, after: str, keys: list[tuple[Any, ...]], reason: str
) -> None:
    source, result = redeclared(schema, before, [("m1",), ("m2",)], after)
    source.insert(keys)
    result.schedule_jobs(min_scheduling_interval=0)
    done = result.populate(reserve_jobs=True, suppress_errors=True)
    assert done["success_count"] == len(result()) == 2
    assert job_counts(result) == {"error": 2}
    for key, message in done["error_list"]:
        assert f"The key {key} does not fit OfChanged (schema {schema.database})" in message
        assert f"({reason}" in message
        assert "OfChanged.cleanup_jobs() removes such jobs" in message
    assert [row["attempt"] for row in rows_of(result.jobs)] == [1, 1]
    assert result.cleanup_jobs()["orphaned_incomplete"] == 2


def test_errors_can_be_returned_as_they_were_raised(squares: Any) -> None:
    error = ValueError("the very object")
    Square = squares(3, failing_for(2, error=error))
    result = Square.populate(reserve_jobs=True, suppress_errors=True, return_exception_objects=True)
    ((key, returned),) = result["error_list"]
    assert key == {"n": 2}
    assert returned is error


def test_an_error_that_is_not_suppressed_is_raised_as_it_was(squares: Any) -> None:
    error = ValueError("the very object")
    Square = squares(40, failing_for(5, error=error))
    with pytest.raises(ValueError) as raised:
        Square.populate(reserve_jobs=True)
    assert raised.value is error
    assert raised.traceback[-1].name == "make"


def test_after_an_error_the_jobs_claimed_with_it_are_given_back(squares: Any) -> None:
    Square = squares(40, failing_for(5))
    Square.schedule_jobs()
    before = rows_by_number(Square)
    with pytest.raises(ValueError):
        Square.populate(reserve_jobs=True)
    after = rows_by_number(Square)
    assert sorted(after) == list(range(5, 41))
    assert after.pop(5)["status"] == "error"
    told = {"timestamp", "user", "host", "pid", "connection_id", "claim"}
    for n, row in after.items():
        assert {k: v for k, v in row.items() if k not in told} == {k: v for k, v in before[n].items() if k not in told}
    with pytest.raises(ValueError):  # and they run in the same order the next time
        Square.make = failing_for(6)
        Square.populate(reserve_jobs=True)
    assert made(Square()) == [1, 2, 3, 4]


def test_a_failed_job_tells_what_happened(squares: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        try:
            {}["missing"]
        except KeyError as cause:
            raise ValueError("no square") from cause

    Square = squares(1, make)
    Square.populate(reserve_jobs=True, suppress_errors=True)
    (row,) = rows_of(Square.jobs.errors)
    assert row["error_message"] == "ValueError: no square"
    assert (row["attempt"], row["run_duration"] >= 0) == (1, True)
    assert row["run_metadata"]["datajoint"] == dj.__version__
    stack = Square.jobs.errors.fetch1("error_stack")
    assert stack == row["error_stack"]
    for line in ("KeyError: 'missing'", "direct cause", "in make", '{}["missing"]', "ValueError: no square"):
        assert line in stack


def test_a_deep_stack_is_kept_whole(squares: Any) -> None:
    functions: list[Callable[[], None]] = []
    for number in range(300):
        names: dict[str, Any] = {"functions": functions}
        following = f"functions[{number + 1}]()" if number < 299 else "raise ValueError('at the end')"
        exec(f"def step_{number}():\n    {following}", names)
        functions.append(names[f"step_{number}"])
    Square = squares(1, lambda self, key: functions[0]())
    Square.populate(reserve_jobs=True, suppress_errors=True)
    stack = Square.jobs.errors.fetch1("error_stack")
    assert all(f"in step_{number}\n" in stack for number in range(300))


MESSAGES = {
    "many scripts": "μV ≥ 5, 日本語, 🧠, عربى",
    "quotes and signs": """it's "quoted" \\ 100 % %s %(table)s {braces} `tick` \n new line\ttab""",
    "percent at the end": "100%",
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages_are_kept_as_they_are(squares: Any, message: str) -> None:
    Square = squares(1, failing_for(1, error=ValueError(message)))
    Square.populate(reserve_jobs=True, suppress_errors=True)
    (row,) = rows_of(Square.jobs.errors)
    assert row["error_message"] == f"ValueError: {message}"
    assert message in row["error_stack"]


def test_a_message_is_cut_only_at_the_columns_length(squares: Any) -> None:
    long = {1: "x" * 5000, 2: "🧠" * 5000, 3: "", 4: ""}

    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError(long[key["n"]])

    Square = squares(4, make)
    column = int(re.search(r"\d+", Square.jobs.heading["error_message"].type).group())
    room = column - len("ValueError: ")
    long[3], long[4] = "y" * room, "y" * (room + 1)
    Square.populate(reserve_jobs=True, suppress_errors=True)
    rows = rows_by_number(Square)
    messages = {n: row["error_message"] for n, row in rows.items()}
    assert messages[3] == f"ValueError: {long[3]}"
    for n, letter in ((1, "x"), (2, "🧠"), (4, "y")):
        assert len(messages[n]) == column
        assert messages[n].startswith("ValueError: " + letter * 2000)
        assert messages[n].endswith("truncated")
    assert "🧠" * 5000 in rows[2]["error_stack"]


UNPRINTABLE = {
    "a NUL": ValueError("before\0after"),
    "a file name that is no text": ValueError("before caf\udce9.dat after"),
}


@pytest.mark.parametrize("error", UNPRINTABLE.values(), ids=UNPRINTABLE)
def test_messages_that_no_column_can_hold_still_make_an_error_row(squares: Any, error: Exception) -> None:
    Square = squares(3, failing_for(2, error=error))
    result = Square.populate(reserve_jobs=True, suppress_errors=True, return_exception_objects=True)
    assert [returned for _, returned in result["error_list"]] == [error]
    assert made(Square()) == [1, 3]
    assert statuses(Square) == {2: "error"}
    (row,) = rows_of(Square.jobs.errors)
    for text in (row["error_message"], row["error_stack"]):
        assert "before" in text
        assert "after" in text


def test_an_error_that_cannot_even_say_what_it_is(squares: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    Square = squares(3, failing_for(2, error=Mute()))
    result = Square.populate(reserve_jobs=True, suppress_errors=True)
    assert result["success_count"] == 2
    assert [key for key, _ in result["error_list"]] == [{"n": 2}]
    assert statuses(Square) == {2: "error"}
    assert "Mute" in Square.jobs.errors.fetch1("error_stack")


def test_an_error_of_the_database_inside_make_is_recorded_like_any_other(squares: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 2:
            self.connection.query("SELECT * FROM no_such_table_anywhere")

    Square = squares(3, make)
    result = Square.populate(reserve_jobs=True, suppress_errors=True)
    assert result["success_count"] == 2
    assert statuses(Square) == {2: "error"}
    assert "no_such_table_anywhere" in Square.jobs.errors.fetch1("error_stack")
    assert made(Square()) == [1, 3]


def test_a_row_that_is_there_twice_is_an_error_of_the_job(squares: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        insert_square(self, key)

    Square = squares(1, make)
    with pytest.raises(dj.errors.DuplicateError):
        Square.populate(reserve_jobs=True)
    assert statuses(Square) == {1: "error"}
    assert made(Square()) == []


# -- the progress bar ---------------------------------------------------------------------------------------


def test_a_progress_bar_shows_what_is_done_and_what_failed(squares: Any, capfd: Any) -> None:
    Square = squares(7, failing_for(2, 4))
    Square.populate(reserve_jobs=True, suppress_errors=True, display_progress=True)
    bar = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "Square" in bar
    assert "7/7" in bar
    assert "errors=2" in bar
    assert "job/s" in bar


def test_the_bar_counts_no_further_than_max_calls(squares: Any, capfd: Any) -> None:
    Square = squares(7)
    Square.populate("n > 1", reserve_jobs=True, max_calls=4, display_progress=True)
    shown = capfd.readouterr().err
    assert "0/4" in shown
    assert "4/4" in shown


def test_no_bar_without_being_asked(squares: Any, capfd: Any) -> None:
    squares(3).populate(reserve_jobs=True)
    assert capfd.readouterr().err == ""
