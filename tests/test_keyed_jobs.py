"""`Table.jobs` has the attributes of the table's key: what is said of some jobs acts on these and on no others."""

from __future__ import annotations

import datetime
import decimal
import logging
import secrets
import uuid
from collections.abc import Iterator
from typing import Any

import datajoint as dj
import pytest
from pipelines import (
    INT,
    MODERN,
    Lab,
    computed,
    job_counts,
    keys_of,
    manual,
    no_signal_in_session_3,
    rows_of,
    standing_lab,
)
from workloads.squares import another_connection

import djjobs
from djjobs.queue import by_hand


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    with standing_lab(make=no_signal_in_session_3, keep_completed=True) as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab) -> Lab:
    """The session 3 of each subject has failed; m1 has nothing but that. All others wait."""
    standing.start_over()
    standing.Spectrum.populate({"session": 3}, reserve_jobs=True, suppress_errors=True)
    standing.Spectrum.schedule_jobs(min_scheduling_interval=0)
    return standing


@pytest.fixture
def second(lab: Lab) -> Iterator[Any]:
    """Another table with the same keys, all scheduled."""
    table = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Second")
    table.schedule_jobs(min_scheduling_interval=0)
    yield table
    table().drop_quick()
    (djjobs.jobs(lab.schema) & {"table_name": table.table_name}).delete()


def keys_in(jobs: Any) -> set[tuple[str, int]]:
    return {(key["subject"], key["session"]) for key in keys_of(jobs)}


ERRORS = {("m0", 3), ("m1", 3), ("m2", 3)}
ONE = {"subject": "m1", "session": 3}


