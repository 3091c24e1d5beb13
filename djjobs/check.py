"""`djjobs check`: what is wrong with a set-up, and how to mend it. Looks, and changes nothing."""

from __future__ import annotations

import datetime
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import datajoint as dj

from .dj.compat import AccessError, datajoint_api
from .queue.database import connected
from .queue.queue import Queue, version_of
from .queue.tables import JobControl, Jobs, Runs, Sightings, Workers
from .recurring.rows import Timetable
from .settings import settings
from .sql import engine_for
from .sql.check import DECLARING, USING, WRITING, MySQLProbes, PostgreSQLProbes, skip_locked
from .table.adopt import auto_populated

__all__ = ["Finding", "check"]

#: The oldest servers whose SKIP LOCKED and JSON the queue can use.
_OLDEST = {"MySQL": (8, 0), "MariaDB": (10, 6), "PostgreSQL": (14,)}
#: What a worker takes besides a connection for each slot: its own, and one for heartbeats.
_CONNECTIONS_OF_A_WORKER = 2
_NEARLY_ALL = 0.8
#: The switches of MySQL and MariaDB.
_READ_ONLY = ("read_only", "super_read_only", "innodb_read_only")


@dataclass(frozen=True)
class Finding:
    """What one look at the set-up gave.

    Attributes
    ----------
    level : str
        "ok", "warning" or "problem"; with a problem, workers would not work.
    subject : str
        What was looked at.
    message : str
        What was seen.
    remedy : str
        What to do about it. Defaults to nothing.
    """

    level: str
    subject: str
    message: str
    remedy: str = ""


def check(schema_or_module: Any = None) -> list[Finding]:
    """Look for what is wrong with a set-up.

    Parameters
    ----------
    schema_or_module : dj.Schema or module
        The pipeline whose queues and rights to look at as well. Defaults to none, only the server.

    Returns
    -------
    list of Finding

    Raises
    ------
    DjJobsError
        If there is no connection to the server.
    """
    connection = getattr(schema_or_module, "connection", None) or connected()
    server = _server_of(connection)
    databases = _databases(schema_or_module)
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("DataJoint", _datajoint),
        ("settings", _settings),
        ("server", lambda: _version(server)),
        ("SKIP LOCKED", lambda: _skip_locked(server)),
        ("transactions", server.transactions),
        ("connections", lambda: _connections(server, databases)),
        ("clock", lambda: _clock(server)),
    ]
    for database, targets in databases.items():
        looks.append((f"queue of {database}", lambda database=database: _queue(connection, database)))  # type: ignore[misc]
        looks.append((f"schedules of {database}", lambda database=database: _schedules(connection, database)))  # type: ignore[misc]
        looks.append(
            (
                f"rights in {database}",
                lambda database=database, targets=targets: _rights(server, database, targets),  # type: ignore[misc]
            )
        )
    return [finding for subject, look in looks for finding in _findings(subject, look)]


