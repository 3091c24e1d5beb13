"""A lab switches over: by a mixin, by a base class, or without touching the pipeline at all."""

from __future__ import annotations

import types
from typing import Any

import datajoint as dj
import pytest
from datajoint.table import Table
from pipelines import INT, MODERN, job_counts, keys_of, rows_of, sessions

import djjobs

DEFINITION = f"""
-> Session
---
power : {INT}
"""


def make(self: Any, key: dict[str, Any]) -> None:
    self.insert1({**key, "power": key["session"]})


def declare(schema: Any, lab: Any, name: str, base: type) -> Any:
    table = type(name, (base,), {"definition": DEFINITION, "make": make})
    return schema(table, context={"Session": lab.Session})


@pytest.mark.parametrize("base", [djjobs.Computed, djjobs.Imported])
def test_the_base_classes_have_the_queue(schema: Any, base: type) -> None:
    table = declare(schema, sessions(schema), "Trace", base)
    assert table.populate(reserve_jobs=True) == {"success_count": 12, "error_list": []}
    assert len(table()) == 12
    assert job_counts(table) == {}


def test_adopting_a_schema_gives_its_classes_the_queue(schema: Any) -> None:
    lab = sessions(schema)
    computed, imported = declare(schema, lab, "Trace", dj.Computed), declare(schema, lab, "Raw", dj.Imported)
    adopted = djjobs.adopt(schema)
    assert set(adopted) == {lab.Spectrum, computed, imported}
    assert djjobs.adopt(schema) == adopted  # again, with nothing left to do
    for table in (computed, imported):
        assert int(table.schedule_jobs()) == 12
        assert table.populate(reserve_jobs=True)["success_count"] == 12
    assert not issubclass(lab.Session, djjobs.JobsMixin)


def test_adopting_a_module_takes_the_classes_it_defines(schema: Any) -> None:
    lab = sessions(schema)
    module = types.ModuleType("lab")
    module.Session, module.Trace = lab.Session, declare(schema, lab, "Trace", dj.Computed)
    other = declare(schema, lab, "Other", dj.Computed)
    module.Computed = djjobs.Computed  # imported there, not a table
    assert djjobs.adopt(module) == [module.Trace]
    assert int(module.Trace.schedule_jobs()) == 12
    assert not issubclass(other, djjobs.JobsMixin)


def test_adopting_what_has_no_classes_says_what_to_import(server: Any, schema: Any) -> None:
    with pytest.raises(djjobs.DjJobsError, match=f"{schema.database}.*Import the module"):
        djjobs.adopt(schema)
    with pytest.raises(djjobs.DjJobsError, match=r"neither an activated dj.Schema nor a module"):
        djjobs.adopt("lab")


def test_a_class_made_from_another_has_a_name_of_its_own(schema: Any) -> None:
    lab = sessions(schema)
    table = declare(schema, lab, "Trace", djjobs.Computed)
    inherited = table().full_table_name  # asked for before there was the other
    other = declare(schema, lab, "Other", table)
    for cls in (table, other, table):
        assert cls.full_table_name == cls().full_table_name == Table.full_table_name.fget(cls())
    assert other.full_table_name != inherited


def test_a_class_that_moves_to_another_schema_is_found_there(schema: Any) -> None:
    lab = sessions(schema)
    table = declare(schema, lab, "Trace", djjobs.Computed)
    assert schema.database in table().full_table_name
    elsewhere = dj.Schema(f"{schema.database}_2", connection=schema.connection)
    try:
        elsewhere(table, context={"Session": lab.Session})
        assert table().full_table_name == Table.full_table_name.fget(table())
        assert table.populate(reserve_jobs=True)["success_count"] == 12
    finally:
        elsewhere.drop()


def test_tables_without_the_mixin_work_beside_it(schema: Any) -> None:
    lab = sessions(schema)
    plain = declare(schema, lab, "Plain", dj.Computed)
    lab.Spectrum.schedule_jobs()
    assert plain.populate(reserve_jobs=True, suppress_errors=True)["success_count"] == 12
    assert len(plain()) == 12
    assert job_counts(lab.Spectrum) == {"scheduled": 12}


