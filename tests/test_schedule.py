"""schedule_jobs: which keys become jobs, when it is skipped, and what it costs."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import datajoint as dj
import pytest
from helpers import wait_for
from pipelines import (
    FLOAT,
    INT,
    Lab,
    computed,
    evaluations,
    forked,
    in_processes,
    job_counts,
    keys_of,
    manual,
    redeclared,
    rows_of,
    standing_lab,
    statements_of,
)
from plans import Reading

import djjobs
from djjobs.queue.claim import Claims
from djjobs.queue.enqueue import insert_few
from djjobs.queue.finish import Finisher
from djjobs.queue.keys import Keys
from djjobs.queue.queue import Queue


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    with standing_lab() as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab) -> Lab:
    return standing.start_over()


@pytest.fixture
def interval() -> Iterator[None]:
    """Put dj.config["min_scheduling_interval"] back afterwards."""
    before = dj.config["min_scheduling_interval"]
    yield
    dj.config["min_scheduling_interval"] = before


def values(keys: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Keys as sorted tuples of the values of their sorted attributes."""
    return sorted(tuple(value for _, value in sorted(key.items())) for key in keys)


def age_scheduling(lab: Lab, seconds: float) -> None:
    """Let so many seconds go by since every scheduling, without waiting for them."""
    for row in rows_of(lab.control):
        last = row["last_scheduled"] - datetime.timedelta(seconds=seconds)
        lab.control.update1({"table_name": row["table_name"], "scope": row["scope"], "last_scheduled": last})


# -- which keys ------------------------------------------------------------------------------------------


def test_keys_of_key_source_that_are_not_in_the_target_become_scheduled_jobs(lab: Lab) -> None:
    lab.Spectrum.insert(
        [{"subject": "m1", "session": session, "power": 0} for session in range(4)],
        allow_direct_insert=True,
    )
    run = lab.Spectrum.schedule_jobs()
    assert (int(run), run.scheduled, run.rate_limited) == (8, 8, False)
    assert job_counts(lab.Spectrum) == {"scheduled": 8}
    queued = [row["key"] for row in rows_of(lab.Spectrum.jobs)]
    assert values(queued) == values(keys_of(lab.Session - {"subject": "m1"}))


def test_scheduling_again_adds_what_is_new_and_nothing_else(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    before = rows_of(lab.Spectrum.jobs)
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 0
    assert rows_of(lab.Spectrum.jobs) == before
    lab.Session.insert([{"subject": "m0", "session": 99}])
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 1
    assert len(lab.Spectrum.jobs) == 13


def test_scheduling_works_on_the_class_and_on_an_instance(lab: Lab) -> None:
    assert int(lab.Spectrum().schedule_jobs({"subject": "m0"})) == 4
    assert int(lab.Spectrum.schedule_jobs({"subject": "m1"})) == 4


@pytest.mark.parametrize("force", [False, True])
def test_only_force_puts_jobs_back_and_never_those_that_wait_run_or_are_done(lab: Lab, force: bool) -> None:
    lab.start_over(6, 2).Spectrum.schedule_jobs()
    statuses = ["scheduled", "reserved", "success", "error", "ignore", "cancelled"]
    for number, status in enumerate(statuses):
        lab.set_status(status, subject=f"m{number}")
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0, force=force)) == (6 if force else 0)
    put_back = {"error", "ignore", "cancelled"} if force else set()
    for number, status in enumerate(statuses):
        expected = "scheduled" if status in put_back else status
        found = [row["status"] for row in rows_of(lab.Spectrum.jobs) if row["key"]["subject"] == f"m{number}"]
        assert found == [expected, expected]


