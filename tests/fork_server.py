"""Python commands that start at once: they are forked from a process that has DataJoint and djjobs loaded.

To import DataJoint takes most of a second, and the tests start some hundred commands. What `start` returns is a
process like any other, with its own session, folder, environment, files, signals and exit code.

This file is both sides. The tests import it and call `start` or `run`. Run as a script, it is the server: it reads
orders from the socket that is its standard input. The first server has loaded what DataJoint needs, and nothing that
reads the environment. For each environment it forks another one, which imports DataJoint and djjobs there. That one
forks the commands.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["Forked", "begin", "run", "start"]

#: What takes long to import and does not read the environment. What is missing here costs time only.
OF_OTHERS = """
    numpy pandas networkx pyparsing tqdm psutil click.testing rich.console rich.table rich.progress cronsim asyncio
    pymysql psycopg2.extras pydantic_settings fsspec cryptography.hazmat.primitives.serialization packaging.version
    minio deepdiff matplotlib.pyplot IPython.display multiprocessing.pool xml.etree.ElementTree
""".split()
#: What a server for one environment imports.
OURS = ["datajoint", "djjobs.cli", "djjobs.worker"]
#: Variables that nothing reads while it is imported: commands that differ in these have one server.
READ_LATE = ("PYTEST_CURRENT_TEST", "WORKER_LAB", "SCHEDULE_LAB", "FILLING", "SLURM_", "COLUMNS", "NO_COLOR")
#: So many servers for one environment each are kept.
MOST_SERVERS = 12

# -- the side of the tests ----------------------------------------------------------------------------------------


class Forked:
    """A command that was forked, with the attributes and methods of `subprocess.Popen` that the tests use."""

    def __init__(self, words: Sequence[str], pid: int, report: int, stdout: IO[str] | None) -> None:
        self.args, self.pid, self.stdout = [sys.executable, *words], pid, stdout
        self.returncode: int | None = None
        self._report = report

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = hear(self._report)
            os.close(self._report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has written to its standard output until its end."""
        assert self.stdout
        text = self.stdout.read()
        self.wait(timeout)
        return text, None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


class _Servers:
    """The first server, and those for one environment each."""

    def __init__(self) -> None:
        self._first: socket.socket | None = None
        self._path = ""
        self._others: dict[str, socket.socket] = {}

    def begin(self) -> None:
        """Start the first server, which loads what it has to while the tests go on."""
        if self._first is None:
            self._first, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._path = os.environ.get("PYTHONPATH", "")
            with theirs:
                subprocess.Popen([sys.executable, __file__], stdin=theirs, cwd=Path(__file__).parent)

    def can_serve(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        self.begin()
        return words[0] in ("-m", "-c") and environment.get("PYTHONPATH", "") == self._path

    def send(self, order: dict[str, Any], files: list[int]) -> tuple[int, int]:
        """Have a command forked; return its process id and where its exit code will be told."""
        report, theirs = os.pipe()
        try:
            socket.send_fds(self._for(order["environment"]), [json.dumps(order).encode()], [*files, theirs])
        finally:
            os.close(theirs)
        return hear(report), report

    def _for(self, environment: dict[str, str]) -> socket.socket:
        """The server for this environment."""
        kept = {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
        key = json.dumps(kept, sort_keys=True)
        if key not in self._others:
            while len(self._others) >= MOST_SERVERS:
                self._others.pop(next(iter(self._others))).close()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            assert self._first
            with theirs:
                order = {"modules": OURS, "environment": kept}
                socket.send_fds(self._first, [json.dumps(order).encode()], [theirs.fileno()])
            self._others[key] = ours
        self._others[key] = found = self._others.pop(key)  # the last is the one that was used last
        return found


def hear(report: int) -> int:
    """The next number that the server tells: first the process id, then the exit code."""
    told = os.read(report, _NUMBER.size)
    if not told:
        raise RuntimeError("The fork server has died; its standard error tells why")
    return _NUMBER.unpack(told)[0]


_NUMBER = struct.Struct("q")
_servers = _Servers()


def begin() -> None:
    """Let the server get ready, for those who will need it soon."""
    if sys.platform == "linux":
        _servers.begin()


def start(
    words: Sequence[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
) -> Forked | subprocess.Popen[str]:
    """Start `python WORDS`, as `subprocess.Popen` does; text comes through pipes, and only stdout can be one.

    What cannot be forked (other options of Python, another PYTHONPATH) gets an interpreter of its own.
    """
    environment = dict(os.environ if env is None else env)
    if sys.platform != "linux" or not _servers.can_serve(words, environment):
        files = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "start_new_session": start_new_session}
        return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment, text=True, **files)
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "r+b"))
        pipe: IO[str] | None = None
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            stack.callback(os.close, stdout)
            pipe = open(ours)  # noqa: SIM115 - the caller closes it

        def number(file: Any, usual: int) -> int:
            if file == subprocess.DEVNULL:
                return nothing.fileno()
            return usual if file is None else file if isinstance(file, int) else file.fileno()

        files_of_child = [number(stdin, 0), number(stdout, 1), number(stderr, 2)]
        order = {
            "words": list(words),
            "folder": str(cwd or os.getcwd()),
            "environment": environment,
            "new_session": start_new_session,
        }
        return Forked(words, *_servers.send(order, files_of_child), pipe)


