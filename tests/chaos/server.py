"""The database as a bystander sees it: its own connection, plain SQL, and none of the code under test."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import version
from typing import Any


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
            self._connection = self._connect()
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def _connect(self) -> Any:
        where = {"host": self._server.host, "port": self._server.port, "user": self._server.user}
        if self.is_postgresql:
            import psycopg2

            connection = psycopg2.connect(**where, password=self._server.password, dbname="postgres")
            connection.autocommit = True
            return connection
        import pymysql

        return pymysql.connect(**where, password=self._server.password, autocommit=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.close()
        self._connection = None

    # -- the pipeline ------------------------------------------------------------------------------------

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
            sql = (
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' "
                "AND pid <> pg_backend_pid() ORDER BY backend_start, pid"
            )
        else:
            sql = (
                "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() "
                "AND user NOT IN ('system user', 'event_scheduler') ORDER BY id"
            )
        return [number for (number,) in self.ask(sql)]

    def cut(self, connections: list[int]) -> None:
        """Kill connections from the server's side."""
        for number in connections:
            with contextlib.suppress(Exception):  # it may have gone by itself meanwhile
                self.ask(f"SELECT pg_terminate_backend({number})" if self.is_postgresql else f"KILL {number}")


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
