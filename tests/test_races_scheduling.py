"""Two who schedule the same table at the same moment: each guard of the control row and of a taken-along job."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from interleaving import another, claims_of, impatient, job_locked, just, schedule_automatically
from pipelines import rows_of
from workloads.lives import ago
from workloads.squares import Bystander, change_jobs, rows_by_number, statuses

import djjobs

#: The id of a process that is none of ours.
ANOTHER = "a" * 36
#: The statements at which the other one comes in between.
BEGIN = r"^UPDATE \S*~jobs_control\W+ SET scheduling_until = (?!NULL)"
END = r"^UPDATE \S*~jobs_control\W+ SET scheduling_until = NULL"
FORGET = r"^DELETE FROM \S*~jobs_control\W"
INSERT = r"^INSERT .*INTO \S*~jobs\W.* SELECT"
FIND_AUTOMATIC = r"^SELECT job\.key_hash FROM \S*~jobs\W"
LOCK_AUTOMATIC = r"^SELECT key_hash, run_id FROM \S*~jobs\W"


def control_of(table: Any) -> str:
    return table.jobs.full_table_name.replace("~jobs", "~jobs_control")


def scopes(table: Any) -> dict[str, tuple[str | None, bool, Any]]:
    """Of each scope: who is at it, whether the mark is set, and when it was scheduled last."""
    sql = f"SELECT scope, scheduling_by, scheduling_until IS NOT NULL, last_scheduled FROM {control_of(table)}"
    rows = table.Number.connection.query(f"{sql} WHERE table_name = '{table.table_name}'").fetchall()
    return {scope: (by, bool(marked), last) for scope, by, marked, last in rows}


def mark(theirs: Any, where: str = "scope <> 'automatic'", seconds: float = 60) -> None:
    """Another process takes the right to schedule, in every scope that there is unless told otherwise."""
    connection = theirs.Number.connection
    until = ago(connection, -seconds)
    changes = f"scheduling_until = {until}, scheduling_by = '{ANOTHER}'"
    connection.query(f"UPDATE {control_of(theirs)} SET {changes} WHERE {where}")


def runs_of(table: Any) -> dict[int, int | None]:
    return {n: row["run_id"] for n, row in rows_by_number(table).items()}


# -- the right to schedule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_who_has_looked_before_another_scheduled_does_not_schedule_again(start: Any, restrictions: Any) -> None:
    """The last scheduling is looked at again in the statement that takes the right."""
    Square = start(3)
    Square.schedule_jobs(*restrictions, min_scheduling_interval=0)
    Square.Number.connection.query(f"UPDATE {control_of(Square)} SET last_scheduled = '2001-01-01'")
    with another(Square) as theirs:
        ours = Square.Number.connection
        with just("before", ours, BEGIN, lambda: theirs.schedule_jobs(*restrictions, min_scheduling_interval=60)):
            run = Square.schedule_jobs(*restrictions, min_scheduling_interval=60)
    assert run.rate_limited


def test_who_has_looked_before_another_began_to_schedule_leaves_it_to_that_one(start: Any) -> None:
    Square = start(3)
    with another(Square) as theirs, just("before", Square, BEGIN, lambda: mark(theirs)):
        run = Square.schedule_jobs(min_scheduling_interval=60)
    assert (run.rate_limited, int(run)) == (True, 0)
    assert scopes(Square)[""] == (ANOTHER, True, None)


def test_a_mark_that_has_run_out_does_not_keep_others_from_scheduling(start: Any) -> None:
    Square = start(3)
    with another(Square) as theirs, just("before", Square, BEGIN, lambda: mark(theirs, seconds=-1)):
        assert int(Square.schedule_jobs(min_scheduling_interval=60)) == 3


def test_who_took_too_long_does_not_end_the_scheduling_of_another(start: Any) -> None:
    """Its mark ran out meanwhile: the right, and the end of it, are the other one's."""
    Square = start(3)
    with another(Square) as theirs, just("before", Square, END, lambda: mark(theirs)):
        Square.schedule_jobs()
    assert scopes(Square)[""] == (ANOTHER, True, None)


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_who_took_too_long_and_failed_does_not_end_the_scheduling_of_another(start: Any, restrictions: Any) -> None:
    Square = start(3)

    def fail() -> None:
        mark(theirs)
        raise KeyError("out of luck")

    with another(Square) as theirs, just("before", Square, INSERT, fail), pytest.raises(KeyError):
        Square.schedule_jobs(*restrictions)
    assert set(scopes(Square).values()) - {(None, False, None)} == {(ANOTHER, True, None)}


def test_a_scheduling_that_fails_does_not_make_the_one_before_forgotten(start: Any) -> None:
    Square = start(3)
    Square.schedule_jobs("n > 0")

    def fail() -> None:
        raise KeyError("out of luck")

    before = scopes(Square)
    with just("before", Square, INSERT, fail), pytest.raises(KeyError):
        Square.schedule_jobs("n > 0", min_scheduling_interval=0)
    assert scopes(Square) == before


