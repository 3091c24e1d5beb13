"""cleanup_jobs, retry_jobs, ignore_jobs and cancel_jobs: which jobs they change, and which they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import wait_for
from pipelines import Lab, computed, forked, job_counts, manual, rows_of, standing_lab, statements_of
from workloads.lives import job_of, note_sighting
from workloads.squares import change_jobs, squares, statuses

import djjobs
from djjobs import DjJobsError
from djjobs.queue.claim import Claims, Job
from djjobs.queue.identity import Claimant
from djjobs.queue.keys import Keys
from djjobs.queue.leases import recover_once
from djjobs.queue.queue import Queue
from djjobs.queue.table_queue import TableQueue

NOTHING = {"orphaned_success": 0, "orphaned_incomplete": 0, "recovered": 0, "expired": 0, "runs": 0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who seems to be dead has so long to be heard."""
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.1)


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    with standing_lab(keep_completed=True) as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab) -> Lab:
    standing.start_over()
    standing.Spectrum.schedule_jobs()
    return standing


def claim(lab: Lab, *restrictions: Any) -> list[Job]:
    """Take jobs as a worker does, which then has them until it ends."""
    queue = Queue.of(lab.schema.connection, lab.schema.database)
    return Claims(queue, Keys(lab.Spectrum(), restrictions, queue.engine)).take(100)


def left(lab: Lab) -> set[tuple[str, int]]:
    return {(row["key"]["subject"], row["key"]["session"]) for row in rows_of(lab.Spectrum.jobs)}


def sessions_of(*subjects: str, sessions: Any = range(4)) -> set[tuple[str, int]]:
    return {(subject, session) for subject in subjects for session in sessions}


# -- clean-up ----------------------------------------------------------------------------------------------


def test_a_tidy_queue_stays_as_it_is(lab: Lab) -> None:
    lab.Spectrum.populate({"subject": "m0"}, reserve_jobs=True)
    before = rows_of(lab.Spectrum.jobs)
    assert lab.Spectrum.cleanup_jobs() == NOTHING
    assert rows_of(lab.Spectrum.jobs) == before


def test_a_success_goes_when_its_result_is_gone(lab: Lab) -> None:
    lab.Spectrum.populate(reserve_jobs=True)
    (lab.Spectrum & {"subject": "m1"}).delete_quick()
    assert lab.Spectrum.cleanup_jobs() == {**NOTHING, "orphaned_success": 4}
    assert left(lab) == sessions_of("m0", "m2")
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 4


def test_a_success_stays_when_its_key_left_key_source_but_its_result_is_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.Spectrum.populate(reserve_jobs=True)
    monkeypatch.setattr(lab.Spectrum, "key_source", property(lambda self: lab.Session & "session = 0"))
    assert lab.Spectrum.cleanup_jobs() == NOTHING


def test_an_unfinished_job_of_any_status_goes_when_its_key_has_left_key_source(lab: Lab) -> None:
    for session, status in enumerate(["scheduled", "error", "ignore", "cancelled"]):
        lab.set_status(status, session=session)
    (lab.Session & {"subject": "m1"}).delete_quick()
    assert lab.Spectrum.cleanup_jobs() == {**NOTHING, "orphaned_incomplete": 4}
    assert left(lab) == sessions_of("m0", "m2")
    assert job_counts(lab.Spectrum) == {"scheduled": 2, "error": 2, "ignore": 2, "cancelled": 2}


def test_jobs_go_when_key_source_has_become_narrower(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "key_source", property(lambda self: lab.Session & "session > 1"))
    assert lab.Spectrum.cleanup_jobs()["orphaned_incomplete"] == 6
    assert left(lab) == sessions_of("m0", "m1", "m2", sessions=[2, 3])


def test_a_reserved_job_is_never_removed(lab: Lab) -> None:
    jobs = claim(lab, {"subject": "m1"})
    assert len(jobs) == 4
    (lab.Session & {"subject": "m1"}).delete_quick()
    assert lab.Spectrum.cleanup_jobs() == NOTHING
    assert lab.Spectrum.cleanup_jobs({"subject": "m1"}) == NOTHING
    assert job_counts(lab.Spectrum) == {"reserved": 4, "scheduled": 8}


