"""Two schedulers, and people who change schedules, at the same moment: each guard of a schedule and of a firing."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interleaving import just
from schedule_labs import RESULT, Lab
from workloads.lives import ago
from workloads.squares import another_connection

import djjobs
from djjobs.recurring.rows import Timetable, new_token

HOUR = datetime.timedelta(hours=1)
#: The statements at which the other one comes in between.
FIRE = r"^INSERT INTO \S*~firings\W"
ADVANCE = r"^UPDATE \S*~schedules\W+ SET last_state"
TAKE_UP = r"^UPDATE \S*~firings\W+ SET runner"
END = r"^UPDATE \S*~schedules\W+ SET last_time"
GIVE_BACK = r"^UPDATE \S*~firings\W+ SET expires = .*attempt - 1"


class Theirs:
    """Another process, with a connection of its own: what it does to the tables of schedules."""

    def __init__(self, lab: Lab) -> None:
        self.connection = another_connection()
        self.timetable = Timetable.of(self.connection, lab.schema.database)

    def _change(self, table: Any, changes: str) -> None:
        self.connection.query(f"UPDATE {table.full_table_name} SET {changes}")

    def schedule(self, changes: str) -> Callable[[], None]:
        return lambda: self._change(self.timetable.schedules, changes)

    def firing(self, changes: str) -> Callable[[], None]:
        return lambda: self._change(self.timetable.firings, changes)

    def leader(self, changes: str) -> Callable[[], None]:
        return lambda: self._change(self.timetable.leader, changes)

    def in_an_hour(self) -> str:
        return ago(self.connection, -3600)

    def an_hour_ago(self) -> str:
        return ago(self.connection, 3600)


@pytest.fixture
def theirs(lab: Lab) -> Iterator[Theirs]:
    theirs = Theirs(lab)
    yield theirs
    theirs.connection.close()


@pytest.fixture
def me(lab: Lab) -> str:
    """The leader."""
    me = new_token()
    assert lab.timetable.lead(me, RESULT)
    return me


#: What makes a firing another one's to decide, just before it is entered or the schedule is due again.
OVERTAKEN: dict[str, Callable[[Theirs], Callable[[], None]]] = {
    "paused": lambda theirs: theirs.schedule("enabled = 0"),
    "due at another time": lambda theirs: theirs.schedule(f"next_time = {theirs.in_an_hour()}"),
    "another leads": lambda theirs: theirs.leader(f"leader = '{'a' * 36}'"),
    "the lead has run out": lambda theirs: theirs.leader(f"expires = {theirs.an_hour_ago()}"),
}


@pytest.mark.parametrize("how", OVERTAKEN)
def test_a_schedule_that_another_decides_about_is_not_fired(lab: Lab, theirs: Theirs, me: str, how: str) -> None:
    name = lab.add(RESULT, due=True)
    schedule = lab.timetable.find(name)
    assert schedule is not None
    with just("before", lab.schema.connection, FIRE, OVERTAKEN[how](theirs)):
        assert lab.timetable.fire(schedule, lab.timetable.now(), me) == (None, "")
    assert lab.firings() == []


@pytest.mark.parametrize("how", [*OVERTAKEN, "removed with its history and added again"])
def test_a_schedule_that_another_decides_about_is_not_moved_on(lab: Lab, theirs: Theirs, me: str, how: str) -> None:
    """It was fired, and then somebody else changed it: when it is due next, and how it went, is theirs to say."""
    name = lab.add(RESULT, due=True)
    schedule = lab.timetable.find(name)
    assert schedule is not None
    seen: list[Any] = []

    def change() -> None:
        if how in OVERTAKEN:
            OVERTAKEN[how](theirs)()
        else:
            theirs.connection.query(f"DELETE FROM {theirs.timetable.firings.full_table_name}")
        seen.append(theirs.timetable.find(name))

    with just("before", lab.schema.connection, ADVANCE, change):
        lab.timetable.fire(schedule, lab.timetable.now(), me)
    assert lab.timetable.find(name) == seen[0]
    assert (lab.schedule(name).last_time, lab.schedule(name).last_state) == (None, "")


def test_a_schedule_whose_firing_is_gone_is_not_moved_on_though_it_was_fired_before(
    lab: Lab, theirs: Theirs, me: str
) -> None:
    """What came of it is told by the firing itself, and by no other of the same schedule."""
    name = lab.add(RESULT)
    for hours in (3, 1):
        due = lab.make_due(name, hours * HOUR)
        schedule = lab.timetable.find(name)
        assert schedule is not None
        firing, _ = lab.timetable.fire(schedule, due, me)
        assert firing is not None and lab.timetable.end(firing, "done", f"{hours} hours ago")
    assert lab.schedule(name).last_outcome == "1 hours ago"
    lab.make_due(name)
    schedule = lab.timetable.find(name)
    assert schedule is not None
    forget = f"DELETE FROM {theirs.timetable.firings.full_table_name} WHERE running = 1"
    with just("before", lab.schema.connection, ADVANCE, lambda: theirs.connection.query(forget)):
        lab.timetable.fire(schedule, lab.timetable.now(), me)
    assert lab.timetable.find(name) == schedule
    assert lab.schedule(name).last_outcome == "1 hours ago"


@pytest.fixture
def lost(lab: Lab, me: str) -> Any:
    """A firing whose process was not heard of for too long, and another one that runs."""
    name = lab.add(RESULT, due=True)
    other = lab.add(RESULT, name="other")
    lab.timetable.fire_by_hand(other)
    schedule = lab.timetable.find(name)
    assert schedule is not None
    firing, _ = lab.timetable.fire(schedule, lab.timetable.now(), me)
    assert firing is not None
    expires = lab.timetable.now() - HOUR
    lab.timetable.firings.update1({"name": name, "fire_time": firing.fire_time, "expires": expires})
    ((found, _),) = lab.timetable.lost_firings()
    assert found == firing
    return firing


#: What makes a lost firing none.
FOUND = {
    "it has ended": lambda theirs: theirs.firing("running = NULL, state = 'done'"),
    "another has taken it up": lambda theirs: theirs.firing(f"runner = '{'a' * 36}'"),
    "it is heard of again": lambda theirs: theirs.firing(f"expires = {theirs.in_an_hour()}"),
    "another leads": OVERTAKEN["another leads"],
    "the lead has run out": OVERTAKEN["the lead has run out"],
}


@pytest.mark.parametrize("how", FOUND)
def test_a_firing_that_is_not_lost_any_more_is_not_taken_up(
    lab: Lab, theirs: Theirs, me: str, lost: Any, how: str
) -> None:
    with just("before", lab.schema.connection, TAKE_UP, FOUND[how](theirs)):
        assert lab.timetable.take_up(lost, me, RESULT) is None
    assert {firing.attempt for firing in lab.firings()} == {1}


def test_a_firing_that_is_lost_is_taken_up_and_no_other_with_it(lab: Lab, me: str, lost: Any) -> None:
    """So that the test above could fail."""
    taken = lab.timetable.take_up(lost, me, RESULT)
    assert taken is not None
    assert {firing.name: firing.attempt for firing in lab.firings()} == {lost.name: 2, "other": 1}


#: How a firing is taken from the process that runs it, while that is about to say what came of it.
TAKEN = {
    "by another": lambda theirs: theirs.firing(f"runner = '{'a' * 36}'"),
    "and ended": lambda theirs: theirs.firing("running = NULL, state = 'failed', outcome = 'theirs'"),
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("act", ["end", "give back"])
def test_a_firing_that_was_just_taken_away_is_not_changed(
    lab: Lab, theirs: Theirs, me: str, lost: Any, act: str, how: str
) -> None:
    seen: list[Any] = []

    def take() -> None:
        TAKEN[how](theirs)()
        seen.append([vars(firing) for firing in lab.firings()] + [vars(lab.schedule(lost.name))])

    with just("before", lab.schema.connection, END if act == "end" else GIVE_BACK, take):
        if act == "end":
            assert not lab.timetable.end(lost, "done", "ours")
        else:
            lab.timetable.give_back(lost)
    assert [vars(firing) for firing in lab.firings()] + [vars(lab.schedule(lost.name))] == seen[0]


def test_a_firing_that_has_ended_is_not_shown_to_run(lab: Lab, theirs: Theirs, me: str, lost: Any) -> None:
    keep = r"^UPDATE \S*~firings\W+ SET expires"
    with just("before", lab.schema.connection, keep, theirs.firing("running = NULL, state = 'failed'")):
        assert not lab.timetable.keep(lost)
    assert {firing.name: firing.expires < lab.timetable.now() for firing in lab.firings()}[lost.name]


# -- the lead ------------------------------------------------------------------------------------------------------


def test_of_two_who_find_nobody_leading_one_leads(lab: Lab, theirs: Theirs) -> None:
    me, other = new_token(), new_token()
    with just("before", lab.schema.connection, r"^UPDATE \S*~leader\W", lambda: theirs.timetable.lead(other, RESULT)):
        assert not lab.timetable.lead(me, RESULT)
    assert lab.leader["leader"] == other


def test_one_who_resigns_late_does_not_end_the_lead_of_another(lab: Lab, theirs: Theirs, me: str) -> None:
    change = theirs.leader(f"leader = '{'a' * 36}', expires = {theirs.in_an_hour()}")
    with just("before", lab.schema.connection, r"^UPDATE \S*~leader\W", change):
        lab.timetable.resign(me)
    assert lab.leader["leader"] == "a" * 36
    assert lab.leader["expires"] > lab.timetable.now()


# -- people --------------------------------------------------------------------------------------------------------


def test_of_two_who_resume_a_schedule_the_second_changes_nothing(lab: Lab, theirs: Theirs) -> None:
    """It may have been fired since the first did."""
    name = lab.add(RESULT)
    assert djjobs.pause_schedule(lab.schema, name)
    fired = theirs.schedule(f"enabled = 1, next_time = {ago(theirs.connection, -7200)}")
    with just("before", lab.schema.connection, r"^UPDATE \S*~schedules\W+ SET enabled = 1", fired):
        assert not djjobs.resume_schedule(lab.schema, name)
    assert lab.schedule(name).next_time > lab.timetable.now() + 1.5 * HOUR


def test_of_two_who_pause_a_schedule_one_has_paused_it(lab: Lab, theirs: Theirs) -> None:
    name = lab.add(RESULT)
    with just(
        "before", lab.schema.connection, r"^UPDATE \S*~schedules\W+ SET enabled = 0", theirs.schedule("enabled = 0")
    ):
        assert not djjobs.pause_schedule(lab.schema, name)


def test_of_two_who_remove_a_schedule_one_has_removed_it(lab: Lab, theirs: Theirs) -> None:
    name = lab.add(RESULT)
    removing = r"^DELETE FROM \S*~schedules\W"
    with just("before", lab.schema.connection, removing, lambda: theirs.timetable.remove(name)):
        assert djjobs.remove_schedule(lab.schema, name) == []
