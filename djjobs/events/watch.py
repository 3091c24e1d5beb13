"""Events: an insert upstream of a table with the mixin schedules its new keys, and a delete cleans up after it.

DataJoint's own methods tell of every insert and delete of this process. A change waits in the outbox of its connection
for the commit. Then the event thread acts on it. If a job of the queue made the change, the loop that ran the job acts
on it before the next job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..dj.connection import connection_of, has_transaction, server_of
from ..dj.patches import patch_when_needed, tell_of_changes, tell_of_transactions
from ..dj.routing import route_over, routed
from ..dj.tables import name_of
from ..settings import check_seconds
from .outbox import MOST_KEYS, Change, Outbox, changes_here
from .react import Agenda
from .thread import event_thread
from .upstream import registry

__all__ = ["HeldEvents", "act_now", "flush_events", "tell_of_inserts", "watch"]

logger = logging.getLogger("djjobs")

#: What rows come in that can be looked at twice.
_COLLECTIONS = (list, tuple, np.ndarray, pd.DataFrame)
#: While jobs follow each other, what they change is acted on every so many seconds.
_BETWEEN_JOBS = 0.2


def flush_events(timeout: float = 30.0) -> bool:
    """Wait until the inserts and deletes made so far in this process have been acted on.

    Parameters
    ----------
    timeout : float
        Wait no longer than so many seconds. Defaults to 30.

    Returns
    -------
    bool
        Whether everything was done; False if it takes longer, or if something has failed since the last call, which
        the log tells.
    """
    return event_thread.flush(check_seconds("timeout of flush_events", timeout))


def act_now(timeout: float) -> None:
    """Have the inserts and deletes made so far in this process acted on before somebody schedules by hand.

    What was put off is done at once: a person waits for it.
    """
    event_thread.hurry(timeout)


class HeldEvents:
    """What jobs change over these connections is acted on between jobs, over the same connections.

    Use it as a context manager around the work.
    """

    def __init__(self, connections: Iterable[Any]) -> None:
        self._connections = list(connections)
        self._agenda = Agenda(self._connect, by_jobs=True)
        self._acted = time.monotonic()

    def __enter__(self) -> HeldEvents:
        for connection in self._connections:
            Outbox.of(connection).held = True
        return self

    def __exit__(self, *_: object) -> None:
        self.act()
        for connection in self._connections:
            Outbox.of(connection).held = False
        for server, change in self._agenda.rest():
            _pass_on(server, change)

    def act(self, more_jobs: bool = False) -> None:
        """Act on what was changed. If more jobs follow at once, a few of them are acted on together."""
        if more_jobs and time.monotonic() - self._acted < _BETWEEN_JOBS:
            return
        try:
            for connection in self._connections:
                outbox = Outbox.of(connection)
                self._agenda.add(outbox.server, outbox.take_held())
            self._agenda.act()
        finally:
            route_over(None)
        self._acted = time.monotonic()

    def _connect(self, cls: Any) -> Any:
        """The connection that goes where the class's own goes, which another process may be using."""
        server = server_of(connection_of(cls))
        connection = next(held for held in self._connections if server_of(held) == server)
        route_over(connection)
        return connection


# -- what DataJoint tells ------------------------------------------------------------------------------------------


def watch() -> None:
    """Let DataJoint's methods tell of changes and, once somebody listens, of transactions and their ends.

    Changes are counted before any table with the mixin is there: a table that comes later is scheduled at once if
    this process has changed something. To wait for a commit there is no need until somebody is to be told of it.
    """
    tell_of_changes(tell_of_inserts, _tell_of_deletes)
    patch_when_needed(lambda: tell_of_transactions(_send_committed))


def _tell_of_deletes(table: Any) -> None:
    _tell(table, lambda name, _: Change(name, deleted=True))


def _send_committed(connection: Any) -> None:
    outbox = Outbox.of(connection)
    for change in outbox.take_uncommitted():
        _send(outbox, change)


# -- what becomes of it --------------------------------------------------------------------------------------------


def tell_of_inserts(table: Any, rows: Any = None) -> None:
    """These rows were inserted into a table; without rows, some that are not known."""
    if not isinstance(rows, _COLLECTIONS) or len(rows):
        _tell(table, lambda name, attributes: Change(name, attributes, _keys_of(table, attributes, rows)))


def _tell(table: Any, change: Callable[[str, tuple[str, ...]], Change]) -> None:
    """Pass on a change, if it may concern somebody. Never raises: the change itself was made."""
    try:
        name = name_of(table)
        connection = routed(table.connection)
        outbox = Outbox.of(connection)
        if not outbox.held:
            changes_here[outbox.server] += 1
        if name[name.index(".") + 2] == "~":
            return
        if not registry.may_concern(outbox.server, name):
            return
        what = change(name, outbox.primary_key_of(name, table))
        if has_transaction(connection):
            outbox.wait_for_commit(what)
        else:
            outbox.drop()
            _send(outbox, what)
    except Exception as error:
        logger.warning("A change of %r was not seen: %s", type(table).__name__, error, extra={"event": "event failed"})


def _send(outbox: Outbox, change: Change) -> None:
    if outbox.held:
        outbox.hold(change)
    else:
        _pass_on(outbox.server, change)


def _pass_on(server: Any, change: Change) -> None:
    try:
        event_thread.take(server, change)
    except Exception as error:
        logger.warning("A change of %s was not acted on: %s", change.table, error, extra={"event": "event failed"})


def _keys_of(table: Any, attributes: tuple[str, ...], rows: Any) -> list[tuple[Any, ...]] | None:
    """The primary keys of inserted rows, as they were given; None where that would take a second look at something."""
    try:
        if isinstance(rows, pd.DataFrame) and len(rows) <= MOST_KEYS:
            rows = rows[list(attributes)].to_records(index=False)
        if not isinstance(rows, _COLLECTIONS) or len(rows) > MOST_KEYS:
            return None
        keys, places = [], None
        row: Any
        for row in rows:
            if isinstance(row, (dict, np.void, Mapping)):
                keys.append(tuple([row[name] for name in attributes]))
            else:
                places = places or [table.heading.names.index(name) for name in attributes]
                keys.append(tuple([row[place] for place in places]))
        return keys
    except (KeyError, ValueError, IndexError, TypeError):
        # An attribute with a default or counted up by the server.
        return None
