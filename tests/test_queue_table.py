"""`~jobs`: declared at first use, once, with every field a lab may ask for."""

from __future__ import annotations

import datetime
import os
import platform
import re
from contextlib import closing
from typing import Any

import datajoint as dj
import pytest
from pipelines import in_processes, job_counts, rows_of, sessions, statements_of
from workloads.squares import another_connection

import djjobs
from djjobs.dj.connection import keep_with
from djjobs.queue import tables
from djjobs.queue.database import Database
from djjobs.queue.queue import Queue

SEED_FIELDS = """
    table_name key_hash status key error_message error_stack user host pid connection_id timestamp
    run_duration run_metadata
""".split()


def names_in(schema: Any) -> list[str]:
    """All tables of the schema, hidden ones too."""
    sql = "SELECT table_name FROM information_schema.tables WHERE table_schema = %s"
    return [name for (name,) in schema.connection.query(sql, args=(schema.database,)).fetchall()]


def comment_of(jobs: Any) -> str:
    return tables.Jobs(jobs.connection, jobs.database).heading.table_status["comment"]


def test_the_queue_appears_when_it_is_first_used(schema: Any) -> None:
    lab = sessions(schema)
    assert len(lab.Spectrum()) == 0
    assert "~jobs" not in names_in(schema)
    assert len(lab.Spectrum.jobs) == 0
    assert names_in(schema).count("~jobs") == 1


def test_any_first_use_will_do(schema: Any) -> None:
    lab = sessions(schema)
    first_uses = [
        lambda: lab.Spectrum.jobs,
        lab.Spectrum.schedule_jobs,
        lab.Spectrum.cleanup_jobs,
        lambda: lab.Spectrum.populate(reserve_jobs=True),
        lambda: djjobs.jobs(schema),
    ]
    for use in first_uses:
        use()
        assert comment_of(djjobs.jobs(schema)) == tables.VERSION_MARK
        djjobs.jobs(schema).drop()
        assert "~jobs" not in names_in(schema)


def test_a_queue_on_another_connection_is_there_altogether(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    queue = Queue.of(schema.connection, schema.database)
    before = queue.signature()
    with closing(another_connection()) as connection:
        elsewhere = queue.on(Database(connection))
        for name in ("jobs", "control", "workers", "runs"):
            for whose, where in ((elsewhere, connection), (queue, schema.connection)):
                table = getattr(whose, name)
                assert table.connection is where, name
                assert table.heading.table_info["conn"] is where, name
        schema.connection.close()  # nothing may go that way any more
        assert len(elsewhere.jobs) == len(rows_of(elsewhere.jobs & "status = 'scheduled'")) == 12
        assert rows_of(elsewhere.jobs)[0]["key"].keys() == {"subject", "session"}
        assert len(rows_of(elsewhere.control)) == 1 and len(elsewhere.runs) == 1 and len(elsewhere.workers) == 0
        assert elsewhere.change("UPDATE {jobs} SET priority = 9") == 12
        here = elsewhere.signature()
        assert here["connection_id"] == connection.connection_id != before["connection_id"]
        assert here["user"] == connection.get_user() == before["user"]
        (elsewhere.jobs & "status = 'scheduled'").delete()
        assert len(elsewhere.jobs) == 0


def test_a_queue_that_is_there_is_not_declared_again(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    with statements_of(schema.connection) as statements:
        lab.Spectrum.jobs
        lab.Spectrum.schedule_jobs(min_scheduling_interval=0)
    assert statements
    assert not [sql for sql in statements if re.match(r"\s*(CREATE|ALTER|DROP)\b", sql, re.I)]


def test_every_field_of_the_list_is_there_under_its_name(schema: Any) -> None:
    heading = djjobs.jobs(schema).heading
    assert set(SEED_FIELDS) <= set(heading.names)
    assert heading.primary_key == ["table_name", "key_hash"]
    later = "priority job_group due_time created_time attempt worker_id claim cancel_request progress run_id"
    assert set(later.split()) <= set(heading.names)


def test_processes_that_declare_it_at_the_same_moment_get_one_queue(schema: Any) -> None:
    lab = sessions(schema, subjects=2, each=3)

    def first_use(number: int) -> int:
        return int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0))

    scheduled = in_processes(schema, 8, first_use)
    assert sum(scheduled) == 6
    assert names_in(schema).count("~jobs") == 1
    assert comment_of(lab.Spectrum.jobs) == tables.VERSION_MARK
    assert job_counts(lab.Spectrum) == {"scheduled": 6}


