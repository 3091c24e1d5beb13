"""Schedulers: who leads, what is fired, what is skipped and made up, and what becomes of it when processes die."""

from __future__ import annotations

import datetime
import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from helpers import wait_for
from pipelines import job_counts, rows_of
from schedule_labs import MODULE, PLOT, RESULT, SHORT_EXPIRY, Command, Lab, running
from workloads.squares import another_connection

import djjobs

SECOND = datetime.timedelta(seconds=1)


def leads(lab: Lab, command: Command) -> bool:
    """Whether this process, or one that it started, is the leader and alive."""
    row = lab.leader
    return bool(row) and row["expires"] > lab.timetable.now() and row["pid"] in command.processes()


def the_leader(lab: Lab, schedulers: Sequence[Command]) -> Command:
    """The one of them that leads, as soon as one does."""
    leader = wait_for(lambda: next((scheduler for scheduler in schedulers if leads(lab, scheduler)), None))
    assert leader is not None
    return leader


# -- what is fired ---------------------------------------------------------------------------------------------


def test_what_is_due_is_fired_once_and_what_is_not_due_is_left(lab: Lab) -> None:
    lab.fill(3)
    due, later = lab.add(RESULT, due=True), lab.add(PLOT)
    with running(lab, "scheduler", MODULE, "--once") as scheduler:
        assert scheduler.end() == 0
    (firing,) = lab.firings()
    assert (firing.name, firing.state, firing.outcome) == (due, "done", "3 jobs scheduled in Result")
    assert job_counts(lab.Result) == {"scheduled": 3}
    schedule = lab.schedule(due)
    assert (schedule.last_time, schedule.last_state) == (firing.fire_time, "done")
    assert schedule.next_time > lab.timetable.now()
    assert lab.schedule(later).last_time is None
    assert "3 jobs scheduled in Result" in scheduler.log


def test_what_strangers_keep_locked_does_not_keep_the_leader_from_leading(lab: Lab) -> None:
    """A schedule that somebody has locked fires once, and its leader goes on meanwhile."""
    name = lab.add(due=True)
    schedules = djjobs.schedules(lab.schema).full_table_name
    with closing(another_connection()) as stranger, running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        with stranger.transaction:
            stranger.query(f"SELECT * FROM {schedules} WHERE name = '{name}' FOR UPDATE").fetchall()
            wait_for(lambda: leads(lab, scheduler))
            since = lab.leader["since"]
            for _ in range(2):
                expires = lab.leader["expires"]
                # one that waits for the lock would do so for 50 s, or for ever
                wait_for(lambda expires=expires: lab.leader["expires"] > expires, timeout=20)
        wait_for(lambda: lab.states() == ["done"] and lab.schedule(name).last_state == "done")
        assert lab.leader["since"] == since


def test_a_cleanup_removes_what_nothing_needs_and_a_schedule_can_do_both(lab: Lab) -> None:
    lab.fill(3)
    lab.Result.schedule_jobs()
    (lab.Task & "n = 1").delete_quick()
    lab.Task.insert1({"n": 7})
    nightly = lab.add(RESULT, cleanup=True, due=True)
    assert lab.fire() == 0
    assert lab.schedule(nightly).last_outcome == "1 removed and 0 recovered in Result"
    assert job_counts(lab.Result) == {"scheduled": 2}
    both = lab.add(MODULE, cleanup=True, jobs=True, due=True)
    assert lab.fire() == 0
    parts = lab.schedule(both).last_outcome.split("; ")
    assert parts == [
        "0 removed and 0 recovered in Result",
        "1 job scheduled in Result",
        "0 removed and 0 recovered in Plot",
        "0 jobs scheduled in Plot",
    ]


def test_a_firing_is_not_swallowed_by_the_limit_on_scheduling(lab: Lab) -> None:
    lab.Result.schedule_jobs()
    lab.fill(2)
    assert lab.Result.schedule_jobs(min_scheduling_interval=3600).rate_limited
    lab.add(RESULT, due=True)
    assert lab.fire() == 0
    assert job_counts(lab.Result) == {"scheduled": 2}


