"""What a server does for a statement: the steps of its plan, and the rows that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Reading", "plan"]


def plan(connection: Any, engine: str, sql: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a statement's plan."""
    if engine != "postgresql":
        explain = "EXPLAIN FORMAT=TRADITIONAL" if engine == "mysql" else "EXPLAIN"
        return connection.query(f"{explain} {sql}", args=parameters, as_dict=True).fetchall()
    (document,) = connection.query(f"EXPLAIN (FORMAT JSON) {sql}", args=parameters).fetchone()
    return list(nodes(document[0]["Plan"]))


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", []):
        yield from nodes(below)


class Reading:
    """Counts the rows that the server reads for what goes over a connection meanwhile."""

    def __init__(self, connection: Any, engine: str) -> None:
        self._connection, self._engine = connection, engine
        self.rows = 0
        #: The steps of the plans, with what came out of each; PostgreSQL only.
        self.steps: list[dict[str, Any]] = []

    @contextmanager
    def measured(self) -> Iterator[Reading]:
        if self._engine == "postgresql":
            with self._explaining():
                yield self
        else:
            own = -(self._handlers() - self._handlers())  # what asking costs
            before = self._handlers()
            yield self
            self.rows = self._handlers() - before - own

    def _handlers(self) -> int:
        rows = self._connection.query("SHOW SESSION STATUS").fetchall()
        return sum(int(value) for name, value in rows if name.startswith("Handler_read"))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Before each statement on `~jobs`, let the server run it and say what it read, and undo it."""
        query = self._connection.query
        begun = False

        def explain(sql: str, args: Any = (), **options: Any) -> Any:
            nonlocal begun
            word = sql.split()[0]
            if "~jobs" in sql and word in ("SELECT", "UPDATE", "DELETE", "INSERT"):
                query("SAVEPOINT before" if begun else "BEGIN")
                (document,) = query(f"EXPLAIN (ANALYZE, VERBOSE, FORMAT JSON) {sql}", args=args).fetchone()
                query("ROLLBACK TO before" if begun else "ROLLBACK")
                self.steps += nodes(document[0]["Plan"])
                self.rows = sum(map(rows_read, self.steps))
            begun = word == "BEGIN" or (begun and word not in ("COMMIT", "ROLLBACK"))
            return query(sql, args=args, **options)

        self._connection.query = explain
        try:
            yield
        finally:
            del self._connection.query


def rows_read(node: dict[str, Any]) -> float:
    if "Relation Name" not in node or "Scan" not in node["Node Type"]:
        return 0
    return (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
