"""Named events: who hears of them, and that a subscriber harms nobody."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from djjobs import telemetry
from djjobs.log_lines import write_log_lines
from djjobs.telemetry import Event, emit, flush, forward_to, subscribe


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No subscribers but the test's own."""
    monkeypatch.setattr(telemetry, "_subscriptions", [])
    yield
    forward_to(None)


def test_a_subscriber_hears_of_an_event_with_all_that_is_known_of_it() -> None:
    heard: list[Event] = []
    subscribe(heard.append)
    emit("job done", "Spectrum", {"session": 1}, attempt=2, duration=0.5, waited=3.0, made=True)
    assert flush(10)
    assert heard == [Event("job done", "Spectrum", {"session": 1}, 2, 0.5, 3.0, {"made": True})]


def test_a_subscriber_hears_of_what_it_asked_for_until_it_has_enough() -> None:
    heard: list[str] = []
    end = subscribe(lambda event: heard.append(event.name), "job done", "job failed", direct=True)
    emit("job started", "Spectrum")
    emit("job failed", "Spectrum")
    end()
    emit("job done", "Spectrum")
    assert heard == ["job failed"]


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no event .job finished.*job done"):
        subscribe(print, "job finished")


@pytest.mark.parametrize("direct", [False, True])
def test_what_a_subscriber_raises_is_logged_once_and_harms_nobody(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def fails(event: Event) -> None:
        raise RuntimeError("no disk")

    subscribe(fails, direct=direct)
    subscribe(heard.append, direct=direct)
    for _ in range(3):
        emit("job done", "Spectrum")
    assert flush(10)
    assert len(heard) == 3
    assert [record.message for record in caplog.records if "fails" in record.message and record.exc_info] != []
    assert len(caplog.records) == 1


def test_nobody_waits_for_a_slow_subscriber() -> None:
    """It gets everything in order, in a thread of its own."""
    released, heard = threading.Event(), []

    def slow(event: Event) -> None:
        released.wait(30)
        heard.append((event.details["n"], threading.current_thread() is threading.main_thread()))

    subscribe(slow)
    for n in range(100):
        emit("job done", n=n)
    assert heard == []
    assert not flush(0)
    released.set()
    assert flush(10)
    assert heard == [(n, False) for n in range(100)]


def test_a_subscriber_that_is_too_slow_misses_the_oldest_events_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "_MOST_WAITING", 5)
    begun, released, heard = threading.Event(), threading.Event(), []

    def slow(event: Event) -> None:
        begun.set()
        released.wait(30)
        heard.append(event.details["n"])

    subscribe(slow)
    emit("job done", n=0)
    assert begun.wait(10)
    for n in range(1, 20):
        emit("job done", n=n)
    released.set()
    assert flush(10)
    assert heard == [0, 15, 16, 17, 18, 19]
    assert [record.message for record in caplog.records] == [
        "The subscriber test_a_subscriber_that_is_too_slow_misses_the_oldest_events_and_that_is_said.<locals>.slow "
        "is too slow; it misses events."
    ]


def test_a_child_process_sends_its_events_to_its_parent_alone() -> None:
    here: list[Event] = []
    parent: list[Event] = []
    subscribe(here.append, direct=True)
    forward_to(parent.append)
    emit("job done", "Spectrum")
    assert (here, [event.name for event in parent]) == ([], ["job done"])
    forward_to(None)
    emit("job failed", "Spectrum")
    assert [event.name for event in here] == ["job failed"]


def test_a_parent_that_is_gone_harms_nobody() -> None:
    def gone(event: Event) -> None:
        raise BrokenPipeError

    forward_to(gone)
    emit("job done", "Spectrum")


