"""What happens to jobs is told in one way, wherever they run: in the caller's process, in slots, in a worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import wait_for
from workloads.lives import note_sighting
from workloads.squares import Bystander, CallLog, insert_square

import djjobs
from djjobs import telemetry
from djjobs.queue.identity import Claimant
from djjobs.queue.leases import Registration, recover_once
from djjobs.queue.table_queue import TableQueue
from djjobs.worker import WorkerOptions, run_worker

Heard = list[telemetry.Event]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Every event that a subscriber hears of."""
    events: Heard = []
    end = telemetry.subscribe(events.append)
    yield events
    end()


def named(heard: Heard, *names: str) -> Heard:
    assert telemetry.flush(10)
    return [event for event in heard if event.name in names]


def told_of(heard: Heard, n: int) -> list[str]:
    """What was told of the job with this number, in order."""
    assert telemetry.flush(10)
    return [event.name for event in heard if event.key == {"n": n}]


def populate(table: Any) -> None:
    table.populate(reserve_jobs=True, suppress_errors=True)


def populate_in_processes(table: Any) -> None:
    table.populate(reserve_jobs=True, suppress_errors=True, processes=2)


def work(table: Any) -> None:
    table.schedule_jobs()
    try:
        run_worker([table], WorkerOptions(drain=True))
    finally:
        if not table.Number.connection.is_connected:
            table.Number.connection.connect()


WAYS = pytest.mark.parametrize("way", [populate, populate_in_processes, work])


@WAYS
def test_every_job_is_told_of_from_its_claim_to_its_end(
    start: Any, heard: Heard, way: Callable[[Any], None], tmp_path: Any
) -> None:
    flag = tmp_path / "failed once"

    def make(self: Any, key: dict[str, Any]) -> None:
        if key["n"] == 2 or (key["n"] == 3 and not flag.exists()):
            flag.touch() if key["n"] == 3 else None
            raise (KeyError if key["n"] == 2 else OSError)("not today")
        insert_square(self, key)

    Square = start(3, make, max_attempts=2, retry_on=OSError, backoff=0)
    way(Square)
    if way is populate_in_processes:
        populate(Square)  # a job that is to be tried again may come back when all slots have ended
    assert told_of(heard, 1) == ["job claimed", "job started", "job done"]
    assert told_of(heard, 2) == ["job claimed", "job started", "job failed"]
    assert told_of(heard, 3) == ["job claimed", "job started", "job retried", "job claimed", "job started", "job done"]
    for event in heard:
        if event.key is not None:
            assert event.table == "Square"
            assert event.waited is not None and event.waited >= 0
            assert (event.duration is None) == (event.name in ("job claimed", "job started"))
    assert [event.attempt for event in heard if event.key == {"n": 3}] == [1, 1, 1, 2, 2, 2]
    (failed,) = named(heard, "job failed")
    assert failed.details["message"] == "KeyError: 'not today'"


@WAYS
def test_a_worker_is_told_of_from_its_start_to_its_end(start: Any, heard: Heard, way: Callable[[Any], None]) -> None:
    way(start(2))
    started, ended = named(heard, "worker started", "worker ended")
    assert (started.name, ended.name) == ("worker started", "worker ended")
    assert started.details["worker"] == ended.details["worker"]
    assert ended.details["done"] == 2
    (scheduled, *_) = named(heard, "table scheduled")
    assert (scheduled.table, scheduled.details["count"]) == ("Square", 2)
    (begun,) = named(heard, "run begun")
    assert begun.details["count"] == 2


def test_heartbeats_are_told_of_by_the_process_that_keeps_a_populate_alive(
    start: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "heartbeat_interval", 0.2)

    def make(self: Any, key: dict[str, Any]) -> None:
        wait_for(lambda: len(named(heard, "worker heard")) >= 3)
        insert_square(self, key)

    populate(start(1, make))
    assert len({event.details["worker"] for event in named(heard, "worker heard")}) == 1


def test_a_job_that_a_stop_gives_back_is_told_of(start: Any, heard: Heard) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    Square = start(1, make)
    with pytest.raises(SystemExit):
        Square.populate(reserve_jobs=True)
    assert told_of(heard, 1) == ["job claimed", "job started", "job given back"]


def test_a_job_whose_slot_dies_is_told_of(start: Any, heard: Heard, log: CallLog) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        log.record(key["n"])
        if len(log.lines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        insert_square(self, key)

    populate_in_processes(start(1, make))
    assert told_of(heard, 1) == ["job claimed", "job started", "job retried", "job claimed", "job started", "job done"]
    (retried,) = named(heard, "job retried")
    assert "SIGKILL" in retried.details["message"]


def test_the_jobs_of_a_dead_worker_are_told_of_when_they_come_back(
    start: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    Square = start(2)
    Square.schedule_jobs()
    claimant = Claimant()
    jobs = TableQueue.of(Square())
    Registration(jobs.queue, claimant.worker_id, [jobs.table_name], 1).beat()
    assert len(jobs.claims(claimant=claimant).take(2)) == 2
    note_sighting(Square, claimant.worker_id, 2 * djjobs.settings.lease)
    recover_once(jobs.queue, {jobs.table_name: jobs.finisher}, sleep=lambda _: None)
    (died,) = named(heard, "worker died")
    assert died.details["worker"] == claimant.worker_id
    recovered = named(heard, "job recovered")
    assert sorted((event.key["n"], event.attempt, event.details["status"]) for event in recovered if event.key) == [
        (1, 1, "scheduled"),
        (2, 1, "scheduled"),
    ]


def test_a_job_that_was_given_to_another_is_told_of_as_lost(start: Any, heard: Heard) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        with Bystander(Square) as bystander:
            bystander.change(key["n"], "worker_id = 'another'")
        insert_square(self, key)

    Square = start(1, make)
    populate(Square)
    assert told_of(heard, 1) == ["job claimed", "job started", "job lost"]


def test_a_cancelled_job_and_a_clean_up_are_told_of(start: Any, heard: Heard) -> None:
    def make(self: Any, key: dict[str, Any]) -> None:
        raise djjobs.JobCancelled("by itself")

    Square = start(1, make)
    populate(Square)
    Square.cleanup_jobs()
    assert told_of(heard, 1) == ["job claimed", "job started", "job cancelled"]
    (cleaned,) = named(heard, "table cleaned up")
    assert set(cleaned.details["counts"]) == {
        "orphaned_success",
        "orphaned_incomplete",
        "recovered",
        "expired",
        "runs",
    }


@WAYS
def test_a_subscriber_that_fails_or_is_slow_harms_no_job(start: Any, way: Callable[[Any], None]) -> None:
    def fails(event: telemetry.Event) -> None:
        raise RuntimeError("no disk")

    def is_slow(event: telemetry.Event) -> None:
        time.sleep(60)

    ends = [telemetry.subscribe(fails), telemetry.subscribe(fails, direct=True), telemetry.subscribe(is_slow)]
    try:
        Square = start(4)
        way(Square)
        assert len(Square()) == 4
    finally:
        for end in ends:
            end()
