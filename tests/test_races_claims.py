"""Two who claim the same jobs, end them, give them back or call them off at the same moment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from interleaving import (
    Beside,
    another,
    claims_of,
    commit_without_answer,
    finisher_of,
    give_back_slot,
    impatient,
    job_locked,
    just,
    registration_of,
)
from workloads.lives import ago, job_of, kinds, status_of
from workloads.squares import Bystander, change_jobs, made, rows_by_number, statuses

import djjobs
from djjobs.queue.finish import Failure

#: The statements at which the other one comes in between. No pattern has a guard in it, so that a statement without
#: its guards is found, too.
PICK_DUE = r"^SELECT key_hash FROM \S*~jobs\W.*ORDER BY .*LIMIT"
PICK_THESE = r"^SELECT key_hash, .*run_id FROM \S*~jobs\W.*key_hash IN "
RESERVE = r"^UPDATE \S*~jobs\W+ SET status = 'reserved'"
PUT_BACK = r"^UPDATE \S*~jobs\W+ SET status = 'scheduled', worker_id = NULL"
LOOK_AT_CLAIM = r"^SELECT attempt, attempts, cancel_request"
COMPLETE = r"^DELETE FROM \S*~jobs\W|^UPDATE \S*~jobs\W+ SET status = 'success'"


@pytest.fixture
def waiting(start: Any) -> Callable[..., Any]:
    """Gives Square with so many scheduled jobs."""

    def start_over(count: int = 3, **members: Any) -> Any:
        Square = start(count, **members)
        Square.schedule_jobs(min_scheduling_interval=0)
        return Square

    return start_over


def numbers(jobs: list[Any]) -> list[int]:
    return sorted(job.key["n"] for job in jobs)


# -- claiming ------------------------------------------------------------------------------------------------------


def test_a_claim_whose_commit_was_not_answered_leaves_no_job_behind(waiting: Any) -> None:
    """The server has committed it: what nobody heard of goes back, and is claimed again."""
    Square = waiting(2)
    claims = claims_of(Square)
    with commit_without_answer(Square, RESERVE):
        jobs = claims.take(2)
    assert numbers(jobs) == [1, 2]
    rows = rows_by_number(Square)
    assert {(rows[job.key["n"]]["worker_id"], rows[job.key["n"]]["claim"]) for job in jobs} == {
        (job.worker_id, job.claim) for job in jobs
    }


def test_a_claim_that_is_given_back_unheard_takes_no_other_claim_with_it(waiting: Any) -> None:
    """Neither another claim of the same worker, nor one of the same number of another worker."""
    Square = waiting(4)
    claims, others = claims_of(Square), claims_of(Square)
    (mine,), (theirs,) = claims.take(1), others.take(1)
    with commit_without_answer(Square, RESERVE):
        # The next one will have the next number.
        change_jobs(Square, [theirs.key["n"]], f"claim = {mine.claim + 1}")
        (third,) = claims.take(1)
    assert statuses(Square) == {1: "reserved", 2: "reserved", 3: "reserved", 4: "scheduled"}
    rows = rows_by_number(Square)
    assert (rows[1]["claim"], rows[2]["claim"]) == (mine.claim, mine.claim + 1) and third.key == {"n": 3}


def test_a_claim_that_is_given_back_unheard_and_was_ended_meanwhile_stays_ended(waiting: Any) -> None:
    """Somebody took the worker for dead, and its job was out of attempts."""
    Square = waiting(1)
    with Bystander(Square) as bystander:
        ending = just("before", Square, PUT_BACK, lambda: bystander.change(1, "status = 'error'"))
        with commit_without_answer(Square, RESERVE), ending:
            assert claims_of(Square).take(1) == []
    assert statuses(Square) == {1: "error"}


@pytest.mark.parametrize("order", ["original", "random"])
def test_a_job_that_is_claimed_between_finding_and_locking_it_is_the_first_ones(waiting: Any, order: str) -> None:
    Square = waiting(2)
    with another(Square) as theirs:
        first: list[Any] = []
        with just("before", Square, PICK_THESE, lambda: first.extend(claims_of(theirs).take(2))):
            assert claims_of(Square, *(["n > 0"] if order == "original" else []), order=order).take(2) == []
    assert numbers(first) == [1, 2]
    assert {row["worker_id"] for row in rows_by_number(Square).values()} == {first[0].worker_id}


def test_a_job_that_fails_between_finding_and_locking_it_waits_for_its_time(waiting: Any) -> None:
    """It is scheduled again, but not due: nobody may claim it now."""
    Square = waiting(1, max_attempts=3, backoff=3600)

    def fail() -> None:
        (job,) = claims_of(theirs).take(1)
        finisher_of(theirs).failed(job, Failure("error", "ValueError: no square"), wait=3600)

    with another(Square, max_attempts=3) as theirs, just("before", Square, PICK_THESE, fail):
        assert claims_of(Square, "n > 0").take(1) == []
    row = job_of(Square, 1)
    assert (row["status"], row["turn"], row["attempt"]) == ("scheduled", None, 1)


@pytest.mark.parametrize("restrictions", [(), ("n > 0",)], ids=["all", "restricted"])
def test_who_claims_does_not_wait_for_a_job_that_another_holds(waiting: Any, restrictions: Any) -> None:
    Square = waiting(2)
    with impatient(Square), job_locked(Square, 1):
        assert numbers(claims_of(Square, *restrictions).take(1)) == [2]


def make_due(table: Any) -> None:
    """Jobs that were to wait have become due, and nobody has given them a turn."""
    change_jobs(table, list(rows_by_number(table)), f"turn = NULL, due_time = {ago(table.Number.connection, 60)}")


def test_giving_turns_to_due_jobs_does_not_wait_for_those_that_others_hold(waiting: Any) -> None:
    Square = waiting(2)
    make_due(Square)
    with impatient(Square), job_locked(Square, 1):
        assert numbers(claims_of(Square).take(2)) == [2]
    assert numbers(claims_of(Square).take(2)) == [1]


def test_a_due_job_is_not_changed_while_it_gets_its_turn(waiting: Any) -> None:
    """Else one that gets a later time in between would have its turn too early."""
    Square = waiting(1)
    make_due(Square)
    with Bystander(Square) as bystander:
        later = f"due_time = {ago(bystander.connection, -3600)}"
        with Beside(bystander.connection, lambda: bystander.change(1, later)) as beside:
            with just("after", Square, PICK_DUE, beside.start_and_wait):
                claims_of(Square).take(1)
            assert beside.had_to_wait


@pytest.mark.only(engines=["postgresql", "mysql"])
def test_giving_turns_to_due_jobs_keeps_nobody_from_those_that_have_one(waiting: Any) -> None:
    """MariaDB also locks the row after the range, for as long as that takes; nobody else is kept from the others."""
    Square = waiting(2)
    change_jobs(Square, [1], f"turn = NULL, due_time = {ago(Square.Number.connection, 60)}")
    with another(Square) as theirs:
        claimed: list[Any] = []
        claim = claims_of(theirs)
        with just("after", Square, PICK_DUE, lambda: claimed.extend(claim.take(2))):
            assert numbers(claims_of(Square).take(2)) == [1]
    assert numbers(claimed) == [2]


# -- ending a job --------------------------------------------------------------------------------------------------


def test_who_ends_a_job_and_who_calls_it_off_do_not_pass_each_other(waiting: Any) -> None:
    """A request that comes while an attempt is being ended waits, and is then too late; it is not left behind."""
    Square = waiting(1)
    (job,) = claims_of(Square).take(1)
    finisher = finisher_of(Square)
    with another(Square) as theirs, Beside(theirs.Number.connection, theirs.cancel_jobs) as beside:
        with just("after", Square, LOOK_AT_CLAIM, beside.start_and_wait):
            assert finisher.failed(job, Failure("error", "ValueError: no square"), wait=None) == "error"
        assert beside.had_to_wait
        with pytest.raises(djjobs.JobNotCancellable):
            beside.result()
    row = job_of(Square, 1)
    assert (row["status"], row["cancel_request"], kinds(row)) == ("error", "", ["error"])


#: How a job is taken from its worker while that is about to end it.
TAKEN = {
    "by another worker": f"worker_id = '{'a' * 36}'",
    "by another claim": f"claim = claim + {2**41}",
    "and ended": "status = 'error'",
}


def completing(Square: Any, job: Any) -> None:
    with pytest.raises(djjobs.LeaseLost):
        finisher_of(Square).already_done(job)


def failing(Square: Any, job: Any) -> None:
    with pytest.raises(djjobs.LeaseLost):
        finisher_of(Square).failed(job, Failure("error", "ValueError: no square"), wait=None)


def cancelling(Square: Any, job: Any) -> None:
    with pytest.raises(djjobs.LeaseLost):
        finisher_of(Square).cancelled(job)


def insisting(Square: Any, job: Any) -> None:
    with pytest.raises(djjobs.LeaseLost):
        finisher_of(Square).insist_on(job)


def crashing(Square: Any, job: Any) -> None:
    assert finisher_of(Square).crashed(job, Failure("crash", "WorkerDied")) is None


def giving_back(Square: Any, job: Any) -> None:
    assert finisher_of(Square).give_back([job]) == 0


def giving_back_a_slot(Square: Any, job: Any) -> None:
    assert give_back_slot(Square, job.worker_id) == 0


def telling_progress(Square: Any, job: Any) -> None:
    registration_of(Square, job.worker_id).save_progress(Square.table_name, job.key_hash, job.claim, '{"done": 1}')


#: What a worker does to its job, and the first statement of it.
ENDINGS: dict[Callable[[Any, Any], None], str] = {
    completing: COMPLETE,
    failing: LOOK_AT_CLAIM,
    cancelling: r"^UPDATE \S*~jobs\W+ SET status = 'cancelled'",
    insisting: LOOK_AT_CLAIM,
    crashing: LOOK_AT_CLAIM,
    giving_back: PUT_BACK,
    giving_back_a_slot: PUT_BACK,
    telling_progress: r"^UPDATE \S*~jobs\W+ SET progress",
}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize(("ending", "keep"), [(completing, True), *((ending, False) for ending in ENDINGS)])
def test_a_job_that_was_just_taken_away_is_not_changed(
    waiting: Any, ending: Callable[[Any, Any], None], taken: str, keep: bool
) -> None:
    """Whoever has it now finds it as it was given to them."""
    Square = waiting(1, keep_completed=keep)
    claims = claims_of(Square)
    (job,) = claims.take(1)
    with Bystander(Square) as bystander:
        seen: list[Any] = []

        def take() -> None:
            bystander.change(1, TAKEN[taken])
            seen.append(bystander.row(1))

        with just("before", Square, ENDINGS[ending], take):
            ending(Square, job)
        assert bystander.row(1) == seen[0]


def test_a_make_whose_job_was_taken_away_just_before_the_commit_leaves_nothing(waiting: Any) -> None:
    Square = waiting(1)
    with Bystander(Square) as bystander:
        taking = just("before", Square, COMPLETE, lambda: bystander.change(1, TAKEN["and ended"]))
        with taking, pytest.raises(djjobs.LeaseLost):
            Square.populate(reserve_jobs=True)
    assert (made(Square()), statuses(Square)) == ([], {1: "error"})


# -- calling off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_slot", [False, True], ids=["jobs", "slot"])
def test_a_job_that_is_called_off_just_before_it_is_given_back_does_not_go_back(waiting: Any, whole_slot: bool) -> None:
    """And those that are not called off are not cancelled with it."""
    Square = waiting(2)
    jobs = claims_of(Square).take(2)
    with another(Square) as theirs, just("before", Square, PUT_BACK, lambda: theirs.cancel_jobs("n = 1")):
        if whole_slot:
            assert give_back_slot(Square, jobs[0].worker_id) == 2
        else:
            assert finisher_of(Square).give_back(jobs) == 2
    assert statuses(Square) == {1: "cancelled", 2: "scheduled"}
    assert {row["cancel_request"] for row in rows_by_number(Square).values()} == {""}


def test_a_job_that_is_called_off_just_before_its_commit_is_not_made(waiting: Any) -> None:
    Square = waiting(1)
    with another(Square) as theirs, just("before", Square, COMPLETE, theirs.cancel_jobs):
        assert Square.populate(reserve_jobs=True)["success_count"] == 0
    assert (made(Square()), statuses(Square)) == ([], {1: "cancelled"})


def test_a_job_that_is_claimed_between_the_two_looks_of_a_cancel_does_not_escape(waiting: Any) -> None:
    """Neither running when running jobs were asked to stop, nor waiting when waiting ones were cancelled."""
    Square = waiting(2)
    with another(Square) as theirs:
        claim = claims_of(theirs, "n = 1")
        cancelled = r"^UPDATE \S*~jobs\W.*SET status = 'cancelled'"
        with just("before", Square, cancelled, lambda: claim.take(1)):
            assert Square.cancel_jobs() == 2
    assert statuses(Square) == {1: "reserved", 2: "cancelled"}
    assert job_of(Square, 1)["cancel_request"] == "cancel"


def test_a_job_that_datajoint_itself_reserves_just_before_it_is_called_off_is_not_asked_to_stop(waiting: Any) -> None:
    """It has no worker of ours; nobody would heed the request."""
    Square = waiting(2)
    with Bystander(Square) as bystander:
        reserve = functools.partial(bystander.change, 1, "status = 'reserved', worker_id = NULL")
        with just("before", Square, r"^UPDATE \S*~jobs\W.*SET cancel_request", reserve):
            assert Square.cancel_jobs() == 1
    assert statuses(Square) == {1: "reserved", 2: "cancelled"}
    assert job_of(Square, 1)["cancel_request"] == ""


def test_a_job_that_is_over_when_it_is_called_off_is_not_called_off(waiting: Any) -> None:
    """Found waiting, then made by another before the statement that cancels it."""
    Square = waiting(2, keep_completed=True)
    with another(Square, keep_completed=True) as theirs:

        def work() -> None:
            theirs.populate("n = 1", reserve_jobs=True)

        with just("before", Square, r"^UPDATE \S*~jobs\W.*SET cancel_request", work):
            assert Square.cancel_jobs() == 1
    assert statuses(Square) == {1: "success", 2: "cancelled"}


# -- by hand -------------------------------------------------------------------------------------------------------


def test_a_job_that_is_claimed_between_choosing_and_deleting_it_stays(waiting: Any) -> None:
    """`jobs.delete` removes what was chosen, as it was chosen: waiting jobs, not running ones."""
    Square = waiting(2)
    with another(Square) as theirs:
        claim = claims_of(theirs, "n = 1")
        with just("before", Square, r"^DELETE FROM \S*~jobs\W", lambda: claim.take(1)):
            Square.jobs.scheduled.delete_quick()
    assert statuses(Square) == {1: "reserved"}


def test_a_job_that_a_worker_claims_just_before_it_is_reserved_by_hand_is_the_workers(waiting: Any) -> None:
    Square = waiting(1)
    with another(Square) as theirs:
        claim = claims_of(theirs)
        with just("before", Square, RESERVE, lambda: claim.take(1)):
            assert not Square.jobs.reserve({"n": 1})
    assert (status_of(Square, 1), job_of(Square, 1)["worker_id"]) == ("reserved", claim.claimant.worker_id)


def test_a_job_that_gets_a_later_time_just_before_it_is_reserved_by_hand_waits(waiting: Any) -> None:
    Square = waiting(1)
    with Bystander(Square) as bystander:
        later = f"turn = NULL, due_time = {ago(bystander.connection, -3600)}"
        with just("before", Square, RESERVE, functools.partial(bystander.change, 1, later)):
            assert not Square.jobs.reserve({"n": 1})
    assert statuses(Square) == {1: "scheduled"}


@pytest.mark.parametrize("keep", [False, True], ids=["forget", "keep"])
@pytest.mark.parametrize("how", ["complete", "error"])
def test_a_job_that_a_worker_claims_just_before_it_is_ended_by_hand_is_the_workers(
    waiting: Any, how: str, keep: bool
) -> None:
    Square = waiting(1, keep_completed=keep)
    end = {"complete": lambda: Square.jobs.complete({"n": 1}), "error": lambda: Square.jobs.error({"n": 1}, "bad")}[how]
    ending = r"^DELETE FROM \S*~jobs\W|^UPDATE \S*~jobs\W+ SET status = '(success|error)'"
    with another(Square) as theirs:
        claim = claims_of(theirs)
        claimed = just("before", Square, ending, lambda: claim.take(1))
        with claimed, pytest.raises(djjobs.DjJobsError, match="running"):
            end()
    assert statuses(Square) == {1: "reserved"}


def test_jobs_that_are_ended_just_before_they_are_taken_from_their_workers_stay_ended(waiting: Any) -> None:
    """`refresh(orphan_timeout=...)` takes old reservations away; it puts nothing back that is over."""
    Square = waiting(2)
    jobs = claims_of(Square).take(2)
    registration_of(Square, jobs[0].worker_id).beat()
    change_jobs(Square, [1, 2], "timestamp = '2001-01-01'")
    failed = Failure("error", "ValueError: no square")
    with another(Square) as theirs:
        finisher = finisher_of(theirs)
        with just("before", Square, PUT_BACK, lambda: finisher.failed(jobs[0], failed, None)):
            Square.jobs.refresh(orphan_timeout=60)
    assert statuses(Square) == {1: "error", 2: "scheduled"}
