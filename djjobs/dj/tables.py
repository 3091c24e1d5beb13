"""DataJoint's tables, queries and headings, as djjobs builds and changes them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import datajoint as dj
import numpy as np
from datajoint.expression import QueryExpression
from datajoint.heading import Heading
from datajoint.preview import preview as _preview
from datajoint.preview import repr_html as _repr_html
from datajoint.table import Table

from ..printable import as_html, one_line
from .compat import datajoint_api

__all__ = [
    "QueryExpression",
    "Table",
    "change_attribute",
    "copy_over",
    "declared_database",
    "heading_like",
    "instance_over",
    "is_cut",
    "keys_of",
    "make_one",
    "name_of",
    "preview",
    "query_on",
    "recast",
    "repr_html",
    "set_heading",
    "set_up",
    "with_condition",
]

T = TypeVar("T")


def declared_database(cls: type) -> str | None:
    """The schema that a class itself was declared in; None for a base class, and before its schema is activated."""
    return cls.__dict__.get("database")


def name_of(table: Any) -> str:
    """The full name of a table. To put it together takes DataJoint long, so it is read off where it is known."""
    name = table._support[0]
    return name if name[0] in '`"' else table.full_table_name


# -- auto-populated tables ------------------------------------------------------------------------------------------


def keys_of(table: Any, restrictions: tuple[Any, ...]) -> Any:
    """The key_source of a table under restrictions, with DataJoint's own checks: a query."""
    return table._jobs_to_do(restrictions)


def make_one(
    table: Any,
    key: dict[str, Any],
    make_kwargs: dict[str, Any] | None,
    in_make: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Call make() for one key in a transaction, as `populate` does; whether there was something to make.

    Parameters
    ----------
    in_make : callable
        Gives a context manager for each stretch in which make() itself runs, and nothing of DataJoint around it.
        Defaults to none.
    """
    name = "_make_tuples" if hasattr(table, "_make_tuples") else "make"
    make = getattr(table, name)

    def at_once(*arguments: Any, **options: Any) -> Any:
        with in_make():
            return make(*arguments, **options)

    def in_steps(*arguments: Any, **options: Any) -> Iterator[Any]:
        steps, given = make(*arguments, **options), None
        while True:
            with in_make():
                try:
                    result = steps.send(given)
                except StopIteration:
                    return
            given = yield result

    # DataJoint looks at the function to see whether make() has three parts.
    table.__dict__[name] = in_steps if inspect.isgeneratorfunction(make) else at_once
    try:
        return table._populate1(key, None, False, True, make_kwargs=make_kwargs)
    finally:
        del table.__dict__[name]


# -- tables of ours -------------------------------------------------------------------------------------------------


def set_up(table: Any, connection: Any, database: str, name: str) -> None:
    """Make an object of a class of ours the table of this name."""
    table.database = database
    table._connection = connection
    table._heading = _heading(connection, database, name, None)
    table._support = [table.full_table_name]


def _heading(connection: Any, database: str, name: str, context: Any) -> Heading:
    """The heading of a table, which DataJoint looks up when it is first needed."""
    return Heading(table_info={"conn": connection, "database": database, "table_name": name, "context": context})


def instance_over(cls: Any, connection: Any) -> Any:
    """An instance of a table over another connection than its schema's. It looks up its heading there, too."""
    table = cls()
    if table.connection is not connection:
        datajoint_api.put_on(table, connection)
        table._heading = _heading(connection, table.database, table.table_name, table.declaration_context)
    return table


def copy_over(table: T, connection: Any) -> T:
    """The same table over another connection. What is known of its columns is not looked up again."""
    other: Any = copy.copy(table)
    datajoint_api.put_on(other, connection)
    other._heading = copy.copy(other._heading)
    other._heading.table_info = {**other._heading.table_info, "conn": connection}
    return other


# -- queries ----------------------------------------------------------------------------------------------------------


def recast(cls: type[T], table: Any, **attributes: Any) -> T:
    """The same query as an object of another class of ours, with these attributes besides."""
    view = cls.__new__(cls)
    view.__dict__.update(table.__dict__, **attributes)
    return view


def query_on(view: Any, rows: Any, heading: Heading) -> None:
    """Make an object a query on the rows of another, as a subquery, with this heading."""
    view._heading, view._support = heading, [rows]


def with_condition(query: T, sql: str) -> T:
    """A query with one more condition, as it is. DataJoint would take words in it for attributes."""
    restricted: Any = copy.copy(query)
    restricted._restriction = dj.AndList([*restricted.restriction, sql])
    return restricted


def is_cut(query: Any) -> bool:
    """Whether a query gives some of its rows only: the first ones, or one of each kind."""
    return bool(query._top or query._distinct)


# -- previews ---------------------------------------------------------------------------------------------------------


def preview(query: Any, limit: int | None = None, width: int | None = None) -> str:
    """The first rows of a query as text, as DataJoint shows them."""
    return _preview(_Shown(query, one_line), limit, width)


def repr_html(query: Any) -> str:
    """The first rows of a query as HTML, as DataJoint shows them."""
    return _repr_html(_Shown(query, as_html))


class _Shown:
    """A query as DataJoint's previews see it. They put texts into a terminal and into HTML as they are, so they get
    texts that are fit for that.

    Parameters
    ----------
    query
        The query. Its heading is changed, so it must be nobody else's.
    fit : callable
        Makes a text fit to be shown.
    """

    def __init__(self, query: Any, fit: Callable[[str], str]) -> None:
        self._query, self._fit = query, fit
        self.connection, self.primary_key, self.heading = query.connection, query.primary_key, query.heading
        for name, attribute in self.heading.attributes.items():
            change_attribute(self.heading, name, comment=fit(attribute.comment or ""))
        # Not `table_status`: DataJoint would look it up, and the columns with it.
        status = self.heading._table_status
        if status is not None:
            self.heading._table_status = {**status, "comment": fit(status["comment"] or "")}

    def __len__(self) -> int:
        return len(self._query)

    def proj(self, *names: str) -> _Rows:
        return _Rows(self._query.proj(*names), self._fit)


class _Rows:
    """The rows of a query, in which every value is a text that is fit to be shown."""

    def __init__(self, query: Any, fit: Callable[[str], str]) -> None:
        self._query, self._fit, self.primary_key = query, fit, query.primary_key

    def __len__(self) -> int:
        return len(self._query)

    def fetch(self, **options: Any) -> Any:
        """DataJoint 0.14 asks so."""
        return self._shown(self._query.fetch(**options))

    def to_arrays(self, **options: Any) -> Any:
        """DataJoint 2 asks so."""
        return self._shown(self._query.to_arrays(**options))

    def _shown(self, rows: Any) -> Any:
        names = rows.dtype.names
        texts = [tuple(self._fit(str(row[name])) for name in names) for row in rows]
        return np.array(texts, dtype=[(name, object) for name in names])


# -- headings ---------------------------------------------------------------------------------------------------------


def heading_like(heading: Heading, attributes: Iterable[Any], comment: str) -> Heading:
    """A heading with these attributes in the place of another's."""
    like = Heading([attribute.todict() for attribute in attributes], heading.table_info)
    # DataJoint would look it up, and the columns with it.
    like._table_status = {"comment": comment}
    return like


def set_heading(query: Any, heading: Heading) -> None:
    query._heading = heading


def change_attribute(heading: Heading, name: str, **changes: Any) -> None:
    """Change what DataJoint knows of a column."""
    heading._attributes[name] = heading._attributes[name]._replace(**changes)
