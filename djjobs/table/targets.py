"""From what a user types to tables and schemas: `module`, `module:Table`, or the name of a schema."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import datajoint as dj
from datajoint.errors import DataJointError

from ..dj.compat import LostConnectionError, datajoint_api
from ..dj.tables import declared_database
from ..errors import DjJobsError
from ..queue.database import connect
from ..sql import engine_for
from .adopt import auto_populated
from .mixin import JobsMixin

__all__ = ["loaded_tables", "module_or_schema", "schemas_of", "tables_of", "upstream_first"]

_MIXIN_HINT = "Derive them from djjobs.JobsMixin as well, or have the module call djjobs.adopt({module})."


def tables_of(targets: Sequence[str]) -> list[type]:
    """The tables with the mixin that the targets name, each once, upstream first.

    Parameters
    ----------
    targets : sequence of str
        `module`, `module:Table`, or `module:name` of a module that is imported there.
    """
    return upstream_first(list(dict.fromkeys(table for target in targets for table in _tables_of(target))))


def loaded_tables(target: str, database: str) -> list[Any]:
    """The tables with the mixin that a target names in a schema, as far as this process has imported them already.

    For targets that come out of a database. Nothing is imported and no code is run: whoever may write there could name
    any module.
    """
    name, colon, inside = target.partition(":")
    thing: Any = sys.modules.get(name)
    for part in inside.split(".") if colon else ():
        # Not getattr: a module may import something when it is asked for a name.
        thing = vars(thing).get(part) if isinstance(thing, (ModuleType, type)) else None
    found: list[Any] = [thing]
    if isinstance(thing, ModuleType):
        found = [table for table in auto_populated(thing) if _is_defined_in(table, thing)]
    with_mixin = [table for table in found if isinstance(table, type) and issubclass(table, JobsMixin)]
    return [table for table in with_mixin if declared_database(table) == database]


def module_or_schema(name: str) -> Any:
    """The module or, if there is none with tables, the schema of this name."""
    module = _find_module(name)
    if module is not None and _schemas_in(module):
        return module
    connect()
    # A schema may be called like some module that has nothing to do with it: `test`, `common`.
    if name in dj.list_schemas():
        return dj.Schema(name, create_schema=False)
    if module is not None:
        return module
    raise DjJobsError(f"{name!r} is neither a module that can be imported from here nor a schema on the server.")


def schemas_of(pipeline: Any) -> list[Any]:
    """The schemas of a module, or the schema itself. Either may be given by its name; or `module:Table`."""
    if isinstance(pipeline, str) and ":" in pipeline:
        return _schemas_with(tables_of([pipeline]))
    found = module_or_schema(pipeline) if isinstance(pipeline, str) else pipeline
    if not isinstance(found, ModuleType):
        return [found]
    schemas = _schemas_in(found)
    if not schemas:
        raise DjJobsError(f"The module {found.__name__} has no schema and no Computed or Imported tables.")
    return schemas


def _schemas_in(module: ModuleType) -> list[Any]:
    """The schemas that a module has tables in or holds itself."""
    schemas = {
        value.database: value
        for value in vars(module).values()
        if isinstance(value, dj.Schema) and value.is_activated()
    }
    own = _schemas_with([table for table in auto_populated(module) if _is_defined_in(table, module)])
    return list(({schema.database: schema for schema in own} | schemas).values())


def _schemas_with(tables: Sequence[Any]) -> list[Any]:
    databases = {table.database: table.connection for table in tables}
    return [dj.Schema(name, connection=connection, create_schema=False) for name, connection in databases.items()]


# -- modules ---------------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    module = _find_module(name)
    if module is not None:
        return module
    if name.endswith(".py") or os.sep in name:
        dotted = ".".join(Path(name).with_suffix("").parts)
        raise DjJobsError(f"{name!r} is a file; name the module as in an import: {dotted}.")
    raise DjJobsError(f"There is no module {name!r} that can be imported from {os.getcwd()}.")


def _find_module(name: str) -> ModuleType | None:
    """Import a module, as a script in the current folder would; None if there is none of this name."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        # What a module prints when it is imported is no result of ours.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise _does_not_import(name, error) from error
    except (Exception, SystemExit) as error:
        if _is_about_connecting(error):
            connect()  # says what is wrong with the connection
        raise _does_not_import(name, error) from error


