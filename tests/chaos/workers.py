"""The pool: so many places, each with a worker; one that is gone is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.script import READY

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Worker:
    """One process at a place of the pool, with all its children."""

    place: int
    kind: str
    pid: int
    log: Path
    fresh: bool = False
    started: float = field(default_factory=time.time)
    ready: bool = False
    #: "up", "stopped" by SIGSTOP, "leaving" after SIGTERM, or "killed"
    state: str = "up"
    told_to_leave: float = 0.0
    #: All that it ever had: a slot that ended before its worker may have left a claim, too.
    all_children: set[int] = field(default_factory=set)

    def children(self) -> list[int]:
        """Its slots or its monitor."""
        with contextlib.suppress(OSError):
            children = [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
            self.all_children.update(children)
            return children
        return []

    def signal(self, number: int, pids: list[int] | None = None) -> None:
        for pid in pids or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def words(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def where(self) -> str:
        """Where it and its children are in their code, if they can tell."""
        before = len(self.words())
        if not self.fresh:
            self.signal(signal.SIGUSR1, [self.pid, *self.children()])
            time.sleep(0.5)
        return self.words()[before:]

    def is_idle_since(self, when: float) -> bool:
        """Whether a script has had nothing to do after this time."""
        return self.log.stat().st_mtime > when

    def is_ready(self) -> bool:
        """Whether it handles signals: a supervisor does when it has slots."""
        if not self.ready:
            self.ready = READY in self.words() if self.kind == "script" else bool(self.children())
        return self.ready


@dataclass(frozen=True)
class End:
    """A worker that ended, and how."""

    worker: Worker
    code: int
    when: float


class WorkerPool:
    """Starts workers through a process that forks them, and hears of their ends. Use it as a context manager."""

    def __init__(self, size: int, environment: dict[str, str], folder: Path) -> None:
        self.size, self._folder = size, folder
        self.workers: dict[int, Worker] = {}
        self._count = 0
        self._answers: list[dict[str, Any]] = []
        self._rest = b""
        #: They all inherit it.
        self._mark = f"CHAOS_SCHEMA={environment['CHAOS_SCHEMA']}".encode()
        with open(folder / "forking.log", "ab") as log:
            self._forking = subprocess.Popen(
                [sys.executable, "-m", "chaos.forking"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=TESTS,
                env=environment,
                bufsize=0,
            )

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: nobody is left behind."""
        families = [[worker.pid, *worker.children()] for worker in self.workers.values()]
        for family in families:
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._forking.kill()
        self._forking.wait()
        for pipe in (self._forking.stdin, self._forking.stdout):
            assert pipe
            pipe.close()

    def survivors(self) -> set[int]:
        """All processes that were ever started here, directly or by others, and are still there."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
        return found - {self._forking.pid}

    def declare(self) -> None:
        """Declare the pipeline, in a process of its own."""
        log = self._folder / "declare.log"
        pid = self._start("declare", [], False, log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for answer in self._hear(0.2):
                if answer.get("ended") == pid:
                    if answer["code"]:
                        raise AssertionError(f"The pipeline could not be declared:\n{log.read_text()}")
                    return
        raise AssertionError("The pipeline was not declared within a minute")

    def start_worker(self, place: int, fresh: bool = False) -> Worker:
        """Start a worker at this place: every other one is a script, the rest have one slot or two."""
        self._count += 1
        kind = "script" if place % 2 else "worker"
        if kind == "script":
            # Some scripts meet poison, each kind in its own way.
            arguments = {1: ["slots"], 3: ["tame"]}.get(place % 8, [])
        else:
            arguments = ["--processes", str(1 + place // 2 % 2), "--order", "random"]
        log = self._folder / f"{self._count:03}-{kind}-{place:02}.log"
        worker = Worker(place, kind, self._start(kind, arguments, fresh, log), log, fresh)
        self.workers[place] = worker
        return worker

    def ends(self) -> list[End]:
        """Who has ended since this was asked last."""
        ended = []
        by_pid = {worker.pid: worker for worker in self.workers.values()}
        for answer in self._hear(0):
            worker = by_pid.get(answer.get("ended", 0))
            if worker is not None:
                ended.append(End(worker, answer["code"], time.time()))
        return ended

    def _start(self, kind: str, arguments: list[str], fresh: bool, log: Path) -> int:
        order = {"kind": kind, "arguments": arguments, "fresh": fresh, "log": str(log)}
        assert self._forking.stdin
        self._forking.stdin.write(json.dumps(order).encode() + b"\n")
        deadline = time.monotonic() + 60
        kept: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            answers = self._hear(1)
            for number, answer in enumerate(answers):
                if "started" in answer:
                    self._answers = kept + answers[number + 1 :]
                    return answer["started"]
                kept.append(answer)
        raise AssertionError(f"No worker was started:\n{(self._folder / 'forking.log').read_text()}")

    def _hear(self, timeout: float) -> list[dict[str, Any]]:
        """What the process that forks has said; waits for something for so long."""
        answers, self._answers = self._answers, []
        assert self._forking.stdout
        while select.select([self._forking.stdout], [], [], 0 if answers else timeout)[0]:
            data = self._forking.stdout.read(65536)
            if not data:
                raise AssertionError(f"Nobody forks workers any more:\n{(self._folder / 'forking.log').read_text()}")
            *lines, self._rest = (self._rest + data).split(b"\n")
            answers += [json.loads(line) for line in lines]
        return answers
