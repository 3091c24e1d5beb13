"""A pipeline seen from outside: the auto-populated classes of a schema or a module."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import datajoint as dj

from .errors import DjJobsError
from .mixin import JobsMixin
from .upstream import registry

__all__ = ["adopt", "auto_populated", "subclasses"]


def adopt(schema_or_module: Any) -> list[type]:
    """Give the Computed and Imported classes of an existing pipeline the mixin, without editing it.

    Parameters
    ----------
    schema_or_module : dj.Schema or module
        A schema whose classes are imported, or the module that defines them.

    Returns
    -------
    list of type
        The classes that have the mixin now, those that had it before included.
    """
    classes = list(auto_populated(schema_or_module))
    if not classes:
        raise DjJobsError(
            f"{_name(schema_or_module)} has no Computed or Imported classes to adopt. "
            "Import the module that defines them first, or pass that module."
        )
    for table in classes:
        if not issubclass(table, JobsMixin):
            table.__bases__ = (JobsMixin, *table.__bases__)
            registry.add(table)
    return classes


def auto_populated(schema_or_module: Any) -> Iterator[type]:
    """The Computed and Imported classes of a schema or a module, in the order they were defined."""
    if isinstance(schema_or_module, ModuleType):
        defined = vars(schema_or_module).values()
        candidates = [value for value in defined if isinstance(value, type) and _is_auto_populated(value)]
    elif getattr(schema_or_module, "database", None):
        candidates = [
            table
            for table in [*subclasses(dj.Imported), *subclasses(dj.Computed)]
            if table.__dict__.get("database") == schema_or_module.database
            and table.connection is schema_or_module.connection
        ]
    else:
        raise DjJobsError(f"{schema_or_module!r} is neither an activated dj.Schema nor a module.")
    yield from dict.fromkeys(candidates)


def _is_auto_populated(value: type) -> bool:
    # A class without a schema of its own is a base class, such as djjobs.Computed.
    return issubclass(value, (dj.Computed, dj.Imported)) and value.__dict__.get("database") is not None


def subclasses(base: Any) -> Iterator[Any]:
    """The classes below a class, at any depth."""
    for subclass in base.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def _name(schema_or_module: Any) -> str:
    if isinstance(schema_or_module, ModuleType):
        return f"The module {schema_or_module.__name__}"
    return f"The schema {schema_or_module.database}"
