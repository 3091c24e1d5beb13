"""A stop is not an error: SIGTERM and SIGINT give jobs back, at whatever moment they come."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import datajoint as dj
import forks
import pytest
from helpers import wait_for
from pipelines import job_counts
from workloads.squares import (
    Bystander,
    Standing,
    another_connection,
    insert_square,
    made,
    rows_by_number,
    statuses,
)

from djjobs.events.watch import HeldEvents

STOPS = pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "SIGINT"],
)
HANDLED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def squares(standing: Standing) -> Callable[..., Any]:
    return standing.start_over


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[dict[int, Any]]:
    """The caller's handlers. What they raise shows that a signal reached them and not the populate."""

    def escaped(number: int, _: Any) -> None:
        raise AssertionError(f"signal {number} reached the caller's handler")

    before = {number: signal.signal(number, escaped) for number in HANDLED}
    yield {number: escaped for number in HANDLED}
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in HANDLED}


def stopping_at(n: int, number: int) -> Callable[..., None]:
    """A make() in which the signal arrives while it works on this number, the first time only."""
    sent = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == n and not sent:
            sent.append(n)
            os.kill(os.getpid(), number)

    return make


# -- inside make() --------------------------------------------------------------------------------------


@STOPS
@pytest.mark.parametrize("suppress_errors", [False, True], ids=["raise errors", "suppress errors"])
def test_a_signal_inside_make_gives_the_job_back(
    squares: Any, number: int, raised: type, suppress_errors: bool, own_handlers: dict[int, Any]
) -> None:
    Square = squares(40, stopping_at(3, number))
    Square.schedule_jobs()
    before = rows_by_number(Square)
    with pytest.raises(raised):
        Square.populate(reserve_jobs=True, suppress_errors=suppress_errors)
    assert handlers() == own_handlers
    assert made(Square()) == [1, 2]
    after = rows_by_number(Square)
    assert set(after) == set(range(3, 41))
    told = {"timestamp", "user", "host", "pid", "connection_id", "claim"}
    for n, row in after.items():
        assert {k: v for k, v in row.items() if k not in told} == {k: v for k, v in before[n].items() if k not in told}
    assert Square.populate(reserve_jobs=True)["success_count"] == 38
    assert job_counts(Square) == {}


@STOPS
def test_a_signal_inside_a_three_part_make_gives_the_job_back(squares: Any, number: int, raised: type) -> None:
    sent = []

    def make_compute(self: Any, key: dict[str, Any], n: int) -> tuple[int]:
        if not sent:
            sent.append(n)
            os.kill(os.getpid(), number)
        return (n**2,)

    parts = {
        "make_fetch": lambda self, key: (key["n"],),
        "make_compute": make_compute,
        "make_insert": lambda self, key, square: self.insert1({**key, "square": square}),
    }
    Square = squares(2, dj.Computed.make, **parts)
    with pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert statuses(Square) == {1: "scheduled", 2: "scheduled"}
    assert Square.populate(reserve_jobs=True)["success_count"] == 2


class Blockade:
    """A lock that keeps a query waiting; somebody else holds it until the job of the query is given back."""

    def __init__(self, engine: str) -> None:
        name = secrets.randbits(31)
        if engine == "postgresql":
            self.query, self._free = f"SELECT pg_advisory_lock({name})", f"SELECT pg_advisory_unlock({name})"
            self._all = "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        else:
            self.query, self._free = f"SELECT GET_LOCK('{name}', 120)", f"SELECT RELEASE_LOCK('{name}')"
            self._all = "SELECT info FROM information_schema.processlist WHERE command = 'Query'"
        self._connection = another_connection()
        self._connection.query(self.query)

    def blocks(self) -> bool:
        return (self.query,) in set(self._connection.query(self._all).fetchall())

    def free(self) -> None:
        self._connection.query(self._free)
        self._connection.close()


@STOPS
def test_a_query_that_make_waits_for_does_not_hold_up_a_stop(
    squares: Any, engine: str, number: int, raised: type
) -> None:
    """The job is given back while the query still waits, and the connection can be used afterwards."""
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 2:
            self.connection.query(blockade.query)

    def watch() -> None:
        try:
            wait_for(blockade.blocks)
            signal.pthread_kill(threading.main_thread().ident, number)
            wait_for(lambda: bystander.row(2)[2] == "scheduled", timeout=15)
            seen.append("given back")
        finally:
            blockade.free()

    Square = squares(3, make)
    Square.schedule_jobs()
    blockade = Blockade(engine)
    with Bystander(Square) as bystander:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(raised):
                Square.populate(reserve_jobs=True)
        finally:
            watcher.join()
    assert Square.Number.connection.query("SELECT 41 + 1").fetchone()[0] == 42
    assert made(Square()) == [1]
    assert statuses(Square) == {2: "scheduled", 3: "scheduled"}
    assert rows_by_number(Square)[2]["attempt"] == 0
    assert seen == ["given back"]