def test_both_kinds_are_counted_in_one_call(lab: Lab) -> None:
    lab.Spectrum.populate({"subject": "m0"}, reserve_jobs=True)
    (lab.Spectrum & {"subject": "m0"} & "session < 3").delete_quick()
    (lab.Session & {"subject": "m2"}).delete_quick()
    assert lab.Spectrum.cleanup_jobs() == {**NOTHING, "orphaned_success": 3, "orphaned_incomplete": 4}
    assert left(lab) == {("m0", 3)} | sessions_of("m1")


def test_restrictions_limit_a_clean_up(lab: Lab) -> None:
    """They choose among the jobs, whose keys key_source no longer has."""
    lab.Session().delete_quick()
    steps: list[tuple[Any, int]] = [
        ({"subject": "m0", "session": 1}, 1),
        ("session = 2", 3),
        ([{"subject": "m1", "session": 0}, {"subject": "m1", "session": 3}], 2),
        (lab.Spectrum.jobs & {"key.subject": "m2"}, 3),
        ({"subject": "nobody"}, 0),
        (lab.Subject & {"subject": "m1"}, 1),
    ]
    for restriction, count in steps:
        assert lab.Spectrum.cleanup_jobs(restriction)["orphaned_incomplete"] == count
    assert left(lab) == sessions_of("m0", sessions=[0, 3])
    assert lab.Spectrum.cleanup_jobs({"subject": "m0"}, "session > 0")["orphaned_incomplete"] == 1
    assert left(lab) == {("m0", 0)}


def test_restrictions_limit_the_clean_up_of_successes_too(lab: Lab) -> None:
    lab.Spectrum.populate(reserve_jobs=True)
    lab.Spectrum().delete_quick()
    assert lab.Spectrum.cleanup_jobs({"subject": "m2"})["orphaned_success"] == 4
    assert lab.Spectrum.cleanup_jobs(lab.Spectrum.jobs.completed & {"key.subject": "m1"})["orphaned_success"] == 4
    assert left(lab) == sessions_of("m0")


def test_a_clean_up_leaves_the_jobs_of_other_tables_alone(lab: Lab) -> None:
    Other = computed(lab.schema, "-> Session", {"Session": lab.Session}, "Other")
    Other.schedule_jobs(min_scheduling_interval=0)
    lab.Session().delete_quick()
    assert lab.Spectrum.cleanup_jobs()["orphaned_incomplete"] == 12
    assert len(Other.jobs) == 12
    assert Other.cleanup_jobs()["orphaned_incomplete"] == 12


def test_each_kind_takes_one_statement_whatever_the_number_of_jobs(lab: Lab) -> None:
    def cost(count: int) -> list[str]:
        lab.start_over(1, count)
        lab.Spectrum.schedule_jobs()
        set_half_to_success(lab)
        lab.Session().delete_quick()
        with statements_of(lab.schema.connection) as statements:
            assert sum(lab.Spectrum.cleanup_jobs().values()) == count
        return statements

    few, many = cost(4), cost(1000)
    assert len(few) == len(many)
    assert len([sql for sql in many if sql.lstrip().startswith("DELETE")]) == 2


def set_half_to_success(lab: Lab) -> None:
    table = djjobs.jobs(lab.schema).full_table_name
    lab.schema.connection.query(f"UPDATE {table} SET status = 'success' WHERE key_hash < '8'")


def test_a_worker_that_runs_meanwhile_loses_nothing(lab: Lab) -> None:
    lab.start_over(1, 150)

    def work(number: int) -> int:
        return lab.Spectrum.populate(reserve_jobs=True)["success_count"]

    with forked(lab.schema, 3, work) as workers:
        wait_for(lambda: len(lab.Spectrum()))
        while len(lab.Spectrum()) < 150:
            assert lab.Spectrum.cleanup_jobs() == NOTHING
        assert sum(worker.result() for worker in workers) == 150
    assert job_counts(lab.Spectrum) == {"success": 150}


