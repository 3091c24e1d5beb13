"""What the keys of a table depend on: which tables with the mixin have to do with a change of another table."""

from __future__ import annotations

import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datajoint as dj

from ..dj.compat import datajoint_api
from ..dj.connection import connection_of, server_of
from ..dj.tables import declared_database, keys_of
from ..queue.database import portions
from ..queue.keys import kind_of, table_label
from ..settings import settings
from ..sql import Engine
from ..sql.queries import keys_among
from .outbox import Change

__all__ = ["Upstream", "listens", "registry", "restrictions_for"]

#: How many keys one statement looks for.
_PORTION = 500
#: A table's full name, and a column under another name, as DataJoint writes them.
_TABLE = re.compile(r"[`\"][^`\"]+[`\"]\.[`\"][^`\"]+[`\"]")
_RENAMED = re.compile(r"\bas [`\"](?!\$)", re.IGNORECASE)


@dataclass(frozen=True)
class Upstream:
    """What the key_source of a table depends on.

    Attributes
    ----------
    tables : frozenset of str
        The tables that it is a query on.
    ancestors : frozenset of str
        Tables that its Python code may have looked at. DataJoint's own key_source looks at none.
    renames : bool
        Whether it calls columns by other names, so that a key of another table says nothing about its own.
    """

    tables: frozenset[str]
    ancestors: frozenset[str]
    renames: bool

    @classmethod
    def of(cls, table: Any) -> Upstream:
        """Look at an instance of an auto-populated table; takes statements on its connection."""
        dependencies = table.connection.dependencies
        dependencies.load(force=False)
        if table.full_table_name not in dependencies:
            dependencies.load(force=True)
        if table.full_table_name not in dependencies:
            # It was dropped.
            return cls(frozenset(), frozenset(), False)
        if _has_own_key_source(table):
            sql = keys_of(table, ()).make_sql()
            return cls(frozenset(_TABLE.findall(sql)), _ancestors(table), bool(_RENAMED.search(sql)))
        parents = table.parents(primary=True, foreign_key_info=True)
        return cls(frozenset(name for name, _ in parents), frozenset(), any(props["aliased"] for _, props in parents))

    @classmethod
    def unknown(cls, table: Any) -> Upstream:
        """For a key_source that could not be looked at."""
        return cls(frozenset(), _ancestors(table), True)

    def includes(self, table: str) -> bool:
        """Whether a change of this table may change the keys."""
        return table in self.tables or table in self.ancestors or datajoint_api.master_of(table) in self.ancestors

    def is_told_by_keys_of(self, table: str) -> bool:
        """Whether new keys come only with new keys of this table that have the same values."""
        return table in self.tables and not self.renames


def _ancestors(table: Any) -> frozenset[str]:
    return frozenset(table.ancestors()) - {table.full_table_name}


def _has_own_key_source(table: Any) -> bool:
    return inspect.getattr_static(table, "key_source") is not inspect.getattr_static(dj.Computed, "key_source")


def restrictions_for(table: Any, change: Change, engine: Engine) -> list[str] | None:
    """Conditions on key_source that keep to the inserted keys, a portion each; None if these do not tell."""
    source = keys_of(table, ())
    names = [name for name in change.attributes if name in source.heading.primary_key]
    if not names or change.keys is None:
        return None
    kinds = [kind_of(table.heading[name], table_label(table)) for name in names]
    places = [change.attributes.index(name) for name in names]
    columns = [datajoint_api.quote(table.connection, name) for name in names]
    found: dict[tuple[str, ...], None] = {}
    for key in change.keys:
        literals = [engine.dialect.literal(kind, key[place]) for kind, place in zip(kinds, places, strict=True)]
        if None in literals:
            return None
        found[tuple(literals)] = None  # type: ignore[arg-type]
    return [keys_among(columns, portion) for portion in portions(list(found), _PORTION)]


def listens(table: type) -> bool:
    """Whether a table wants to hear of changes upstream."""
    own = table.events  # type: ignore[attr-defined]
    return settings.events if own is None else bool(own)


class _Registry:
    """The classes with the mixin in this process, and which of them a change of a table matters to.

    A class that was defined again takes the place of the older one.
    """

    def __init__(self) -> None:
        self.renew_lock()
        # A class gets its table only when its schema is activated.
        self._without_table: list[weakref.ref[type]] = []
        self._tables: weakref.WeakValueDictionary[tuple[Any, str], type] = weakref.WeakValueDictionary()
        self._downstream: dict[tuple[Any, str], list[type]] = {}

    def renew_lock(self) -> None:
        """Another thread may have held it when this process was forked."""
        self._lock = threading.Lock()

    def add(self, table: type) -> None:
        with self._lock:
            self._without_table.append(weakref.ref(table))

    def may_concern(self, server: Any, table: str) -> bool:
        """Whether a change may matter to somebody who listens; if that is not known yet, it may. Takes no time."""
        self._find_tables()
        tables = self._downstream.get((server, table))
        return any(map(listens, self.tables_at(server) if tables is None else tables))

    def downstream(self, server: Any, table: str, upstream_of: Callable[[type], Upstream | None]) -> list[type]:
        """The tables that a change matters to, listening or not.

        Where nobody can say now what a table depends on, that is asked again the next time.
        """
        self._find_tables()
        known = self._downstream
        if (server, table) in known:
            return known[server, table]
        tables = self.tables_at(server)
        upstream = {cls: upstream_of(cls) for cls in tables}
        found = [cls for cls in tables if _full_name(cls) == table]
        found += [cls for cls, its in upstream.items() if its is not None and its.includes(table)]
        if None not in upstream.values():
            known[server, table] = found
        return found

    def tables_at(self, server: Any) -> list[type]:
        """The classes whose tables are on this server."""
        self._find_tables()
        return [table for (where, _), table in list(self._tables.items()) if where == server]

    def _find_tables(self) -> None:
        for ref in self._without_table:
            table = ref()
            if table is None or declared_database(table) is not None:
                break
        else:
            return
        with self._lock:
            waiting, self._without_table = self._without_table, []
            for ref in waiting:
                table = ref()
                if table is not None and declared_database(table) is not None:
                    self._tables[server_of(connection_of(table)), _full_name(table)] = table
                elif table is not None:
                    self._without_table.append(ref)
            self._downstream = {}


def _full_name(table: Any) -> str:
    return table.full_table_name


registry = _Registry()
os.register_at_fork(after_in_child=registry.renew_lock)
