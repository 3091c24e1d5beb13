"""A schema whose ~jobs was made by DataJoint 0.14 gets a queue, and keeps every row."""

from __future__ import annotations

import datetime
import decimal
import os
import subprocess
import sys
import uuid
from typing import Any

import datajoint as dj
import fork_server
import pytest
from conftest import ENGINE
from datajoint import blob
from pipelines import MODERN, job_counts, keys_of, rows_of, sessions

import djjobs

#: DataJoint 0.14 never made a ~jobs on PostgreSQL.
__test__ = ENGINE != "postgresql"

#: As DataJoint 0.14 declares it.
LEGACY = """
CREATE TABLE `{database}`.`~jobs` (
  `table_name` varchar(255) NOT NULL COMMENT 'className of the table',
  `key_hash` char(32) NOT NULL COMMENT 'key hash',
  `status` enum('reserved','error','ignore') NOT NULL,
  `key` blob COMMENT 'structure containing the key',
  `error_message` varchar(2047) NOT NULL DEFAULT '',
  `error_stack` mediumblob COMMENT 'error stack if failed',
  `user` varchar(255) NOT NULL DEFAULT '',
  `host` varchar(255) NOT NULL DEFAULT '',
  `pid` int unsigned NOT NULL DEFAULT '0',
  `connection_id` bigint unsigned NOT NULL DEFAULT '0',
  `timestamp` timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (`table_name`,`key_hash`)
) ENGINE=InnoDB COMMENT='job reservation table for `{database}`'"""

RECORDED = datetime.datetime(2021, 6, 1, 12, 0, 0)


def legacy_jobs(schema: Any, rows: list[tuple[str, str, str, Any]]) -> None:
    """A legacy ~jobs with these rows: table, hash, status, key."""
    query = schema.connection.query
    query(LEGACY.format(database=schema.database))
    for table_name, key_hash, status, key in rows:
        query(
            f"INSERT INTO `{schema.database}`.`~jobs` (table_name, key_hash, status, `key`, error_message,"
            " error_stack, user, host, pid, timestamp) VALUES (%s, %s, %s, %s, %s, %s, 'ada', 'node1', 7, %s)",
            (
                table_name,
                key_hash,
                status,
                None if key is None else blob.pack(key),
                f"{status}!",
                blob.pack("stack"),
                RECORDED,
            ),
        )


def test_the_first_use_says_what_to_run_and_changes_nothing(schema: Any) -> None:
    lab = sessions(schema)
    legacy_jobs(schema, [("__spectrum", "a" * 32, "error", {"subject": "m0", "session": 0})])
    for use in (
        lab.Spectrum.schedule_jobs,
        lambda: lab.Spectrum.populate(reserve_jobs=True),
        lambda: lab.Spectrum.jobs,
    ):
        with pytest.raises(djjobs.DjJobsError, match=f"djjobs migrate {schema.database}"):
            use()
    (count,) = schema.connection.query(f"SELECT COUNT(*) FROM `{schema.database}`.`~jobs`").fetchone()
    assert count == 1
    assert len(lab.Spectrum()) == 0


def test_every_row_is_kept_with_its_key_readable(schema: Any) -> None:
    odd = {
        "name": 'Zoë "quoted" \\ 100% | 鼠',
        "day": datetime.date(2020, 2, 29),
        "moment": datetime.datetime(2020, 2, 29, 1, 2, 3, 456789),
        "amount": decimal.Decimal("1.50"),
        "id": uuid.UUID(int=7),
        "big": 2**62,
    }
    rows = [
        ("__spectrum", "a" * 32, "error", {"subject": "m0", "session": 0}),
        ("__spectrum", "b" * 32, "ignore", {"subject": "m0", "session": 1}),
        ("_other", "c" * 32, "reserved", odd),
        ("_other", "d" * 32, "error", None),
    ]
    legacy_jobs(schema, rows)
    assert djjobs.migrate(schema) == len(rows)
    kept = {(row["table_name"], row["key_hash"]): row for row in rows_of(djjobs.jobs(schema))}
    assert set(kept) == {row[:2] for row in rows}
    for table_name, key_hash, status, key in rows:
        row = kept[table_name, key_hash]
        text = {name: value if isinstance(value, int) else str(value) for name, value in (key or {}).items()}
        assert row["key"] == (text or None)
        assert (row["status"], row["error_message"], row["error_stack"]) == (status, f"{status}!", "stack")
        assert (row["user"], row["host"], row["pid"], row["timestamp"]) == ("ada", "node1", 7, RECORDED)
    assert len(djjobs.jobs(schema) & {"key.subject": "m0"}) == 2


def test_it_can_be_run_again(schema: Any) -> None:
    legacy_jobs(schema, [("__spectrum", "a" * 32, "error", {"subject": "m0", "session": 0})])
    assert djjobs.migrate(schema) == 1
    before = rows_of(djjobs.jobs(schema))
    assert djjobs.migrate(schema.database) == 0
    assert rows_of(djjobs.jobs(schema)) == before


def test_an_interrupted_migration_is_taken_up_again(schema: Any) -> None:
    legacy_jobs(schema, [("__spectrum", "a" * 32, "error", {"subject": "m0", "session": 0})])
    schema.connection.query(f"ALTER TABLE `{schema.database}`.`~jobs` ADD key_json json DEFAULT NULL")
    with pytest.raises(djjobs.DjJobsError, match="djjobs migrate"):
        djjobs.jobs(schema)
    assert djjobs.migrate(schema) == 1
    assert rows_of(djjobs.jobs(schema))[0]["key"] == {"subject": "m0", "session": 0}


