"""Events: inserts upstream schedule jobs by themselves and deletes clean up, after the commit and for free."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datajoint as dj
import fork_server
import numpy as np
import pandas as pd
import pytest
from helpers import wait_for
from pipelines import computed, forked, keys_of, manual, rows_of, statements_of
from plans import Reading
from workloads import filling
from workloads.squares import Bystander, another_connection

import djjobs
from djjobs.events.watch import HeldEvents
from djjobs.queue.database import Database
from djjobs.queue.tables import JobControl

TESTS = Path(__file__).resolve().parent
S1, S2, S3 = ({"subject": "m1", "session": n} for n in (1, 2, 3))


# -- a lab ------------------------------------------------------------------------------------------------------


class Lab(SimpleNamespace):
    """The tables of workloads.filling, and two subjects."""

    def __init__(self, schema: Any, other: Any) -> None:
        super().__init__(schema=schema, other=other, **vars(filling.declare(schema, other)))
        for where in (schema, other):
            djjobs.jobs(where)

    def start_over(self) -> Lab:
        if not self.schema.connection.is_connected:
            self.schema.connection.connect()
        queues = [
            table
            for where in (self.schema, self.other)
            for table in (djjobs.jobs(where), JobControl(where.connection, where.database))
        ]
        tables = "Band Pair Chosen Wired Reply Spectrum Note Planned".split()
        for table in (*queues, *(getattr(self, name)() for name in tables), self.Session.Channel(), self.Session()):
            table.delete_quick()
        self.Subject.delete_quick()
        self.Subject.insert([{"subject": "m1"}, {"subject": "m2"}])
        return self


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    gc.collect()  # classes of other tests would hear of changes, too, whose users and tables are gone
    name = f"djjobs_test_{secrets.token_hex(4)}"
    lab = Lab(dj.Schema(f"{name}_a"), dj.Schema(f"{name}_b"))
    yield lab
    if not lab.schema.connection.is_connected:
        lab.schema.connection.connect()
    lab.other.drop()
    lab.schema.drop()


@pytest.fixture
def lab(standing: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Lab]:
    """The lab with events, and what these have done in the log."""
    standing.start_over()
    monkeypatch.setattr(djjobs.settings, "events", True)
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0.3)
    caplog.set_level(logging.DEBUG, logger="djjobs")
    yield standing
    if standing.schema.connection.in_transaction:
        standing.schema.connection.cancel_transaction()
    monkeypatch.setattr(djjobs.settings, "events", False)
    djjobs.flush_events()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[Any], list[str]]:
    """What the events have done for a table so far."""

    def said(table: Any) -> list[str]:
        about = [r for r in caplog.records if getattr(r, "table", "") == table.__name__ and "event" in r.__dict__]
        return [record.getMessage() for record in about if record.event in ("event", "event failed")]

    return said


def queued(table: Any) -> list[tuple[Any, ...]]:
    """The keys that have a job."""
    return sorted(tuple(row["key"].values()) for row in rows_of(table.jobs))


def sessions_of(table: Any) -> list[int]:
    """The sessions that have a job."""
    return sorted(row["key"]["session"] for row in rows_of(table.jobs))


def acted() -> None:
    assert djjobs.flush_events()


# -- inserts ----------------------------------------------------------------------------------------------------


def as_records() -> Any:
    return np.array([("m1", 1), ("m1", 2)], dtype=[("subject", "U16"), ("session", int)])


KNOWN: dict[str, Callable[[Lab], Any]] = {
    "insert1 of a dict": lambda lab: [lab.Session.insert1(row) for row in (S1, S2)],
    "insert1 of a tuple": lambda lab: [lab.Session.insert1(("m1", n, None)) for n in (1, 2)],
    "insert of dicts": lambda lab: lab.Session.insert([S1, S2]),
    "insert of tuples": lambda lab: lab.Session.insert([("m1", n, None) for n in (1, 2)]),
    "insert of a record array": lambda lab: lab.Session.insert(as_records()),
    "insert of records": lambda lab: lab.Session.insert(list(as_records())),
    "insert of a frame": lambda lab: lab.Session.insert(pd.DataFrame([S1, S2])),
    "insert over an instance": lambda lab: lab.Session().insert([S1, S2], skip_duplicates=True),
    "insert by name": lambda lab: dj.FreeTable(lab.schema.connection, lab.Session.full_table_name).insert([S1, S2]),
}


def insert_planned(lab: Lab) -> None:
    lab.Planned.insert([S1, S2])
    lab.Session.insert(lab.Planned & "session < 3", ignore_extra_fields=True)


def insert_file(lab: Lab) -> None:
    path = Path(os.environ["HOME"]) / f"{secrets.token_hex(4)}.csv"
    path.write_text("subject,session\nm1,1\nm1,2\n")
    lab.Session.insert(path)
    path.unlink()


UNKNOWN: dict[str, Callable[[Lab], Any]] = {
    "insert of a generator": lambda lab: lab.Session.insert(row for row in (S1, S2)),
    "insert of an iterator over a frame": lambda lab: lab.Session.insert(iter([S1, S2])),
    "insert of a query": insert_planned,
    "insert of a file": insert_file,
}


@pytest.mark.filterwarnings("ignore:Positional inserts")
@pytest.mark.parametrize("insert", KNOWN.values(), ids=KNOWN)
def test_inserted_keys_are_scheduled_and_nothing_else_is_looked_at(lab: Lab, said: Any, insert: Any) -> None:
    insert(lab)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2]
    assert not [words for words in said(lab.Spectrum) if "all keys" in words]


@pytest.mark.parametrize("insert", UNKNOWN.values(), ids=UNKNOWN)
def test_where_keys_are_not_known_all_are_looked_at(lab: Lab, said: Any, insert: Any) -> None:
    insert(lab)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2]
    assert [words for words in said(lab.Spectrum) if "all keys" in words]


@pytest.mark.only(datajoint=2)
def test_a_staged_insert_is_an_insert(lab: Lab) -> None:
    with lab.Session.staged_insert1 as staged:
        staged.rec.update(S1)
    acted()
    assert sessions_of(lab.Spectrum) == [1]


@pytest.mark.only(datajoint=2)
def test_what_got_in_before_a_chunk_failed_is_scheduled(lab: Lab) -> None:
    with pytest.raises(dj.DataJointError):
        lab.Session.insert([S1, {"subject": "nobody", "session": 1}, S2], chunk_size=1)
    acted()
    assert sessions_of(lab.Spectrum) == [1]


def test_an_insert_over_another_connection_counts_too(lab: Lab) -> None:
    connection = another_connection()
    dj.FreeTable(connection, lab.Session.full_table_name).insert1(S1)
    acted()
    assert sessions_of(lab.Spectrum) == [1]
    connection.close()


def test_a_key_with_a_default_is_not_known(lab: Lab, schema: Any) -> None:
    Source = manual(schema, "a = 7 : int\nb : int")
    Result = computed(schema, "-> Source", {"Source": Source})
    Source.insert1({"b": 1})
    acted()
    assert queued(Result) == [(7, 1)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("varchar(16)", "o'neil"),
        ("varchar(16)", " 100% \\"),
        ("varchar(16)", "été"),
        ("date", "2024-05-01"),
        ("datetime", "2024-05-01 10:00:00"),
        ("decimal(6,2)", 1.5),
        ("enum('a', 'b')", "b"),
    ],
)
def test_keys_of_every_type_are_found(lab: Lab, schema: Any, kind: str, value: Any) -> None:
    Source = manual(schema, f"a : {kind}")
    Result = computed(schema, "-> Source", {"Source": Source})
    Source.insert1({"a": value})
    acted()
    assert len(Result.jobs) == 1


@pytest.mark.parametrize("name", ["Wired", "Chosen"])
def test_a_part_table_that_key_source_asks_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whether it is part of the query, or the code of key_source has fetched from it."""
    table = getattr(lab, name)
    monkeypatch.setattr(table, "events", True)
    lab.Session.insert([S1, S2])
    acted()
    assert queued(table) == []
    lab.Session.Channel.insert1({**S2, "channel": 0})
    acted()
    assert sessions_of(table) == [2]