def test_a_declaration_that_died_half_way_is_replaced(schema: Any) -> None:
    lab = sessions(schema)
    half = tables.Jobs(schema.connection, schema.database)
    half.declare()
    assert comment_of(half) == tables.UNFINISHED_MARK
    assert int(lab.Spectrum.schedule_jobs()) == 12
    assert comment_of(half) == tables.VERSION_MARK


def test_a_declaration_that_died_before_its_second_table_is_finished(schema: Any) -> None:
    lab = sessions(schema)
    djjobs.jobs(schema)
    tables.JobControl(schema.connection, schema.database).drop()
    keep_with(schema.connection, "queues", {})  # as in a process that starts now
    assert int(lab.Spectrum.schedule_jobs()) == 12


def test_the_fields_say_who_scheduled_a_job_and_when(schema: Any, server: Any) -> None:
    lab = sessions(schema, subjects=1, each=1)
    sql = "SELECT UTC_TIMESTAMP(6)"
    if server.settings["database.backend"] == "postgresql":
        sql = "SELECT clock_timestamp() AT TIME ZONE 'UTC'"
    before = schema.connection.query(sql).fetchone()[0]
    lab.Spectrum.schedule_jobs()
    after = schema.connection.query(sql).fetchone()[0]
    (job,) = rows_of(lab.Spectrum.jobs)
    assert job["table_name"] == lab.Spectrum.table_name
    assert len(job["key_hash"]) == 32
    assert job["status"] == "scheduled"
    assert job["key"] == {"subject": "m0", "session": 0}
    assert job["user"] == schema.connection.get_user()
    assert job["host"] == platform.node()
    assert job["pid"] == os.getpid()
    assert job["connection_id"] == schema.connection.connection_id
    assert before <= job["timestamp"] <= after
    assert before <= job["created_time"] <= after
    assert (job["error_message"], job["error_stack"]) == ("", None)
    assert (job["run_duration"], job["run_metadata"]) == (None, None)
    assert job["attempt"] == 0


