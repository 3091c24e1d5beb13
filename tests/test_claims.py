"""What a claim costs and locks: an index in the order of the claim, and no more rows than it takes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datajoint as dj
import pytest
from pipelines import computed, keys_of
from plans import Reading, plan
from workloads.squares import (
    Standing,
    another_connection,
    change_jobs,
    made,
    rows_by_number,
    squares,
    standing_schema,
    statuses,
)

from djjobs.queue.claim import Claims
from djjobs.queue.keys import Keys
from djjobs.queue.queue import Queue

DONE, SCHEDULED, DELAYED = 2_000, 20_000, 5_000
#: What a claim of ten may read: a few times ten, and nothing that grows with the queue.
FEW = 150
ORDERS = ("original", "reverse", "random")
LATER = datetime.timedelta(hours=1)


@pytest.fixture(scope="module")
def standing(server: Any, engine: str) -> Iterator[Standing]:
    """A long queue of Square: done, scheduled and delayed jobs; and of Cube: delayed ones only."""
    with standing_schema() as standing:
        Square = standing.start_over(DONE + SCHEDULED + DELAYED)
        Square.schedule_jobs(f"n <= {DONE}", min_scheduling_interval=0)
        jobs = Square.jobs.full_table_name
        standing.schema.connection.query(f"UPDATE {jobs} SET status = 'success'")
        Square.schedule_jobs(f"n <= {DONE + SCHEDULED}", min_scheduling_interval=0)
        Square.schedule_jobs(due_time=LATER, min_scheduling_interval=0)
        standing.Square = Square
        standing.Cube = computed(standing.schema, "-> Number", {"Number": Square.Number}, "Cube")
        standing.Cube.schedule_jobs("n <= 6000", due_time=LATER)
        analyze = "ANALYZE" if engine == "postgresql" else "ANALYZE TABLE"
        standing.schema.connection.query(f"{analyze} {jobs}")
        yield standing


@pytest.fixture
def long(standing: Standing) -> Iterator[Any]:
    """Square with its long queue. What a test claims is given back after it."""
    yield standing.Square
    jobs = standing.Square.jobs.full_table_name
    standing.schema.connection.query(
        f"UPDATE {jobs} SET status = 'scheduled', worker_id = NULL WHERE status = 'reserved'"
    )


def claims(table: Any, *restrictions: Any, order: str = "original", priority: int | None = None) -> Claims:
    """What a worker on this table would claim."""
    table = table()
    queue = Queue.of(table.connection, table.database)
    return Claims(queue, Keys(table, restrictions, queue.engine), order, priority)


@contextmanager
def over_another_connection(table: Any, engine: str) -> Iterator[Any]:
    """The same table for somebody else, who does not wait for locks."""
    connection = another_connection()
    patience = "SET lock_timeout = '2s'" if engine == "postgresql" else "SET innodb_lock_wait_timeout = 2"
    connection.query(patience)
    yield squares(dj.Schema(table.database, connection=connection))
    connection.close()


# -- plans ------------------------------------------------------------------------------------------------

IN_ORDER, PRIMARY = "claim_in_order", "PRIMARY"
#: What an index is called, and which columns it must begin with.
COLUMNS = {IN_ORDER: "(table_name, status, turn, due_time", PRIMARY: "(table_name, key_hash"}

STATEMENTS: dict[str, tuple[str, dict[str, str], str]] = {
    "in order": ("pick_in_order", {"direction": "ASC", "asked_for": ""}, IN_ORDER),
    "in reverse": ("pick_in_order", {"direction": "DESC", "asked_for": ""}, IN_ORDER),
    "found at random": ("pick_these", {}, PRIMARY),
    "find at random": ("find_near", {"asked_for": ""}, PRIMARY),
    "asked for": ("pick_in_order", {"direction": "ASC", "asked_for": "AND automatic = 0"}, IN_ORDER),
    "become due": ("pick_due", {}, IN_ORDER),
}
#: Those that lock jobs to claim them.
LOCKING = dict(list(STATEMENTS.items())[:3])
PARAMETERS = {"turn": 5, "count": 10, "start": "0" * 32, "window": 30, "floor": -1, "priority": 3}


def render(table: Any, name: str, parts: dict[str, str]) -> tuple[str, dict[str, Any]]:
    queue = Queue.of(table().connection, table.database)
    parameters = {**PARAMETERS, "table": table.table_name}
    if name == "pick_these":
        rows = queue.db.execute(queue.sql(queue.engine.claims.find_near, asked_for=""), **parameters).fetchall()
        parameters["hashes"] = tuple(row[0] for row in rows)
    return queue.sql(getattr(queue.engine.claims, name), **parts), parameters


def check_plan(steps: list[dict[str, Any]], connection: Any, engine: str, index: str) -> None:
    if engine != "postgresql":
        assert [step["key"] for step in steps if not step["table"].startswith("<derived")] == [index]
        assert not any("filesort" in (step["Extra"] or "") for step in steps)
        return
    assert not [step for step in steps if "Sort" in step["Node Type"] or step["Node Type"] == "Seq Scan"]
    used = [step["Index Name"] for step in steps if "Index Name" in step]
    assert len(used) == 1
    (definition,) = connection.query(
        "SELECT indexdef FROM pg_indexes WHERE indexname = %(name)s", args={"name": used[0]}
    ).fetchone()
    assert COLUMNS[index] in definition


@pytest.mark.parametrize(("name", "parts", "index"), STATEMENTS.values(), ids=STATEMENTS)
def test_a_claim_follows_its_index_and_sorts_nothing(
    long: Any, engine: str, name: str, parts: dict[str, str], index: str
) -> None:
    connection = long.Number.connection
    check_plan(plan(connection, engine, *render(long, name, parts)), connection, engine, index)


# -- rows read --------------------------------------------------------------------------------------------


@pytest.fixture
def reading(standing: Standing, engine: str) -> Callable[[], Any]:
    return lambda: Reading(standing.schema.connection, engine).measured()


def test_the_measure_sees_a_scan(long: Any, reading: Any) -> None:
    """So that the tests below could fail."""
    with reading() as read:
        jobs = long.jobs.full_table_name
        long.Number.connection.query(f"SELECT COUNT(*) FROM {jobs} WHERE priority > 100").fetchall()
    assert read.rows > SCHEDULED


@pytest.mark.parametrize("order", ORDERS)
def test_a_claim_reads_what_it_takes_however_long_the_queue(long: Any, reading: Any, order: str) -> None:
    with reading() as read:
        assert len(claims(long, order=order).take(10)) == 10
    assert 10 <= read.rows < FEW


def test_a_claim_reads_no_more_when_the_queue_has_just_become_long(server: Any, engine: str) -> None:
    with standing_schema() as fresh:
        Square = fresh.start_over(SCHEDULED)
        if engine == "postgresql":  # or the server might be just about to look by itself
            fresh.schema.connection.query(f"ALTER TABLE {Square.jobs.full_table_name} SET (autovacuum_enabled = off)")
        Square.schedule_jobs(min_scheduling_interval=0)
        for order in ORDERS:
            with Reading(fresh.schema.connection, engine).measured() as read:
                assert len(claims(Square, order=order).take(10)) == 10
            assert 10 <= read.rows < FEW, order


@pytest.mark.parametrize("order", ORDERS)
def test_delayed_jobs_are_not_in_the_way(standing: Standing, reading: Any, order: str) -> None:
    with reading() as read:
        assert claims(standing.Cube, order=order).take(10) == []
    assert read.rows < FEW


@pytest.mark.parametrize("order", ORDERS)
def test_the_one_job_among_many_rows_is_found(standing: Standing, long: Any, reading: Any, order: str) -> None:
    jobs, name = long.jobs.full_table_name, standing.Cube.table_name
    connection = standing.schema.connection
    (rare,) = connection.query(f"SELECT MIN(key_hash) FROM {jobs} WHERE table_name = '{name}'").fetchone()
    one = f"WHERE table_name = '{name}' AND key_hash = '{rare}'"
    connection.query(f"UPDATE {jobs} SET turn = 5 {one}")
    try:
        with reading() as read:
            assert [job.key_hash for job in claims(standing.Cube, order=order).take(10)] == [rare]
        assert read.rows < 3_000
    finally:
        connection.query(f"UPDATE {jobs} SET turn = NULL, status = 'scheduled', worker_id = NULL {one}")


def test_random_jobs_come_from_everywhere(long: Any) -> None:
    """Not the first by hash or by due time: of forty claims some are from each half of either, but once in 2**38."""
    taken = {job.key_hash: job.key["n"] for _ in range(40) for job in claims(long, order="random").take(2)}
    assert len(taken) == 80
    first, last = min(taken), max(taken)
    assert first < "8" < last
    middle = DONE + SCHEDULED / 2
    assert min(taken.values()) < middle < max(taken.values())


def test_less_urgent_jobs_are_not_in_the_way(long: Any, reading: Any) -> None:
    """A worker that takes priority 3 and better, where all jobs have 5."""
    with reading() as read:
        assert claims(long, priority=3).take(10) == []
    assert read.rows < FEW


def test_jobs_become_due_in_portions(standing: Standing, long: Any, reading: Any) -> None:
    """All delayed jobs of Cube become due at once: one claim does not have to line them all up."""
    jobs, name = long.jobs.full_table_name, standing.Cube.table_name
    connection = standing.schema.connection
    connection.query(f"UPDATE {jobs} SET due_time = created_time WHERE table_name = '{name}'")
    try:
        with reading() as read:
            assert len(claims(standing.Cube).take(10)) == 10
        assert read.rows < 5_000
    finally:
        late = f"UPDATE {jobs} SET due_time = '2100-01-01', turn = NULL WHERE table_name = '{name}'"
        connection.query(late)


# -- what a claim tells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_a_claim_tells_for_how_long_each_job_was_due(schema: Any, order: str, restrictions: tuple[str, ...]) -> None:
    Square = squares(schema, 3)
    ago, started = {1: 1000, 2: 100, 3: 0}, time.monotonic()
    for n, seconds in ago.items():
        Square.schedule_jobs({"n": n}, due_time=-datetime.timedelta(seconds=seconds), min_scheduling_interval=0)
    waited = {job.key["n"]: job.waited for job in claims(Square, *restrictions, order=order).take(10)}
    took = time.monotonic() - started
    assert set(waited) == set(ago)
    for n, seconds in waited.items():
        assert isinstance(seconds, float)
        assert -0.01 < seconds - ago[n] < took + 0.01


def test_a_job_that_becomes_due_this_moment_has_not_waited(schema: Any) -> None:
    """Each job is due a moment after the one before it, and may be claimed at once."""
    Square = squares(schema, 1)
    Square.schedule_jobs()
    change_jobs(Square, [1], "due_time = '2100-01-01 00:00:00'")
    (job,) = claims(Square).take(1)
    assert job.waited == 0


# -- locks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parts", "index"), LOCKING.values(), ids=LOCKING)
def test_a_claim_locks_only_the_jobs_it_takes(
    long: Any, engine: str, name: str, parts: dict[str, str], index: str
) -> None:
    db = Queue.of(long.Number.connection, long.database).db
    sql, parameters = render(long, name, parts)
    scheduled = f"FROM {long.jobs.full_table_name} WHERE table_name = '{long.table_name}' AND status = 'scheduled'"
    with over_another_connection(long, engine) as theirs:
        connection = theirs.Number.connection
        with db.transaction():
            held = {row[0] for row in db.execute(sql, **parameters).fetchall()}
            assert len(held) == 10
            for order in ORDERS:
                jobs = claims(theirs, order=order).take(10)
                assert len(jobs) == 10
                assert not held & {job.key_hash for job in jobs}
            others = Queue.of(connection, long.database).db
            with others.transaction():
                free = others.execute(f"SELECT key_hash {scheduled} FOR UPDATE SKIP LOCKED").fetchall()
            assert len(free) == SCHEDULED + DELAYED - 10 - 30
            assert not held & {row[0] for row in free}


def test_jobs_that_others_hold_do_not_change_the_order_of_the_rest(schema: Any, engine: str) -> None:
    """Due in the order that is the reverse of the one in which the server finds them by their hashes."""
    Square = squares(schema, 6)
    Square.schedule_jobs()
    hashes = {n: row["key_hash"] for n, row in rows_by_number(Square).items()}
    order = sorted(hashes, key=lambda n: hashes[n], reverse=True)
    for place, n in enumerate(order):
        change_jobs(Square, [n], f"due_time = '2001-01-01 00:00:{place:02}'")
    with over_another_connection(Square, engine) as theirs:
        stranger = theirs.Number.connection
        with stranger.transaction:
            first = f"table_name = '{Square.table_name}' AND key_hash = '{hashes[order[0]]}'"
            stranger.query(f"SELECT * FROM {Square.jobs.full_table_name} WHERE {first} FOR UPDATE").fetchall()
            taken = claims(Square, "n > 0").take(3)
    assert [job.key["n"] for job in taken] == order[1:4]


@pytest.mark.parametrize("order", ORDERS)
def test_a_claim_in_progress_blocks_neither_scheduling_nor_work(schema: Any, engine: str, order: str) -> None:
    Square = squares(schema, 60)
    Square.schedule_jobs("n <= 40", min_scheduling_interval=0)
    Square.schedule_jobs("n <= 50", due_time=LATER, min_scheduling_interval=0)
    db = Queue.of(schema.connection, schema.database).db
    statement = {
        "original": STATEMENTS["in order"],
        "reverse": STATEMENTS["in reverse"],
        "random": STATEMENTS["found at random"],
    }[order]
    sql, parameters = render(Square, *statement[:2])
    with over_another_connection(Square, engine) as theirs, db.transaction():
        held = db.execute(sql, **parameters).fetchall()
        assert len(held) == 10
        assert theirs.schedule_jobs(min_scheduling_interval=0).scheduled == 10
        assert theirs.populate(reserve_jobs=True, order=order)["success_count"] == 40
        assert theirs.cancel_jobs("n between 41 and 50") == 10
    assert len(keys_of(Square())) == 40
    left = statuses(Square)
    assert sorted(left.values()) == ["cancelled"] * 10 + ["scheduled"] * 10
    assert Square.populate(reserve_jobs=True)["success_count"] == 10
    assert not set(made(Square())) & set(range(41, 51))


# -- memory -----------------------------------------------------------------------------------------------


@contextmanager
def most_rows_fetched(connection: Any) -> Iterator[list[int]]:
    """How many rows each SELECT brought into this process."""
    query, fetched = connection.query, []

    def count(sql: str, *arguments: Any, **options: Any) -> Any:
        cursor = query(sql, *arguments, **options)
        if sql.split()[0].upper() in ("SELECT", "SHOW", "WITH"):
            fetched.append(cursor.rowcount)
        return cursor

    connection.query = count
    try:
        yield fetched
    finally:
        del connection.query


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("restrictions", "most"), [((), 32), (("n > 0",), 500)], ids=["all", "restricted"])
def test_a_worker_never_holds_more_than_a_page_of_the_queue(
    long: Any, order: str, restrictions: tuple[str, ...], most: int
) -> None:
    with most_rows_fetched(long.Number.connection) as fetched:
        long.schedule_jobs(*restrictions, min_scheduling_interval=0)
        result = long.populate(*restrictions, reserve_jobs=True, order=order, max_calls=60)
    assert result["success_count"] == 60
    assert 0 < max(fetched) <= most
