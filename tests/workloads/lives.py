"""Workers that live, hang, sleep and die: what the tests of leases, retries, time-outs and cancelling share."""

from __future__ import annotations

import ctypes
import secrets
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datajoint as dj
import psutil
from helpers import wait_for
from pipelines import Child, forked, rows_of

import djjobs
from djjobs.queue import judge
from djjobs.queue.queue import Queue
from workloads.squares import another_connection, change_jobs, insert_square, rows_by_number, squares


class Gate:
    """A door between processes: whoever goes through waits until somebody opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        self._path.touch()

    @property
    def is_open(self) -> bool:
        return self._path.exists()

    def wait(self, timeout: float = 60) -> None:
        wait_for(lambda: self.is_open, timeout, every=0.02)


def hold_the_interpreter(seconds: float) -> None:
    """Code stuck in C: no other thread of the process, and no handler of a signal, runs meanwhile."""
    library = ctypes.PyDLL(None)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        # A signal ends the sleep early; a real computation would not care.
        library.usleep(min(900_000, int(left * 1e6) + 1))


def stuck_in_c(seconds: int) -> None:
    """The same, but Python gets no say between the parts: pending handlers do not run until the end."""
    library = ctypes.PyDLL(None)
    # Blocked in this thread, a signal neither cuts the sleep short nor reaches Python.
    everything = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    library.sleep(seconds)
    signal.pthread_sigmask(signal.SIG_SETMASK, everything)


# -- processes ------------------------------------------------------------------------------------------------


@contextmanager
def populating(table: Any, count: int = 1, **words: Any) -> Iterator[list[Child]]:
    """So many processes, each in a populate of its own; they are killed at the end, and their monitors with them."""
    words = {"reserve_jobs": True, **words}
    with forked(table.Number, count, lambda _: table.populate(**words)) as children:
        try:
            yield children
        finally:
            for child in children:
                kill_tree(child.process.pid)


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started, as a node that loses its power does: none can do anything after."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        top.suspend()
        family = [*top.children(recursive=True), top]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def monitor_of(child: Child) -> psutil.Process:
    """The process that keeps a populate alive: the only one that it has started."""
    (monitor,) = psutil.Process(child.process.pid).children()
    return monitor


# -- what the tables say ----------------------------------------------------------------------------------------


def job_of(table: Any, n: int) -> dict[str, Any]:
    """The row of a number's job; empty if it has none."""
    return rows_by_number(table).get(n, {})


def status_of(table: Any, n: int) -> str | None:
    return job_of(table, n).get("status")


def kinds(row: dict[str, Any]) -> list[str]:
    """How each attempt ended."""
    return [attempt["kind"] for attempt in row["attempts"] or []]


def worker_rows(table: Any) -> list[dict[str, Any]]:
    return rows_of(djjobs.workers(table.Number))


def forget_all_workers(table: Any) -> None:
    djjobs.workers(table.Number).delete_quick()


def lose(table: Any, numbers: Iterable[int], silent_for: float = 2.5, lease: float = 0.4) -> str:
    """Let a worker that was last heard of so long ago have these jobs; return its id.

    What the tables look like when a whole node has gone, and somebody of this machine has seen that it does not answer,
    without waiting for it.
    """
    connection, worker = table.Number.connection, str(uuid.uuid4())
    now = ago(connection, 0)
    then = ago(connection, silent_for)
    connection.query(
        f"INSERT INTO {djjobs.workers(table.Number).full_table_name} "
        "(worker_id, host, pid, started, last_heartbeat, lease) "
        f"VALUES ('{worker}', 'gone.example', 4711, {then}, {then}, {lease})"
    )
    changes = f"status='reserved', worker_id='{worker}', claim=7, host='gone.example', pid=4711, timestamp={now}"
    change_jobs(table, numbers, changes)
    note_sighting(table, worker, silent_for)
    return worker


def note_sighting(table: Any, worker: str, silent_for: float) -> None:
    """Somebody of this machine has seen so long ago that the worker had sent the heartbeat that it has sent last."""
    queue = Queue.of(table().connection, table.database)
    signs, sightings = judge._signs(queue, [table.table_name]), judge.Sightings(queue)
    seen = sightings.load()
    seen[worker] = signs[worker].heartbeat, time.monotonic() - silent_for
    sightings.save(seen, signs)


