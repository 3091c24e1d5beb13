"""Poison: jobs whose make() does what no make() should, and what must come of each.

Knows no DataJoint, so that the verdict can use it, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: One of each kind among so many numbers, from this one on.
_EVERY, _FIRST = 1000, 100
#: How often a poison job is tried.
MAX_ATTEMPTS = 2
#: How often make() of one may be called in all. A connection that is lost, and a stop, cost no attempt.
MOST_CALLS = 15
#: A class that can be imported only by a process that knows where it is.
_FOREIGN = "class ForeignError(Exception):\n    pass\n"
_LONG_TEXT = 20_000_000


class Doom(BaseException):
    """Neither an error nor a stop."""


@dataclass(frozen=True)
class Poison:
    """One kind of poison.

    Attributes
    ----------
    act : callable
        What make() does before it inserts its row.
    end : str
        The status in the end: "error" or "success"; "" if both are right, as long as the row is there after a success
        only.
    says : str
        What the error message must contain.
    tame : bool
        Whether it does no harm to the process around it, so that a populate in a user's own process may meet it.
    """

    name: str
    act: Callable[[], Any]
    end: str = "error"
    says: str = ""
    tame: bool = True


def _raise(error: BaseException) -> None:
    raise error


def _terminate_oneself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    # If nobody minds, the job succeeds, and is late.
    time.sleep(20)


def _raise_foreign_error() -> None:
    folder = Path(os.environ["CHAOS_FOLDER"]) / "foreign"
    folder.mkdir(exist_ok=True)
    (folder / "chaos_foreign.py").write_text(_FOREIGN)
    sys.path.append(str(folder))
    from chaos_foreign import ForeignError  # type: ignore[import-not-found]

    raise ForeignError("nobody else knows this class")


def _leave_a_child() -> None:
    """It is to be ended with its slot."""
    child = subprocess.Popen(["sleep", "1000"])
    write(child=child.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def _print_much() -> None:
    sys.stdout.write("x" * 1_000_000)


KINDS = (
    Poison("cancelled", lambda: _raise(asyncio.CancelledError("of a task")), says="CancelledError"),
    Poison("generator", lambda: _raise(GeneratorExit()), says="GeneratorExit"),
    Poison("doom", lambda: _raise(Doom("neither nor")), says="Doom"),
    Poison("exit", lambda: sys.exit("enough"), tame=False),
    Poison("hard exit", lambda: os._exit(0), tame=False),
    Poison("sigterm", _terminate_oneself, tame=False),
    Poison("twins", os.fork, end="", tame=False),
    Poison("thread", lambda: threading.Thread(target=time.sleep, args=(1000,)).start(), end="success", tame=False),
    Poison("child", _leave_a_child, tame=False),
    Poison("output", _print_much, end="success"),
    Poison("foreign", _raise_foreign_error, says="ForeignError"),
    Poison("long text", lambda: _raise(ValueError("x" * _LONG_TEXT)), says="ValueError: xxx"),
)


def kind_of(n: int) -> Poison | None:
    """What kind of poison a number is; most are none."""
    number = n % _EVERY - _FIRST
    return KINDS[number] if 0 <= number < len(KINDS) else None


def condition(only_tame: bool = False) -> str:
    """SQL that chooses the numbers that are poison."""
    chosen = [str(_FIRST + number) for number, kind in enumerate(KINDS) if kind.tame or not only_tame]
    return f"MOD(n, {_EVERY}) IN ({', '.join(chosen)})"


# -- who was called ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of make(), and a process that it left behind."""

    pid: int
    supervisor: int
    n: int = -1
    child: int = 0


def write(**words: int) -> None:
    """Note something about this call of make(), whatever becomes of its transaction."""
    line = json.dumps({"pid": os.getpid(), "supervisor": os.getppid(), **words}) + "\n"
    log = os.open(_log(os.environ["CHAOS_FOLDER"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, line.encode())
    os.close(log)


def calls(folder: Path) -> list[Call]:
    """All calls so far."""
    log = Path(_log(folder))
    lines = log.read_text().splitlines() if log.exists() else []
    return [Call(**json.loads(line)) for line in lines]


def _log(folder: str | Path) -> str:
    return f"{folder}/poison.log"
