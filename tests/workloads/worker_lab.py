"""A pipeline for workers: each task says what make() is to do, so that one schema serves every test.

`python -m djjobs.cli worker workloads.worker_lab` finds its tables in the schema that WORKER_LAB names. What the
tests and the processes of a worker tell each other goes through files in WORKER_LAB_FOLDER.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datajoint as dj
from pipelines import INT, MODERN

import djjobs
from workloads.squares import CallLog


def folder() -> Path:
    return Path(os.environ["WORKER_LAB_FOLDER"])


def declare(schema: Any) -> tuple[Any, Any, Any]:
    """Task, First and Second, which depend on each other in this order."""

    @schema
    class Task(dj.Manual):
        definition = f"""
        n : {INT}
        ---
        act : varchar(255)
        """

    @schema
    class First(djjobs.JobsMixin, dj.Computed):
        definition = "-> Task"
        retry_on = (ValueError,)

        def make(self, key: dict[str, Any]) -> None:
            rows = (Task & key).to_dicts() if MODERN else (Task & key).fetch(as_dict=True)
            # Before the act, so that whatever ends it has something to roll back.
            self.insert1(key)
            tell("First", key)
            perform(rows[0]["act"], key["n"])

    @schema
    class Second(djjobs.JobsMixin, dj.Computed):
        definition = "-> First"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)
            tell("Second", key)

    for name, value in json.loads(os.environ.get("WORKER_LAB_POLICY", "{}")).items():
        setattr(First, name, value)
    return Task, First, Second


def tell(table: str, key: dict[str, Any]) -> None:
    """Record a call: number, table, process, time."""
    CallLog(folder() / "calls").record(key["n"], table, os.getpid(), time.monotonic())


def perform(act: str, n: int) -> None:
    word, _, rest = act.partition(" ")
    if word and djjobs.current_job().attempt <= int(os.environ.get("WORKER_LAB_ACTS", "1000")):
        ACTS[word](rest, n)


# -- acts -----------------------------------------------------------------------------------------------------


def wait_for_file(pattern: str, count: int = 1) -> None:
    while len(list(folder().glob(pattern))) < count:
        time.sleep(0.02)


def meet(rest: str, n: int) -> None:
    """Go on when so many are here."""
    (folder() / f"here-{n}").touch()
    wait_for_file("here-*", int(rest))


def fail(rest: str, n: int) -> None:
    raise ValueError(rest)


def die(rest: str, n: int) -> None:
    """Say something, the last of it without an end of line, and be killed."""
    for line in range(30):
        print(f"line {line} of {n}")
    print(f"the last words of {n}", end="", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.Signals[rest])


def leave(rest: str, n: int) -> None:
    print(f"the last words of {n}", flush=True)
    os._exit(int(rest))


def quit_politely(rest: str, n: int) -> None:
    """As a script does whose main() is called in make()."""
    sys.exit(rest)


def stick(rest: str, n: int) -> None:
    """Wait in C for a lock that one holds oneself, and hold the interpreter's lock too; no handler can run."""
    (folder() / f"stuck-{n}").touch()
    mutex = ctypes.create_string_buffer(128)
    c = ctypes.PyDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)


def spawn(rest: str, n: int) -> None:
    """Start a process, in the background of another that ends at once, and one that is detached; then do as told."""
    script = "sleep 600 & echo $! > {}"
    subprocess.run(["sh", "-c", script.format(folder() / f"left-{n}")], check=True, stdout=subprocess.DEVNULL)
    detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder() / f"detached-{n}").write_text(str(detached.pid))
    (folder() / f"spawned-{n}").touch()
    perform(rest, n)


def print_bar(rest: str, n: int) -> None:
    """What a progress bar prints, without an end of line, and a very long line."""
    for percent in range(101):
        print(f"\r{percent} %", end="", flush=True)
    print("\n" + "x" * 100_000 + "the end\n", flush=True)


def linger(rest: str, n: int) -> None:
    """Sleep, and leave a sign when that is over, whatever ends it."""
    try:
        time.sleep(float(rest))
    finally:
        (folder() / f"over-{n}").touch()


def ask(rest: str, n: int) -> None:
    """Ask the server something all the time, as make() does that reads its data bit by bit."""
    connection = First.connection
    deadline = time.monotonic() + float(rest)
    while time.monotonic() < deadline:
        connection.query("SELECT 1").fetchall()
        time.sleep(0.01)


ACTS = {
    "spawn": spawn,
    "bar": print_bar,
    "ask": ask,
    "linger": linger,
    "sleep": lambda rest, n: time.sleep(float(rest)),
    "gate": lambda rest, n: wait_for_file(f"open-{n}"),
    "meet": meet,
    "fail": fail,
    "die": die,
    "leave": leave,
    "quit": quit_politely,
    "stick": stick,
    "print": lambda rest, n: print(rest),
}

if os.environ.get("WORKER_LAB"):
    Task, First, Second = declare(dj.Schema(os.environ["WORKER_LAB"]))