# -- retry, ignore, cancel -----------------------------------------------------------------------------------

#: The statuses that each of them changes, and to what
CHANGES: dict[str, tuple[set[str], str]] = {
    "retry_jobs": ({"error", "cancelled"}, "scheduled"),
    "ignore_jobs": ({"scheduled", "error", "cancelled"}, "ignore"),
    "cancel_jobs": ({"scheduled"}, "cancelled"),
}


@pytest.mark.parametrize("method", CHANGES)
def test_only_jobs_that_may_change_do(lab: Lab, method: str) -> None:
    lab.start_over(6, 1).Spectrum.schedule_jobs()
    statuses = ["scheduled", "reserved", "error", "ignore", "success", "cancelled"]
    for number, status in enumerate(statuses):
        lab.set_status(status, subject=f"m{number}")
    changed, new = CHANGES[method]
    assert getattr(lab.Spectrum, method)(True) == len(changed)
    found = {row["key"]["subject"]: row["status"] for row in rows_of(lab.Spectrum.jobs)}
    assert found == {f"m{n}": new if status in changed else status for n, status in enumerate(statuses)}


def choose_by_key(lab: Lab) -> Any:
    return {"subject": "m1", "session": 2}


def choose_by_text(lab: Lab) -> Any:
    return "subject = 'm1' AND session = 2"


def choose_by_list(lab: Lab) -> Any:
    return [{"subject": "m1", "session": 2}]


def choose_by_jobs(lab: Lab) -> Any:
    return lab.Spectrum.jobs & {"key_hash": hash_of(lab, "m1", 2)}


def choose_by_table(lab: Lab) -> Any:
    return lab.Session & {"subject": "m1"} & "session_date = '2024-05-03'"


def hash_of(lab: Lab, subject: str, session: int) -> str:
    rows = rows_of(lab.Spectrum.jobs)
    return next(row["key_hash"] for row in rows if row["key"] == {"subject": subject, "session": session})


@pytest.mark.parametrize("choose", [choose_by_key, choose_by_text, choose_by_list, choose_by_jobs, choose_by_table])
def test_jobs_are_chosen_by_key_by_condition_and_by_query(lab: Lab, choose: Callable[[Lab], Any]) -> None:
    def others() -> set[str]:
        return {row["status"] for row in rows_of(lab.Spectrum.jobs) if row["key"] != choose_by_key(lab)}

    def mine() -> str:
        return (lab.Spectrum.jobs & {"key_hash": hash_of(lab, "m1", 2)}).fetch1("status")

    assert lab.Spectrum.cancel_jobs(choose(lab)) == 1
    assert (mine(), others()) == ("cancelled", {"scheduled"})
    assert lab.Spectrum.retry_jobs(choose(lab)) == 1
    assert (mine(), others()) == ("scheduled", {"scheduled"})
    assert lab.Spectrum.ignore_jobs(choose(lab)) == 1
    assert (mine(), others()) == ("ignore", {"scheduled"})


