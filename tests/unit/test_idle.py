"""When idle slots are woken up: at first every second, then less and less often, and at once when there is news."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from djjobs.work import idle
from djjobs.work.idle import IdleSlots
from djjobs.work.messages import Idle


class Clock:
    """Time that goes on when it is told to, and chance that is the middle of the road."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    @staticmethod
    def uniform(least: float, most: float) -> float:
        return (least + most) / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(idle, "time", clock)
    monkeypatch.setattr(idle, "random", clock)
    return clock


class Slots:
    """Slots that find nothing, and the moments at which one of them was woken up."""

    def __init__(self, clock: Clock, idle: IdleSlots, says: Idle | None = None) -> None:
        self.clock, self.idle, self.says = clock, idle, says or Idle()
        self.moments: list[float] = []
        self.slots: list[Any] = [SimpleNamespace(busy=False, wake=self._wake) for _ in range(3)]

    def _wake(self) -> None:
        self.moments.append(self.clock.now)

    def live(self, seconds: float) -> list[float]:
        """Let so much time pass; the pauses between the looks in it."""
        self.moments.clear()
        end = self.clock.now + seconds
        while self.clock.now < end:
            before = len(self.moments)
            self.idle.wake_one(self.slots)
            if len(self.moments) > before:
                self.idle.hear(self.says)
            self.clock.now += 0.01
        return [round(later - at, 1) for at, later in zip(self.moments, self.moments[1:], strict=False)]


def test_an_idle_worker_asks_once_a_second_at_most_and_then_less_and_less(clock: Clock) -> None:
    pauses = Slots(clock, IdleSlots(hurries=False)).live(200)
    assert min(pauses) >= 1
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(15, abs=0.1) and len(pauses) < 25


def test_who_ends_when_nothing_is_left_looks_as_soon_as_it_may_schedule(clock: Clock) -> None:
    limited = Slots(clock, IdleSlots(hurries=True), Idle(limited=True)).live(30)
    assert set(limited) == {1.0}
    assert max(Slots(clock, IdleSlots(hurries=True)).live(30)) > 3


def test_news_is_acted_on_at_once_and_begins_anew(clock: Clock) -> None:
    slots = Slots(clock, IdleSlots(hurries=False))
    slots.live(100)
    slots.idle.announced()
    pauses = slots.live(3)
    assert len(slots.moments) >= 2 and pauses[0] < 2.5


def test_news_that_comes_between_a_look_and_its_answer_is_not_forgotten(clock: Clock) -> None:
    slots = Slots(clock, IdleSlots(hurries=False))
    slots.live(100)
    slots.idle.announced()
    slots.idle.hear(Idle())  # it had looked before
    slots.live(0.05)
    assert slots.moments


def test_busy_slots_are_left_alone(clock: Clock) -> None:
    slots = Slots(clock, IdleSlots(hurries=False))
    for slot in slots.slots:
        slot.busy = True
    slots.live(10)
    assert slots.moments == []