def test_both_names_of_a_renamed_key_are_looked_at(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Pair, "events", True)
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0)
    lab.Session.insert1(S1)
    acted()
    lab.Session.insert1(S2)
    acted()
    assert len(lab.Pair.jobs) == 4


def test_a_row_in_a_table_that_nobody_depends_on_is_no_event(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.Planned.insert1(S1)
    acted()
    assert not [record for record in caplog.records if hasattr(record, "event")]


# -- transactions -------------------------------------------------------------------------------------------------


def test_nothing_happens_before_the_commit_and_then_once(lab: Lab, said: Any) -> None:
    with lab.schema.connection.transaction:
        for row in (S1, S2, S3):
            lab.Session.insert1(row)
            acted()
        lab.Subject.insert1({"subject": "m3"})
        assert said(lab.Spectrum) == []
    acted()
    assert len(said(lab.Spectrum)) == 1
    assert sessions_of(lab.Spectrum) == [1, 2, 3]


def test_nothing_happens_after_a_rollback(lab: Lab, said: Any) -> None:
    with pytest.raises(ZeroDivisionError), lab.schema.connection.transaction:
        lab.Session.insert1(S1)
        1 / 0
    lab.Session.insert1(S2)
    acted()
    assert sessions_of(lab.Spectrum) == [2]
    assert len(said(lab.Spectrum)) == 1
    with lab.schema.connection.transaction:
        lab.Planned.insert1(S1)
    acted()
    assert len(said(lab.Spectrum)) == 1


def test_a_transaction_that_was_lost_leaves_no_event(lab: Lab, said: Any) -> None:
    connection = lab.schema.connection
    connection.start_transaction()
    lab.Session.insert1(S1)
    Database(connection).start_afresh()
    with connection.transaction:
        lab.Planned.insert1(S1)
    acted()
    assert said(lab.Spectrum) == []


def test_a_commit_that_does_not_get_through_is_no_event(lab: Lab, said: Any, engine: str) -> None:
    connection, other = lab.schema.connection, another_connection()
    number = connection.query("SELECT pg_backend_pid()" if engine == "postgresql" else "SELECT connection_id()")
    end = "SELECT pg_terminate_backend({})" if engine == "postgresql" else "KILL {}"
    connection.start_transaction()
    lab.Session.insert1(S1)
    other.query(end.format(number.fetchone()[0]))
    with pytest.raises(Exception, match=r"(?i)connection|gone away"):
        connection.commit_transaction()
    acted()
    assert said(lab.Spectrum) == []
    Database(connection).start_afresh()
    other.close()


def test_an_insert_that_fails_is_no_event(lab: Lab, said: Any) -> None:
    with pytest.raises(dj.DataJointError):
        lab.Session.insert1({"subject": "nobody", "session": 1})
    acted()
    assert said(lab.Spectrum) == []


# -- make() -------------------------------------------------------------------------------------------------------


def reserving(table: Any) -> Any:
    return table.populate(reserve_jobs=True, schedule_jobs=False, suppress_errors=True)


def not_reserving(table: Any) -> Any:
    result = table.populate(suppress_errors=True)
    acted()
    return result


POPULATES = pytest.mark.parametrize("populate", [reserving, not_reserving])


@POPULATES
def test_what_make_inserts_anywhere_is_scheduled_downstream(lab: Lab, populate: Any) -> None:
    lab.Session.insert([S1, S2])
    acted()
    assert populate(lab.Spectrum)["success_count"] == 2
    assert sessions_of(lab.Band) == [1, 2]
    assert queued(lab.Reply) == [(1,), (2,)]


@POPULATES
def test_a_make_that_fails_leaves_no_trace(lab: Lab, said: Any, populate: Any) -> None:
    lab.Session.insert1({**S1, "session": filling.BAD})
    acted()
    assert len(populate(lab.Spectrum)["error_list"]) == 1
    assert said(lab.Band) == said(lab.Reply) == []
    lab.Session.insert1(S1)
    acted()
    populate(lab.Spectrum)
    assert sessions_of(lab.Band) == [1]


def test_a_make_whose_job_was_taken_away_leaves_no_trace(lab: Lab, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.Session.insert1(S1)
    acted()
    make = lab.Spectrum.make

    def make_and_lose(self: Any, key: dict[str, Any]) -> None:
        make(self, key)
        other.connection.query(f"DELETE FROM {lab.Spectrum.jobs.full_table_name}")

    monkeypatch.setattr(lab.Spectrum, "make", make_and_lose)
    with Bystander(lab.Spectrum) as other:
        assert len(reserving(lab.Spectrum)["error_list"]) == 1
    acted()
    assert said(lab.Band) == said(lab.Reply) == []


def test_a_populate_of_its_own_process_needs_no_second_connection(lab: Lab) -> None:
    lab.Session.insert([S1, S2])
    acted()
    with statements_of(lab.schema.connection) as statements:
        reserving(lab.Spectrum)
    inserts = [sql for sql in statements if "INSERT" in sql and lab.other.database in sql and "~jobs" in sql]
    assert inserts
    assert sessions_of(lab.Band) == [1, 2]


def test_processes_of_a_populate_schedule_too(lab: Lab) -> None:
    lab.Session.insert([{**S1, "session": n} for n in range(6)])
    acted()
    lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False, processes=2)
    assert sessions_of(lab.Band) == list(range(6))


def test_processes_of_datajoints_own_populate_lose_nothing(lab: Lab) -> None:
    lab.Session.insert([S1, S2])
    acted()
    lab.Spectrum.populate(processes=2)
    acted()
    assert sessions_of(lab.Band) == [1, 2]


# -- deletes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True], ids=["delete", "delete_quick"])
def test_jobs_go_with_the_rows_upstream(lab: Lab, quick: bool) -> None:
    lab.Session.insert([S1, S2])
    acted()
    chosen = lab.Session & S1
    chosen.delete_quick() if quick else chosen.delete()
    acted()
    assert sessions_of(lab.Spectrum) == [2]


def test_a_delete_cascades_to_the_jobs_of_all_tables_below(lab: Lab) -> None:
    lab.Session.insert([S1, S2])
    acted()
    reserving(lab.Spectrum)
    assert sessions_of(lab.Band) == [1, 2]
    (lab.Subject & S1).delete()
    acted()
    assert sessions_of(lab.Band) == []


@pytest.mark.parametrize("quick", [False, True], ids=["delete", "delete_quick"])
def test_finished_jobs_go_with_their_rows(lab: Lab, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    monkeypatch.setattr(lab.Spectrum, "keep_completed", True)
    lab.Session.insert([S1, S2])
    acted()
    reserving(lab.Spectrum)
    chosen = lab.Spectrum & S1
    chosen.delete_quick() if quick else chosen.delete()
    acted()
    assert [row["key"]["session"] for row in rows_of(lab.Spectrum.jobs.completed)] == [2]


def test_a_row_that_was_deleted_and_inserted_again_is_made_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finished job is in the way until it is cleaned up, which may be a while after the insert."""
    monkeypatch.setattr(lab.Spectrum, "keep_completed", True)
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 1)
    for _ in range(3):
        lab.Session.insert1(S1)
        acted()
        assert reserving(lab.Spectrum)["success_count"] == 1
        (lab.Session & S1).delete()


def test_a_delete_that_is_rolled_back_removes_nothing(lab: Lab, said: Any) -> None:
    lab.Session.insert1(S1)
    acted()
    before = said(lab.Spectrum)
    with pytest.raises(ZeroDivisionError), lab.schema.connection.transaction:
        (lab.Session & S1).delete_quick()
        1 / 0
    acted()
    assert said(lab.Spectrum) == before


def test_hooks_that_a_delete_calls_do_not_see_the_users_transaction(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask over their tables' connection, where the user may be in the middle of something."""
    seen = []

    def before_delete(self: Any, job: dict[str, Any]) -> None:
        with lab.Planned.connection.transaction:
            seen.append(len(lab.Planned()))

    monkeypatch.setattr(lab.Spectrum, "before_delete", before_delete)
    lab.Session.insert1(S1)
    acted()
    (lab.Session & S1).delete()
    with lab.schema.connection.transaction:
        lab.Planned.insert1(S1)
        acted()
    assert seen == [0]
    assert len(lab.Planned()) == 1


# -- over schemas and processes -------------------------------------------------------------------------------------


def run_script(lab: Lab, code: str, anew: bool = False, **environment: str) -> str:
    """What a script prints that has the lab's tables; `anew` starts an interpreter of its own for it."""
    where = f"{lab.schema.database},{lab.other.database}"
    variables = {**os.environ, "FILLING": where, "DJJOBS_EVENTS": "1", **environment}
    # at its end a process waits a few seconds for its events; a busy machine may need more
    patience = "import djjobs.events.thread\ndjjobs.events.thread._AT_EXIT = 45"
    script = f"from workloads.filling import *\n{patience}\n{code}"
    if anew:
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, cwd=TESTS, env=variables, capture_output=True, text=True, timeout=60)
    else:
        done = fork_server.run(["-c", script], cwd=TESTS, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_that_inserts_and_ends_has_scheduled(lab: Lab) -> None:
    run_script(lab, f"Session.insert1({S1})", anew=True)
    assert sessions_of(lab.Spectrum) == [1]


def test_a_script_does_not_end_before_its_last_event_though_the_interval_is_not_over(lab: Lab) -> None:
    code = f"Session.insert(iter([{S1}]))\ndjjobs.flush_events()\nSession.insert(iter([{S2}]))"
    run_script(lab, code, DJJOBS_MIN_SCHEDULING_INTERVAL="1000")
    assert sessions_of(lab.Spectrum) == [1, 2]


def test_a_process_of_multiprocessing_has_scheduled_when_it_ends(lab: Lab) -> None:
    code = f"""
import multiprocessing
dj.conn().close()
def work():
    dj.conn().connect()
    Session.insert1({S1})
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
"""
    run_script(lab, code)
    assert sessions_of(lab.Spectrum) == [1]


def test_a_script_without_events_starts_no_thread(lab: Lab) -> None:
    code = f"import threading\nSession.insert1({S1})\nprint(threading.active_count())"
    assert run_script(lab, code, DJJOBS_EVENTS="0").split() == ["1"]
    assert run_script(lab, code.replace("session': 1", "session': 2")).split() == ["2"]


def test_parent_and_child_go_on_after_a_fork(lab: Lab) -> None:
    lab.Session.insert1(S1)
    acted()

    def work(number: int) -> bool:
        lab.Session.insert1(S2)
        return djjobs.flush_events()

    with forked(lab.schema, 1, work) as [child]:
        assert child.result()
    lab.Session.insert1(S3)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2, 3]


def test_a_pipeline_fills_itself_with_nobody_calling_schedule(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has one table, so none schedules what is downstream of it; and none schedules its own."""
    lab.Session.insert([S1, S2])
    acted()
    code = """
import sys
from djjobs.work.empty import UntilTold
UntilTold._schedule = lambda self, tables: None
from djjobs.worker import WorkerOptions, run_worker
sys.exit(run_worker([{table}], WorkerOptions(drain=True)))
"""
    for table in ("Spectrum", "Band", "Reply"):
        run_script(lab, code.format(table=table))
    assert [key["session"] for key in keys_of(lab.Band())] == [1, 2]
    assert [key["note"] for key in keys_of(lab.Reply())] == [1, 2]


# -- off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("altogether", "own", "expected"),
    [(True, None, 1), (False, None, 0), (True, False, 0), (False, True, 1)],
)
def test_events_can_be_turned_off_for_one_table_and_for_all(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, altogether: bool, own: bool | None, expected: int
) -> None:
    monkeypatch.setattr(djjobs.settings, "events", altogether)
    monkeypatch.setattr(lab.Spectrum, "events", own)
    lab.Session.insert1(S1)
    acted()
    assert len(lab.Spectrum.jobs) == expected


# -- classes ------------------------------------------------------------------------------------------------------


def test_a_class_that_is_defined_again_counts_once(lab: Lab, schema: Any, said: Any) -> None:
    Source = manual(schema, "a : int")
    for priority in (7, 3):
        Result = computed(schema, "-> Source", {"Source": Source}, priority=priority)
    Source.insert1({"a": 1})
    acted()
    assert [row["priority"] for row in rows_of(Result.jobs)] == [3]
    assert len(said(Result)) == 1


def test_a_class_that_was_adopted_counts(lab: Lab, schema: Any) -> None:
    Source = manual(schema, "a : int")
    Result = schema(type("Result", (dj.Computed,), {"definition": "-> Source"}), context={"Source": Source})
    Source.insert1({"a": 1})
    acted()
    djjobs.adopt(schema)
    Source.insert1({"a": 2})
    acted()
    assert queued(Result) == [(2,)]


def test_a_table_that_is_declared_later_is_found(lab: Lab, schema: Any) -> None:
    Source = manual(schema, "a : int")
    Source.insert1({"a": 1})
    acted()
    Result = computed(schema, "-> Source", {"Source": Source})
    Source.insert1({"a": 2})
    acted()
    assert queued(Result) == [(2,)]


# -- the rate limit -----------------------------------------------------------------------------------------------


def test_known_keys_do_not_wait_for_the_interval(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 1000)
    lab.Spectrum.schedule_jobs()
    lab.Session.insert1(S1)
    acted()
    assert sessions_of(lab.Spectrum) == [1]


def test_the_last_of_a_burst_is_acted_on_when_the_interval_is_over(
    lab: Lab, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 4)
    lab.Spectrum.schedule_jobs()
    for n in range(10):
        lab.Session.insert(iter([{**S1, "session": n}]))
    assert not djjobs.flush_events(timeout=0.2)
    assert sessions_of(lab.Spectrum) == []
    wait_for(lambda: sessions_of(lab.Spectrum) == list(range(10)))
    acted()
    assert len(said(lab.Spectrum)) == 1


# -- never in the way ---------------------------------------------------------------------------------------------


@contextmanager
def queue_locked(lab: Lab, engine: str, connection: Any) -> Iterator[None]:
    """Nobody gets at the queue meanwhile."""
    jobs = djjobs.jobs(lab.schema).full_table_name
    if engine == "postgresql":
        connection.query("BEGIN")
        connection.query(f"LOCK TABLE {jobs} IN ACCESS EXCLUSIVE MODE")
    else:
        connection.query(f"LOCK TABLES {jobs} WRITE")
    yield
    connection.query("COMMIT" if engine == "postgresql" else "UNLOCK TABLES")


def test_an_insert_does_not_wait_for_the_queue(lab: Lab, engine: str) -> None:
    lab.Session.insert1(S1)
    acted()
    other = another_connection()
    with queue_locked(lab, engine, other):
        lab.Session.insert([S2, S3])
        assert len(lab.Session()) == 3
        assert not djjobs.flush_events(timeout=0.5)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2, 3]
    other.close()


def test_the_thread_leaves_the_users_connection_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a key_source that asks, and for one that DataJoint makes of the tables above."""
    for table in (lab.Chosen, lab.Wired, lab.Pair):
        monkeypatch.setattr(table, "events", True)
    connection, threads = lab.schema.connection, []
    execute = connection._execute_query

    def record(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        execute(*arguments)

    monkeypatch.setattr(connection, "_execute_query", record)
    lab.Session.insert1(S1)
    (lab.Session & S1).delete_quick()
    acted()
    assert set(threads) == {threading.main_thread()}


def test_a_key_source_that_asks_does_not_see_the_users_transaction(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Chosen, "events", True)
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0)
    lab.Session.insert1(S1)
    lab.Session.Channel.insert1({**S1, "channel": 0})
    lab.schema.connection.start_transaction()
    lab.Session.Channel.delete_quick()
    acted()
    assert len(lab.Session.Channel()) == 0
    lab.schema.connection.cancel_transaction()
    assert sessions_of(lab.Chosen) == [1]


def test_a_failure_is_logged_and_made_good_by_the_next_event(
    lab: Lab, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0)
    monkeypatch.setattr(lab.Spectrum, "priority", 1000)
    lab.Session.insert1(S1)
    assert not djjobs.flush_events()
    assert "must be 0 to 255, not 1000" in said(lab.Spectrum)[-1]
    monkeypatch.setattr(lab.Spectrum, "priority", 5)
    lab.Session.insert1(S2)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2]


def test_a_queue_that_was_dropped_is_declared_again(lab: Lab, schema: Any) -> None:
    Source = manual(schema, "a : int")
    Result = computed(schema, "-> Source", {"Source": Source})
    Source.insert1({"a": 1})
    acted()
    djjobs.jobs(schema).drop_quick()
    Source.insert1({"a": 2})
    acted()
    assert queued(Result) == [(2,)]


@pytest.fixture
def guest(lab: Lab, schema: Any, engine: str, server: Any) -> Iterator[Callable[[], Any]]:
    """Somebody who may insert into the tables that are there, and not use the queue."""
    admin, name, password = schema.connection, f"guest_{secrets.token_hex(4)}", secrets.token_hex(8)
    hosts = [""] if engine == "postgresql" else ["@'%%'", "@'localhost'"]

    def connect() -> Any:
        for host in hosts:
            if engine == "postgresql":
                admin.query(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
                admin.query(f'GRANT USAGE ON SCHEMA "{schema.database}" TO {name}')
                admin.query(f'GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA "{schema.database}" TO {name}')
            else:
                admin.query(f"CREATE USER '{name}'{host} IDENTIFIED BY '{password}'")
                admin.query(f"GRANT SELECT, INSERT ON `{schema.database}`.* TO '{name}'{host}")
        settings = {option: server.settings[f"database.{option}"] for option in ("host", "port", "use_tls")}
        connection = dj.Connection(user=name, password=password, **settings)
        return dj.Schema(schema.database, connection=connection, create_schema=False, create_tables=False)

    yield connect
    for host in hosts:
        if engine == "postgresql":
            admin.query(f"DROP OWNED BY {name}")
            admin.query(f"DROP ROLE {name}")
        else:
            admin.query(f"DROP USER '{name}'{host}")


def test_somebody_who_may_not_use_the_queue_can_insert_all_the_same(
    guest: Callable[[], Any], schema: Any, said: Any
) -> None:
    def declare(schema: Any) -> tuple[Any, Any]:
        Source = manual(schema, "a : int")
        return Source, computed(schema, "-> Source", {"Source": Source})

    declare(schema)
    Source, Result = declare(guest())
    Source.insert1({"a": 1})
    assert not djjobs.flush_events()
    assert "privilege" in said(Result)[-1]
    assert len(Source()) == 1
    Source.connection.close()


def test_a_table_out_of_reach_does_not_keep_the_others_from_hearing(
    guest: Callable[[], Any], lab: Lab, schema: Any, said: Any
) -> None:
    """It belongs to a user whose password was changed, and was not looked at before."""
    computed(schema, "-> Source", {"Source": manual(schema, "a : int")})
    theirs = guest()
    Result = computed(theirs, "-> Source", {"Source": manual(theirs, "a : int")})
    info, password = theirs.connection.conn_info, theirs.connection.conn_info["passwd"]
    info["passwd"] = "another"
    lab.Session.insert1(S1)
    assert not djjobs.flush_events()
    assert sessions_of(lab.Spectrum) == [1]
    assert "password" in said(Result)[-1] or "Access denied" in said(Result)[-1]
    info["passwd"] = password
    lab.Session.insert1(S2)
    acted()
    assert sessions_of(lab.Spectrum) == [1, 2]
    theirs.connection.close()


def test_a_server_that_goes_away_is_logged_and_made_good(
    private_server: Any, lab: Lab, engine: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "min_scheduling_interval", 0)

    def connect() -> Any:
        where = {name: private_server.settings[f"database.{name}"] for name in ("host", "port", "user", "password")}
        return dj.Connection(**where, use_tls=private_server.settings["database.use_tls"])

    connection = connect()
    schema = dj.Schema("djjobs_test_away", connection=connection)
    Source = manual(schema, "a : int")
    Result = computed(schema, "-> Source", {"Source": Source})
    Source.insert1({"a": 1})
    acted()
    lock = queue_locked(SimpleNamespace(schema=schema), engine, connect())
    lock.__enter__()
    Source.insert1({"a": 2})
    assert not djjobs.flush_events(timeout=0.5)
    private_server.kill()
    assert not djjobs.flush_events()
    assert "no connection to the server" in said(Result)[-1]
    private_server.start()
    connection.connect()
    Source.insert1({"a": 3})
    acted()
    assert queued(Result) == [(1,), (2,), (3,)]
    connection.close()


# -- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_is_full", [False, True], ids=["empty queue", "full queue"])
def test_one_row_costs_what_it_brings_however_many_there_are(lab: Lab, engine: str, queue_is_full: bool) -> None:
    connection = lab.schema.connection
    many = 3_000
    lab.Session.insert([{**S1, "session": n} for n in range(1, many)])
    acted()
    if not queue_is_full:
        djjobs.jobs(lab.schema).delete_quick()
    for table in (lab.Session(), djjobs.jobs(lab.schema)):
        # what the server would do by and by: with figures from when a table was empty, any index will do for it
        connection.query(f"ANALYZE {'' if engine == 'postgresql' else 'TABLE '}{table.full_table_name}")
    with HeldEvents([connection]) as events:
        for n, most in ((many, float("inf")), (many + 1, 600)):  # the first time it looks at the pipeline, too
            lab.Session.insert1({**S1, "session": n})
            with Reading(connection, engine).measured() as read:
                events.act()
            assert read.rows < most
    assert len(lab.Spectrum.jobs) == (many - 1 if queue_is_full else 0) + 2
