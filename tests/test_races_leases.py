"""Workers that are heard of, and jobs and runs that change, just when somebody takes them for dead or for orphaned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from interleaving import another, impatient, job_locked, just, recover_all, registration_of
from workloads.lives import ago, forget_all_workers, job_of, kinds, lose, worker_rows
from workloads.squares import Bystander, change_jobs, statuses

#: The statements at which the other one comes in between.
FIND_DEAD = r"^SELECT job.table_name, .* FROM \S*~jobs\W+ AS job WHERE"
DELETE = r"^DELETE FROM \S*~jobs\W"


@pytest.fixture
def waiting(start: Any) -> Callable[..., Any]:
    """Gives Square with so many scheduled jobs, where nobody is at work."""

    def start_over(count: int = 3, **members: Any) -> Any:
        Square = start(count, **members)
        Square.schedule_jobs(min_scheduling_interval=0)
        forget_all_workers(Square)
        return Square

    return start_over


# -- who is dead ---------------------------------------------------------------------------------------------------


def test_a_worker_that_is_heard_of_again_keeps_its_jobs(waiting: Any) -> None:
    """It was silent for its lease when somebody looked, and has sent a heartbeat before its job was taken."""
    Square = waiting(2)
    silent, gone = lose(Square, [1]), lose(Square, [2])
    with another(Square) as theirs:
        heartbeat = registration_of(theirs, silent)
        with just("after", Square, FIND_DEAD, heartbeat.beat):
            assert Square.cleanup_jobs()["recovered"] == 1
    assert statuses(Square) == {1: "reserved", 2: "scheduled"}
    assert {worker["worker_id"]: worker["state"] for worker in worker_rows(Square)} == {
        silent: "working",
        gone: "dead",
    }


def test_a_worker_that_is_gone_from_the_list_is_as_dead_as_it_looked(waiting: Any) -> None:
    """Another one has forgotten it between the look and the recovery."""
    Square = waiting(1)
    lose(Square, [1])
    with just("after", Square, FIND_DEAD, lambda: forget_all_workers(Square)):
        assert Square.cleanup_jobs()["recovered"] == 1
    assert (statuses(Square), kinds(job_of(Square, 1))) == ({1: "scheduled"}, ["crash"])


def test_who_recovers_does_not_wait_for_a_job_that_its_worker_holds(waiting: Any) -> None:
    """The worker may be asleep on the way to its commit; then the job is its own."""
    Square = waiting(2)
    lose(Square, [1, 2])
    with impatient(Square), job_locked(Square, 1):
        assert Square.cleanup_jobs()["recovered"] == 1
    assert statuses(Square) == {1: "reserved", 2: "scheduled"}


def test_who_beats_and_who_leaves_does_so_for_itself_alone(waiting: Any) -> None:
    Square = waiting(2)
    first, second = lose(Square, [1]), lose(Square, [2])

    def heartbeats() -> dict[str, Any]:
        return {row["worker_id"]: row["last_heartbeat"] for row in worker_rows(Square)}

    before = heartbeats()
    registration_of(Square, first).beat()
    assert heartbeats()[first] > before[first] and heartbeats()[second] == before[second]
    registration_of(Square, first).leave()
    assert set(heartbeats()) == {second}


def test_a_new_worker_forgets_only_those_that_died_long_ago(waiting: Any) -> None:
    """And none that may live: after a jump of the clock every heartbeat may look old."""
    Square = waiting(3)
    recent, old = lose(Square, [1], silent_for=3600), lose(Square, [2], silent_for=2 * 86400)
    assert Square.cleanup_jobs()["recovered"] == 2
    alive = lose(Square, [3], silent_for=2 * 86400, lease=10 * 86400)
    registration_of(Square, "a" * 36).beat()
    assert {row["worker_id"] for row in worker_rows(Square)} == {recent, alive, "a" * 36}
    assert old not in {row["worker_id"] for row in worker_rows(Square)}


def test_who_recovers_marks_the_silent_as_dead_and_no_others(waiting: Any) -> None:
    Square = waiting(2)
    silent, alive = lose(Square, [1]), lose(Square, [2], lease=600)
    Square.cleanup_jobs()
    assert {row["worker_id"]: row["state"] for row in worker_rows(Square)} == {silent: "dead", alive: "working"}


def test_who_recovers_many_jobs_is_heard_of_between_two_of_them(waiting: Any) -> None:
    """Else whoever recovers the jobs of a large node would look dead itself."""
    Square = waiting(3)
    lose(Square, [1, 2, 3])
    seen: list[int] = []
    assert recover_all(Square, lambda: seen.append(list(statuses(Square).values()).count("scheduled"))) == 3
    assert seen == [1, 2, 3]


def test_a_request_calls_for_the_attention_of_its_own_worker_alone(waiting: Any) -> None:
    Square = waiting(2)
    asked, other = lose(Square, [1], lease=600), lose(Square, [2], lease=600)
    assert Square.cancel_jobs("n = 1") == 1
    assert {row["worker_id"]: row["calls"] for row in worker_rows(Square)} == {asked: 1, other: 0}


# -- orphans -------------------------------------------------------------------------------------------------------


@pytest.fixture
def orphan(waiting: Any) -> Any:
    """Square, whose job 1 failed and has lost its key since."""
    Square = waiting(2)
    change_jobs(Square, [1], f"status = 'error', timestamp = {ago(Square.Number.connection, 60)}")
    (Square.Number & {"n": 1}).delete_quick()
    return Square


def test_an_orphan_that_nobody_touches_goes(orphan: Any) -> None:
    """So that the tests below could fail."""
    assert orphan.cleanup_jobs()["orphaned_incomplete"] == 1
    assert statuses(orphan) == {2: "scheduled"}


def test_a_job_whose_key_comes_back_and_is_retried_before_it_is_removed_stays(orphan: Any) -> None:
    """It was found without a key; what was asked for since counts."""

    def come_back() -> None:
        theirs.Number.insert1({"n": 1})
        assert theirs.retry_jobs({"n": 1}) == 1

    with another(orphan) as theirs, just("before", orphan, DELETE, come_back):
        assert orphan.cleanup_jobs()["orphaned_incomplete"] == 0
    assert statuses(orphan) == {1: "scheduled", 2: "scheduled"}


def test_a_job_that_somebody_has_reserved_before_it_is_removed_stays(orphan: Any) -> None:
    """DataJoint's own workers do not tell when; the status alone must keep it."""
    with Bystander(orphan) as bystander:
        reserved = just("before", orphan, DELETE, lambda: bystander.change(1, "status = 'reserved'"))
        with reserved:
            assert orphan.cleanup_jobs()["orphaned_incomplete"] == 0
    assert statuses(orphan)[1] == "reserved"