def test_a_make_that_swallows_the_stop_is_the_last_one(squares: Any) -> None:
    """Its job is done, or was given back where the stop had cancelled one of its queries."""

    def make(self: Any, key: dict[str, Any]) -> None:
        calls.append(key["n"])
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            insert_square(self, key)

    calls: list[int] = []
    Square = squares(3, make)
    for count in (1, 2, 3):
        with pytest.raises(SystemExit):
            Square.populate(reserve_jobs=True)
        assert len(calls) == count
        assert sorted([*made(Square()), *statuses(Square)]) == [1, 2, 3]
        assert set(statuses(Square).values()) <= {"scheduled"}


# -- anywhere else ----------------------------------------------------------------------------------------


@contextmanager
def signals_at(connection: Any, send: Callable[[int, str], int | None], own: dict[int, Any]) -> Iterator[list[str]]:
    """Send this process the signals that `send` names, each just before a statement of the populate.

    `send` gets the statement and its place among those that run under the populate's own handlers.
    """
    query, counted = connection.query, []

    def count(sql: str, *arguments: Any, **options: Any) -> Any:
        if handlers() != own:
            counted.append(sql)
            number = send(len(counted) - 1, sql)
            if number is not None:
                os.kill(os.getpid(), number)
        return query(sql, *arguments, **options)

    connection.query = count
    try:
        yield counted
    finally:
        del connection.query


def test_a_signal_before_any_statement_stops_the_populate_and_loses_nothing(
    squares: Any, own_handlers: dict[int, Any]
) -> None:
    """One populate for each statement that a populate of two jobs consists of."""
    place, sent, failures = 0, True, []
    while sent:
        Square = squares(2)
        Square.schedule_jobs()
        number, raised = ((signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt))[place % 2]

        def send(at: int, _: str, place: int = place, number: int = number) -> int | None:
            return number if at == place else None

        outcome: Any = None
        with signals_at(Square.Number.connection, send, own_handlers) as counted:
            try:
                Square.populate(reserve_jobs=True, schedule_jobs=False)
            except BaseException as error:
                outcome = type(error)
        sent = len(counted) > place
        assert handlers() == own_handlers
        rows = rows_by_number(Square)
        given_back = all(row["status"] == "scheduled" and row["attempt"] == 0 for row in rows.values())
        whole = sorted([*made(Square()), *rows]) == [1, 2]
        if not (given_back and whole and outcome == (raised if sent else None)):
            failures.append((place, counted[place] if sent else "", outcome, made(Square()), statuses(Square)))
        place += 1
    assert place > 15
    assert not failures


@STOPS
def test_an_impatient_user_changes_nothing(
    squares: Any, number: int, raised: type, own_handlers: dict[int, Any]
) -> None:
    """After the first signal, one more before every statement."""
    stopping = []

    def make(self: Any, key: dict[str, Any]) -> None:
        insert_square(self, key)
        if key["n"] == 3:
            stopping.append(3)
            os.kill(os.getpid(), number)

    Square = squares(40, make)
    Square.schedule_jobs()
    connection = Square.Number.connection
    with signals_at(connection, lambda *_: number if stopping else None, own_handlers), pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert handlers() == own_handlers
    assert made(Square()) == [1, 2]
    assert job_counts(Square) == {"scheduled": 38}


@STOPS
def test_a_signal_ends_the_wait_for_somebody_elses_scheduling(
    squares: Any, number: int, raised: type, own_handlers: dict[int, Any]
) -> None:
    Square = squares(2)
    Square.schedule_jobs()
    Square.jobs.delete()
    connection = Square.Number.connection
    control = Square.jobs.full_table_name.replace("~jobs", "~jobs_control")
    connection.query(f"UPDATE {control} SET scheduling_until = '2100-01-01'")

    def send(at: int, _: str) -> int | None:
        return number if at == 30 else None

    with signals_at(connection, send, own_handlers), pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert handlers() == own_handlers