def test_what_was_missed_while_nobody_ran_is_made_up_once(lab: Lab) -> None:
    """Fifty-nine times and a half an interval ago it was due for the first time."""
    name = lab.add(RESULT, every=60)
    first = lab.make_due(name, 59.5 * 60 * SECOND)
    assert lab.fire() == 0
    (firing,) = lab.firings()
    assert firing.missed_since == first
    assert firing.fire_time == first + 59 * 60 * SECOND
    assert lab.schedule(name).next_time == first + 60 * 60 * SECOND, "at the fixed rate, not from now on"
    assert lab.fire() == 0
    assert len(lab.firings()) == 1


def test_a_table_that_fails_is_told_of_and_the_others_are_seen_to(lab: Lab) -> None:
    lab.fill(2)
    (lab.folder / "fail-Result").touch()
    name = lab.add(MODULE, due=True)
    assert lab.fire() == 1
    assert lab.schedule(name).last_state == "failed"
    assert lab.schedule(name).last_outcome == ("ValueError: no luck with Result, \N{SNOWMAN}; 0 jobs scheduled in Plot")


def test_a_schedule_that_means_nothing_on_this_machine_does_not_keep_the_others_from_being_fired(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    odd, other = lab.add(RESULT, cron="* * * * *", due=True), lab.add(PLOT, due=True)
    lab.timetable.schedules.update1({"name": odd, "timezone": "Mars/Olympus_Mons"})
    assert lab.fire() == 1
    assert lab.schedule(other).last_state == "done"
    assert lab.states(odd) == []
    assert "cannot be fired: This machine does not know the time zone 'Mars/Olympus_Mons'" in caplog.text


def test_a_paused_schedule_is_not_fired(lab: Lab) -> None:
    name = lab.add(RESULT, due=True)
    assert djjobs.pause_schedule(lab.schema, name)
    assert lab.fire() == 0
    assert lab.firings() == []
    assert djjobs.resume_schedule(lab.schema, name)
    assert lab.schedule(name).next_time > lab.timetable.now(), "what was due meanwhile is not made up"


# -- at the same time --------------------------------------------------------------------------------------------


def test_a_firing_is_skipped_while_the_one_before_it_runs_and_the_other_schedules_are_not_held_up(lab: Lab) -> None:
    slow, other = lab.add(RESULT, every=1, due=True), lab.add(PLOT, every=1, due=True)
    with lab.closed(), running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        wait_for(lambda: lab.states(slow).count("skipped") >= 2 and lab.states(other).count("done") >= 2)
        first, *later = lab.firings(slow)
        assert first.state == "running"
        assert {firing.state for firing in later} == {"skipped"}
        words = f"the firing of {first.fire_time:%Y-%m-%d %H:%M:%S} UTC still ran on {first.host} (process {first.pid})"
        assert {firing.outcome for firing in later} == {words}
        assert (lab.schedule(slow).last_state, lab.schedule(slow).last_outcome) == ("skipped", words)
        wait_for(lambda: lab.firings(slow)[0].expires > first.started + 4 * SECOND)
        assert lab.firings(slow)[0].attempt == 1, "it is kept alive for longer than the expiry"
        lab.open()
        wait_for(lambda: lab.states(slow).count("done") >= 2)
        scheduler.send(signal.SIGTERM)
        assert scheduler.end() == 0
    assert f"{slow} is skipped: {words}" in scheduler.log


def test_one_that_does_not_lead_fires_nothing(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "djjobs")
    name = lab.add(RESULT)
    with running(lab, "scheduler", MODULE) as first:
        wait_for(lambda: leads(lab, first))
        lab.make_due(name)
        assert lab.fire() == 0
        assert f"stands by, {lab.leader['host']} (process {first.pid}) leads" in caplog.text
        wait_for(lambda: lab.states(name) == ["done"])
        assert leads(lab, first)
    assert [told.word for told in lab.told] == ["begin", "end"]


# -- the leader ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_leader_that_is_stopped_hands_over_at_once_and_gives_back_what_it_runs(lab: Lab, number: int) -> None:
    """With an expiry of an hour, nobody could take over otherwise."""
    expiry = {"DJJOBS_LEADER_EXPIRY": "3600"}
    name = lab.add(RESULT, due=True)
    with lab.closed(), running(lab, "scheduler", MODULE, **expiry) as first:
        wait_for(lambda: lab.told)
        first.send(number)
        assert first.end() == 0
        (firing,) = lab.firings(name)
        assert (firing.state, firing.attempt) == ("running", 0)
        lab.open()
        assert lab.fire() == 0
    (firing,) = lab.firings(name)
    assert (firing.state, firing.attempt) == ("done", 1)
    assert [told.word for told in lab.told] == ["begin", "begin", "end"]


def test_a_firing_whose_scheduler_was_killed_is_taken_up_again_under_the_same_row(lab: Lab) -> None:
    name = lab.add(RESULT, due=True)
    with lab.closed(), ExitStack() as stack:
        both = [stack.enter_context(running(lab, "scheduler", MODULE, **SHORT_EXPIRY)) for _ in range(2)]
        wait_for(lambda: lab.told)
        first, second = sorted(both, key=lambda scheduler: lab.leader["pid"] not in scheduler.processes())
        first.kill()
        wait_for(lambda: leads(lab, second))
        lab.open()
        wait_for(lambda: lab.states(name) == ["done"])
    (firing,) = lab.firings(name)
    assert (firing.attempt, firing.outcome) == (2, "0 jobs scheduled in Result")
    assert [(told.word, told.attempt) for told in lab.told] == [("begin", 1), ("begin", 2), ("end", 2)]
    assert lab.schedule(name).last_state == "done"


def test_a_firing_that_takes_its_scheduler_with_it_is_given_up_in_the_end(lab: Lab) -> None:
    name = lab.add(RESULT, due=True)
    few = {"DJJOBS_LEADER_EXPIRY": "2", "DJJOBS_MAX_CRASHES": "2"}
    with lab.closed(), ExitStack() as stack:
        schedulers = [stack.enter_context(running(lab, "scheduler", MODULE, **few)) for _ in range(3)]
        for attempt in (1, 2):
            wait_for(lambda attempt=attempt: len(lab.told) == attempt)
            the_leader(lab, schedulers).kill()
        wait_for(lambda: lab.states(name) == ["failed"])
    (firing,) = lab.firings(name)
    assert firing.outcome.startswith("Given up: its process died 2 times, the last time on ")
    assert len(lab.told) == 2


def test_a_firing_whose_own_process_dies_has_failed(lab: Lab) -> None:
    (lab.folder / "die-Result").touch()
    name = lab.add(RESULT, due=True)
    assert lab.fire() == 1
    assert "was ended by SIGKILL" in lab.schedule(name).last_outcome
    assert lab.states(name) == ["failed"]
    assert len(lab.told) == 1


def test_a_leader_that_was_suspended_for_longer_than_its_expiry_fires_nothing(lab: Lab) -> None:
    """It wakes up with a schedule due that another has fired meanwhile, and with a firing that another has taken."""
    name, ticking = lab.add(RESULT, due=True), lab.add(PLOT, every=1)
    with lab.closed(), running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as first:
        wait_for(lambda: name in {told.name for told in lab.told} and lab.firings(ticking))
        first.send(signal.SIGSTOP)
        try:
            with running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as second:
                wait_for(lambda: leads(lab, second))
                (taken,) = wait_for(lambda: [f for f in lab.firings(name) if f.pid == second.pid])
                count = len(lab.firings(ticking))
                wait_for(lambda: len(lab.firings(ticking)) > count + 1)
                first.send(signal.SIGCONT)
                wait_for(lambda: "stands by" in first.log)
                # The child of the first was not suspended; it ends too late to say so.
                lab.open()
                wait_for(lambda: lab.states(name) == ["done"])
                wait_for(lambda: leads(lab, second))
                wait_for(lambda: f"{name} ({taken.fire_time:%Y-%m-%d %H:%M:%S} UTC) lost" in first.log)
        finally:
            first.send(signal.SIGCONT)
    (firing,) = lab.firings(name)
    assert (firing.attempt, firing.pid, firing.runner) == (2, second.pid, taken.runner)
    assert_every_firing_happened_once(lab, ticking)


def test_a_leader_that_slept_and_still_leads_does_not_take_its_own_firing_for_lost(lab: Lab) -> None:
    """As after a laptop was closed: nobody else was there to take anything over."""
    name = lab.add(RESULT, due=True)
    with lab.closed(), running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        wait_for(lambda: lab.told)
        scheduler.send(signal.SIGSTOP)
        try:
            (firing,) = lab.firings(name)
            wait_for(lambda: lab.timetable.lost_firings())
        finally:
            scheduler.send(signal.SIGCONT)
        wait_for(lambda: lab.firings(name)[0].expires > firing.expires)
        lab.open()
        wait_for(lambda: lab.states(name) == ["done"])
    assert [(told.word, told.attempt) for told in lab.told] == [("begin", 1), ("end", 1)]
    assert lab.firings(name)[0].runner == firing.runner


def assert_every_firing_happened_once(lab: Lab, name: str) -> None:
    """As recorded, and as the firings themselves told, who do not look into the record of others."""
    firings = [firing for firing in lab.firings(name) if firing.state != "running"]
    begun = Counter(told.time for told in lab.told if (told.word, told.name) == ("begin", name))
    ended = Counter(told.time for told in lab.told if (told.word, told.name) == ("end", name))
    for firing in firings:
        if firing.state == "skipped":
            assert begun[firing.fire_time] == 0
        else:
            assert firing.state == "done", firing
            assert ended[firing.fire_time] >= 1, f"{firing} was recorded, but did not happen"
            assert begun[firing.fire_time] <= firing.attempt, f"{firing} happened more often than it was begun"
            if firing.attempt == 1:
                assert ended[firing.fire_time] == 1, f"{firing} happened twice"
    assert set(begun) <= {firing.fire_time for firing in lab.firings(name)}, "a firing that nobody recorded"


def test_of_three_schedulers_the_leader_is_killed_again_and_again_and_every_firing_happens_once(lab: Lab) -> None:
    names = [lab.add(RESULT, every=1, name="fast"), lab.add(PLOT, every=1.5, name="odd")]
    first_due = {name: lab.schedule(name).next_time for name in names}
    kills = 0
    # One firing may be hit by several of the kills.
    patient = {**SHORT_EXPIRY, "DJJOBS_MAX_CRASHES": "100"}
    with ExitStack() as stack:
        schedulers = [stack.enter_context(running(lab, "scheduler", MODULE, **patient)) for _ in range(3)]
        leader: Command | None = None
        while kills < 3:
            leader = the_leader(lab, schedulers)
            before = len(lab.firings())
            # In the middle of its work, wherever that is.
            wait_for(lambda before=before: len(lab.firings()) >= before + 3, every=0.01)
            leader.kill()
            kills += 1
            schedulers.remove(leader)
            schedulers.append(stack.enter_context(running(lab, "scheduler", MODULE, **patient)))
        wait_for(lambda: any(leads(lab, s) for s in schedulers))
        # On a busy machine many are skipped: some have to have happened.
        wait_for(lambda: all(lab.states(name).count("done") >= 3 for name in names), timeout=60)
        # What a leader gives back would be taken up by another, at no cost of an attempt.
        for name in names:
            djjobs.pause_schedule(lab.schema, name)
        wait_for(lambda: "running" not in lab.states())
        for scheduler in schedulers:
            scheduler.send(signal.SIGTERM)
            scheduler.end()
    for name, interval in zip(names, (1.0, 1.5), strict=True):
        assert_every_firing_happened_once(lab, name)
        # Nothing is lost: from one firing to the next there is one interval, or the firing says what it makes up for.
        expected = first_due[name]
        for firing in lab.firings(name):
            assert (firing.missed_since or firing.fire_time) == expected
            expected = firing.fire_time + interval * SECOND
        assert lab.schedule(name).next_time == expected
    taken_up = [firing for firing in lab.firings() if firing.attempt > 1]
    print(f"{len(lab.firings())} firings, {len(taken_up)} taken up again, {Counter(lab.states())}")


def test_a_scheduler_whose_connections_the_server_ends_goes_on(lab: Lab, engine: str) -> None:
    """Those of the scheduler and of a firing that runs, which is carried out on a new one."""
    slow, ticking = lab.add(RESULT, due=True), lab.add(PLOT, every=1)
    with lab.closed(), running(lab, "scheduler", MODULE, **SHORT_EXPIRY) as scheduler:
        wait_for(lambda: slow in {told.name for told in lab.told} and "done" in lab.states(ticking))
        end_other_connections(lab, engine)
        count = len(lab.firings(ticking))
        lab.open()
        wait_for(lambda: lab.states(slow) == ["done"] and len(lab.firings(ticking)) >= count + 2)
        wait_for(lambda: leads(lab, scheduler))
        scheduler.send(signal.SIGTERM)
        scheduler.end()
    assert "Traceback" not in scheduler.log


def test_a_step_whose_own_query_loses_its_connection_is_done_again(lab: Lab) -> None:
    """One of DataJoint's, in code of the table, which no statement of ours could repeat."""
    lab.fill(3)
    name = lab.add(RESULT, due=True)
    (lab.folder / "lose-Result").touch()
    with running(lab, "scheduler", MODULE, "--once") as scheduler:
        assert scheduler.end() == 0
    assert [told.word for told in lab.told] == ["begin", "begin", "end"]
    assert lab.schedule(name).last_outcome == "3 jobs scheduled in Result"


def end_other_connections(lab: Lab, engine: str) -> None:
    """All but ours: of this server nobody else has any."""
    query = lab.schema.connection.query
    if engine == "postgresql":
        others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        query(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        return
    mine = query("SELECT CONNECTION_ID()").fetchone()[0]
    found = query("SELECT id FROM information_schema.processlist WHERE command IN ('Sleep', 'Query')").fetchall()
    for (number,) in found:
        if number != mine:
            with suppress(Exception):  # it may be gone by now
                query(f"KILL {number}")


# -- beside a worker --------------------------------------------------------------------------------------------


def test_a_worker_can_fire_the_schedules_beside_its_work(lab: Lab) -> None:
    """Its own scheduling would not find the keys: it is told to schedule once an hour."""
    quiet = {"DJJOBS_MIN_SCHEDULING_INTERVAL": "3600", **SHORT_EXPIRY}
    lab.Result.schedule_jobs(min_scheduling_interval=0)
    lab.fill(3)
    name = lab.add(RESULT, every=1, due=True)
    with running(lab, "worker", RESULT, "--with-scheduler", **quiet) as worker:
        wait_for(lambda: len(lab.Result()) == 3)
        wait_for(lambda: leads(lab, worker))
        assert lab.leader["pid"] != worker.pid
        # its jobs may be done before the firing has ended, and one that is stopped says nothing
        wait_for(lambda: "3 jobs scheduled in Result" in worker.log)
        worker.send(signal.SIGTERM)
        assert worker.end() == 0
    assert f"{name} (" in worker.log
    assert lab.leader["expires"] <= lab.timetable.now()


def test_a_worker_is_not_kept_waiting_by_its_scheduler_and_starts_it_again_when_it_dies(lab: Lab) -> None:
    beats = {"DJJOBS_HEARTBEAT_INTERVAL": "0.3", "DJJOBS_LEASE": "3", **SHORT_EXPIRY}
    lab.add(PLOT, due=True)
    with running(lab, "worker", PLOT, "--with-scheduler", **beats) as worker:
        wait_for(lambda: leads(lab, worker))
        pid = lab.leader["pid"]
        os.kill(pid, signal.SIGSTOP)
        (row,) = djjobs_workers(lab)
        wait_for(lambda: djjobs_workers(lab)[0]["last_heartbeat"] > row["last_heartbeat"] + SECOND)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: leads(lab, worker) and lab.leader["pid"] != pid)
        assert "The scheduler of this worker died" in worker.log
        worker.kill()
    assert not worker.processes()


def djjobs_workers(lab: Lab) -> list[dict[str, Any]]:
    return rows_of(djjobs.workers(lab.schema))
