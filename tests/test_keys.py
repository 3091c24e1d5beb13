"""Keys come back from the queue as DataJoint itself gives them, whatever their type; no two share a job."""

from __future__ import annotations

import datetime
import os
import secrets
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datajoint as dj
import pytest
from conftest import ENGINE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import INT, MODERN, computed, evaluations, keys_of, manual, rows_of, statements_of

import djjobs
from djjobs.queue.claim import Claims, Job
from djjobs.queue.finish import Finisher
from djjobs.queue.keys import Keys
from djjobs.queue.queue import Queue

POSTGRESQL = ENGINE == "postgresql"
#: Each example is a batch of keys, since it costs round trips. More of them: DJJOBS_TEST_EXAMPLES=200
EXAMPLES = int(os.environ.get("DJJOBS_TEST_EXAMPLES", 4))


def property_of_keys(test: Any) -> Any:
    return settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))(test)


# -- the types ---------------------------------------------------------------------------------------------

# What joins, quotes, escapes or pads somewhere on the way, and what is easily taken for something else
NASTY = [
    *"'\"\\%|,:;{}[]() \t\n`$&/.-",
    *"%s|%(key)s|\\n|\\u0041|null|true|0|00|1|--|/*".split("|"),
    *"é e\u0301 日本 \U0001f42d ß ﬀ \u202e עברית".split(" "),
]
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0" if POSTGRESQL else "")
TEXT = st.lists(st.sampled_from(NASTY) | CHARACTERS, max_size=5).map("".join).map(lambda text: text[:20])


def integers(bits: int, signed: bool = True) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    # where a float can no longer tell one from the next
    near = [low, high, high - 1, 0, 1, 10, 2**53, 2**53 + 1, 2**24 + 1]
    return st.integers(low, high) | st.sampled_from([n for n in near if low <= n <= high])


@dataclass(frozen=True)
class Type:
    """A type of key attribute as this cell declares it, and values for it."""

    sql: str
    values: st.SearchStrategy[Any]


