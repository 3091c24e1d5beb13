"""All SQL of djjobs: shared statements by what they are about, the rest side by side in `mysql` and `postgresql`."""

from __future__ import annotations

from .engine import Engine
from .mysql import MySQL
from .postgresql import PostgreSQL

__all__ = ["Engine", "engine_for"]

_ENGINES: dict[str, Engine] = {"mysql": MySQL(), "postgresql": PostgreSQL()}


def engine_for(backend: str) -> Engine:
    """The engine of a DataJoint backend; MariaDB speaks as MySQL does."""
    return _ENGINES[backend]