@STOPS
def test_a_signal_while_populate_schedules_is_a_stop(
    squares: Any, number: int, raised: type, own_handlers: dict[int, Any]
) -> None:
    Square = squares(3)
    Square.jobs
    connection = Square.Number.connection
    query = connection.query

    def send(sql: str, *arguments: Any, **options: Any) -> Any:
        if re.match(r"\s*INSERT (/\*.*?\*/ )?INTO \S*~jobs\W", sql):
            os.kill(os.getpid(), number)
        return query(sql, *arguments, **options)

    connection.query = send
    try:
        with pytest.raises(raised):
            Square.populate(reserve_jobs=True)
    finally:
        del connection.query
    assert handlers() == own_handlers
    control = Square.jobs.full_table_name.replace("~jobs", "~jobs_control")
    assert set(connection.query(f"SELECT scheduling_until FROM {control}").fetchall()) == {(None,)}
    assert Square.populate(reserve_jobs=True)["success_count"] == 3


def fail(self: Any, key: dict[str, Any]) -> None:
    raise ValueError("no square")


@STOPS
@pytest.mark.parametrize("make", [insert_square, fail], ids=["success", "error"])
def test_a_signal_when_all_is_done_is_a_stop(
    squares: Any, number: int, raised: type, make: Any, own_handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a script that populates in a loop would go on for ever."""
    end = HeldEvents.__exit__

    def end_later(events: HeldEvents, *error: Any) -> None:
        os.kill(os.getpid(), number)
        end(events, *error)

    monkeypatch.setattr(HeldEvents, "__exit__", end_later)
    Square = squares(2, make)
    with pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert handlers() == own_handlers
    assert made(Square()) == ([] if make is fail else [1, 2])
    assert statuses(Square) == ({1: "error", 2: "scheduled"} if make is fail else {})


# -- the caller's handlers ------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("make", [insert_square, fail], ids=["success", "error"])
def test_the_callers_handlers_are_restored(
    squares: Any, make: Any, processes: int, own_handlers: dict[int, Any]
) -> None:
    Square = squares(2, make)
    with pytest.raises(ValueError) if make is fail else nullcontext():
        Square.populate(reserve_jobs=True, processes=processes)
    assert handlers() == own_handlers


def test_ignored_signals_are_ignored_again(squares: Any) -> None:
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    squares(1).populate(reserve_jobs=True)
    assert set(handlers().values()) == {signal.SIG_IGN}


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_that_make_starts_have_the_callers_handlers(squares: Any, processes: int) -> None:
    """A Pool ends its workers with SIGTERM; one that handles it in Python may miss it and hang."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    context = multiprocessing.get_context("fork")

    def report(answer: Any) -> None:
        answer.send(([str(handler) for handler in handlers().values()], signal.set_wakeup_fd(-1)))

    def make(self: Any, key: dict[str, Any]) -> None:
        answer, child_answer = context.Pipe(duplex=False)
        child = context.Process(target=report, args=(child_answer,))
        child.start()
        child_answer.close()
        inside, wakeup = answer.recv()
        child.join()
        assert set(inside) == {str(signal.SIG_DFL)}
        assert wakeup == -1
        insert_square(self, key)

    Square = squares(2, make)
    assert Square.populate(reserve_jobs=True, processes=processes)["success_count"] == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_make_starts_can_be_ended_from_its_very_beginning(squares: Any, processes: int) -> None:
    """A Pool that is not needed for long ends workers that have hardly begun, and waits for them."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    context = multiprocessing.get_context("fork")

    def make(self: Any, key: dict[str, Any]) -> None:
        child = context.Process(target=os._exit, args=(0,))
        with forks.child_does_first(lambda: os.kill(os.getpid(), signal.SIGTERM)):
            child.start()
        child.join()
        assert child.exitcode == -signal.SIGTERM
        insert_square(self, key)

    Square = squares(2, make)
    assert Square.populate(reserve_jobs=True, processes=processes)["success_count"] == 2


@STOPS
def test_a_signal_that_comes_while_make_starts_a_process_stops_it_at_once(
    squares: Any, number: int, raised: type
) -> None:
    went_on = []

    def make(self: Any, key: dict[str, Any]) -> None:
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
        with forks.parent_does_last(lambda: os.kill(os.getpid(), number)):
            child.start()
        child.join()
        for _ in range(400):
            time.sleep(0.05)
        went_on.append(key)

    Square = squares(2, make)
    with pytest.raises(raised):
        Square.populate(reserve_jobs=True)
    assert not went_on
    assert statuses(Square) == {1: "scheduled", 2: "scheduled"}


def test_outside_the_main_thread_handlers_are_left_alone(squares: Any, own_handlers: dict[int, Any]) -> None:
    during = []

    def make(self: Any, key: dict[str, Any]) -> None:
        during.append(handlers())
        insert_square(self, key)

    Square = squares(3, make)
    results = []
    thread = threading.Thread(target=lambda: results.append(Square.populate(reserve_jobs=True)))
    thread.start()
    thread.join()
    assert results == [{"success_count": 3, "error_list": []}]
    assert during == [own_handlers] * 3
