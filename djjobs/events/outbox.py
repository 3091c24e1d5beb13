"""What was changed over a connection: it waits for the commit and, while jobs run there, for the end of the job."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from ..dj.connection import keep_with, kept_with, server_of, when_rolled_back

__all__ = ["MOST_KEYS", "Change", "Outbox", "changes_here", "merge_into"]

#: So many inserted keys of a table are remembered; if there are more, all keys are looked at.
MOST_KEYS = 10_000


@dataclass
class Change:
    """What happened to a table.

    Attributes
    ----------
    table : str
        The full name of the table.
    attributes : tuple of str
        Its primary key.
    keys : list of tuple, optional
        The keys that were inserted; None if these are not known.
    deleted : bool
        Whether rows were deleted.
    """

    table: str
    attributes: tuple[str, ...] = ()
    keys: list[tuple[Any, ...]] | None = field(default_factory=list)
    deleted: bool = False

    @property
    def inserted(self) -> bool:
        """Whether rows were inserted."""
        return self.keys is None or bool(self.keys)

    def copy(self) -> Change:
        return replace(self, keys=None if self.keys is None else list(self.keys))

    def merge(self, other: Change) -> None:
        """Add what happened later."""
        self.deleted = self.deleted or other.deleted
        if self.keys is None or other.keys is None or len(self.keys) + len(other.keys) > MOST_KEYS:
            self.keys = None
        else:
            self.attributes = self.attributes or other.attributes
            self.keys.extend(other.keys)


def merge_into(changes: dict[Any, Change], key: Any, change: Change) -> None:
    """Let there be one change a table."""
    if key in changes:
        changes[key].merge(change)
    else:
        changes[key] = change


#: How often something was changed on each server by this process itself, not by its jobs.
changes_here: Counter[tuple[Any, ...]] = Counter()


class Outbox:
    """The changes that were made over one connection; get it with `Outbox.of`.

    Attributes
    ----------
    server : tuple
        Where they were made.
    held : bool
        Whether committed changes stay here, for the loop that runs jobs over this connection to act on.
    """

    def __init__(self, connection: Any) -> None:
        self.server = server_of(connection)
        self.held = False
        self.age = _age
        self._uncommitted: dict[str, Change] = {}
        self._committed: dict[str, Change] = {}
        self._primary_keys: dict[str, tuple[str, ...]] = {}

    @classmethod
    def of(cls, connection: Any) -> Outbox:
        outbox = kept_with(connection, "outbox")
        if outbox is None or outbox.age != _age:
            # What a parent process has not sent yet it will send itself.
            outbox = keep_with(connection, "outbox", cls(connection))
        return outbox

    def primary_key_of(self, name: str, table: Any) -> tuple[str, ...]:
        """The names of a table's primary key, looked up once."""
        if name not in self._primary_keys:
            self._primary_keys[name] = tuple(table.primary_key)
        return self._primary_keys[name]

    def wait_for_commit(self, change: Change) -> None:
        merge_into(self._uncommitted, change.table, change)

    def drop(self) -> None:
        """The transaction was rolled back."""
        if self._uncommitted:
            self._uncommitted = {}

    def take_uncommitted(self) -> list[Change]:
        changes, self._uncommitted = self._uncommitted, {}
        return list(changes.values())

    def hold(self, change: Change) -> None:
        merge_into(self._committed, change.table, change)

    def take_held(self) -> list[Change]:
        changes, self._committed = self._committed, {}
        return list(changes.values())


#: How often this process was forked on the way from the first one.
_age = 0


def _grow_older() -> None:
    global _age
    _age += 1
    # What the parent has changed is the parent's to act on.
    changes_here.clear()


os.register_at_fork(after_in_child=_grow_older)
when_rolled_back(lambda connection: Outbox.of(connection).drop())
