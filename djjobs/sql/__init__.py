"""All SQL of djjobs: the statements in groups by what they are about, and one module for what each engine has."""

from __future__ import annotations

from .engine import Engine
from .mysql import MySQL
from .postgresql import PostgreSQL

__all__ = ["Engine", "engine_for"]

_ENGINES: dict[str, Engine] = {"mysql": MySQL(), "postgresql": PostgreSQL()}


def engine_for(backend: str) -> Engine:
    """The engine of a DataJoint backend. MariaDB uses the one of MySQL."""
    return _ENGINES[backend]