def test_errors_are_chosen_by_what_they_say(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        raise OSError("disk full") if key["session"] else ValueError("no signal")

    monkeypatch.setattr(lab.Spectrum, "make", make)
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    full = lab.Spectrum.jobs.errors & "error_message LIKE 'OSError: disk%%'"
    assert lab.Spectrum.retry_jobs(full, {"subject": "m0"}) == 3
    assert lab.Spectrum.ignore_jobs(lab.Spectrum.jobs.errors & {"error_message": "ValueError: no signal"}) == 3
    assert job_counts(lab.Spectrum) == {"scheduled": 3, "ignore": 3, "error": 6}


def test_a_retry_starts_counting_anew_and_succeeds_once_the_cause_is_gone(lab: Lab, monkeypatch: Any) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError("no signal")

    monkeypatch.setattr(lab.Spectrum, "make", make)
    lab.Spectrum.populate({"subject": "m0"}, reserve_jobs=True, suppress_errors=True)
    assert {row["attempt"] for row in rows_of(lab.Spectrum.jobs.errors)} == {1}
    monkeypatch.undo()
    assert lab.Spectrum.retry_jobs() == 4
    assert {row["attempt"] for row in rows_of(lab.Spectrum.jobs)} == {0}
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 12
    assert {row["error_message"] for row in rows_of(lab.Spectrum.jobs.completed)} == {""}


def test_what_is_ignored_or_cancelled_is_not_run_and_not_scheduled_again(lab: Lab) -> None:
    lab.Spectrum.ignore_jobs({"subject": "m0"})
    lab.Spectrum.cancel_jobs({"subject": "m1"})
    lab.Spectrum.schedule_jobs(min_scheduling_interval=0)
    assert lab.Spectrum.populate(reserve_jobs=True)["success_count"] == 4
    assert job_counts(lab.Spectrum) == {"ignore": 4, "cancelled": 4, "success": 4}


def test_a_key_without_a_job_can_be_ignored(lab: Lab) -> None:
    lab.Spectrum.jobs.delete()
    assert lab.Spectrum.ignore_jobs({"subject": "m0", "session": 1}) == 1
    assert lab.Spectrum.ignore_jobs({"subject": "m1"}) == 4
    assert lab.Spectrum.ignore_jobs({"subject": "m1"}) == 0
    assert int(lab.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 7


def test_a_key_that_was_made_is_not_ignored(lab: Lab) -> None:
    lab.Spectrum.populate(reserve_jobs=True)
    lab.Spectrum.jobs.delete()
    assert lab.Spectrum.ignore_jobs({"subject": "m0"}) == 0
    assert len(lab.Spectrum.jobs) == 0


def test_ignore_wants_to_be_told_what(lab: Lab) -> None:
    with pytest.raises(DjJobsError, match=r"Spectrum.*True for all"):
        lab.Spectrum.ignore_jobs()
    assert job_counts(lab.Spectrum) == {"scheduled": 12}


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: [key]], ids=["key", "list"])
def test_a_key_that_key_source_does_not_have_is_an_error(lab: Lab, method: str, wrap: Callable[[Any], Any]) -> None:
    before = rows_of(lab.Spectrum.jobs)
    with pytest.raises(DjJobsError, match=r"'m1'.*not in the key_source of Spectrum.*cleanup_jobs"):
        getattr(lab.Spectrum, method)(wrap({"subject": "m1", "session": 99}))
    assert rows_of(lab.Spectrum.jobs) == before


@pytest.mark.parametrize("method", CHANGES)
def test_a_condition_that_chooses_nothing_changes_nothing(lab: Lab, method: str) -> None:
    before = rows_of(lab.Spectrum.jobs)
    assert getattr(lab.Spectrum, method)({"subject": "nobody"}) == 0
    assert rows_of(lab.Spectrum.jobs) == before


def test_a_running_job_is_left_to_its_worker(lab: Lab) -> None:
    claim(lab, {"subject": "m0"})
    assert lab.Spectrum.ignore_jobs({"subject": "m0"}) == 0
    assert lab.Spectrum.retry_jobs({"subject": "m0"}) == 0
    assert int(lab.Spectrum.schedule_jobs({"subject": "m0"}, force=True)) == 0
    assert job_counts(lab.Spectrum) == {"reserved": 4, "scheduled": 8}


def test_the_methods_work_on_the_class_and_on_an_instance(lab: Lab) -> None:
    assert lab.Spectrum().cancel_jobs({"subject": "m0"}) == lab.Spectrum.cancel_jobs({"subject": "m1"}) == 4
    assert lab.Spectrum().retry_jobs({"subject": "m0"}) == lab.Spectrum.retry_jobs({"subject": "m1"}) == 4
    assert lab.Spectrum().cleanup_jobs() == lab.Spectrum.cleanup_jobs() == NOTHING


