"""A database engine: what it says in its own way, and the statements about each table.

A statement is a template: `{jobs}`, `{control}`, `{workers}` and `{runs}` are the queue's tables, `{now}` the server's
UTC time, `{key}` and `{user}` columns whose names need quotes; `%(...)s` are parameters.
"""

from __future__ import annotations

from typing import ClassVar

from .attempts import AttemptStatements
from .by_hand import ByHandStatements
from .claims import ClaimStatements
from .connection import ConnectionStatements, Errors
from .control import ControlStatements
from .dialect import Dialect
from .enqueue import EnqueueStatements
from .hooks import HookStatements
from .jobs import JobStatements
from .native import NativeStatements
from .runs import RunStatements
from .schedules import ScheduleStatements
from .tables import LegacyStatements, TableStatements
from .workers import WorkerStatements


class Engine:
    """One database engine. It gives what it says in its own way; the rest is the same for all."""

    dialect: ClassVar[Dialect]
    connection: ClassVar[ConnectionStatements]
    errors: ClassVar[Errors]
    tables: ClassVar[TableStatements]
    enqueue: ClassVar[EnqueueStatements]
    jobs: ClassVar[JobStatements]
    workers: ClassVar[WorkerStatements]

    # -- statements that are the same for all, or that only one engine has

    legacy = LegacyStatements()
    control = ControlStatements()
    claims = ClaimStatements()
    attempts = AttemptStatements()
    by_hand = ByHandStatements()
    runs = RunStatements()
    hooks = HookStatements()
    schedules = ScheduleStatements()
    native = NativeStatements()

    def render(self, statement: str, **parts: str) -> str:
        """Fill a statement's template."""
        dialect = self.dialect
        own = {"now": dialect.now, "key": dialect.key, "user": dialect.user, "or_skip": dialect.or_skip}
        return statement.format(**{**own, **dialect.hints, **parts})