def test_force_with_a_restriction_puts_back_only_what_it_chooses(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    lab.Spectrum.ignore_jobs(True)
    assert int(lab.Spectrum.schedule_jobs({"subject": "m2"}, "session > 1", force=True)) == 2
    assert job_counts(lab.Spectrum) == {"ignore": 10, "scheduled": 2}


def test_a_job_that_was_put_back_runs(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    lab.Spectrum.cancel_jobs()
    lab.Spectrum.schedule_jobs(force=True)
    assert lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 12


def test_restrictions_of_every_kind_choose_the_keys(lab: Lab) -> None:
    chosen = {
        "dict": ({"subject": "m0"}, 4),
        "text": ("session = 1 AND subject <> 'm0'", 2),
        "list": ([{"subject": "m2", "session": 2}, {"subject": "m2", "session": 3}], 2),
        "query": (lab.Session & "session_date = '2024-05-01'", 2),
        "table": (lab.Subject & {"subject": "m1"}, 2),
    }
    for restriction, count in chosen.values():
        assert int(lab.Spectrum.schedule_jobs(restriction)) == count
    assert len(lab.Spectrum.jobs) == 12


def test_a_condition_on_percent_signs_and_quotes_is_taken_literally(lab: Lab) -> None:
    lab.Subject.insert([{"subject": "100%"}, {"subject": "O'Hara"}])
    lab.Session.insert([{"subject": "100%", "session": 1}, {"subject": "O'Hara", "session": 1}])
    assert int(lab.Spectrum.schedule_jobs({"subject": "100%"})) == 1
    assert int(lab.Spectrum.schedule_jobs({"subject": "O'Hara"})) == 1
    assert int(lab.Spectrum.schedule_jobs(lab.Session & "subject LIKE 'm%%'")) == 12


# -- how often ---------------------------------------------------------------------------------------------


def test_a_scheduling_within_the_interval_is_skipped_and_recorded_ones_are_what_counts(
    lab: Lab, interval: None
) -> None:
    assert dj.config["min_scheduling_interval"] == djjobs.settings.min_scheduling_interval
    dj.config["min_scheduling_interval"] = 60
    lab.Spectrum.schedule_jobs()
    lab.Session.insert([{"subject": "m0", "session": 99}])
    run = lab.Spectrum.schedule_jobs()
    assert run.rate_limited and int(run) == 0
    age_scheduling(lab, 40)  # and what the test takes
    assert lab.Spectrum.schedule_jobs(min_scheduling_interval=600).rate_limited
    age_scheduling(lab, 21)
    run = lab.Spectrum.schedule_jobs()
    assert not run.rate_limited and int(run) == 1
    (event,) = rows_of(lab.control)
    assert event["table_name"] == lab.Spectrum.table_name
    assert event["last_scheduled"] is not None


def test_the_interval_comes_from_dj_config_and_from_the_call(lab: Lab, interval: None) -> None:
    lab.Spectrum.schedule_jobs()
    age_scheduling(lab, 60)
    dj.config["min_scheduling_interval"] = 300
    assert djjobs.settings.min_scheduling_interval == 300
    assert lab.Spectrum.schedule_jobs().rate_limited
    assert lab.Spectrum.schedule_jobs(min_scheduling_interval=3600).rate_limited
    assert not lab.Spectrum.schedule_jobs(min_scheduling_interval=30).rate_limited
    djjobs.settings.min_scheduling_interval = 0
    assert dj.config["min_scheduling_interval"] == 0
    assert not lab.Spectrum.schedule_jobs().rate_limited
    assert not lab.Spectrum.schedule_jobs().rate_limited


def test_a_fraction_of_a_second_is_an_interval_too(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    assert lab.Spectrum.schedule_jobs(min_scheduling_interval=1000.5).rate_limited
    age_scheduling(lab, 1000)
    assert not lab.Spectrum.schedule_jobs(min_scheduling_interval=999.5).rate_limited


def test_nobody_waits_until_a_clock_that_was_set_back_has_come_to_the_last_scheduling_again(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    age_scheduling(lab, -300)
    assert not lab.Spectrum.schedule_jobs(min_scheduling_interval=60).rate_limited
    assert lab.Spectrum.schedule_jobs(min_scheduling_interval=60).rate_limited


def test_nobody_waits_for_who_died_while_scheduling_by_a_clock_that_was_set_back(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    (row,) = rows_of(lab.control)
    later = row["last_scheduled"] + datetime.timedelta(seconds=300 + djjobs.settings.scheduling_timeout)
    lab.control.update1({**row, "scheduling_until": later, "scheduling_by": "a" * 36})
    assert not lab.Spectrum.schedule_jobs(min_scheduling_interval=0.001).rate_limited
    lab.control.update1({**row, "scheduling_until": later, "scheduling_by": "a" * 36})
    lab.Spectrum.populate(reserve_jobs=True)
    assert len(lab.Spectrum()) == len(lab.Session())


def test_a_scheduling_of_everything_covers_one_of_a_part(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    lab.Session.insert([{"subject": "m0", "session": 99}])
    assert lab.Spectrum.schedule_jobs({"subject": "m0"}, min_scheduling_interval=600).rate_limited


def test_a_scheduling_of_a_part_covers_neither_another_part_nor_everything(lab: Lab) -> None:
    assert int(lab.Spectrum.schedule_jobs({"subject": "m0"})) == 4
    assert int(lab.Spectrum.schedule_jobs({"subject": "m1"})) == 4
    for subject in ("m0", "m1"):
        assert lab.Spectrum.schedule_jobs({"subject": subject}, min_scheduling_interval=600).rate_limited
    assert int(lab.Spectrum.schedule_jobs()) == 4


def test_force_is_not_held_up_by_a_scheduling_without_it(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    lab.Spectrum.ignore_jobs({"subject": "m0"})
    assert int(lab.Spectrum.schedule_jobs(force=True)) == 4
    lab.Spectrum.ignore_jobs({"subject": "m0"})
    assert int(lab.Spectrum.schedule_jobs({"subject": "m0"}, force=True)) == 4


def test_another_table_of_the_schema_has_an_interval_of_its_own(lab: Lab) -> None:
    Other = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Other")
    assert int(lab.Spectrum.schedule_jobs()) == 12
    assert int(Other.schedule_jobs()) == 12


def test_a_scheduling_that_failed_does_not_hold_up_the_next(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = property(lambda self: lab.Session & "session / (session - session) > no_such_column")
    monkeypatch.setattr(lab.Spectrum, "key_source", broken)
    with pytest.raises(Exception, match="no_such_column"):
        lab.Spectrum.schedule_jobs()
    monkeypatch.undo()
    assert int(lab.Spectrum.schedule_jobs()) == 12


# -- at what cost ------------------------------------------------------------------------------------------


def test_one_statement_schedules_any_number_of_keys(lab: Lab, engine: str) -> None:
    def cost(count: int) -> list[str]:
        lab.start_over(1, count)
        with statements_of(lab.schema.connection) as statements:
            assert int(lab.Spectrum.schedule_jobs()) == count
        return statements

    few, many = cost(2), cost(3000)
    # PostgreSQL is asked how long it takes the queue for, and to look.
    about_length = [sql for sql in many if "reltuples" in sql or sql.lstrip().startswith("ANALYZE")]
    assert len(many) - len(about_length) == len(few)
    assert len(about_length) == (2 if engine == "postgresql" else 0)
    assert len([sql for sql in many if sql.lstrip().startswith("INSERT") and "~jobs" in sql and "SELECT" in sql]) == 1
    assert len(lab.Spectrum.jobs) == 3000


@pytest.mark.only(engines=["postgresql"])
def test_no_key_is_compared_with_each_job_of_the_queue(lab: Lab) -> None:
    lab.start_over(1, 3000)
    lab.Spectrum.schedule_jobs()
    lab.Session.insert([{"subject": "m0", "session": session} for session in (5000, 5001)])
    with Reading(lab.schema.connection, "postgresql").measured() as reading:
        assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 2
    joins = [step["Node Type"] for step in reading.steps if "Anti" in step.get("Join Type", "")]
    assert len(joins) == 2
    assert "Nested Loop" not in joins


def test_a_restriction_that_the_server_refuses_is_tried_once(lab: Lab) -> None:
    lab.Spectrum.jobs
    with statements_of(lab.schema.connection) as statements, pytest.raises(djjobs.DjJobsError, match="out of range"):
        lab.Spectrum.schedule_jobs("session + 9223372036854775807 > 0")
    assert len(evaluations(statements)) == 1


@pytest.mark.parametrize(
    "before, rows, after, value",
    [
        ("varchar(20)", ["seven", "8", "12345678901"], INT, 8),
        ("varchar(20)", ["abcdef"], "varchar(3)", "abc"),
        (INT, [1], "varchar(20)", "1 "),
        ("date", ["2024-01-01"], INT, 2024),
    ],
)
def test_jobs_that_a_table_of_the_same_name_has_left_keep_no_key_from_its_job(
    schema: Any, before: str, rows: list[Any], after: str, value: Any
) -> None:
    source, result = redeclared(schema, f"k : {before}", [(row,) for row in rows], f"k : {after}")
    source.insert([(value,)])
    assert int(result.schedule_jobs(min_scheduling_interval=0)) == 1
    assert int(result.schedule_jobs(min_scheduling_interval=0)) == 0
    assert {"k": value} in [row["key"] for row in rows_of(result.jobs)]
    assert len(result.jobs) == len(rows) + 1


# -- priority and due time -------------------------------------------------------------------------------------


def test_new_jobs_get_the_priority_of_the_call_or_of_the_table(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.Spectrum.schedule_jobs({"subject": "m0"}, priority=1)
    lab.Spectrum.schedule_jobs({"subject": "m1"})
    monkeypatch.setattr(lab.Spectrum, "priority", 9)
    lab.Spectrum.schedule_jobs({"subject": "m2"})
    found = {(row["key"]["subject"], row["priority"]) for row in rows_of(lab.Spectrum.jobs)}
    assert found == {("m0", 1), ("m1", 5), ("m2", 9)}


def test_urgent_jobs_are_made_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.Spectrum.schedule_jobs({"subject": "m0"}, priority=7)
    lab.Spectrum.schedule_jobs({"subject": "m1"}, priority=0)
    lab.Spectrum.schedule_jobs({"subject": "m2"}, priority=255)
    made: list[str] = []
    monkeypatch.setattr(lab.Spectrum, "make", lambda self, key: made.append(key["subject"]))
    lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)
    assert made == ["m1"] * 4 + ["m0"] * 4 + ["m2"] * 4


@pytest.mark.parametrize("kind", ["timedelta", "utc", "tokyo"])
def test_a_job_waits_for_its_due_time(lab: Lab, kind: str) -> None:
    tokyo = datetime.timezone(datetime.timedelta(hours=9))
    later = datetime.timedelta(hours=2)
    earlier = datetime.timedelta(hours=-2)

    def moment(delay: datetime.timedelta) -> Any:
        zones = {"utc": datetime.timezone.utc, "tokyo": tokyo}
        return delay if kind == "timedelta" else datetime.datetime.now(zones[kind]) + delay

    lab.Spectrum.schedule_jobs({"subject": "m0"}, due_time=moment(later))
    lab.Spectrum.schedule_jobs({"subject": "m1"}, due_time=moment(earlier))
    for row in rows_of(lab.Spectrum.jobs):
        ahead = row["due_time"] - row["created_time"]
        expected = later if row["key"]["subject"] == "m0" else earlier
        assert abs(ahead - expected) < datetime.timedelta(minutes=5)
    assert lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 4
    assert job_counts(lab.Spectrum) == {"scheduled": 4}
    # scheduling it again does not make it due
    lab.Spectrum.schedule_jobs({"subject": "m0"}, min_scheduling_interval=0)
    assert lab.Spectrum.populate({"subject": "m0"}, reserve_jobs=True, schedule_jobs=False)["success_count"] == 0


def test_a_job_runs_once_its_due_time_has_come(lab: Lab) -> None:
    started = time.monotonic()
    lab.Spectrum.schedule_jobs(due_time=datetime.timedelta(seconds=0.5))
    done = wait_for(lambda: lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"])
    assert done == 12
    assert time.monotonic() - started > 0.45


def test_jobs_that_are_put_back_can_be_put_off(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    lab.Spectrum.cancel_jobs()
    lab.Spectrum.schedule_jobs(force=True, due_time=datetime.timedelta(hours=1))
    assert lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 0
    assert job_counts(lab.Spectrum) == {"scheduled": 12}


# -- any key_source --------------------------------------------------------------------------------------------


def run_through(table: Any, keys: list[dict[str, Any]]) -> None:
    """Schedule, claim as a worker does, give back, make, clean up: the queue has just these keys throughout."""
    source = table().key_source
    as_datajoint_gives_them = keys_of(source() if isinstance(source, type) else source)
    assert values(as_datajoint_gives_them) == values(keys)
    assert int(table.schedule_jobs(min_scheduling_interval=0)) == len(keys)
    queue = Queue.of(table.connection, table.database)
    all_keys = Keys(table(), (), queue.engine)
    jobs = Claims(queue, all_keys).take(1000)
    assert sorted(repr(job.key) for job in jobs) == sorted(map(repr, as_datajoint_gives_them))
    Finisher(queue, all_keys, keep_completed=True).give_back(jobs)
    done = table.populate(reserve_jobs=True)
    assert (done["success_count"], done["error_list"]) == (len(keys), [])
    assert int(table.schedule_jobs(min_scheduling_interval=0)) == 0
    assert sum(table.cleanup_jobs().values()) == 0
    assert len(table.jobs.completed) == len(keys)


@pytest.fixture
def variant(lab: Lab) -> Iterator[Any]:
    """Declares a Computed table for one test."""
    declared: list[Any] = []

    def declare(definition: str, parents: dict[str, Any] | None = None, **members: Any) -> Any:
        parents = {"Session": lab.Session, "Subject": lab.Subject} | (parents or {})
        members.setdefault("keep_completed", True)
        table = computed(lab.schema, definition, parents, f"Variant{os.urandom(3).hex()}", **members)
        declared.append(table)
        return table

    yield declare
    for table in reversed(declared):
        table.jobs.delete()
        table().drop_quick()


def test_key_source_by_default_is_the_join_of_the_parents(lab: Lab, variant: Any) -> None:
    Method = manual(lab.schema, f"method : {INT}", "Method")
    Method.insert([(1,), (2,)], skip_duplicates=True)
    table = variant("-> Session\n-> Method", {"Method": Method})
    run_through(table, keys_of(lab.Session * Method))
    assert len(table()) == 24


def test_key_source_as_a_property(lab: Lab, variant: Any) -> None:
    table = variant("-> Session", key_source=property(lambda self: lab.Session & "session > 1"))
    run_through(table, keys_of(lab.Session & "session > 1"))


def test_key_source_as_a_class(lab: Lab, variant: Any) -> None:
    run_through(variant("-> Session", key_source=lab.Session), keys_of(lab.Session()))


def test_key_source_as_a_query_on_the_class(lab: Lab, variant: Any) -> None:
    table = variant("-> Session", key_source=lab.Session & "session < 2" & {"subject": "m1"})
    run_through(table, keys_of(lab.Session & "session < 2" & {"subject": "m1"}))


def test_key_source_restricted_by_another_query(lab: Lab, variant: Any) -> None:
    late = lab.Session & "session = 3" & "subject <> 'm0'"
    table = variant("-> Session", key_source=(lab.Session & (lab.Subject & late)) - "session = 0")
    run_through(table, keys_of(lab.Session & "subject <> 'm0'" & "session > 0"))


def test_key_source_projected_with_a_rename(lab: Lab, variant: Any) -> None:
    table = variant("-> Session.proj(recording='session')")
    keys = [{"subject": key["subject"], "recording": key["session"]} for key in keys_of(lab.Session())]
    run_through(table, keys_of(lab.Session.proj(recording="session")))
    assert sorted(map(str, keys)) == sorted(map(str, keys_of(table())))


def test_key_source_of_two_renamed_keys_of_one_parent(lab: Lab, variant: Any) -> None:
    table = variant("-> Subject.proj(first='subject')\n-> Subject.proj(second='subject')")
    pairs = lab.Subject.proj(first="subject") * lab.Subject.proj(second="subject")
    run_through(table, keys_of(pairs))
    assert len(table()) == 9


def test_key_source_renamed_by_a_property_of_the_table(lab: Lab, variant: Any) -> None:
    source = property(lambda self: lab.Session.proj(animal="subject") & "session = 1")
    table = variant(f"animal : varchar(16)\nsession : {INT}", key_source=source)
    run_through(table, keys_of(lab.Session.proj(animal="subject") & "session = 1"))


def test_key_source_with_fewer_attributes_than_the_primary_key(lab: Lab, variant: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        assert set(key) == {"subject"}
        self.insert({**key, "session": session} for session in range(4))

    table = variant("-> Session", key_source=property(lambda self: lab.Subject), make=make)
    run_through(table, keys_of(lab.Subject()))
    assert len(table()) == 12


def test_key_source_aggregated_with_u(lab: Lab, variant: Any) -> None:
    source = property(lambda self: dj.U("session_date").aggr(lab.Session, n="count(*)") & "n > 2")
    table = variant("session_date : date", key_source=source)
    run_through(table, keys_of(dj.U("session_date").aggr(lab.Session, n="count(*)")))
    assert len(table()) == 4


def test_key_source_of_the_distinct_values_of_an_attribute(lab: Lab, variant: Any) -> None:
    table = variant("session_date : date", key_source=property(lambda self: dj.U("session_date") & lab.Session))
    run_through(table, keys_of(dj.U("session_date") & lab.Session))


def test_key_source_that_aggregates_a_child(lab: Lab, variant: Any) -> None:
    source = property(lambda self: lab.Subject.aggr(lab.Session & "session > 1", last="max(session)") & "last = 3")
    table = variant("-> Subject", key_source=source)
    run_through(table, keys_of(lab.Subject()))


def test_key_source_as_a_union(lab: Lab, variant: Any) -> None:
    source = property(lambda self: (lab.Session & "session = 0").proj() + (lab.Session & "session = 3").proj())
    table = variant("-> Session", key_source=source)
    run_through(table, keys_of(lab.Session & "session in (0, 3)"))


@pytest.mark.parametrize(
    "expression, kind",
    [
        ("FLOOR(session / 2)", INT),
        ("session / 2 * 2", INT),
        ("session * 2", INT),
        ("session * 1.50", "decimal(8,4)"),
        ("session_date", "datetime(6)"),
        ("subject", "char(16)"),
    ],
)
def test_key_source_whose_types_are_not_those_of_the_target(lab: Lab, variant: Any, expression: str, kind: str) -> None:
    """Whatever type the server computes in, the job is that of the row in the target."""
    source = property(lambda self: dj.U("block") & lab.Session.proj(block=expression))
    table = variant(f"block : {kind}", key_source=source)
    count = len(table().key_source)
    assert int(table.schedule_jobs()) == count
    with statements_of(lab.schema.connection) as statements:
        assert int(table.schedule_jobs(min_scheduling_interval=0)) == 0
    assert len(evaluations(statements)) == 1
    assert table.populate(reserve_jobs=True)["success_count"] == count
    assert sum(table.cleanup_jobs().values()) == 0
    assert int(table.schedule_jobs(min_scheduling_interval=0)) == 0
    assert len(table.jobs.completed) == count


def test_key_source_that_is_empty(lab: Lab, variant: Any) -> None:
    table = variant("-> Session", key_source=property(lambda self: lab.Session & False))
    run = table.schedule_jobs()
    assert (int(run), run.rate_limited) == (0, False)
    assert table.populate(reserve_jobs=True) == {"success_count": 0, "error_list": []}


def test_a_target_of_another_name_keeps_results_elsewhere(lab: Lab, variant: Any) -> None:
    """A table may name another one as its `target`, as DataJoint allows."""
    Store = variant(f"-> Session\n---\nx : {FLOAT}")
    table = variant("-> Session", target=property(lambda self: Store()))
    Store.insert([{"subject": "m0", "session": 0, "x": 1.0}], allow_direct_insert=True)
    assert int(table.schedule_jobs()) == 11


# -- many workers at once ----------------------------------------------------------------------------------------

WORKERS = 20


def slow(engine: str, seconds: float) -> str:
    """A condition that is always true, and takes so long for each row that it is asked about."""
    if engine == "postgresql":
        return f"pg_sleep({seconds}) IS NOT NULL"
    return f"SLEEP({seconds}) = 0"


def test_workers_that_start_together_cause_one_scheduling_and_none_goes_home_with_nothing(
    lab: Lab, engine: str, interval: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dj.config["min_scheduling_interval"] = 600  # one that is slow to start has still started with the others
    lab.start_over(1, 2 * WORKERS)
    source = property(lambda self: lab.Session & slow(engine, 0.03))
    monkeypatch.setattr(lab.Spectrum, "key_source", source)

    def worker(number: int) -> tuple[int, int]:
        with statements_of(lab.schema.connection) as statements:
            done = lab.Spectrum.populate(reserve_jobs=True, max_calls=2)
        evaluations = [
            sql for sql in statements if sql.lstrip().startswith("INSERT") and "~jobs" in sql and "SLEEP" in sql.upper()
        ]
        return done["success_count"], len(evaluations)

    results = in_processes(lab.schema, WORKERS, worker)
    assert sum(count for _, count in results) == 1
    assert [done for done, _ in results] == [2] * WORKERS
    assert len(lab.Spectrum.jobs) == 0


def test_a_scheduler_that_dies_in_the_middle_blocks_nobody_for_longer_than_its_mark_lives(
    lab: Lab, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "scheduling_timeout", 8.0)

    def schedule_slowly(number: int) -> None:
        lab.Spectrum.key_source = property(lambda self: lab.Session & slow(engine, 0.4))
        lab.Spectrum.schedule_jobs()

    def mark() -> Any:
        return [row["scheduling_until"] for row in rows_of(lab.control) if row["scheduling_until"]]

    djjobs.jobs(lab.schema)
    with forked(lab.schema, 1, schedule_slowly) as (child,):
        wait_for(mark)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.join()
        started = time.monotonic()
        assert lab.Spectrum.schedule_jobs().rate_limited
        assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 12
        assert time.monotonic() - started < 30


def test_a_scheduler_that_dies_does_not_block_who_schedules_without_an_interval(lab: Lab) -> None:
    lab.Spectrum.schedule_jobs()
    (row,) = rows_of(lab.control)
    for_ever = row["last_scheduled"] + datetime.timedelta(days=1)
    lab.control.update1({**row, "scheduling_until": for_ever, "scheduling_by": "somebody who died"})
    lab.Session.insert([{"subject": "m0", "session": 99}])
    assert lab.Spectrum.schedule_jobs().rate_limited
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 1


def test_two_that_schedule_without_an_interval_do_not_trip_over_each_other(lab: Lab) -> None:
    lab.start_over(1, 300)
    scheduled = in_processes(lab.schema, 6, lambda number: int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)))
    assert sum(scheduled) == 300
    assert job_counts(lab.Spectrum) == {"scheduled": 300}


def overtaken(lab: Lab, engine: str, schedule: Callable[[str], Any]) -> tuple[djjobs.Run, Any]:
    """Have a process schedule all keys and, in the middle of its statement, schedule some of them here.

    `schedule` is called there with a condition that is true, but not before that was done. Returns the run of those
    that were scheduled here, and what `schedule` returned.
    """
    name, go = secrets.randbits(31), multiprocessing.get_context("fork").Event()
    if engine == "postgresql":
        lock, unlock = f"pg_advisory_lock({name})", f"pg_advisory_unlock({name})"
        condition = f"pg_advisory_xact_lock({name}) IS NOT NULL"
        waiting = "SELECT query FROM pg_stat_activity WHERE wait_event = 'advisory'"
    else:
        lock, unlock = f"GET_LOCK('{name}', 60)", f"RELEASE_LOCK('{name}')"
        # by a column, so that it is asked of a row and not before there is any
        condition = f"GET_LOCK('{name}', 60 + 0 * session) = 1"
        waiting = "SELECT info FROM information_schema.processlist WHERE state = 'User lock'"

    def work(number: int) -> Any:
        go.wait(60)
        return schedule(condition)

    def is_evaluating() -> bool:
        # Not just begun: it has read a row, so what is done from now on it does not see.
        return bool(evaluations([sql for (sql,) in lab.schema.connection.query(waiting).fetchall()]))

    djjobs.jobs(lab.schema)
    with forked(lab.schema, 1, work) as (child,):
        lab.schema.connection.query(f"SELECT {lock}")
        go.set()
        wait_for(is_evaluating)
        mine = lab.Spectrum.schedule_jobs("session = 1", min_scheduling_interval=0)
        lab.schema.connection.query(f"SELECT {unlock}")
        return mine, child.result()


def test_a_scheduling_that_is_overtaken_begins_again_and_leaves_those_keys_to_who_was_first(
    lab: Lab, engine: str
) -> None:
    def schedule(condition: str) -> tuple[int, int, int]:
        lab.Spectrum.key_source = property(lambda self: lab.Session & condition)
        with statements_of(lab.schema.connection) as statements:
            run = lab.Spectrum.schedule_jobs()
        return run.run_id, run.scheduled, len(evaluations(statements))

    mine, (run_id, count, tries) = overtaken(lab, engine, schedule)
    assert (mine.scheduled, count, tries) == (3, 9, 2)
    runs = {(row["key"]["session"], row["run_id"]) for row in rows_of(lab.Spectrum.jobs)}
    assert runs == {(session, mine.run_id if session == 1 else run_id) for session in range(4)}


def test_a_few_keys_are_inserted_at_once_and_skip_what_has_overtaken_them(lab: Lab, engine: str) -> None:
    def schedule(condition: str) -> tuple[int, int]:
        queue = Queue.of(lab.schema.connection, lab.schema.database)
        with statements_of(lab.schema.connection) as statements:
            count = insert_few(queue, Keys(lab.Spectrum(), (condition,), queue.engine), priority=5)
        return count, len(evaluations(statements))

    mine, (count, tries) = overtaken(lab, engine, schedule)
    assert (mine.scheduled, count, tries) == (3, 9, 1)
    assert job_counts(lab.Spectrum) == {"scheduled": 12}
