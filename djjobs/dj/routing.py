"""Which connection a thread uses for the tables of a server.

A table's key_source and its hooks know no other connection than their schema's. Where somebody acts for a table over
another one, because the user may be in the middle of a transaction, what they ask has to go that way, too.
"""

from __future__ import annotations

import threading
from typing import Any

from .connection import server_of

__all__ = ["route_over", "routed"]

_here = threading.local()


def route_over(connection: Any) -> None:
    """From now on this thread uses one connection for all that goes to its server; None ends that."""
    _here.connection = connection


def routed(connection: Any) -> Any:
    """The connection that this thread uses in place of another."""
    own = getattr(_here, "connection", None)
    return connection if own is None or server_of(own) != server_of(connection) else own