def ago(connection: Any, seconds: float) -> str:
    """SQL of the moment so many seconds ago by the server's clock, in UTC."""
    if is_postgresql(connection):
        return f"((statement_timestamp() - {seconds} * INTERVAL '1 second') AT TIME ZONE 'UTC')"
    return f"(UTC_TIMESTAMP(6) - INTERVAL {int(seconds * 1e6)} MICROSECOND)"


def is_postgresql(connection: Any) -> bool:
    return getattr(getattr(connection, "adapter", None), "backend", "mysql") == "postgresql"


def seconds_until_due(table: Any, n: int) -> float:
    """How long a job still has to wait, by the server's clock."""
    connection, row = table.Number.connection, job_of(table, n)
    now = connection.query(f"SELECT {ago(connection, 0)}").fetchone()[0]
    return (row["due_time"] - now).total_seconds()


# -- connections -----------------------------------------------------------------------------------------------


def own_number(connection: Any) -> int:
    """The number that the server knows this connection by."""
    which = "pg_backend_pid()" if is_postgresql(connection) else "CONNECTION_ID()"
    return connection.query(f"SELECT {which}").fetchone()[0]


def cut(victim: int) -> None:
    """End a connection from the server's side, and wait until it is gone."""
    killer = another_connection()
    try:
        if is_postgresql(killer):
            killer.query(f"SELECT pg_terminate_backend({victim}, 10000)")
            return
        with suppress(Exception):
            killer.query(f"KILL {victim}")
        alive = f"SELECT 1 FROM information_schema.processlist WHERE id = {victim}"
        wait_for(lambda: not killer.query(alive).fetchall())
    finally:
        killer.close()


def other_connections(mine: Any) -> list[int]:
    """The numbers of all connections to the server but this one."""
    if is_postgresql(mine):
        others = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    else:
        others = (
            "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() "
            "AND user NOT IN ('system user', 'event_scheduler') AND command <> 'Daemon'"
        )
    return [row[0] for row in mine.query(others).fetchall()]


def cut_all_but(mine: Any) -> int:
    """End all connections to the server but this one; return how many there were."""
    numbers = other_connections(mine)
    for number in numbers:
        with suppress(Exception):  # it has gone by itself meanwhile
            mine.query(f"SELECT pg_terminate_backend({number})" if is_postgresql(mine) else f"KILL {number}")
    return len(numbers)


class PlainUser:
    """A user who may use the tables of one schema and not see who else is connected; and Square as they see it."""

    def __init__(self, settings: dict[str, Any], table: Any, make: Callable[..., None] = insert_square) -> None:
        self._admin, database = table.Number.connection, table.database
        self._name, password = f"plain_{secrets.token_hex(4)}", secrets.token_hex(8)
        rights = "SELECT, INSERT, UPDATE, DELETE, REFERENCES"
        if is_postgresql(self._admin):
            self._admin.query(f"CREATE ROLE {self._name} LOGIN PASSWORD '{password}'")
            self._admin.query(f'GRANT USAGE ON SCHEMA "{database}" TO {self._name}')
            self._admin.query(f'GRANT {rights} ON ALL TABLES IN SCHEMA "{database}" TO {self._name}')
        for user in self._users():
            self._admin.query(f"CREATE USER {user} IDENTIFIED BY '{password}'")
            self._admin.query(f"GRANT {rights} ON `{database}`.* TO {user}")
        where = {name: settings[f"database.{name}"] for name in ("host", "port", "use_tls")}
        self.connection = dj.Connection(user=self._name, password=password, **where)
        schema = dj.Schema(database, connection=self.connection, create_schema=False, create_tables=False)
        self.Square = squares(schema, 0, make)

    def _users(self) -> list[str]:
        if is_postgresql(self._admin):
            return []
        # MySQL's users have hosts, and MariaDB's nameless user of localhost would go before one of any host
        return [f"'{self._name}'@'{host}'" for host in ("%%", "localhost")]

    def sees_connections(self) -> int:
        """How many connections of other users this one sees at work."""
        if is_postgresql(self.connection):
            others = f"SELECT COUNT(query_start) FROM pg_stat_activity WHERE usename <> '{self._name}'"
        else:
            others = f"SELECT COUNT(*) FROM information_schema.processlist WHERE user <> '{self._name}'"
        return self.connection.query(others).fetchone()[0]

    def __enter__(self) -> PlainUser:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(Exception):
            self.connection.close()
        if is_postgresql(self._admin):
            self._admin.query(f"DROP OWNED BY {self._name}")
            self._admin.query(f"DROP ROLE {self._name}")
        for user in self._users():
            self._admin.query(f"DROP USER {user}")