def run(
    words: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end; what it writes is in the result, as text."""
    with open_for_both("stdout") as out, open_for_both("stderr") as err:
        process = start(words, cwd=cwd, env=env, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(process.args, code, *texts)


def open_for_both(name: str) -> IO[str]:
    """A file without a name that a process writes and this one reads."""
    return open(os.memfd_create(name), "w+") if sys.platform == "linux" else _temporary()


def _temporary() -> IO[str]:
    import tempfile

    return tempfile.TemporaryFile("w+")


# -- the side of the server ----------------------------------------------------------------------------------------


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork whatever is ordered, and report who has ended. Returns in a command alone, with its order."""
    children: dict[int, tuple[int, int]] = {}  # by file: the process and where to report
    listening = True
    while listening or children:
        ready, _, _ = select.select([*children, *([orders] if listening else [])], [], [])
        for file in set(ready) & set(children):
            pid, report = children.pop(file)
            tell(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(report)
            os.close(file)
        if orders not in ready:
            continue
        message, files, _, _ = socket.recv_fds(orders, 1 << 20, 4)
        if not message:
            listening = False
            continue
        order = json.loads(message)
        pid = os.fork()
        if not pid:
            orders.close()
            for file, (_, report) in children.items():
                os.close(file)
                os.close(report)
            if "words" in order:
                become(order, files)
                return order
            children.clear()
            orders = socket.socket(fileno=files[0])
            load(order)
        elif "words" in order:
            tell(files[3], pid)
            children[os.pidfd_open(pid)] = pid, files[3]
            for file in files[:3]:
                os.close(file)
        else:
            os.close(files[0])
            # A server ends when nobody needs it any more, and nobody asks how.
            children[os.pidfd_open(pid)] = pid, os.open(os.devnull, os.O_WRONLY)
    sys.exit()


def tell(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(report, _NUMBER.pack(number))


def load(order: dict[str, Any]) -> None:
    use_environment(order["environment"])
    for name in order["modules"]:
        importlib.import_module(name)


def use_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()


def become(order: dict[str, Any], files: list[int]) -> None:
    """Give this process all that a new interpreter would have been given."""
    if order["new_session"]:
        os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(order["folder"])
    use_environment(order["environment"])
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    importlib.invalidate_caches()


def live(order: dict[str, Any]) -> None:
    """Do what `python WORDS` does."""
    option, what, *arguments = order["words"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.argv = [option, *arguments]
    sys.path[0] = "" if option == "-c" else order["folder"]
    if option == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        exec(compile(what, "<string>", "exec"), vars(main))


def live_and_end(order: dict[str, Any]) -> NoReturn:
    """Live, and end as an interpreter does; but what it has loaded is not taken apart, which would take long."""
    code = 1
    try:
        live(order)
        code = 0
    except SystemExit as end:
        code = code_of(end)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    _orders = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as _nothing:
        os.dup2(_nothing.fileno(), 0)
    for _name in OF_OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
    live_and_end(serve(_orders))
