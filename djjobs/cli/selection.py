"""Which jobs a command is about: `--restrict`, `--key` and `--where`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import datajoint as dj

from ..errors import DjJobsError
from ..queue.database import explained
from ..queue.keys import table_label
from ..queue.table_queue import TableQueue
from .options import Condition, NameValue

__all__ = ["Selection", "selecting"]


@dataclass(frozen=True)
class Selection:
    """The conditions of a command line, for any of its tables."""

    restrict: tuple[str, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    where: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.restrict or self.key or self.where)

    def restrictions(self, table: Any) -> tuple[Any, ...]:
        """The conditions, as the mixin's methods take them."""
        about_jobs = [table.jobs & dj.AndList(self.where)] if self.where else []
        return (*self._on_keys(table), *about_jobs)

    def jobs(self, table: Any) -> Any:
        """The jobs of a table whose own keys fit, as a query."""
        with explained(table.connection, table_label(table()), "find jobs of"):
            return (table.jobs & dj.AndList(self.where)).fitting(self._on_keys(table))

    def living_jobs(self, table: Any) -> Any:
        """The jobs of a table whose keys fit in key_source, as a query: those that the mixin's methods change."""
        jobs = table.jobs & dj.AndList(self.where)
        with explained(table.connection, table_label(table()), "find jobs of"):
            return jobs.among(TableQueue.of(table(), self._on_keys(table)).keys.sql.chosen)

    def _on_keys(self, table: Any) -> tuple[Any, ...]:
        return (*self.restrict, self._checked_key(table)) if self.key else self.restrict

    def _checked_key(self, table: Any) -> dict[str, Any]:
        """The key. DataJoint would take a name that it does not know for no condition at all."""
        attributes = table().heading.attributes
        for name, _ in self.key:
            if name not in table().primary_key:
                raise DjJobsError(
                    f"{table_label(table())} has no {name!r} in its key, which is {', '.join(table().primary_key)}."
                )
        return {name: _value(attributes[name], text) for name, text in self.key}


def _value(attribute: Any, text: str) -> Any:
    if not attribute.numeric:
        return text
    try:
        number = float(text)
    except ValueError:
        raise DjJobsError(f"{attribute.name} is a number ({attribute.type}), not {text!r}.") from None
    return int(text) if text.lstrip("+-").isdigit() else number


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that choose jobs; it gets them as `selection`."""

    def with_selection(
        *, restrict: tuple[str, ...], key: tuple[tuple[str, str], ...], where: tuple[str, ...], **others: Any
    ) -> Any:
        return command(selection=Selection(restrict, key, where), **others)

    with_selection.__doc__, with_selection.__name__ = command.__doc__, command.__name__
    with_selection.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("--where", multiple=True, type=Condition(), help="Only jobs whose row in ~jobs fits. Repeatable."),
        click.option("--key", multiple=True, type=NameValue(), help="Only jobs with this in their key. Repeatable."),
        click.option("--restrict", multiple=True, type=Condition(), help="Only jobs whose key fits. Repeatable."),
    ):
        option(with_selection)
    return with_selection