def test_the_queue_is_refreshed_in_the_words_of_datajoint_2(lab: Lab) -> None:
    lab.Spectrum.populate({"subject": "m0"}, reserve_jobs=True)
    (lab.Spectrum & {"subject": "m0"} & "session = 0").delete_quick()
    (lab.Session & {"subject": "m2"}).delete_quick()
    lab.Session.insert([{"subject": "m1", "session": 9}])
    refreshed = lab.Spectrum.jobs.refresh(stale_timeout=0.001)
    assert (refreshed["added"], refreshed["removed"], refreshed["re_pended"]) == (1, 4, 1)
    progress = lab.Spectrum.jobs.progress()
    assert (progress["pending"], progress["success"], progress["total"]) == (6, 3, 9)
    lab.Spectrum.jobs.ignore({"subject": "m1", "session": 9})
    assert len(lab.Spectrum.jobs.pending) == 5


# -- jobs of the dead that are hard to look at ----------------------------------------------------------------


def lose_all(*tables: Any) -> None:
    """Let a worker that is dead have all jobs of these tables."""
    claimant = Claimant()
    for table in tables:
        table.schedule_jobs(min_scheduling_interval=0)
        assert TableQueue.of(table()).claims(claimant=claimant).take(100)
    note_sighting(tables[0], claimant.worker_id, 600)


def test_lost_jobs_whose_keys_have_any_text_come_back_and_are_known_to_be_done(schema: Any) -> None:
    """DataJoint 0.14 cannot restrict by some of them."""
    names = ['5" probe', "it's", "100% sure", "%s %(x)s", "back\\slash", "\\", "{x}", "`", "é", '";--', "a" * 60]
    Probe = manual(schema, "name : varchar(64)", "Probe")
    Probe.insert([{"name": name} for name in names])
    Reading = computed(schema, "-> Probe", {"Probe": Probe}, "Reading", keep_completed=True)
    lose_all(Reading)
    Reading.insert([{"name": name} for name in names[::2]], allow_direct_insert=True)
    assert Reading.cleanup_jobs()["recovered"] == len(names)
    expected = {name: ("scheduled", 1) if number % 2 else ("success", 0) for number, name in enumerate(names)}
    assert {row["key"]["name"]: (row["status"], row["attempt"]) for row in rows_of(Reading.jobs)} == expected


def test_a_lost_job_whose_table_was_dropped_becomes_an_error_and_keeps_no_other_from_coming_back(schema: Any) -> None:
    Square = squares(schema, 2)
    Cube = computed(schema, "-> Number", {"Number": Square.Number}, "Cube")
    lose_all(Square, Cube)
    queue = TableQueue.of(Cube()).queue
    finishers = {table.table_name: TableQueue.of(table()).finisher for table in (Square, Cube)}
    schema.connection.query(f"DROP TABLE {Square.full_table_name}")
    assert recover_once(queue, finishers) == 4
    rows = rows_of(djjobs.jobs(schema))
    assert sorted((row["table_name"], row["status"], row["attempt"]) for row in rows) == [
        (Cube.table_name, "scheduled", 1),
        (Cube.table_name, "scheduled", 1),
        (Square.table_name, "error", 1),
        (Square.table_name, "error", 1),
    ]
    told = [row["error_message"] for row in rows if row["status"] == "error"]
    assert all("WorkerDied" in text and "Square" in text and "cannot be seen" in text for text in told)
    assert recover_once(queue, finishers) == 0


def test_a_lost_job_that_cannot_be_put_back_is_told_of_once_and_keeps_no_other_from_coming_back(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Square = squares(schema, 3)
    lose_all(Square)
    change_jobs(Square, [2], "attempts = '5'")  # which is no list
    assert Square.cleanup_jobs()["recovered"] == 2
    assert Square.cleanup_jobs()["recovered"] == 0
    assert statuses(Square) == {1: "scheduled", 2: "reserved", 3: "scheduled"}
    (told,) = [record.getMessage() for record in caplog.records if "cannot be put back" in record.getMessage()]
    assert "Square" in told and '"n": 2' in told.replace("'", '"') and job_of(Square, 2)["key_hash"] in told
