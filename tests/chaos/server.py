"""The database as a bystander sees it: its own connection, plain SQL, and none of the code under test."""

from __future__ import annotations

import contextlib
import json
import secrets
from importlib.metadata import version
from typing import Any

#: As whom the workers connect. For an administrator there is always a connection left, and nothing is read-only.
USER = "lab"


class Bystander:
    """A connection to a private server that outlives its restarts."""

    def __init__(self, server: Any, schema: str) -> None:
        self._server, self.schema = server, schema
        self.is_postgresql = server.backend == "postgresql"
        self._connection: Any = None

    def table(self, name: str) -> str:
        quote = '"' if self.is_postgresql else "`"
        return f"{quote}{self.schema}{quote}.{quote}{name}{quote}"

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query; a connection that is gone is opened anew once."""
        try:
            return self._ask(sql)
        except Exception:
            self.close()
            return self._ask(sql)

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self.connect()
        return execute(self._connection, sql)

    def connect(self) -> Any:
        """A new connection of an administrator."""
        where = {"host": self._server.host, "port": self._server.port, "user": self._server.user}
        if self.is_postgresql:
            import psycopg2

            # The administrator must be able to end a read-only spell.
            where |= {"dbname": "postgres", "options": "-c default_transaction_read_only=off"}
            connection = psycopg2.connect(**where, password=self._server.password)
            connection.autocommit = True
            return connection
        import pymysql

        return pymysql.connect(**where, password=self._server.password, autocommit=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.close()
        self._connection = None

    def settings_of_workers(self) -> dict[str, Any]:
        """What a worker's DataJoint needs to connect as a plain user, which is made here."""
        password = secrets.token_hex(8)
        if self.is_postgresql:
            self.ask(f"CREATE ROLE {USER} LOGIN PASSWORD '{password}'")
            self.ask(f"GRANT CREATE ON DATABASE postgres TO {USER}")
        else:
            self.ask(f"CREATE USER '{USER}'@'%' IDENTIFIED BY '{password}'")
            self.ask(f"GRANT ALL ON `{self.schema}`.* TO '{USER}'@'%'")
        return {**self._server.settings, "database.user": USER, "database.password": password}

    @property
    def has_super_read_only(self) -> bool:
        """Whether the server can refuse an administrator's changes, too. MariaDB cannot."""
        return bool(self.ask("SHOW VARIABLES LIKE 'super_read_only'"))

    # -- the pipeline ------------------------------------------------------------------------------------

    def tables(self) -> list[str]:
        """All tables of the schema, those of the queue among them."""
        sql = f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{self.schema}'"
        return sorted(name for (name,) in self.ask(sql))

    def feed(self, numbers: range) -> None:
        values = ", ".join(f"({n})" for n in numbers)
        self.ask(f"INSERT INTO {self.table('number')} (n) VALUES {values}")

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, with what is to be known of them."""
        key = '"key"' if self.is_postgresql else "`key`"
        columns = ("table_name", "status", "attempt", "attempts", "worker_id", "error_message")
        rows = self.ask(f"SELECT {', '.join(columns)}, {key} FROM {self.table('~jobs')}")
        jobs = [dict(zip((*columns, "key"), row, strict=True)) for row in rows]
        for job in jobs:
            for name in ("attempts", "key"):
                job[name] = json.loads(job[name]) if isinstance(job[name], str) else job[name]
        return jobs

    def made(self, name: str) -> list[int]:
        return [n for (n,) in self.ask(f"SELECT n FROM {self.table(name)} ORDER BY n")]

    def entries(self) -> list[tuple[str, int]]:
        return [(made, n) for made, n in self.ask(f"SELECT made, n FROM {self.table('entry')}")]

    def is_drained(self, squares: int, twins: int) -> bool:
        """Whether every key is made and no job is left to do."""
        sql = f"SELECT COUNT(*) FROM {self.table('~jobs')} WHERE status IN ('scheduled', 'reserved')"
        left = self.ask(sql)[0][0]
        counts = [self.ask(f"SELECT COUNT(*) FROM {self.table(name)}")[0][0] for name in ("__square", "__twin")]
        return not left and counts == [squares, twins]

    # -- connections ---------------------------------------------------------------------------------------

    def connections(self) -> list[int]:
        """The connections of the workers, the oldest first."""
        if self.is_postgresql:
            sql = f"SELECT pid FROM pg_stat_activity WHERE usename = '{USER}' ORDER BY backend_start, pid"
        else:
            sql = f"SELECT id FROM information_schema.processlist WHERE user = '{USER}' ORDER BY id"
        return [number for (number,) in self.ask(sql)]

    def cut(self, connections: list[int]) -> None:
        """Kill connections from the server's side."""
        for number in connections:
            with contextlib.suppress(Exception):  # it may have gone by itself meanwhile
                self.ask(self.cutting(number))

    def cutting(self, connection: int) -> str:
        """The statement that kills a connection."""
        return f"SELECT pg_terminate_backend({connection})" if self.is_postgresql else f"KILL {connection}"


def execute(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []


def environment(settings: dict[str, Any], home: str) -> dict[str, str]:
    """What a worker's DataJoint needs to find the server."""
    if not version("datajoint").startswith("2"):
        # 0.14 takes neither port nor TLS from the environment, only from a file in the home folder
        config = {name: value for name, value in settings.items() if name != "database.backend"}
        with open(f"{home}/.datajoint_config.json", "w") as file:
            json.dump({**config, "loglevel": "ERROR"}, file)
        return {"HOME": home}
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASS", "use_tls": "USE_TLS"}
    values = {f"DJ_{name}": settings[f"database.{key}"] for key, name in names.items()}
    values |= {"DJ_BACKEND": settings["database.backend"], "DJ_LOG_LEVEL": "ERROR", "DJ_IGNORE_CONFIG_FILE": "true"}
    return {name: str(value) for name, value in values.items() if value is not None}
