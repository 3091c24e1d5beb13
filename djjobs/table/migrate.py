"""`djjobs.migrate`: the queues that DataJoint itself made become ours, for the tables that have the mixin."""

from __future__ import annotations

from typing import Any

import datajoint as dj

from ..dj.compat import datajoint_api
from ..errors import DjJobsError
from ..queue.database import explained
from ..queue.migrate import copy_native_jobs, upgrade_queue
from ..queue.queue import Queue
from .adopt import classes_of
from .mixin import JobsMixin

__all__ = ["migrate"]


def migrate(schema: Any) -> int:
    """Bring along what DataJoint's own queues of a schema hold.

    A `~jobs` that DataJoint 0.14 made is upgraded in place. Every row is kept, with its key as JSON. Nothing happens
    if the queue is up to date, so it can be run any number of times. Workers of tables without the mixin may go on
    meanwhile.

    Of the queues `~~name` that DataJoint 2 keeps, jobs are copied whose key is not in the queue: those that are to be
    ignored, have failed or are pending, and those that succeeded and whose result is there. Reserved jobs are left to
    their workers, and so are pending and failed ones whose result is there by now. If classes of this schema are
    imported, only those with the mixin count; if none is, as on the command line, every table that has such a queue.
    (The first use of a table's queue does the same for that table. Jobs that were removed from the queue since come
    back only if this is run again.)

    Parameters
    ----------
    schema : dj.Schema or str
        The schema, or its name.

    Returns
    -------
    int
        How many rows were converted or copied.
    """
    connection = getattr(schema, "connection", None) or dj.conn()
    database = getattr(schema, "database", schema)
    if not isinstance(database, str):
        raise DjJobsError(f"{schema!r} is neither a schema nor the name of one.")
    with explained(connection, f"`{database}`.`~jobs`", "migrate"):
        converted = upgrade_queue(connection, database)
        queue = Queue.of(connection, database)
        return converted + copy_native_jobs(queue, _natively_queued(connection, database))


def _natively_queued(connection: Any, database: str) -> dict[str, Any]:
    """The tables that have a queue of DataJoint's own and get ours, with their classes where these are known."""
    names = datajoint_api.natively_queued(connection, database)
    known = {cls.table_name: cls for cls in classes_of(connection, database)}
    if not known:
        return dict.fromkeys(names)
    return {name: known[name] for name in names if name in known and issubclass(known[name], JobsMixin)}
