"""A database engine: its dialect, and the statements in groups by what they are about.

A statement is a template: `{jobs}`, `{control}`, `{workers}`, `{sightings}` and `{runs}` are the queue's tables.
`{now}` is the server's UTC time when the statement began, `{clock}` the time at this moment. `{key}` and `{user}` are
columns whose names need quotes; `%(...)s` are parameters. `{seconds[wait]}` is an interval of as many seconds as the
parameter `wait` says.
`{catalog}` stands before the name of every function of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

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
    """One database engine. What it has in its own way is in its subclass, the rest is the same for all."""

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
        return statement.format(**{**self._words, **parts})

    @cached_property
    def _words(self) -> dict[str, Any]:
        """The words of a template that each engine writes in its own way."""
        dialect = self.dialect
        return {
            "catalog": dialect.catalog,
            "now": dialect.now,
            "clock": dialect.clock,
            "key": dialect.key,
            "user": dialect.user,
            "or_skip": _Lookup(dialect.or_skip),
            "seconds": _Lookup(lambda parameter: dialect.seconds(f"%({parameter})s")),
            "seconds_since": _Lookup(dialect.seconds_since),
            "microseconds_in": _Lookup(dialect.microseconds),
            "utc": _Lookup(dialect.utc_time),
            "text_of": _Lookup(dialect.json_as_text),
            "version_json": _Lookup(dialect.version_json),
            **dialect.hints,
        }


class _Lookup:
    """Lets a template name what an expression is made of: `{seconds[lease]}`."""

    def __init__(self, expression: Callable[[str], str]) -> None:
        self._expression = expression

    def __getitem__(self, name: str) -> str:
        return self._expression(name)