def test_a_schema_is_shown_one_row_a_table(schema: Any) -> None:
    def fails_twice(self: Any, key: dict[str, Any]) -> None:
        if key["session"] == 1 and key["subject"] != "m0":
            raise ValueError("noise")
        self.insert1({**key, "power": 0})

    lab = sessions(schema, make=fails_twice)
    plain = declare(schema, lab, "Plain", dj.Computed)
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True, max_calls=12)
    frame = djjobs.status(schema)
    assert list(frame.index) == ["Spectrum", "Plain"]
    assert list(frame.columns) == ["scheduled", "reserved", "error", "ignore", "success", "cancelled", "done"]
    assert frame.loc["Spectrum"].to_dict() | {"error": 2, "done": 10} == frame.loc["Spectrum"].to_dict()
    assert frame.loc["Plain"].sum() == 0
    module = types.ModuleType("lab")
    module.Plain = plain
    assert list(djjobs.status(module).index) == ["Plain"]


def test_a_table_whose_class_was_defined_twice_is_shown_with_its_jobs(schema: Any) -> None:
    """As when a cell of a notebook is run again."""
    lab = sessions(schema)
    first = declare(schema, lab, "Again", djjobs.Computed)
    second = declare(schema, lab, "Again", djjobs.Computed)
    second.schedule_jobs()
    assert first is not second
    frame = djjobs.status(schema)
    assert sorted(frame.index) == ["Again", "Spectrum"]
    assert frame.loc["Again", "scheduled"] == 12


