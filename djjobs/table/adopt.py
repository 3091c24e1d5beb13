"""A pipeline seen from outside: the auto-populated classes of a schema or a module."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import datajoint as dj

from ..dj.patches import apply_patches
from ..dj.tables import declared_database
from ..errors import DjJobsError
from ..events.upstream import registry
from .mixin import JobsMixin

__all__ = ["adopt", "auto_populated", "classes_of", "subclasses"]

#: What all classes of schemas are made from; DataJoint 2 has several.
_SCHEMA = dj.Schema.__mro__[-2]


def adopt(schema_or_module: Any) -> list[type]:
    """Give the Computed and Imported classes of an existing pipeline the mixin, without editing it.

    Parameters
    ----------
    schema_or_module : dj.Schema or module
        A schema whose classes are imported, or the module that defines them. The schema may be activated later, as
        those of the DataJoint Elements are: its classes have their queue then.

    Returns
    -------
    list of type
        The classes that have the mixin now, those that had it before included.
    """
    classes = _to_adopt(schema_or_module)
    if not classes:
        raise DjJobsError(
            f"{_name(schema_or_module)} has no Computed or Imported classes to adopt. "
            "Import the module that defines them first, or pass that module."
        )
    apply_patches()
    without = [table for table in classes if not issubclass(table, JobsMixin)]
    # A class that is made from another comes after it, and has the mixin from there.
    for table in sorted(without, key=lambda table: len(table.__mro__)):
        if not issubclass(table, JobsMixin):
            table.__bases__ = (JobsMixin, *table.__bases__)
        registry.add(table)
    return classes


def _to_adopt(schema_or_module: Any) -> list[type]:
    if isinstance(schema_or_module, ModuleType):
        waiting = _waiting(_schemas_around(schema_or_module))
        return [table for table in _tables_in(schema_or_module) if _is_activated(table) or table in waiting]
    if _is_schema(schema_or_module) and not schema_or_module.is_activated():
        return _waiting([schema_or_module])
    return list(auto_populated(schema_or_module))


def auto_populated(schema_or_module: Any) -> Iterator[type]:
    """The Computed and Imported classes of a schema or a module, in the order they were defined.

    Those of a module whose schema is not activated yet are left out: they have no table.
    """
    if isinstance(schema_or_module, ModuleType):
        yield from filter(_is_activated, _tables_in(schema_or_module))
    elif getattr(schema_or_module, "database", None):
        yield from classes_of(schema_or_module.connection, schema_or_module.database)
    else:
        raise DjJobsError(f"{schema_or_module!r} is neither an activated dj.Schema nor a module.")


def classes_of(connection: Any, database: str) -> list[Any]:
    """The Computed and Imported classes of a schema in this process."""
    candidates = [
        table
        for table in [*subclasses(dj.Imported), *subclasses(dj.Computed)]
        if declared_database(table) == database and table.connection is connection
    ]
    return list(dict.fromkeys(candidates))


def _tables_in(module: ModuleType) -> list[Any]:
    """What a module holds of Computed and Imported classes, base classes such as djjobs.Computed among them."""
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return list(dict.fromkeys(value for value in found if issubclass(value, (dj.Computed, dj.Imported))))


def _is_activated(table: type) -> bool:
    # A class without a schema of its own is a base class, or its schema is not activated yet.
    return declared_database(table) is not None


def _waiting(schemas: Iterable[Any]) -> list[type]:
    """The Computed and Imported classes that will be declared when these schemas are activated."""
    declared = [table for schema in schemas if not schema.is_activated() for table, _context in schema.declare_list]
    return list(dict.fromkeys(table for table in declared if issubclass(table, (dj.Computed, dj.Imported))))


def _schemas_around(module: ModuleType) -> list[Any]:
    """The schemas that classes of a module may belong to: held there, where these are defined, or a module further."""
    homes = [sys.modules.get(table.__module__) for table in _tables_in(module)]
    near = [module, *(home for home in homes if home is not None)]
    far = [value for home in near for value in vars(home).values() if isinstance(value, ModuleType)]
    schemas = [value for home in [*near, *far] for value in list(vars(home).values()) if _is_schema(value)]
    return list({id(schema): schema for schema in schemas}.values())


def _is_schema(value: Any) -> bool:
    return isinstance(value, _SCHEMA)


def subclasses(base: Any) -> Iterator[Any]:
    """The classes below a class, at any depth."""
    for subclass in base.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def _name(schema_or_module: Any) -> str:
    if isinstance(schema_or_module, ModuleType):
        return f"The module {schema_or_module.__name__}"
    if not schema_or_module.is_activated():
        return "The schema, which is not activated yet,"
    return f"The schema {schema_or_module.database}"
