"""`djjobs ...` as a process, for tests of what becomes of it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import fork_server
import psutil
from helpers import wait_for

TESTS = Path(__file__).resolve().parent


class Command:
    """A command in a session of its own, by which everything that it starts is found.

    Parameters
    ----------
    words
        What follows `python`.
    folder
        Where what it says is kept.
    environment
        Variables besides those of this process.
    """

    #: How long what it has started may outlive it.
    gone_within = 6.0

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder / f"output-{secrets.token_hex(4)}"
        with self._log.open("w") as log:
            self._process = fork_server.start(
                words,
                cwd=TESTS,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        """The command itself and whatever else was started in its session."""
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float = 45) -> int:
        """Wait for its end, see that nothing of it is left, and return its exit code."""
        code = self._process.wait(timeout)
        wait_for(lambda: not self.processes(), timeout=self.gone_within)
        return code

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.end()

    def clear_away(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        print(f"process {self.pid} ended with {self._process.returncode} and said:\n{self.log}")
