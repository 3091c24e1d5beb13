"""The processes of a worker: how their ends are told, and what they say last; and how long Slurm lets it work."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest
from helpers import wait_for

from djjobs.work import pool as pool_module
from djjobs.work.messages import SlotDied, SlotEnded
from djjobs.work.pool import Pool
from djjobs.work.walltime import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59", 59),
        ("0:00", 0),
        ("4:05", 245),
        ("12:34:56", 45296),
        ("1-00:00:01", 86401),
        ("30-23:59:59", 2678399),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
        ("1:2:3:4", None),
    ],
)
def test_slurms_way_to_write_a_time_is_understood(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGRTMIN + 3])
def test_a_kill_for_want_of_memory_is_named_as_such(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A real one would endanger the machine; what the kernel counts is raised instead."""
    kills = 7
    monkeypatch.setattr(pool_module, "_out_of_memory_kills", lambda: kills)

    def end(channel: Any, _number: int) -> None:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may have had it ignored
        print("allocating", flush=True)
        channel.send("ready")
        time.sleep(60)

    pool = Pool(slots_context(), end)
    slot = pool.start_slot()
    try:
        wait_for(lambda: [message for _, message in pool.listen(0.1) if message == "ready"])
        slot.measure()
        kills += 1
        os.kill(slot.process.pid, number)
        wait_for(lambda: [message for _, message in pool.listen(0.1) if isinstance(message, SlotDied)])
        story = slot.story()
    finally:
        pool.end(1, lambda _slot: None)
    assert ("out-of-memory" in story) == (number == signal.SIGKILL)
    assert bool(re.search(r"having taken \d+ MB", story)) == (number == signal.SIGKILL)
    assert story.endswith("Its last words:\nallocating")


@pytest.mark.parametrize("patience", [30, 0], ids=["ended", "killed"])
def test_what_a_slot_says_at_the_last_moment_is_heard(patience: float) -> None:
    """Else a job that fails just then would be missing from the exit code."""

    def main(channel: Any, _number: int) -> None:
        signal.signal(signal.SIGTERM, (lambda *_: sys.exit()) if patience else signal.SIG_IGN)
        try:
            channel.send("ready")
            if patience:
                time.sleep(60)
        finally:
            channel.send("last")
            time.sleep(0 if patience else 60)

    pool = Pool(slots_context(), main)
    (slot,) = [pool.start_slot()]
    wait_for(lambda: slot.messages.poll())
    assert slot.messages.recv() == "ready"
    if not patience:
        wait_for(lambda: slot.messages.poll())
    said: list[Any] = []
    pool.end(patience, lambda _slot: None, lambda _slot, message: said.append(message))
    assert [message for message in said if not isinstance(message, SlotEnded)] == ["last"]


def slots_context() -> Any:
    import multiprocessing

    return multiprocessing.get_context("fork")