def test_a_forked_process_delivers_its_own_events_and_not_its_parents() -> None:
    """The parent's wait for a thread that the child does not have."""
    released = threading.Event()
    reader, writer = os.pipe()

    def tell(event: Event) -> None:
        released.wait(30)
        os.write(writer, event.name.encode() + b"\n")

    subscribe(tell)
    emit("job started")
    pid = os.fork()
    if pid == 0:
        released.set()
        emit("job done")
        os._exit(0 if flush(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(reader, 1000) == b"job done\n"
    released.set()
    assert flush(10)
    assert os.read(reader, 1000) == b"job started\n"
    os.close(reader)
    os.close(writer)


#: An event of each name as it is told, the level of its line and what stands in it.
LINES: list[tuple[str, dict[str, Any], int, str]] = [
    ("job claimed", {}, logging.DEBUG, "Spectrum {'n': 1} claimed"),
    ("job started", {}, logging.INFO, "Spectrum {'n': 1} started"),
    ("job done", {"made": True, "duration": 0.5}, logging.INFO, "Spectrum {'n': 1} done in 0.50 s"),
    ("job done", {"made": False, "duration": 0.5}, logging.INFO, "Spectrum {'n': 1} was done already in 0.50 s"),
    (
        "job failed",
        {"message": "ValueError: bad\nmore", "retry_in": None, "duration": 1.0},
        logging.ERROR,
        "Spectrum {'n': 1} failed in 1.00 s: ValueError: bad",
    ),
    (
        "job retried",
        {"message": "ValueError: bad", "retry_in": 2.0, "duration": 1.0},
        logging.WARNING,
        "Spectrum {'n': 1} failed in 1.00 s: ValueError: bad; tried again in 2 s",
    ),
    ("job cancelled", {}, logging.INFO, "Spectrum {'n': 1} cancelled"),
    ("job given back", {}, logging.DEBUG, "Spectrum {'n': 1} given back"),
    ("job lost", {}, logging.WARNING, "Spectrum {'n': 1} was given to another"),
    (
        "job recovered",
        {"message": "It died.", "status": "scheduled"},
        logging.WARNING,
        "Spectrum {'n': 1}: It died. It is scheduled now.",
    ),
    ("slot died", {"story": "A slot died: killed"}, logging.ERROR, "A slot died: killed"),
    ("worker started", {"worker": "w1", "tables": "A, B"}, logging.INFO, "Worker w1 works on A, B."),
    ("worker heard", {"worker": "w1"}, logging.DEBUG, "Worker w1 is alive."),
    ("worker stopping", {"why": "SIGTERM"}, logging.INFO, "SIGTERM"),
    (
        "worker ended",
        {"worker": "w1", "done": 3, "failed": 1},
        logging.INFO,
        "Worker w1 ends: 3 jobs done, 1 failed.",
    ),
    ("worker died", {"worker": "w1", "story": "killed"}, logging.INFO, "Worker w1 died: killed"),
    ("run begun", {"run_id": 7, "count": 2}, logging.DEBUG, "Run 7 of Spectrum begins: 2 jobs."),
    (
        "run ended",
        {"run_id": 7, "run_name": "night", "state": "done", "progress": "2 of 2 jobs over"},
        logging.INFO,
        "Run 7 (night) of Spectrum is done: 2 of 2 jobs over.",
    ),
    ("schedule fired", {"schedule": "s", "words": "s fired"}, logging.INFO, "s fired"),
    ("table scheduled", {"count": 2}, logging.DEBUG, "Spectrum: 2 jobs scheduled"),
    ("table cleaned up", {"counts": {"expired": 2, "runs": 0}}, logging.DEBUG, "Spectrum cleaned up: 2 expired"),
]


def test_every_event_has_a_line_here() -> None:
    assert {name for name, *_ in LINES} == telemetry.NAMES


@pytest.mark.parametrize("name, facts, level, words", LINES)
def test_every_event_is_a_line_of_the_log(
    name: str, facts: dict[str, Any], level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "djjobs")
    write_log_lines()
    emit(name, "Spectrum", {"n": 1}, **facts)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage(), record.event) == (level, words, name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("suppressed", [True, False])
def test_an_error_that_a_populate_handles_is_not_told_twice(suppressed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is raised, or told where DataJoint does."""
    caplog.set_level(logging.INFO)
    write_log_lines()
    emit("job failed", "Spectrum", {"n": 1}, message="ValueError: bad", retry_in=None, suppressed=suppressed)
    errors = [(record.name, record.getMessage()) for record in caplog.records if record.levelno >= logging.WARNING]
    assert errors == ([("datajoint", "Spectrum {'n': 1}: ValueError: bad")] if suppressed else [])