def test_jobs_of_tables_without_a_class_here_are_shown_too(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    lab.Spectrum.__dict__  # the class lives on, but belongs to another schema object
    other = types.SimpleNamespace(database=schema.database, connection=schema.connection)
    lab.Spectrum.database = "elsewhere"
    try:
        frame = djjobs.status(other)
    finally:
        lab.Spectrum.database = schema.database
    assert frame.loc["__spectrum", "scheduled"] == 12


# -- code written for DataJoint 2's own queue ------------------------------------------------------------


def test_native_words_work_on_our_queue(schema: Any) -> None:
    lab = sessions(schema, keep_completed=True)
    jobs = lab.Spectrum.jobs
    assert jobs.refresh() == {"added": 12, "removed": 0, "orphaned": 0, "re_pended": 0}
    assert len(jobs.pending) == 12
    jobs.ignore({"subject": "m0", "session": 0})
    assert len(jobs.ignored) == 1
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 11
    assert (len(jobs.completed), len(jobs.errors), len(jobs.reserved)) == (11, 0, 0)
    progress = jobs.progress()
    assert {name: progress[name] for name in ("pending", "reserved", "success", "error", "ignore", "total")} == {
        "pending": 0,
        "reserved": 0,
        "success": 11,
        "error": 0,
        "ignore": 1,
        "total": 12,
    }


def test_native_refresh_puts_back_what_was_deleted_from_the_target(schema: Any) -> None:
    lab = sessions(schema, keep_completed=True)
    lab.Spectrum.populate(reserve_jobs=True)
    (lab.Spectrum & "session = 0").delete_quick()
    assert lab.Spectrum.jobs.refresh() == {"added": 0, "removed": 0, "orphaned": 0, "re_pended": 3}
    assert job_counts(lab.Spectrum) == {"scheduled": 3, "success": 9}


def test_native_refresh_removes_jobs_whose_key_is_gone(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.jobs.refresh()
    (lab.Session & "session = 0").delete_quick()
    assert lab.Spectrum.jobs.refresh()["removed"] == 0  # they are not an hour old
    assert lab.Spectrum.jobs.refresh(stale_timeout=0.001) == {
        "added": 0,
        "removed": 3,
        "orphaned": 0,
        "re_pended": 0,
    }


def test_native_refresh_takes_orphans_away_from_their_workers(schema: Any) -> None:
    from djjobs.queue.table_queue import TableQueue

    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    jobs = TableQueue.of(lab.Spectrum())
    queue, held = jobs.queue, jobs.claims().take(2)
    queue.db.execute(f"UPDATE {queue.jobs.full_table_name} SET timestamp = '2020-01-01' WHERE status = 'reserved'")
    assert lab.Spectrum.jobs.refresh(orphan_timeout=3600)["orphaned"] == len(held) == 2
    assert job_counts(lab.Spectrum) == {"scheduled": 12}


def test_native_refresh_with_a_delay_schedules_for_later(schema: Any) -> None:
    lab = sessions(schema)
    assert lab.Spectrum.jobs.refresh("session = 0", delay=3600, priority=7)["added"] == 3
    assert {row["priority"] for row in rows_of(lab.Spectrum.jobs)} == {7}
    assert lab.Spectrum.populate(reserve_jobs=True, schedule_jobs=False)["success_count"] == 0


def test_errors_are_retried_by_deleting_them_as_datajoint_users_do(schema: Any) -> None:
    broken = {"now": True}

    def fails_at_first(self: Any, key: dict[str, Any]) -> None:
        if broken["now"]:
            raise ValueError("noise")
        make(self, key)

    lab = sessions(schema, make=fails_at_first)
    assert len(lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)["error_list"]) == 12
    broken["now"] = False
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 0
    lab.Spectrum.jobs.errors.delete()
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 12


if not MODERN:

    def test_the_schema_of_0_14_shows_the_jobs_that_0_14_would_have_there(schema: Any) -> None:
        lab = sessions(schema)
        lab.Spectrum.schedule_jobs()
        assert len(schema.jobs) == 0 and len(djjobs.jobs(schema)) == 12
        lab.set_status("error", subject="m1")
        lab.set_status("reserved", subject="m2")
        assert {key["subject"] for key in schema.jobs.fetch("key")} == {"m1", "m2"}
        schema.jobs.delete()
        assert job_counts(lab.Spectrum) == {"scheduled": 4}

    def test_the_job_table_of_0_14_notices_that_it_has_become_a_queue(schema: Any) -> None:
        jobs = schema.jobs  # which DataJoint declares
        assert len(jobs) == 0
        lab = sessions(schema)
        lab.Spectrum.schedule_jobs()
        assert schema.jobs.reserve("fake_table", {"n": 1}) and not schema.jobs.reserve("fake_table", {"n": 1})
        assert schema.jobs.fetch("key").tolist() == [{"n": 1}]
        schema.jobs.complete("fake_table", {"n": 1})
        assert len(schema.jobs) == 0

    def test_a_legacy_table_that_comes_first_does_not_declare_a_legacy_queue(schema: Any) -> None:
        lab = sessions(schema)
        plain = declare(schema, lab, "Plain", dj.Computed)
        assert plain.populate(reserve_jobs=True)["success_count"] == 12
        assert int(lab.Spectrum.schedule_jobs()) == 12

    def test_a_legacy_table_keeps_its_errors_in_the_shared_queue(schema: Any) -> None:
        lab = sessions(schema)

        def fail(self: Any, key: dict[str, Any]) -> None:
            raise ValueError("noise")

        table = type("Plain", (dj.Computed,), {"definition": DEFINITION, "make": fail})
        plain = schema(table, context={"Session": lab.Session})
        lab.Spectrum.schedule_jobs()
        assert len(plain.populate(reserve_jobs=True, suppress_errors=True)["error_list"]) == 12
        errors = schema.jobs & {"table_name": plain.table_name, "status": "error"}
        assert len(errors) == 12
        assert sorted(map(str, errors.fetch("key"))) == sorted(
            str(key) for key in map(sorted_key, keys_of(lab.Session))
        )
        assert "ValueError: noise" in errors.fetch("error_stack")[0]

    def sorted_key(key: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(key.items()))