def test_a_key_chooses_one_job(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    assert keys_in(jobs & ONE) == {("m1", 3)}
    assert keys_in(jobs & ONE & "status = 'error'") == {("m1", 3)}
    assert ONE in jobs and {"subject": "m9", "session": 3} not in jobs


def test_part_of_a_key_chooses_its_jobs(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    assert keys_in(jobs & {"subject": "m1"}) == {("m1", session) for session in range(4)}
    assert keys_in(jobs & "session > 1 AND subject = 'm2'") == {("m2", 2), ("m2", 3)}
    assert keys_in(jobs & [{"subject": "m0", "session": 1}, ONE]) == {("m0", 1), ("m1", 3)}
    assert keys_in(jobs - {"subject": "m1"} - "session = 3") == {(f"m{n}", s) for n in (0, 2) for s in range(3)}


def test_queries_choose_jobs_and_jobs_choose_rows(lab: Lab) -> None:
    Spectrum, Session = lab.Spectrum, lab.Session
    assert keys_in(Spectrum.jobs.errors & (lab.Subject & "subject = 'm2'")) == {("m2", 3)}
    assert keys_in(Session & Spectrum.jobs.errors) == ERRORS
    assert len(Session - Spectrum.jobs.errors) == 9
    joined = rows_of(Spectrum.jobs.errors.proj("error_message") * Session)
    assert {(row["subject"], row["session_date"].day) for row in joined} == {("m0", 4), ("m1", 4), ("m2", 4)}
    counted = lab.Subject.aggr(Spectrum.jobs.errors, n="count(*)")
    assert {row["subject"]: row["n"] for row in rows_of(counted)} == {"m0": 1, "m1": 1, "m2": 1}


def test_jobs_choose_by_being_jobs_of_the_table_or_by_their_keys(lab: Lab, second: Any) -> None:
    # All failed jobs of the schema, as far as they are this table's: there are none.
    assert second.cancel_jobs(djjobs.jobs(lab.schema) & "status = 'error'") == 0
    assert second.populate(lab.Spectrum.jobs.errors, reserve_jobs=True)["success_count"] == 3
    assert keys_in(second()) == ERRORS
    assert second.cancel_jobs(lab.Spectrum.jobs & {"subject": "m1"}) == 3
    assert len(lab.Spectrum.jobs.cancelled) == 0


def test_the_key_comes_first_and_comes_back(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    assert jobs.heading.names[:3] == ["subject", "session", "status"]
    assert jobs.primary_key == ["subject", "session"]
    assert jobs.describe().splitlines()[1:4] == [
        "subject : varchar(16)",
        f"session : {jobs.heading['session'].type}",
        "---",
    ]
    assert keys_in(jobs.errors) == ERRORS
    states = [(row["subject"], row["status"]) for row in rows_of(jobs & "session = 3")]
    assert states == [("m0", "error"), ("m1", "error"), ("m2", "error")]
    assert (jobs & ONE).fetch1("session") == 3
    html = jobs.errors._repr_html_()
    assert html.index("subject") < html.index("session") < html.index("status") < html.index("key_hash")


def test_deleting_the_job_of_a_key_deletes_this_one(lab: Lab) -> None:
    (lab.Spectrum.jobs & ONE & "status = 'error'").delete()
    assert keys_in(lab.Spectrum.jobs.errors) == ERRORS - {("m1", 3)}
    assert len(lab.Spectrum.jobs) == 11
    assert (lab.Spectrum.jobs & {"subject": "m0"}).delete_quick(get_count=True) == 4
    assert len(lab.Spectrum.jobs) == 7


def test_ignoring_a_key_that_the_view_gave_ignores_this_one(lab: Lab) -> None:
    key = keys_of(lab.Spectrum.jobs.pending)[0]
    lab.Spectrum.jobs.ignore(key)
    assert keys_of(lab.Spectrum.jobs.ignored) == [key]
    assert job_counts(lab.Spectrum) == {"scheduled": 8, "error": 3, "ignore": 1}


def test_half_a_key_ignores_nothing(lab: Lab) -> None:
    for half in ({"subject": "m1"}, {"key_hash": "0" * 32}, {}):
        with pytest.raises(djjobs.DjJobsError, match=r"no key of Spectrum .*session is missing"):
            lab.Spectrum.jobs.ignore(half)
    assert len(lab.Spectrum.jobs.ignored) == 0


def test_a_dict_of_unknown_attributes_is_an_error(lab: Lab) -> None:
    for wrong in ({"mosue": "m1"}, [{"mosue": "m1"}], dj.Not({"mosue": "m1"}), dj.AndList([{"mosue": "m1"}])):
        with pytest.raises(djjobs.DjJobsError, match=r"Spectrum .* no attribute 'mosue'"):
            lab.Spectrum.jobs & wrong
    with pytest.raises(djjobs.DjJobsError, match="Did you mean 'subject'"):
        lab.Spectrum.jobs & {"subjct": "m1"}
    # A row of another table says which job is meant, and has attributes of its own.
    row = {**ONE, "session_date": None, "experimenter": "ann"}
    assert keys_in(lab.Spectrum.jobs & row) == {("m1", 3)}
    assert len(lab.Spectrum.jobs & {}) == 12


def test_the_queue_of_a_schema_refuses_what_only_a_table_has(lab: Lab) -> None:
    jobs = djjobs.jobs(lab.schema)
    with pytest.raises(djjobs.DjJobsError, match=r"no attribute 'subject'.*"):
        jobs & {"subject": "m1"}
    with pytest.raises(djjobs.DjJobsError, match=r"Did you mean 'status'"):
        (jobs & {"statsu": "error", "table_name": "__spectrum"}).delete()
    assert len(jobs & {"key.subject": "m1", "table_name": lab.Spectrum.table_name}) == 4
    assert len(jobs) == 12


def test_dropping_the_jobs_of_a_table_leaves_the_queue(lab: Lab, second: Any) -> None:
    lab.Spectrum.jobs.errors.drop()
    assert (len(lab.Spectrum.jobs), len(second.jobs)) == (0, 12)


def test_deleting_a_running_job_takes_it_away_and_says_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        self.insert1({**key, "power": 1})
        with_key = f"table_name = '{self.table_name}' AND status = 'reserved'"
        other = another_connection()
        other.query(f"DELETE FROM {self.jobs.full_table_name} WHERE {with_key}")
        other.close()

    monkeypatch.setattr(lab.Spectrum, "make", make)
    with pytest.raises(djjobs.LeaseLost):
        lab.Spectrum.populate({"subject": "m0", "session": 0}, reserve_jobs=True)
    assert len(lab.Spectrum()) == 0
    lab.set_status("reserved", subject="m2")
    with caplog.at_level(logging.WARNING, "djjobs"):
        (lab.Spectrum.jobs & {"subject": "m2"}).delete()
    assert "4 of the deleted jobs of Spectrum" in caplog.text
    caplog.clear()
    lab.set_status("reserved", subject="m1")
    with caplog.at_level(logging.WARNING, "djjobs"):
        (djjobs.jobs(lab.schema) & "status = 'reserved'").delete()
    assert "4 of the deleted jobs of the schema" in caplog.text
    assert {subject for subject, _ in keys_in(lab.Spectrum.jobs)} == {"m0"}


def test_a_job_that_has_changed_meanwhile_is_not_deleted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = by_hand.delete

    def after_a_retry(*arguments: Any) -> int:
        lab.Spectrum.retry_jobs(ONE)
        return delete(*arguments)

    monkeypatch.setattr(by_hand, "delete", after_a_retry)
    lab.Spectrum.jobs.errors.delete()
    assert keys_in(lab.Spectrum.jobs.errors) == set()
    assert ONE in lab.Spectrum.jobs.scheduled


def test_jobs_can_be_deleted_inside_a_transaction_and_come_back_with_it(lab: Lab) -> None:
    with pytest.raises(ZeroDivisionError), lab.schema.connection.transaction:
        (lab.Spectrum.jobs & ONE).delete()
        assert ONE not in lab.Spectrum.jobs
        raise ZeroDivisionError
    assert ONE in lab.Spectrum.jobs


def test_the_jobs_of_a_table_that_was_dropped_say_so(lab: Lab) -> None:
    Gone = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Gone")
    Gone.schedule_jobs(min_scheduling_interval=0)
    Gone().drop_quick()
    with pytest.raises(djjobs.DjJobsError, match=r"Gone .*is not in the database.*djjobs.jobs"):
        Gone.jobs.errors
    (djjobs.jobs(lab.schema) & {"table_name": "__gone"}).delete()


def test_the_view_is_no_place_to_write(lab: Lab) -> None:
    for write in (lab.Spectrum.jobs.insert1, lab.Spectrum.jobs.update1):
        with pytest.raises(djjobs.DjJobsError, match=r"Spectrum.*row by row.*schedule_jobs"):
            write({**ONE, "status": "scheduled"})


# -- the words of DataJoint 2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "condition",
    [
        "status = 'pending'",
        "status='pending' AND subject <> 'pending'",
        "status IN ('pending', 'reserved')",
        {"status": "pending"},
        [{"status": "pending"}, {"status": "reserved"}],
        dj.AndList(["status = 'pending'", "session < 100"]),
        dj.Not("status <> 'pending'"),
    ],
)
def test_the_status_pending_finds_what_pending_finds(lab: Lab, condition: Any) -> None:
    jobs = lab.Spectrum.jobs
    assert keys_in(jobs & condition) == keys_in(jobs.pending) == keys_in(jobs & "status = 'scheduled'")
    assert len(jobs.pending) == 9


def test_the_columns_have_the_names_of_datajoint(lab: Lab) -> None:
    lab.Spectrum.populate({"subject": "m0", "session": 0}, reserve_jobs=True)
    lab.Spectrum.jobs.refresh(delay=3600)
    done, failed, waits = (
        (lab.Spectrum.jobs & {"subject": "m0", "session": session}).fetch1() for session in (0, 3, 1)
    )
    for row in (done, failed):
        assert row["duration"] == row["run_duration"] >= 0
        assert row["scheduled_time"] <= row["reserved_time"] <= row["completed_time"]
        taken = row["completed_time"] - row["reserved_time"]
        assert abs(taken.total_seconds() - row["duration"]) < 0.001
    assert (waits["reserved_time"], waits["completed_time"], waits["duration"]) == (None, None, None)
    assert done["version"] == failed["version"] == waits["version"] == ""


def test_the_times_are_in_the_time_zone_of_the_session_as_those_of_datajoint(lab: Lab, engine: str) -> None:
    zone = "SET TIME ZONE '-05:00'" if engine == "postgresql" else "SET time_zone = '-05:00'"
    shift = datetime.timedelta(hours=5)
    before = (lab.Spectrum.jobs & ONE).fetch1()
    try:
        lab.schema.connection.query(zone)
        after = (lab.Spectrum.jobs & ONE).fetch1()
        due = lab.Spectrum.jobs.pending & "scheduled_time <= CURRENT_TIMESTAMP(3)"
        assert len(due) == 9
    finally:
        lab.schema.connection.query("SET TIME ZONE 'UTC'" if engine == "postgresql" else "SET time_zone = '+00:00'")
    for name in ("created_time", "scheduled_time", "reserved_time", "completed_time"):
        # PostgreSQL reads the sign of an offset as POSIX does
        assert abs(before[name] - after[name]) == shift
    assert (before["due_time"], before["timestamp"]) == (after["due_time"], after["timestamp"])


def test_jobs_are_reserved_completed_and_failed_by_hand(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    keys = keys_of(jobs.pending)
    assert all(jobs.reserve(key) for key in keys)
    assert not any(jobs.reserve(key) for key in keys)
    assert len(jobs.reserved) == 9
    jobs.complete(keys[0], duration=2.5)
    assert (jobs & keys[0]).fetch1("status", "duration") == ("success", 2.5)
    jobs.error(keys[1], "x" * 3000, "stack")
    message, stack = (jobs & keys[1]).fetch1("error_message", "error_stack")
    assert (len(message), message[-12:], stack) == (2047, "...truncated", "stack")
    assert not jobs.reserve(keys[1])
    assert jobs.target.full_table_name == lab.Spectrum.full_table_name
    # Nobody takes such a job for that of a worker that died.
    assert job_counts(lab.Spectrum) == {"reserved": 7, "success": 1, "error": 4}
    assert lab.Spectrum.cleanup_jobs()["recovered"] == 0
    assert len(jobs.reserved) == 7


def test_a_job_that_is_done_by_hand_goes_where_these_are_not_kept(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "keep_completed", False)
    assert lab.Spectrum.jobs.reserve(keys_of(lab.Spectrum.jobs.pending)[0])
    lab.Spectrum.jobs.complete(keys_of(lab.Spectrum.jobs.reserved)[0])
    assert len(lab.Spectrum.jobs) == 11


def test_what_a_worker_runs_is_not_ended_by_hand(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def make(self: Any, key: dict[str, Any]) -> None:
        for end in (lambda: self.jobs.complete(key), lambda: self.jobs.error(key, "no")):
            try:
                end()
            except djjobs.DjJobsError as error:
                said.append(str(error))
        self.insert1({**key, "power": 0})

    monkeypatch.setattr(lab.Spectrum, "make", make)
    assert lab.Spectrum.populate({"subject": "m0", "session": 0}, reserve_jobs=True)["success_count"] == 1
    assert len(said) == 2 and all("is running" in text and "cancel_jobs" in text for text in said)
    assert keys_of(lab.Spectrum()) == [{"subject": "m0", "session": 0}]


def test_a_job_that_is_not_there_is_not_ended_by_hand(lab: Lab) -> None:
    assert not lab.Spectrum.jobs.reserve({"subject": "m9", "session": 0})
    with pytest.raises(djjobs.DjJobsError, match="no job"):
        lab.Spectrum.jobs.error({"subject": "m9", "session": 0}, "no")


def test_refresh_removes_what_is_stale_and_puts_back_what_was_reserved_too_long(lab: Lab) -> None:
    jobs = lab.Spectrum.jobs
    (lab.Session & {"subject": "m2"}).delete_quick()
    assert jobs.refresh()["removed"] == 0  # they are too young
    assert jobs.refresh(stale_timeout=0)["removed"] == 0
    change(lab, "created_time", 4000)
    assert jobs.refresh(stale_timeout=5000)["removed"] == 0
    lab.Spectrum.jobs.reserve({"subject": "m0", "session": 0})
    assert jobs.refresh() == {"added": 0, "removed": 4, "orphaned": 0, "re_pended": 0}
    change(lab, "timestamp", 100)
    assert jobs.refresh(orphan_timeout=1000)["orphaned"] == 0
    assert jobs.refresh(orphan_timeout=60, priority=2)["orphaned"] == 1
    assert (jobs & {"subject": "m0", "session": 0}).fetch1("status", "priority") == ("scheduled", 2)


def change(lab: Lab, column: str, seconds: int) -> None:
    """Let all jobs be so much older."""
    interval = f"INTERVAL {seconds} SECOND" if "`" in lab.Spectrum.full_table_name else f"INTERVAL '{seconds} s'"
    table = djjobs.jobs(lab.schema).full_table_name
    lab.schema.connection.query(f"UPDATE {table} SET {column} = {column} - {interval}")


def test_ignored_keys_stay_ignored_however_old(lab: Lab) -> None:
    lab.Spectrum.jobs.ignore(ONE)
    (lab.Session & ONE).delete_quick()
    change(lab, "created_time", 4000)
    assert lab.Spectrum.jobs.refresh()["removed"] == 0
    assert keys_in(lab.Spectrum.jobs.ignored) == {("m1", 3)}


@pytest.mark.only(datajoint=2)
def test_a_schema_lists_the_jobs_of_its_tables(lab: Lab) -> None:
    Plain = lab.schema(
        type("Plain", (dj.Computed,), {"definition": "-> Session", "make": lambda self, key: self.insert1(key)}),
        context={"Session": lab.Session},
    )
    Plain.jobs.refresh()
    listed = {type(jobs).__name__: jobs.target.table_name for jobs in lab.schema.jobs}
    assert listed == {"TableJobs": "__spectrum", "Job": "__plain"}
    assert sum(len(jobs.pending) for jobs in lab.schema.jobs) == 9 + 12
    Gone = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Gone")
    Gone.schedule_jobs()
    Gone().drop_quick()
    assert {jobs.target.table_name for jobs in lab.schema.jobs} == {"__spectrum", "__plain"}


@pytest.mark.only(datajoint=2)
def test_a_job_tells_the_version_of_the_code(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from datajoint.jobs import _get_job_version

    seen = []

    def make(self: Any, key: dict[str, Any]) -> None:
        seen.append((self.jobs & key).fetch1("version"))
        self.insert1({**key, "power": 0})

    monkeypatch.setattr(lab.Spectrum, "make", make)
    with dj.config.override(jobs__version_method="git"):
        version = _get_job_version(lab.schema.connection._config)
        lab.Spectrum.populate({"subject": "m0", "session": 1}, reserve_jobs=True)
    assert version and seen == [version]
    assert (lab.Spectrum.jobs & {"subject": "m0", "session": 1}).fetch1("version") == version


# -- keys of every kind --------------------------------------------------------------------------------------------


MYSQLS = ("mysql", "mariadb")
KINDS = {
    "text": ("varchar(12)", ["m1", "Größe", "it's"]),
    "number": (INT, [1, -7, 2**31 - 1]),
    "large": ("int64" if MODERN else "bigint unsigned", [1, 2**53 + 1, 2**63 - 1]),
    "exact": ("decimal(8,3)", [decimal.Decimal("1.500"), decimal.Decimal("-2.125")]),
    "day": ("date", [datetime.date(2024, 2, 29), datetime.date(1999, 1, 1)]),
    "moment": ("datetime", [datetime.datetime(2024, 2, 29, 23, 59, 58)]),
    "choice": ("enum('left', 'right')", ["left", "right"]),
    "code": ("char(4)", ["abcd", "wxyz"]),
}


@pytest.fixture(scope="module")
def tables(server: Any, engine: str) -> Iterator[dict[str, Any]]:
    """For each kind of key a source and a Computed table with jobs."""
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    kinds = dict(KINDS)
    if engine in MYSQLS:
        kinds["identity"] = ("uuid", [uuid.UUID(int=1), uuid.UUID(int=2**127 + 5)])
    found = {}
    for name, (type_, values) in kinds.items():
        Source = manual(schema, f"{name} : {type_}\n---\nremark = '' : varchar(20)", f"Source{name.title()}")
        Source.insert([{name: value} for value in values])
        definition = f"-> {Source.__name__}"
        found[name] = Source, computed(schema, definition, {Source.__name__: Source}, f"Of{name.title()}"), values
        found[name][1].schedule_jobs()
    yield found
    schema.drop()


# DataJoint 2.3 cannot insert uuid keys on PostgreSQL
@pytest.mark.parametrize("name", [*KINDS, pytest.param("identity", marks=pytest.mark.only(engines=MYSQLS))])
def test_a_key_of_any_kind_comes_back_as_the_table_gives_it(tables: dict[str, Any], name: str) -> None:
    Source, Table, _ = tables[name]
    keys = keys_of(Source())
    assert sorted(map(str, keys_of(Table.jobs))) == sorted(map(str, keys))
    for key in keys:
        if "'" not in str(key[name]):
            assert keys_of(Table.jobs & key) == [key]
            assert keys_of(Table.jobs & (Source & key)) == [key]
            assert len(Source & (Table.jobs & key)) == 1
    assert len(Table.jobs.proj("status") * Source()) == len(keys)


def test_a_text_is_compared_as_the_table_compares_it(tables: dict[str, Any]) -> None:
    Source, Table, _ = tables["text"]
    assert len(Table.jobs & "text = 'M1'") == len(Source & "text = 'M1'")


def test_key_attributes_with_the_names_of_a_jobs_columns_go_first(lab: Lab) -> None:
    Probe = manual(
        lab.schema, f"status : {INT}\nuser : varchar(8)\nversion : varchar(8)\nkey_hash : varchar(8)", "Probe"
    )
    Check = computed(lab.schema, "-> Probe", {"Probe": Probe}, "Check")
    Probe.insert([(1, "ann", "a", "x"), (2, "bob", "b", "y")], skip_duplicates=True)
    Check.schedule_jobs(min_scheduling_interval=0)
    assert keys_of(Check.jobs & {"status": 1}) == [{"status": 1, "user": "ann", "version": "a", "key_hash": "x"}]
    assert len(Check.jobs.scheduled) == 2 and len(Check.jobs.errors) == 0
    assert (Check.jobs & {"user": "bob"}).fetch1("job_status") == "scheduled"
    assert Check.cancel_jobs(Check.jobs & {"status": 2}) == 1
    assert Check.retry_jobs(Check.jobs.cancelled.proj()) == 1
    (Check.jobs & {"status": 2}).delete()
    assert {row["status"] for row in rows_of(Check.jobs)} == {1}
    Check.jobs.drop()
