"""A search_path in other hands, on PostgreSQL: functions, types and tables that look like the server's are never used.

DataJoint's own statements do use such names, so what only DataJoint needs is left as it is here.
"""

from __future__ import annotations

import datetime
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Command
from pipelines import INT, job_counts, rows_of
from workloads.squares import another_connection

import djjobs
from djjobs.check import check

pytestmark = pytest.mark.only(engines="postgresql")

#: The functions that statements of djjobs call. `count`, `pg_backend_pid` and the descriptions DataJoint calls, too.
FUNCTIONS = """
    statement_timestamp clock_timestamp pg_postmaster_start_time encode substr sha256 convert_to to_json pg_notify
    hashtextextended pg_advisory_lock pg_advisory_unlock has_table_privilege has_schema_privilege quote_ident
    to_regclass enum_range timezone
""".split()
AGGREGATES = {"min": "int8", "max": "timestamp", "sum": "int4"}
TYPES = "jsonb bpchar float8 timestamptz".split()
RELATIONS = "pg_stat_database pg_type".split()

LAB = """
import datajoint as dj
import djjobs

schema = dj.Schema("{schema}")

@schema
class Task(dj.Manual):
    definition = '''
    n : {INT}
    name : varchar(20)
    ---
    kind : enum('a', 'b')
    '''

@schema
class Result(djjobs.JobsMixin, dj.Computed):
    definition = "-> Task"
    max_attempts = 2
    keep_completed = True
    backoff = djjobs.exponential(first=0.01, most=0.01)
    retry_on = (ValueError,)

    def make(self, key):
        djjobs.current_job().progress(1, 2, note="half")
        if key["n"] == 3:
            raise ValueError("no luck")
        self.insert1(key)
"""


def hostile_functions(query: Any, schema: str) -> Iterator[str]:
    """Statements that make look-alikes of all forms of the server's functions. Each of them raises an error."""
    found = query(
        "SELECT p.proname, pg_catalog.pg_get_function_identity_arguments(p.oid),"
        " pg_catalog.format_type(p.prorettype, NULL)"
        " FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace"
        " AND p.prokind = 'f' AND p.proname IN %(names)s",
        args={"names": tuple(FUNCTIONS)},
    ).fetchall()
    assert {name for name, _, _ in found} == set(FUNCTIONS)
    for name, arguments, result in found:
        yield (
            f"CREATE FUNCTION {schema}.{name}({arguments}) RETURNS {result} LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'hostile {name} was called'; END $$"
        )
    # Of the types that the columns have, so that these fit better than the server's own.
    for name, argument in (("to_json", "varchar"), ("encode", "bytea, varchar"), ("pg_notify", "varchar, varchar")):
        yield (
            f"CREATE FUNCTION {schema}.{name}({argument}) RETURNS text LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'hostile {name} was called'; END $$"
        )


def hostile_others(schema: str) -> Iterator[str]:
    """Aggregates, types and tables of the same kind."""
    raises = f"{schema}.raises"
    yield (
        f"CREATE FUNCTION {raises}() RETURNS bool LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'a hostile type or table was used'; END $$"
    )
    for name, type_ in AGGREGATES.items():
        yield (
            f"CREATE FUNCTION {schema}.step(state {type_}, value {type_}) RETURNS {type_} LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'hostile {name} was called'; END $$"
        )
        yield f"CREATE AGGREGATE {schema}.{name}({type_}) (sfunc = {schema}.step, stype = {type_})"
    for name in RELATIONS:
        yield f"CREATE VIEW {schema}.{name} AS SELECT * FROM pg_catalog.{name} WHERE {raises}()"
    for name in TYPES:
        yield f"CREATE DOMAIN {schema}.{name} AS pg_catalog.{name} CHECK ({raises}())"


@pytest.fixture
def lab(schema: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A pipeline whose queue is declared, and then a search_path that has a hostile schema before the server's own."""
    name, hostile = f"path_lab_{secrets.token_hex(4)}", f"hostile_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(LAB.format(schema=schema.database, INT=INT))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(djjobs.__file__).parents[1]}")
    module = __import__(name)
    module.Result.jobs
    djjobs.schedules(schema)
    module.Task.insert([{"n": n, "name": f"number {n}", "kind": "a"} for n in range(1, 6)])
    owner = another_connection()
    owner.query(f"CREATE SCHEMA {hostile}")
    for sql in [*hostile_functions(owner.query, hostile), *hostile_others(hostile)]:
        owner.query(sql)
    owner.query(f"ALTER ROLE CURRENT_USER SET search_path = {hostile}, pg_catalog, public")
    try:
        schema.connection.close()
        schema.connection.connect()
        yield SimpleNamespace(module=module, name=name, schema=schema, folder=tmp_path, hostile=hostile)
    finally:
        owner.query("ALTER ROLE CURRENT_USER RESET search_path")
        schema.connection.close()
        schema.connection.connect()
        owner.query(f"DROP SCHEMA {hostile} CASCADE")
        owner.close()
        del sys.modules[name]