def _findings(subject: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What a look gave; that a server does not answer a question is no reason not to ask the next."""
    try:
        return list(look())
    except Exception as error:
        return [Finding("warning", subject, f"This could not be found out: {_first_line(error)}")]


def _databases(schema_or_module: Any) -> dict[str, list[Any]]:
    """The schemas to look at, each with the tables that workers will insert into."""
    if schema_or_module is None:
        return {}
    databases: dict[str, list[Any]] = {}
    if not isinstance(schema_or_module, ModuleType):
        databases[schema_or_module.database] = []
    else:
        for value in vars(schema_or_module).values():
            if isinstance(value, dj.Schema) and value.is_activated():
                databases.setdefault(value.database, [])
    for table in auto_populated(schema_or_module):
        databases.setdefault(table.database, []).append(table())  # type: ignore[attr-defined]
    return databases


# -- the looks -------------------------------------------------------------------------------------------


def _datajoint() -> Iterator[Finding]:
    # A DataJoint that does not fit is told when djjobs is imported.
    yield Finding("ok", "DataJoint", f"DataJoint {dj.__version__}.")


def _settings() -> Iterator[Finding]:
    beat, lease = settings.heartbeat_interval, settings.lease
    what = f"A lease of {lease:g} s with a heartbeat every {beat:g} s"
    if lease < 2 * beat:
        yield Finding(
            "problem",
            "settings",
            f"{what}: one late heartbeat, and a worker that is alive loses its jobs.",
            f"Set DJJOBS_LEASE to {2 * beat:g} or more (better {6 * beat:g}), or DJJOBS_HEARTBEAT_INTERVAL to less.",
        )
    else:
        yield Finding("ok", "settings", f"{what}.")


def _version(server: _Server) -> Iterator[Finding]:
    info = server.connection.conn_info
    kind, version, text = server.version()
    oldest = ".".join(map(str, _OLDEST[kind]))
    what = f"{kind} {text} at {info['host']}:{info['port']}, as user {info['user']}."
    if version < _OLDEST[kind]:
        yield Finding("problem", "server", what, f"It takes {kind} {oldest} or newer: upgrade the server.")
    else:
        yield Finding("ok", "server", what)
    if server.is_read_only():
        yield Finding(
            "problem",
            "server",
            "It takes no changes: a replica, or set to read-only.",
            "Connect to the primary server.",
        )


def _skip_locked(server: _Server) -> Iterator[Finding]:
    try:
        server.ask(skip_locked)
    except Exception as error:
        remedy = "Jobs are claimed with it: use MySQL 8.0, MariaDB 10.6, PostgreSQL 14, or newer."
        yield Finding("problem", "SKIP LOCKED", f"The server does not have it ({_first_line(error)}).", remedy)
    else:
        yield Finding("ok", "SKIP LOCKED", "The server has it.")


def _connections(server: _Server, databases: dict[str, list[Any]]) -> Iterator[Finding]:
    most, used = server.connections()
    workers = [row for database in databases for row in _workers(server.connection, database)]
    needed = sum(row["slots"] + _CONNECTIONS_OF_A_WORKER for row in workers)
    what = f"{used} of {most} connections are in use"
    what += f"; {len(workers)} workers here take up to {needed}." if workers else "."
    remedy = (
        "Raise max_connections on the server, or run fewer workers: "
        f"each takes {_CONNECTIONS_OF_A_WORKER} and one for each of its processes."
    )
    if needed > most:
        yield Finding("problem", "connections", what, remedy)
    elif used >= _NEARLY_ALL * most:
        yield Finding("warning", "connections", what, remedy)
    else:
        room = max((most - used) // (1 + _CONNECTIONS_OF_A_WORKER), 0)
        yield Finding("ok", "connections", f"{what} There is room for {room} more workers of one process.")


def _workers(connection: Any, database: str) -> list[dict[str, Any]]:
    workers = Workers(connection, database)
    return datajoint_api.dicts((workers & "state <> 'dead'").proj("slots")) if workers.is_declared else []


def _clock(server: _Server) -> Iterator[Finding]:
    before = _utc_now()
    theirs = server.utc_now()
    after = _utc_now()
    ahead = (theirs - (before + (after - before) / 2)).total_seconds()
    side = "ahead of" if ahead > 0 else "behind"
    what = (
        f"The server's is {abs(ahead):.1f} s {side} this machine's" if abs(ahead) >= 0.1 else "The same as the server's"
    )
    yield Finding("ok", "clock", f"{what}; only the server's counts.")


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)


def _queue(connection: Any, database: str) -> Iterator[Finding]:
    jobs, subject = Jobs(connection, database), f"queue of {database}"
    if not jobs.is_declared:
        yield Finding("ok", subject, "There is none yet; the first use will make it.")
        return
    version = version_of(jobs)
    if version == "legacy":
        yield Finding("problem", subject, "~jobs was made by DataJoint 0.14.", f"Type: djjobs migrate {database}")
    elif version == "unknown":
        what = "~jobs is of a version that this djjobs does not know, or somebody else's table."
        yield Finding("problem", subject, what, "Install the djjobs that made it, or rename the table.")
    elif version == "unfinished":
        yield Finding("warning", subject, "Whoever made it did not finish.", "Nothing to do: the next use will.")
    else:
        yield Finding("ok", subject, f"~jobs is up to date and holds {len(jobs)} jobs.")


def _schedules(connection: Any, database: str) -> Iterator[Finding]:
    """Nothing where there are none."""
    if any(not table.is_declared for table in Timetable.tables_in(connection, database)):
        return
    timetable, subject = Timetable(Queue(connection, database)), f"schedules of {database}"
    awake = [schedule for schedule in timetable.everything() if schedule.enabled]
    if not awake:
        return
    leaders = timetable.living_leaders({schedule.target for schedule in awake})
    alone = [schedule for schedule in awake if schedule.target not in leaders]
    if alone:
        targets = shlex.join(sorted({schedule.target.partition(":")[0] for schedule in alone}))
        remedy = f"Type: djjobs scheduler {targets} (or give a worker the option --with-scheduler)"
        yield Finding("warning", subject, f"Nobody fires {len(alone)} of {len(awake)}: no scheduler runs.", remedy)
    else:
        where = ", ".join(sorted({leader.where for leader in leaders.values()}))
        yield Finding("ok", subject, f"{len(awake)}, fired by {where}.")


def _rights(server: _Server, database: str, targets: list[Any]) -> Iterator[Finding]:
    """Whether the user may use the queue and write results; and make the queue, if that is still to be done."""
    connection, subject = server.connection, f"rights in {database}"
    queue = [kind(connection, database) for kind in (Jobs, JobControl, Workers, Sightings, Runs)]
    declared = [table for table in queue if table.is_declared]
    missing = {table.table_name: server.lacks(table.full_table_name, WRITING) for table in declared}
    if len(declared) < len(queue):
        missing["the schema"] = server.lacks_in_schema(database)
    for table in targets:
        missing[type(table).__name__] = server.lacks(table.full_table_name, USING)
    user = connection.conn_info["user"]
    gaps = [f"{', '.join(rights)} on {where}" for where, rights in missing.items() if rights]
    if gaps:
        what = f"The user {user} lacks {'; '.join(gaps)}."
        yield Finding("problem", subject, what, f"Have this run: {server.grant(database)}")
    else:
        yield Finding("ok", subject, f"The user {user} has those that a worker needs.")


# -- the servers -------------------------------------------------------------------------------------------


class _Version(NamedTuple):
    kind: str
    numbers: tuple[int, ...]
    text: str


class _Server(ABC):
    """What a server tells of itself."""

    _probes: type[MySQLProbes] | type[PostgreSQLProbes]

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.engine = engine_for(datajoint_api.backend(connection))

    def ask(self, sql: str, **parameters: str) -> Any:
        return self.connection.query(sql, args=parameters).fetchone()[0]

    def utc_now(self) -> datetime.datetime:
        return self.ask(self.engine.render(self.engine.connection.server_time))

    def is_denied(self, sql: str) -> bool:
        """Whether the server refuses a statement for want of a privilege; any other refusal does not count."""
        try:
            self.connection.query(sql)
        except Exception as error:
            return isinstance(error, AccessError) or self.engine.errors.diagnose(error) == "access"
        return False

    @abstractmethod
    def version(self) -> _Version: ...

    @abstractmethod
    def is_read_only(self) -> bool: ...

    @abstractmethod
    def transactions(self) -> Iterator[Finding]: ...

    @abstractmethod
    def connections(self) -> tuple[int, int]:
        """How many there may be, and how many there are."""

    @abstractmethod
    def lacks(self, table: str, rights: tuple[str, ...]) -> list[str]:
        """Those of the rights that the user does not have on a table."""

    @abstractmethod
    def lacks_in_schema(self, database: str) -> list[str]:
        """The rights that the user lacks for making a queue and using it."""

    def grant(self, database: str) -> str:
        """The statement that gives the user all rights that it needs."""
        return self._probes.grant(database, self.ask(self._probes.current_user))


class _MySQL(_Server):
    """MySQL and MariaDB."""

    _probes = MySQLProbes

    def version(self) -> _Version:
        text = self.ask(self._probes.version)
        # MariaDB once said that it was MySQL 5.5.5, for old replicas.
        numbers = re.search(r"(\d+)\.(\d+)", text.removeprefix("5.5.5-"))
        kind = "MariaDB" if "mariadb" in text.lower() else "MySQL"
        return _Version(kind, tuple(map(int, numbers.groups())) if numbers else (), text)

    def _variables(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.connection.query(self._probes.variables).fetchall()}

    def is_read_only(self) -> bool:
        variables = self._variables()
        return any(variables.get(name, "OFF") not in ("OFF", "0") for name in _READ_ONLY)

    def transactions(self) -> Iterator[Finding]:
        variables = self._variables()
        isolation = variables.get("transaction_isolation") or variables.get("tx_isolation") or "?"
        if variables["autocommit"] != "ON":
            remedy = "DataJoint needs it: remove it from the server's init_connect and DataJoint's init_function."
            yield Finding("problem", "transactions", "autocommit is off.", remedy)
        if variables.get("log_bin") == "ON" and variables.get("binlog_format") == "STATEMENT":
            what = "binlog_format is STATEMENT, which forbids the queue's READ COMMITTED."
            yield Finding("problem", "transactions", what, "Set binlog_format to ROW (or MIXED) on the server.")
        yield _isolation_finding(isolation.replace("-", " "))

    def connections(self) -> tuple[int, int]:
        variables = self._variables()
        limits = [int(variables[name]) for name in ("max_connections", "max_user_connections")]
        used = int(self.connection.query(self._probes.used_connections).fetchone()[1])
        return min(limit for limit in limits if limit), used

    def lacks(self, table: str, rights: tuple[str, ...]) -> list[str]:
        return [right for right in rights if self.is_denied(self._probes.trials[right].format(table=table))]

    def lacks_in_schema(self, database: str) -> list[str]:
        # No such table: what is allowed fails for want of the table.
        return self.lacks(f"`{database}`.`~djjobs_check_no_such_table`", (*WRITING, *DECLARING))


class _PostgreSQL(_Server):
    _probes = PostgreSQLProbes

    def version(self) -> _Version:
        return _Version(
            "PostgreSQL", (int(self._setting("server_version_num")) // 10000,), self._setting("server_version")
        )

    def _setting(self, name: str) -> str:
        return self.ask(self._probes.setting, name=name)

    def is_read_only(self) -> bool:
        return self._setting("transaction_read_only") == "on"

    def transactions(self) -> Iterator[Finding]:
        yield _isolation_finding(self._setting("default_transaction_isolation").upper())

    def connections(self) -> tuple[int, int]:
        most = int(self._setting("max_connections")) - int(self._setting("superuser_reserved_connections"))
        return most, int(self.ask(self._probes.used_connections))

    def lacks(self, table: str, rights: tuple[str, ...]) -> list[str]:
        return [right for right in rights if not self.ask(self._probes.has_table_right, table=table, right=right)]

    def lacks_in_schema(self, database: str) -> list[str]:
        probes = self._probes
        rights = probes.schema_rights
        return [right for right in rights if not self.ask(probes.has_schema_right, schema=database, right=right)]


def _server_of(connection: Any) -> _Server:
    kinds: dict[str, type[_Server]] = {"mysql": _MySQL, "postgresql": _PostgreSQL}
    return kinds[datajoint_api.backend(connection)](connection)


def _isolation_finding(isolation: str) -> Finding:
    """The queue sets READ COMMITTED for itself; the server's default is what make() runs under."""
    what = f"make() runs under {isolation}, the server's default; the queue under READ COMMITTED."
    if isolation == "SERIALIZABLE":
        remedy = "Set transaction_isolation to REPEATABLE READ or READ COMMITTED."
        return Finding("warning", "transactions", f"{what} Rows that make() reads are locked.", remedy)
    return Finding("ok", "transactions", what)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
