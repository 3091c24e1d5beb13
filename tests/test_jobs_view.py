"""`Table.jobs`, its status views and `djjobs.jobs(schema)`: ordinary DataJoint queries."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import datajoint as dj
import pytest
from pipelines import INT, MODERN, Lab, computed, keys_of, no_signal_in_session_3, rows_of, standing_lab

import djjobs


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    with standing_lab(make=no_signal_in_session_3, keep_completed=True) as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab) -> Lab:
    """m0 is done but for its session 3, which failed; session 0 of m1 is ignored, 1 is cancelled."""
    standing.start_over()
    standing.Spectrum.populate({"subject": "m0"}, reserve_jobs=True, suppress_errors=True)
    standing.Spectrum.schedule_jobs(min_scheduling_interval=0)
    standing.Spectrum.ignore_jobs({"subject": "m1", "session": 0})
    standing.Spectrum.cancel_jobs({"subject": "m1", "session": 1})
    return standing


def sessions_of(jobs: Any) -> set[tuple[str, int]]:
    return {(row["key"]["subject"], row["key"]["session"]) for row in rows_of(jobs)}


def test_the_status_views_divide_the_jobs_among_them(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    assert sessions_of(jobs.completed) == {("m0", 0), ("m0", 1), ("m0", 2)}
    assert sessions_of(jobs.errors) == {("m0", 3)}
    assert sessions_of(jobs.ignored) == {("m1", 0)}
    assert sessions_of(jobs.cancelled) == {("m1", 1)}
    assert len(jobs.scheduled) == 6
    assert len(jobs.reserved) == 0
    assert len(jobs) == 12


def test_a_running_job_is_among_the_reserved_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        seen.append(sessions_of(self.jobs.reserved))
        self.insert1({**key, "power": 0})

    monkeypatch.setattr(lab.Spectrum, "make", make)
    lab.Spectrum.populate({"subject": "m2", "session": 1}, reserve_jobs=True)
    assert seen == [{("m2", 1)}]


def test_jobs_are_the_same_on_the_class_and_on_an_instance(lab: Lab) -> None:
    assert rows_of(lab.Spectrum.jobs.errors) == rows_of(lab.Spectrum().jobs.errors)


def test_a_job_is_found_by_its_fields_and_by_what_its_json_holds(lab: Lab) -> None:
    conditions = [
        ("status = 'error'", 1),
        ({"status": "scheduled"}, 6),
        ([{"status": "error"}, {"status": "ignore"}], 2),
        (dj.Not("status = 'success'"), 9),
        ({"key.subject": "m0"}, 4),
        ({"key.subject": "m1", "status": "scheduled"}, 2),
        ({"run_metadata.datajoint": dj.__version__}, 4),
        ({"run_metadata.datajoint": "0.0.1"}, 0),
    ]
    found = [(condition, len(lab.Spectrum.jobs & condition)) for condition, _ in conditions]
    assert found == conditions


def test_jobs_are_left_out_by_their_fields_and_by_what_their_json_holds(lab: Lab) -> None:
    assert len(lab.Spectrum.jobs - "status = 'error'") == 11
    assert len(lab.Spectrum.jobs - {"key.subject": "m0"}) == 8


def test_a_number_in_the_json_key_can_be_compared_as_a_number(lab: Lab, engine: str) -> None:
    kind = {"postgresql": ":int", "mysql": ":unsigned", "mariadb": ""}[engine]  # which compares by value anyway
    assert len(lab.Spectrum.jobs & {f"key.session{kind}": 2}) == 3


def test_jobs_are_fetched_projected_and_counted(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    error = (jobs & "status = 'error'").fetch1()
    assert error["key"] == {"subject": "m0", "session": 3}
    assert (jobs & {"key_hash": error["key_hash"]}).fetch1("error_message") == "ValueError: no signal"
    assert keys_of(jobs.errors) == [{"subject": "m0", "session": 3}]
    renamed = jobs.errors.proj(state="status")
    assert rows_of(renamed)[0]["state"] == "error"
    counted = dj.U("status").aggr(jobs, n="count(*)")
    assert {row["status"]: row["n"] for row in rows_of(counted)} == {
        "scheduled": 6,
        "success": 3,
        "error": 1,
        "ignore": 1,
        "cancelled": 1,
    }


def test_jobs_can_be_sorted_and_limited(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    if MODERN:
        latest = jobs.to_dicts(order_by="timestamp DESC", limit=1)
    else:
        latest = jobs.fetch(as_dict=True, order_by="timestamp DESC", limit=1)
    assert latest[0]["status"] == "cancelled"


def test_jobs_join_with_and_restrict_other_queries(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    assert rows_of(dj.U("subject") & jobs.errors) == [{"subject": "m0"}]
    assert keys_of(lab.Session & jobs.ignored.proj()) == [{"subject": "m1", "session": 0}]
    by_hash = djjobs.jobs(lab.schema)
    assert sessions_of(jobs & by_hash.ignored.proj()) == {("m1", 0)}
    assert len(by_hash - jobs.errors.proj("table_name", "key_hash").proj("table_name", "key_hash")) == 11
    dates = rows_of(jobs.errors.proj("status") * lab.Session)
    assert [(row["status"], row["session_date"].day) for row in dates] == [("error", 4)]


def test_a_notebook_shows_jobs_as_it_shows_tables(lab: Lab) -> None:
    for query in (lab.Spectrum.jobs, lab.Spectrum.jobs.errors, djjobs.jobs(lab.schema), lab.Spectrum.jobs.reserved):
        text, html = repr(query), query._repr_html_()
        assert "key_hash" in text and "status" in text
        assert "key_hash" in html and "<table" in html
    assert "error" in repr(lab.Spectrum.jobs.errors)
    assert "no signal" in lab.Spectrum.jobs.errors._repr_html_()


def test_what_is_shown_of_a_job_tells_its_key(lab: Lab) -> None:
    errors = lab.Spectrum.jobs.errors
    for query in (errors, errors.proj("key"), djjobs.jobs(lab.schema) & "status = 'error'"):
        for shown in (query.preview(width=60), html.unescape(query._repr_html_())):
            assert re.search("subject.: .m0", shown) and re.search("session.: 3", shown)
    assert errors.heading["key"].json  # to all others it is JSON as before
    assert [row["key"] for row in rows_of(errors)] == [{"subject": "m0", "session": 3}]


def test_the_queue_of_a_schema_holds_the_jobs_of_all_its_tables(lab: Lab) -> None:
    Second = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Second")
    Second.schedule_jobs()
    every = djjobs.jobs(lab.schema)
    assert len(every) == 24
    assert len(Second.jobs) == len(lab.Spectrum.jobs) == 12
    counted = dj.U("table_name").aggr(every, n="count(*)")
    assert {row["table_name"]: row["n"] for row in rows_of(counted)} == {
        lab.Spectrum.table_name: 12,
        Second.table_name: 12,
    }
    Second.jobs.delete()
    assert (len(Second.jobs), len(lab.Spectrum.jobs)) == (0, 12)
    assert len(djjobs.jobs(lab.schema).scheduled) == 6


def test_deleting_some_jobs_leaves_the_others(lab: Lab) -> None:
    (lab.Spectrum.jobs & {"key.subject": "m2"}).delete()
    lab.Spectrum.jobs.errors.delete()
    assert {subject for subject, _ in sessions_of(lab.Spectrum.jobs)} == {"m0", "m1"}
    assert len(lab.Spectrum.jobs) == 7


def test_a_view_taken_earlier_shows_what_is_there_now(lab: Lab) -> None:
    scheduled = lab.Spectrum.jobs.scheduled
    assert len(scheduled) == 6
    lab.Spectrum.cancel_jobs({"subject": "m2"})
    assert len(scheduled) == 2


def test_a_key_attribute_may_have_the_name_of_a_field(lab: Lab) -> None:
    """`status`, `user` and `key` are common names, and the key of a job is JSON."""
    Probe = lab.schema(
        type("Probe", (dj.Manual,), {"definition": f"status : {INT}\nuser : varchar(8)\nhost : varchar(8)"})
    )
    Check = computed(lab.schema, "-> Probe", {"Probe": Probe}, "Check")
    Probe.insert([(1, "ann", "a"), (2, "bob", "b")])
    assert int(Check.schedule_jobs()) == 2
    assert len(Check.jobs & {"key.user": "ann"}) == 1
    assert Check.cancel_jobs({"status": 1}) == 1
    assert Check.cleanup_jobs({"status": 2, "user": "bob"})["orphaned_incomplete"] == 0
    assert Check.populate(reserve_jobs=True)["success_count"] == 1
    assert keys_of(Check()) == [{"status": 2, "user": "bob", "host": "b"}]