def test_the_fields_say_what_came_of_a_job(schema: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        if key["session"]:
            raise ValueError("amplifier saturated")
        self.insert1({**key, "power": 0})

    lab = sessions(schema, subjects=1, each=2, make=make, keep_completed=True)
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    (done,) = rows_of(lab.Spectrum.jobs.completed)
    (failed,) = rows_of(lab.Spectrum.jobs.errors)
    assert done["key"] == {"subject": "m0", "session": 0}
    for job in (done, failed):
        assert 0 <= job["run_duration"] < 60
        assert job["run_metadata"]["datajoint"] == dj.__version__
        assert job["run_metadata"]["python"] == platform.python_version()
    assert done["error_message"] == ""
    assert failed["error_message"] == "ValueError: amplifier saturated"
    assert 'raise ValueError("amplifier saturated")' in failed["error_stack"]
    assert failed["attempt"] == 1


def test_the_timestamp_follows_the_status(schema: Any) -> None:
    lab = sessions(schema, subjects=1, each=1)
    lab.Spectrum.schedule_jobs()
    (before,) = rows_of(lab.Spectrum.jobs)
    lab.Spectrum.ignore_jobs({"subject": "m0"})
    (after,) = rows_of(lab.Spectrum.jobs)
    assert after["timestamp"] > before["timestamp"]
    assert after["created_time"] == before["created_time"]


@pytest.mark.parametrize("text", ["Messfühler 3 überhitzt", "プローブ破損", "probe \U0001f42d lost, 100% \\ 'gone'"])
def test_an_error_in_any_script_is_kept_also_in_a_latin1_schema(schema: Any, engine: str, text: str) -> None:
    if engine != "postgresql":
        schema.connection.query(f"ALTER DATABASE `{schema.database}` CHARACTER SET latin1")

    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError(text)

    lab = sessions(schema, subjects=1, each=1, make=make)
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    (job,) = rows_of(lab.Spectrum.jobs)
    assert job["error_message"] == f"ValueError: {text}"
    assert text in job["error_stack"]


def test_two_schemas_have_two_queues(schema: Any, second_schema: Any) -> None:
    here, there = sessions(schema, 1, 2), sessions(second_schema, 1, 3)
    here.Spectrum.schedule_jobs()
    assert len(djjobs.jobs(second_schema)) == 0
    there.Spectrum.schedule_jobs()
    assert (len(djjobs.jobs(schema)), len(djjobs.jobs(second_schema))) == (2, 3)


@pytest.fixture
def second_schema(schema: Any) -> Any:
    second = dj.Schema(f"{schema.database}_2")
    yield second
    second.drop()


def test_times_do_not_depend_on_the_time_zone_of_a_session(schema: Any, engine: str) -> None:
    lab = sessions(schema, subjects=1, each=2)
    lab.Spectrum.schedule_jobs("session = 0", due_time=datetime.timedelta(seconds=-1))
    zone = "SET TIME ZONE 'Asia/Tokyo'" if engine == "postgresql" else "SET time_zone = '+09:00'"
    schema.connection.query(zone)
    lab.Spectrum.schedule_jobs("session = 1", due_time=datetime.timedelta(seconds=-1))
    first, second = sorted(row["timestamp"] for row in rows_of(lab.Spectrum.jobs))
    assert second - first < datetime.timedelta(minutes=1)
    assert lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 2
    schema.connection.connect()


@pytest.mark.parametrize("mark", tables.EARLIER_MARKS)
def test_a_queue_of_an_earlier_version_is_upgraded_in_place(schema: Any, mark: str) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    before = rows_of(lab.Spectrum.jobs.proj("key_hash", "created_time"))
    jobs, workers = djjobs.jobs(schema).full_table_name, djjobs.workers(schema).full_table_name
    comment = f"COMMENT ON TABLE {jobs} IS '{{}}'" if '"' in jobs else f"ALTER TABLE {jobs} COMMENT = '{{}}'"
    djjobs.workers(schema).insert1({"worker_id": "w" * 36, "host": "node7"})
    if mark.endswith("1"):
        schema.connection.query(f"ALTER TABLE {jobs} DROP COLUMN automatic")
    schema.connection.query(f"ALTER TABLE {workers} DROP COLUMN beats")
    schema.connection.query(f"ALTER TABLE {workers} ADD COLUMN missed timestamp NULL")
    schema.connection.query(f"DROP TABLE {workers.replace('~workers', '~sightings')}")
    schema.connection.query(comment.format(mark))
    with pytest.raises(djjobs.DjJobsError, match=f"earlier version .* djjobs migrate {schema.database}"):
        lab.Spectrum.populate(reserve_jobs=True)
    assert djjobs.migrate(schema) == len(before)
    assert comment_of(djjobs.jobs(schema)) == tables.VERSION_MARK
    assert rows_of(lab.Spectrum.jobs.proj("key_hash", "created_time")) == before
    (worker,) = rows_of(djjobs.workers(schema))
    assert (worker["worker_id"], worker["host"], worker["beats"], "missed" in worker) == ("w" * 36, "node7", 0, False)
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == len(before)
    assert lab.Spectrum.cleanup_jobs()["recovered"] == 0
    assert djjobs.migrate(schema) == 0