def _does_not_import(name: str, error: BaseException) -> DjJobsError:
    last_line = traceback.format_exception_only(type(error), error)[-1].strip()
    place = f"{error.filename}, line {error.lineno}" if isinstance(error, SyntaxError) else _place(error)
    return DjJobsError(f"The module {name} does not import: {last_line} ({place}).")


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


def _is_about_connecting(error: BaseException) -> bool:
    # EOFError: 0.14 asked for a password, and nobody was there
    if isinstance(error, (LostConnectionError, EOFError)):
        return True
    not_configured = isinstance(error, DataJointError) and "not configured" in str(error)
    return not_configured or engine_for(datajoint_api.configured_backend()).errors.diagnose(error) in (
        "credentials",
        "unreachable",
    )


# -- tables -----------------------------------------------------------------------------------------------


def _tables_of(target: str) -> list[type]:
    name, colon, inside = target.partition(":")
    module = _module(name)
    return _named(module, inside) if colon else _tables_in(module)


def _tables_in(module: ModuleType) -> list[type]:
    """The tables with the mixin that a module defines, or that a package collects from its own modules."""
    own = [table for table in auto_populated(module) if _is_defined_in(table, module)]
    with_mixin = [table for table in own if issubclass(table, JobsMixin)]
    if with_mixin:
        return with_mixin
    name = module.__name__
    if own:
        hint = _MIXIN_HINT.format(module=name)
        raise DjJobsError(f"The module {name} has no tables with the djjobs mixin, only {_names(own)}. {hint}")
    imported = _with_mixin(module)
    if imported:
        origins = ", ".join(f"{table.__name__} (schema {table.database})" for table in imported)  # type: ignore[attr-defined]
        raise DjJobsError(
            f"The module {name} defines no tables; it only imports {origins}. "
            f"If these are meant, name them: {name}:{imported[0].__name__}."
        )
    raise DjJobsError(
        f"The module {name} has no tables with the djjobs mixin, nor any Computed or Imported tables that "
        f"djjobs.adopt could give it to{_not_activated(module)}."
    )


def _named(module: ModuleType, name: str) -> list[type]:
    """What `module:name` is: a table, or a module whose tables are meant."""
    thing: Any = module
    for part in name.split("."):
        thing = getattr(thing, part, None)
    if isinstance(thing, ModuleType):
        return _tables_in(thing)
    target = f"{module.__name__}:{name}"
    if isinstance(thing, type) and issubclass(thing, (dj.Computed, dj.Imported)):
        if declared_database(thing) is None:
            raise DjJobsError(f"The schema of {target} is not activated, so it has no queue.")
        if issubclass(thing, JobsMixin):
            return [thing]
        raise DjJobsError(f"{target} has no djjobs mixin. {_those_there_are(module)}")
    what = "There is no" if thing is None else "Not a Computed or Imported table:"
    raise DjJobsError(f"{what} {target}. {_those_there_are(module)}")


def _is_defined_in(table: type, module: ModuleType) -> bool:
    return f"{table.__module__}.".startswith(f"{module.__name__}.")


def _with_mixin(module: ModuleType) -> list[type]:
    return [table for table in auto_populated(module) if issubclass(table, JobsMixin)]


def _those_there_are(module: ModuleType) -> str:
    tables = _with_mixin(module)
    if tables:
        return f"The tables with the mixin there: {_names(tables)}."
    return f"There are none with the mixin. {_MIXIN_HINT.format(module=module.__name__)}"


def _not_activated(module: ModuleType) -> str:
    asleep = [value for value in vars(module).values() if isinstance(value, dj.Schema) and not value.is_activated()]
    return "; its schema is not activated" if asleep else ""


def _names(tables: Iterable[type]) -> str:
    return ", ".join(table.__name__ for table in tables)


def upstream_first(tables: list[type]) -> list[type]:
    """In the order of the foreign keys; as they were defined where these cannot be had."""
    place: dict[str, int] = {}
    connections = {id(table.connection): table.connection for table in tables}  # type: ignore[attr-defined]
    for connection in connections.values():
        with contextlib.suppress(DataJointError):
            connection.dependencies.load()
            place.update({name: number for number, name in enumerate(connection.dependencies.topo_sort())})
    return sorted(tables, key=lambda table: place.get(table().full_table_name, len(place)))
