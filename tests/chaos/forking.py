"""Starts workers. Importing DataJoint takes longer than most workers live here, so they are forked after that.

Run as a module it reads orders from its input, one JSON line each, and says on its output who started and who ended.
All it has started dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

#: The arguments of Python for each kind of worker.
COMMANDS = {"worker": ["-m", "djjobs.cli", "worker", "chaos.pipeline"], "script": ["-m", "chaos.script"]}


def declare() -> int:
    """Declare the pipeline and its queue."""
    from chaos import pipeline

    pipeline.Square.jobs
    pipeline.Twin()
    pipeline.Poison()
    return 0


def worker(arguments: list[str]) -> int:
    from djjobs.cli import main

    sys.argv = ["djjobs", "worker", "chaos.pipeline", *arguments]
    main()
    return 0


def script(arguments: list[str]) -> int:
    from chaos.script import main

    return main(arguments)


def serve() -> None:
    import djjobs.cli
    import djjobs.worker  # noqa: F401

    orders = b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                say(started=start(**json.loads(line)))
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                say(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def start(kind: str, arguments: list[str], fresh: bool, log: str) -> int:
    """Start a worker, with a Python of its own if it is to be `fresh`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    # Who does not do as it should can be asked where it is.
    faulthandler.register(signal.SIGUSR1)
    if fresh:
        os.execv(sys.executable, [sys.executable, *COMMANDS[kind], *arguments])
    work: dict[str, Callable[[], int]] = {
        "declare": declare,
        "worker": lambda: worker(arguments),
        "script": lambda: script(arguments),
    }
    live(work[kind])


def live(work: Callable[[], int]) -> NoReturn:
    code: Any = 1
    try:
        code = work()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve()