def command(lab: Any, *words: str) -> Command:
    """A command that has ended, whatever came of it."""
    command = Command(
        ["-m", "djjobs.cli", *words], lab.folder, {"DJJOBS_HEARTBEAT_INTERVAL": "0.2", "DJJOBS_LEASE": "5"}
    )
    try:
        command.code = command.end()  # type: ignore[attr-defined]
    finally:
        command.clear_away()
    assert "hostile" not in command.log
    return command


def test_the_look_alikes_are_called_by_whoever_does_not_name_the_schema(lab: Any) -> None:
    """So that the tests below could fail."""
    query = lab.schema.connection.query
    for sql in (
        *("SELECT statement_timestamp()", "SELECT sha256('a'::bytea)", "SELECT encode('a'::bytea, 'hex')"),
        *("SELECT min(n) FROM (SELECT 1::int8 AS n) AS one", "SELECT '{}'::jsonb", "SELECT * FROM pg_stat_database"),
        *("SELECT pg_notify('a', 'b')", "SELECT to_json('a'::varchar)"),
    ):
        with pytest.raises(Exception, match="hostile"):
            query(sql).fetchall()


def test_jobs_are_scheduled_run_cancelled_retried_and_cleaned_up(lab: Any) -> None:
    result = lab.module.Result
    assert int(result.schedule_jobs({"n": 1}, name="one")) == 1
    assert result.cancel_jobs({"n": 1}) == 1
    assert result.retry_jobs({"n": 1}) == 1
    assert int(result.schedule_jobs(due_time=datetime.timedelta(0))) == 4
    assert result.ignore_jobs({"n": 5}) == 1
    result.populate(reserve_jobs=True, order="random", suppress_errors=True)
    result.populate(reserve_jobs=True, order="original", suppress_errors=True)
    assert job_counts(result) == {"success": 3, "error": 1, "ignore": 1}
    assert len(result.jobs & {"n": 2}) == 1 and len(result.jobs.errors & "name = 'number 3'") == 1
    assert int(result.schedule_jobs({"n": 3}, force=True)) == 1
    (lab.module.Task & "n = 5").delete_quick()
    assert result.cleanup_jobs()
    assert djjobs.status(lab.schema).loc["Result", "success"] == 3
    assert djjobs.flush_events(30) in (True, None)
    assert [finding for finding in check(lab.module) if finding.level == "problem"] == []


def test_a_worker_does_its_work(lab: Any) -> None:
    worker = command(lab, "worker", lab.name, "--drain", "--processes", "2")
    assert worker.code == 1, "one job fails"  # type: ignore[attr-defined]
    assert job_counts(lab.module.Result) == {"success": 4, "error": 1}


def test_schedules_are_added_fired_and_removed(lab: Any) -> None:
    djjobs.add_schedule(lab.name, every=3600, jobs=True, cleanup=True, name="hourly")
    due = rows_of(djjobs.schedules(lab.schema))[0]["created"]
    djjobs.schedules(lab.schema).update1({"name": "hourly", "next_time": due})
    assert command(lab, "scheduler", lab.name, "--once").code == 0  # type: ignore[attr-defined]
    (firing,) = rows_of(djjobs.firings(lab.schema))
    assert firing["state"] == "done" and firing["outcome"].endswith("5 jobs scheduled in Result")
    assert djjobs.run_schedule_now(lab.schema, "hourly")[0].state == "done"
    assert djjobs.pause_schedule(lab.schema, "hourly") and djjobs.resume_schedule(lab.schema, "hourly")
    assert command(lab, "schedule", "list", lab.schema.database).code == 0  # type: ignore[attr-defined]
    assert djjobs.remove_schedule(lab.schema, "hourly") == [lab.schema.database]


def test_a_temporary_table_in_the_place_of_a_catalog_is_not_read(lab: Any) -> None:
    """A session looks into its temporary tables first, whatever the search_path."""
    query = lab.schema.connection.query
    for name in ("pg_type", "pg_stat_database"):
        query(f"CREATE TEMPORARY TABLE {name} (oid oid, numbackends int)")
    assert len(lab.module.Result.jobs & {"n": 1}) == 0
    assert int(lab.module.Result.schedule_jobs()) == 5
    assert check(lab.module)