TYPES = {
    "tiny": Type("int8" if MODERN else "tinyint", integers(8)),
    "small": Type("int16" if MODERN else "smallint", integers(16)),
    "whole": Type(INT, integers(32)),
    "big": Type("int64" if MODERN else "bigint", integers(64)),
    "text": Type("varchar(20)", TEXT),
    "fixed": Type("char(20)", TEXT),
    "date": Type("date", st.dates()),
    "moment": Type("datetime(6)", st.datetimes()),
    "second": Type("datetime", st.datetimes().map(lambda moment: moment.replace(microsecond=0))),
    "clock": Type(
        "time(6)",
        st.times() if POSTGRESQL else st.timedeltas(datetime.timedelta(hours=-800), datetime.timedelta(hours=800)),
    ),
    "exact": Type("decimal(20,6)", st.decimals(-(10**13), 10**13, places=6)),
    "uuid": Type("uuid", st.uuids() | st.just(uuid.UUID(int=0))),
    "choice": Type("enum('a','b c','é','x:y|z','1')", st.sampled_from(["a", "b c", "é", "x:y|z", "1"])),
    "flag": Type("bool", st.booleans()),
    "double": Type(
        "float64" if MODERN else "double", st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
    ),
    # DataJoint gets six digits of it from MySQL, so two that agree in these are one key to it
    "single": Type("float32" if MODERN else "float", st.integers(-99_999, 99_999).map(lambda n: n / 8 // 1 / 4)),
}
if not POSTGRESQL:
    TYPES |= {
        "medium": Type("mediumint", integers(24)),
        "natural": Type("int unsigned", integers(32, signed=False)),
        # 0.14 itself cannot fetch more
        "most": Type("bigint unsigned", integers(64, signed=False) if MODERN else st.integers(0, 2**63 - 1)),
        "year": Type("year", st.integers(1901, 2155)),
    }
#: DataJoint 2.3 can neither insert nor fetch a uuid on PostgreSQL.
NOT_FETCHED = {"uuid"} if POSTGRESQL else set()
#: And no DataJoint can restrict by a time of MySQL, so it cannot populate such a table.
NOT_FOUND = {"uuid"} if POSTGRESQL else {"clock"}


class Pair:
    """A table with keys of some types and a Computed table that is made from it."""

    def __init__(self, schema: Any, types: dict[str, str], name: str) -> None:
        definition = "\n".join(f"{attribute} : {sql}" for attribute, sql in types.items())
        self.names = list(types)
        self.Source = manual(schema, definition, f"Source{name}")
        self.Result = computed(schema, "-> Source", {"Source": self.Source}, f"Result{name}")
        self.queue = Queue.of(schema.connection, schema.database)

    def start_over(self, keys: list[tuple[Any, ...]]) -> None:
        """Fill the source with these keys; those that the server holds for equal go in once."""
        self.Result().delete_quick()
        self.Source().delete_quick()
        self.Result.jobs.delete()
        quoted = [f'"{name}"' if POSTGRESQL else f"`{name}`" for name in self.names]
        columns, first = ", ".join(quoted), quoted[0]
        row = f"({', '.join(['%s'] * len(quoted))})"
        skip = "ON CONFLICT DO NOTHING" if POSTGRESQL else f"ON DUPLICATE KEY UPDATE {first} = VALUES({first})"
        sql = f"INSERT INTO {self.Source.full_table_name} ({columns}) VALUES {', '.join([row] * len(keys))} {skip}"
        self.Source.connection.query(sql, args=tuple(to_sql(value) for key in keys for value in key))

    def scheduled_and_claimed(self) -> list[Job]:
        scheduled = int(self.Result.schedule_jobs(min_scheduling_interval=0))
        with statements_of(self.Result.connection) as statements:
            assert int(self.Result.schedule_jobs(min_scheduling_interval=0)) == 0
        # It knew all of them for queued. What it takes for new by mistake, it finds out when that is there already.
        assert len(evaluations(statements)) == 1
        jobs = Claims(self.queue, Keys(self.Result(), (), self.queue.engine)).take(1000)
        assert len(jobs) == scheduled
        return jobs

    def give_back(self, jobs: list[Job]) -> None:
        Finisher(self.queue, Keys(self.Result(), (), self.queue.engine), keep_completed=True).give_back(jobs)


def to_sql(value: Any) -> Any:
    if isinstance(value, uuid.UUID):
        return str(value) if POSTGRESQL else value.bytes
    return value


def exactly(keys: list[dict[str, Any]]) -> list[str]:
    """Keys with the types of their values, in a form that can be compared."""
    return sorted(str([(name, type(value), repr(value)) for name, value in key.items()]) for key in keys)


@pytest.fixture(scope="module")
def key_schema(server: Any) -> Iterator[Any]:
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    use_text_that_tells_all_apart(schema)
    yield schema
    schema.drop()


def use_text_that_tells_all_apart(schema: Any) -> None:
    """A collation in which texts are equal only if they are the same, also in their last spaces."""
    if not POSTGRESQL:
        version = schema.connection.query("SELECT version()").fetchone()[0]
        collation = "utf8mb4_nopad_bin" if "MariaDB" in version else "utf8mb4_0900_bin"
        schema.connection.query(f"ALTER DATABASE `{schema.database}` CHARACTER SET utf8mb4 COLLATE {collation}")


@pytest.fixture(scope="module")
def pairs(key_schema: Any) -> dict[str, Pair]:
    return {name: Pair(key_schema, {"k": kind.sql}, name.capitalize()) for name, kind in TYPES.items()}


# -- the properties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
@property_of_keys
@given(data=st.data())
def test_a_key_comes_back_as_datajoint_gives_it(pairs: dict[str, Pair], name: str, data: Any) -> None:
    fewest = 1 if name in ("flag", "choice") else 25
    keys = data.draw(st.lists(TYPES[name].values, min_size=fewest, max_size=60, unique=True))
    pair = pairs[name]
    pair.start_over([(key,) for key in keys])
    jobs = pair.scheduled_and_claimed()
    expected = [{"k": key} for key in keys] if name in NOT_FETCHED else keys_of(pair.Source())
    assert exactly([job.key for job in jobs]) == exactly(expected)
    assert len({job.key_hash for job in jobs}) == len(expected)


@pytest.mark.parametrize("name", [name for name in TYPES if name not in NOT_FOUND])
@property_of_keys
@given(data=st.data())
def test_a_restriction_by_key_finds_the_same_in_the_queue_as_in_the_table(
    pairs: dict[str, Pair], name: str, data: Any
) -> None:
    drawn = data.draw(st.lists(TYPES[name].values, min_size=2, max_size=20, unique=True))
    pair = pairs[name]
    pair.start_over([(key,) for key in drawn])
    pair.Result.schedule_jobs(min_scheduling_interval=0)
    keys = keys_of(pair.Source())
    some = [key for key in keys[: (len(keys) + 1) // 2] if datajoint_finds(pair.Source, key)]
    assert pair.Result.cancel_jobs(some) == len(some)
    assert len(pair.Result.jobs.cancelled) == len(some)
    pair.Source().delete_quick()
    assert pair.Result.cleanup_jobs(some)["orphaned_incomplete"] == len(some)
    assert len(pair.Result.jobs) == len(keys) - len(some)


def datajoint_finds(table: Any, key: dict[str, Any]) -> bool:
    """0.14 stumbles over some quotes, and a single-precision number is not equal to what was fetched of it."""
    try:
        return len(table & key) == 1
    except dj.errors.QuerySyntaxError:
        return False


PIECES = st.sampled_from(["", "1", "2", "12", "a", "|", ",", ":", '"', "'", "\\", "{", "}", " ", "a|", '","', "null"])
PARTS = st.lists(PIECES, max_size=3).map("".join).map(lambda text: text[:12])


@pytest.fixture(scope="module")
def composite(key_schema: Any) -> Pair:
    types = {"a": INT, "b": INT, "s": "varchar(12)", "t": "varchar(12)"}
    return Pair(key_schema, types, "Composite")


@property_of_keys
@given(keys=st.lists(st.tuples(st.integers(0, 123), st.integers(0, 123), PARTS, PARTS), min_size=1, max_size=150))
def test_keys_that_look_alike_when_joined_are_different_jobs(composite: Pair, keys: list[Any]) -> None:
    keys = [(1, 23, "", ""), (12, 3, "", ""), (1, 2, "a|b", "c"), (1, 2, "a", "b|c"), *keys]
    composite.start_over(keys)
    jobs = composite.scheduled_and_claimed()
    assert exactly([job.key for job in jobs]) == exactly(keys_of(composite.Source()))
    assert len(jobs) == len(set(keys))


@pytest.fixture(scope="module")
def wide(key_schema: Any) -> Pair:
    """One key of many types; MySQL allows sixteen attributes. `double` is also a name that needs quotes."""
    names = "tiny big text fixed date moment clock exact uuid choice flag double".split()
    names = [name for name in names if name not in NOT_FOUND]
    return Pair(key_schema, {name: TYPES[name].sql for name in names}, "Wide")


@property_of_keys
@given(data=st.data())
def test_a_key_of_many_types_comes_back_whole(wide: Pair, data: Any) -> None:
    rows = st.tuples(*(TYPES[name].values for name in wide.names))
    wide.start_over(data.draw(st.lists(rows, min_size=1, max_size=20)))
    jobs = wide.scheduled_and_claimed()
    assert exactly([job.key for job in jobs]) == exactly(keys_of(wide.Source()))


# -- and so make() gets them -----------------------------------------------------------------------------------


def test_make_gets_every_nasty_text_and_the_result_is_found_under_it(pairs: dict[str, Pair]) -> None:
    pair = pairs["text"]
    texts = sorted({*NASTY, *(f"{first}a{second}" for first, second in pairwise(NASTY))})
    pair.start_over([(text,) for text in texts])
    texts = [text for text in texts if datajoint_finds(pair.Source, {"k": text})]
    assert len(texts) > 50
    pair.start_over([(text,) for text in texts])
    pair.Result.schedule_jobs(min_scheduling_interval=0)
    done = pair.Result.populate(reserve_jobs=True, suppress_errors=True)
    assert done["error_list"] == []
    assert exactly(keys_of(pair.Result())) == exactly(keys_of(pair.Source()))
    assert len(pair.Result()) == len(texts)


def test_make_gets_keys_of_many_types(wide: Pair) -> None:
    example = {
        "tiny": -128,
        "big": 2**63 - 1,
        "text": "O'Hara \\ 100%",
        "fixed": "mouse",
        "date": datetime.date(2024, 2, 29),
        "moment": datetime.datetime(2024, 2, 29, 23, 59, 59, 999_999),
        "clock": datetime.time(1, 2, 3, 4),
        "exact": "-12345678901234.000001",
        "uuid": uuid.UUID(int=12),
        "choice": "b c",
        "flag": True,
        "double": 0.5,
    }
    wide.start_over([tuple(example[name] for name in wide.names)])
    wide.Result.schedule_jobs(min_scheduling_interval=0)
    assert wide.Result.populate(reserve_jobs=True)["success_count"] == 1
    assert exactly(keys_of(wide.Result())) == exactly(keys_of(wide.Source()))
    assert int(wide.Result.schedule_jobs(min_scheduling_interval=0)) == 0


def test_a_uuid_is_a_uuid_on_every_engine(pairs: dict[str, Pair]) -> None:
    keys = [uuid.uuid4() for _ in range(3)]
    pairs["uuid"].start_over([(key,) for key in keys])
    jobs = pairs["uuid"].scheduled_and_claimed()
    assert sorted(job.key["k"] for job in jobs) == sorted(keys)
    assert {row["key"]["k"] for row in rows_of(pairs["uuid"].Result.jobs)} == {str(key) for key in keys}


def test_neighbours_among_large_integers_are_told_apart(pairs: dict[str, Pair]) -> None:
    numbers = [2**53, 2**53 + 1, 2**62, 2**62 + 1, -(2**63), -(2**63) + 1]
    pair = pairs["big"]
    pair.start_over([(number,) for number in numbers])
    assert int(pair.Result.schedule_jobs(min_scheduling_interval=0)) == 6
    for number in numbers:
        assert pair.Result.cancel_jobs({"k": number}) == 1
    pair.Source().delete_quick()
    for number in numbers:
        assert pair.Result.cleanup_jobs({"k": number})["orphaned_incomplete"] == 1
    assert len(pair.Result.jobs) == 0


def test_texts_that_differ_in_their_last_spaces_are_told_apart(pairs: dict[str, Pair]) -> None:
    texts = ["", " ", "a", "a ", "a  ", "A"]
    pair = pairs["text"]
    pair.start_over([(text,) for text in texts])
    assert int(pair.Result.schedule_jobs(min_scheduling_interval=0)) == 6
    for text in texts:
        assert pair.Result.cancel_jobs({"k": text}) == 1
    pair.Source().delete_quick()
    for text in texts:
        assert pair.Result.cleanup_jobs({"k": text})["orphaned_incomplete"] == 1


def test_a_claim_that_is_given_back_and_taken_again_has_the_same_key(pairs: dict[str, Pair]) -> None:
    pair = pairs["moment"]
    pair.start_over([(datetime.datetime(2024, 1, 1, microsecond=n),) for n in range(5)])
    jobs = pair.scheduled_and_claimed()
    pair.give_back(jobs)
    again = Claims(pair.queue, Keys(pair.Result(), (), pair.queue.engine), "reverse").take(10)
    assert exactly([job.key for job in again]) == exactly([job.key for job in jobs])
    assert {job.key_hash for job in again} == {job.key_hash for job in jobs}


def test_text_beyond_ascii_is_kept_in_a_latin1_schema(schema: Any) -> None:
    if not POSTGRESQL:
        schema.connection.query(f"ALTER DATABASE `{schema.database}` CHARACTER SET latin1")
    pair = Pair(schema, {"k": "varchar(20)"}, "Latin")
    pair.start_over([("Größe",), ("naïve ½",), ("señor's",), ("£5 \\ 100%",)])
    jobs = pair.scheduled_and_claimed()
    assert exactly([job.key for job in jobs]) == exactly(keys_of(pair.Source()))
    pair.give_back(jobs)
    assert pair.Result.cancel_jobs({"k": "Größe"}) == 1
    assert pair.Result.populate(reserve_jobs=True)["success_count"] == 3
    pair.Source.insert([("new",)])
    assert pair.Result.cleanup_jobs({"k": "Größe"})["orphaned_incomplete"] == 0
    assert len(djjobs.jobs(schema)) == 1