def test_an_old_scope_that_another_is_just_scheduling_is_not_forgotten(start: Any) -> None:
    """Nor is the one of all keys, however old."""
    Square = start(3)
    for restrictions in (("n = 1",), ("n = 2",), ()):
        Square.schedule_jobs(*restrictions, min_scheduling_interval=0)
    first, second = sorted(set(scopes(Square)) - {""})
    Square.Number.connection.query(f"UPDATE {control_of(Square)} SET last_scheduled = '2001-01-01'")
    with another(Square) as theirs, just("before", Square, FORGET, lambda: mark(theirs, f"scope = '{first}'")):
        Square.schedule_jobs("n = 3", min_scheduling_interval=0)
    left = scopes(Square)
    assert left[first][:2] == (ANOTHER, True)
    assert "" in left and second not in left


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_a_key_that_another_makes_or_schedules_before_the_statement_is_not_scheduled(
    start: Any, restrictions: Any
) -> None:
    """Whoever schedules has looked at nothing before: one statement finds the keys and inserts them."""
    Square = start(3)

    def overtake() -> None:
        theirs.populate("n = 1")
        schedule_automatically(theirs, "n = 2")

    with another(Square) as theirs, just("before", Square, INSERT, overtake):
        run = Square.schedule_jobs(*restrictions)
    assert (int(run), runs_of(Square)) == (1, {2: None, 3: run.run_id})


# -- jobs that events have put there -------------------------------------------------------------------------------


@pytest.fixture
def automatic(start: Any) -> Any:
    """Square, two jobs of which only an event has put there."""
    Square = start(2)
    assert schedule_automatically(Square) == 2
    return Square


def test_to_take_jobs_along_does_not_make_the_scheduling_forgotten(automatic: Any) -> None:
    """The note that there are such jobs goes, and nothing else of what is known of the table."""
    assert int(automatic.schedule_jobs(min_scheduling_interval=0)) == 2
    assert set(scopes(automatic)) == {""}
    assert automatic.schedule_jobs(min_scheduling_interval=60).rate_limited


def test_a_job_that_another_run_has_just_taken_along_stays_in_it(automatic: Any) -> None:
    with Bystander(automatic) as bystander:
        take = functools.partial(bystander.change, 1, "automatic = 0, run_id = 42")
        with just("after", automatic, FIND_AUTOMATIC, take):
            run = automatic.schedule_jobs(name="ours", min_scheduling_interval=0)
    assert (int(run), runs_of(automatic)) == (1, {1: 42, 2: run.run_id})


def test_a_job_that_is_claimed_before_it_is_locked_is_not_taken_along(automatic: Any) -> None:
    """It is running, and the run that its worker knows of is the one that it stays in."""
    with another(automatic) as theirs:
        claim = claims_of(theirs, "n = 1")
        with just("after", automatic, FIND_AUTOMATIC, lambda: claim.take(1)):
            run = automatic.schedule_jobs(name="ours", min_scheduling_interval=0)
    assert statuses(automatic) == {1: "reserved", 2: "scheduled"}
    assert (int(run), runs_of(automatic)) == (1, {1: None, 2: run.run_id})


def test_a_job_that_is_claimed_before_it_is_locked_does_not_leave_its_run(automatic: Any) -> None:
    """Events make runs, too, where a table has hooks; such a run counts the jobs that are still in it."""
    events = automatic.schedule_jobs(name="events", min_scheduling_interval=0)
    note = f"INSERT INTO {control_of(automatic)} (table_name, scope) VALUES ('{automatic.table_name}', 'automatic')"
    automatic.Number.connection.query(note)
    change_jobs(automatic, [1, 2], "automatic = 1")
    with another(automatic) as theirs:
        claim = claims_of(theirs, "n = 1")
        with just("after", automatic, FIND_AUTOMATIC, lambda: claim.take(1)):
            run = automatic.schedule_jobs(name="ours", min_scheduling_interval=0)
    assert runs_of(automatic) == {1: events.run_id, 2: run.run_id}
    totals = {row["name"]: row["total"] for row in rows_of(djjobs.runs(automatic.Number))}
    assert totals == {"events": 1, "ours": 1}


def test_a_job_that_is_taken_along_cannot_be_claimed_until_that_is_done(automatic: Any) -> None:
    """A worker that got it in between would know nothing of its run."""
    with another(automatic) as theirs:
        claimed: list[Any] = []
        claim = claims_of(theirs)
        with just("after", automatic, LOCK_AUTOMATIC, lambda: claimed.extend(claim.take(2))):
            run = automatic.schedule_jobs(name="ours", min_scheduling_interval=0)
        assert claimed == []
        assert {job.run_id for job in claim.take(2)} == {run.run_id}


def test_who_takes_jobs_along_does_not_wait_for_those_that_others_hold(automatic: Any) -> None:
    """Whoever claims them may be suspended; they stay as they are."""
    with impatient(automatic), job_locked(automatic, 1):
        run = automatic.schedule_jobs(name="ours", min_scheduling_interval=0)
    assert (int(run), runs_of(automatic)) == (1, {1: None, 2: run.run_id})