def test_a_migrated_queue_is_the_same_as_a_new_one(schema: Any) -> None:
    """Same columns, types, character sets and indexes, so the same plans."""
    legacy_jobs(schema, [])
    djjobs.migrate(schema)
    fresh = dj.Schema(schema.database + "_fresh")
    try:
        djjobs.jobs(fresh)
        described = [shape(schema) for schema in (schema, fresh)]
    finally:
        fresh.drop()
    for migrated, new in zip(*described, strict=True):
        assert list(migrated) == list(new)
    character_sets = {column[0]: column[3] for column in described[0][0]}
    assert {character_sets[name] for name in ("table_name", "key_hash", "worker_id")} == {"ascii"}
    assert character_sets["error_message"] == "utf8mb4"


def shape(schema: Any) -> tuple[Any, Any]:
    columns = schema.connection.query(
        "SELECT column_name, column_type, is_nullable, character_set_name, collation_name, column_default"
        " FROM information_schema.columns WHERE table_schema = %s AND table_name = '~jobs' ORDER BY 1",
        (schema.database,),
    ).fetchall()
    indexes = schema.connection.query(
        "SELECT index_name, seq_in_index, column_name FROM information_schema.statistics"
        " WHERE table_schema = %s AND table_name = '~jobs' ORDER BY 1, 2",
        (schema.database,),
    ).fetchall()
    return columns, indexes


def test_jobs_that_the_legacy_queue_recorded_count_once_the_table_has_the_mixin(schema: Any) -> None:
    lab = sessions(schema)
    keys = keys_of(lab.Session)
    rows = [("__spectrum", f"{number:032}", "error", key) for number, key in enumerate(keys[:3])]
    rows += [("__spectrum", f"{number + 3:032}", "ignore", key) for number, key in enumerate(keys[3:5])]
    legacy_jobs(schema, rows)
    djjobs.migrate(schema)
    assert int(lab.Spectrum.schedule_jobs()) == len(keys) - 5
    assert job_counts(lab.Spectrum) == {"error": 3, "ignore": 2, "scheduled": len(keys) - 5}
    assert lab.Spectrum.retry_jobs(keys[0]) == 1
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == len(keys) - 4


def test_the_command_does_the_same(schema: Any) -> None:
    legacy_jobs(schema, [("__spectrum", "a" * 32, "error", {"subject": "m0", "session": 0})])
    for expected in ("1 rows were converted", "0 rows were converted"):
        done = fork_server.run(["-m", "djjobs.cli", "migrate", schema.database])
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


if not MODERN:

    def test_legacy_tables_go_on_reserving_and_reporting_errors(schema: Any) -> None:
        """With a date in the key, which JSON has no word for."""

        class Day(dj.Manual):
            definition = "day : date"

        def make(self: Any, key: dict[str, Any]) -> None:
            if key["day"].day == 2:
                raise ValueError("a bad day")
            self.insert1(key)

        days = schema(Day)
        days.insert([{"day": f"2024-01-0{day}"} for day in (1, 2, 3)])
        plain = type("Plain", (dj.Computed,), {"definition": "-> Day", "make": make})
        plain = schema(plain, context={"Day": days})
        legacy_jobs(schema, [])
        assert len(plain.populate({"day": "2024-01-02"}, reserve_jobs=True, suppress_errors=True)["error_list"]) == 1
        djjobs.migrate(schema)
        schema._jobs = None  # as a new process would have it
        again = plain.populate(reserve_jobs=True, suppress_errors=True)
        assert again == {"success_count": 2, "error_list": []}  # the error of before is still known
        (schema.jobs & 'status = "error"').delete()
        assert len(plain.populate(reserve_jobs=True, suppress_errors=True)["error_list"]) == 1
        assert list(schema.jobs.fetch("key")) == [{"day": "2024-01-02"}]

    ALONE = """
import datajoint as dj
import djjobs

schema = dj.Schema({database!r})

@schema
class Day(dj.Manual):
    definition = "day : date"

@schema
class Plain(dj.Computed):
    definition = "-> Day"
    def make(self, key):
        if key["day"].day == 2:
            raise ValueError("a bad day")
        self.insert1(key)

print(Plain.populate(reserve_jobs=True, suppress_errors=True)["success_count"])
print([(str(key["day"]), status) for key, status in zip(*schema.jobs.fetch("key", "status"))])
"""

    def test_a_process_that_only_imports_djjobs_shares_the_queue(schema: Any) -> None:
        """It has no table with the mixin, so DataJoint was not changed for it when it began."""
        legacy_jobs(schema, [])
        djjobs.migrate(schema)
        days = schema(type("Day", (dj.Manual,), {"definition": "day : date"}))
        days.insert([{"day": f"2024-01-0{day}"} for day in (1, 2, 3)])
        command = [sys.executable, "-W", "ignore", "-c", ALONE.format(database=schema.database)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-2:] == ["2", "[('2024-01-02', 'error')]"]
        assert len(djjobs.jobs(schema).errors) == 1


def test_an_empty_table_of_datajoint_gives_way_to_the_queue(schema: Any) -> None:
    lab = sessions(schema)
    legacy_jobs(schema, [])
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 12
