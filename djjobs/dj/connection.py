"""DataJoint's connections, as djjobs needs them: transactions, the driver below, and what we keep with a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "KEPT",
    "account_of",
    "before_commit",
    "connection_of",
    "driver_of",
    "forget_transaction",
    "has_transaction",
    "keep_with",
    "kept_with",
    "renumber",
    "server_of",
    "share_schemas",
    "tell_of_rollback",
    "when_rolled_back",
]

T = TypeVar("T")

#: Under this name a connection carries what djjobs keeps with it. (Connections cannot be keys of a dictionary.)
KEPT = "_djjobs"


def server_of(connection: Any) -> tuple[Any, ...]:
    """Which server a connection goes to, and which of its databases."""
    info = connection.conn_info
    return info["host"], info["port"], info.get("database_name")


def account_of(connection: Any) -> tuple[Any, ...]:
    """Which server a connection goes to, and as whom."""
    return *server_of(connection), connection.conn_info["user"]


def connection_of(table: Any) -> Any:
    """The connection of a table's class, whatever connection an instance uses."""
    return table._connection


def driver_of(connection: Any) -> Any:
    """The connection of the database driver (psycopg2 or pymysql) below DataJoint's."""
    return connection._conn


def renumber(connection: Any, connection_id: int) -> None:
    """Tell DataJoint the server's number of a connection. It keeps the first one, also after a reconnect."""
    connection.connection_id = connection_id


def share_schemas(connection: Any, other: Any) -> None:
    """Let a connection know the schemas that another one knows."""
    connection.schemas = dict(other.schemas)


# -- what djjobs keeps with a connection -------------------------------------------------------------------------


def kept_with(connection: Any, name: str) -> Any:
    """What was kept with a connection under this name; None if nothing was."""
    return connection.__dict__.get(KEPT, {}).get(name)


def keep_with(connection: Any, name: str, value: T) -> T:
    """Keep something with a connection for as long as there is the connection. Returns it."""
    connection.__dict__.setdefault(KEPT, {})[name] = value
    return value


# -- transactions -------------------------------------------------------------------------------------------------

_after_rollback: list[Callable[[Any], None]] = []


def has_transaction(connection: Any) -> bool:
    """Whether DataJoint began a transaction here and has not ended it.

    DataJoint's own `in_transaction` asks the server, and forgets the transaction when the connection is lost.
    """
    return connection._in_transaction


def forget_transaction(connection: Any) -> None:
    """The transaction that DataJoint began was rolled back, or is gone with its connection."""
    connection._in_transaction = False
    tell_of_rollback(connection)


def when_rolled_back(callback: Callable[[Any], None]) -> None:
    """Call this with every connection from now on on which a transaction was rolled back."""
    _after_rollback.append(callback)


def tell_of_rollback(connection: Any) -> None:
    """What was not committed on this connection never will be."""
    for callback in _after_rollback:
        callback(connection)


@contextmanager
def before_commit(connection: Any, prepare: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, call this just before each commit on a connection. If it raises, nothing is committed.

    DataJoint's plain make and its three-part make both end in `commit_transaction`.
    """
    commit = connection.commit_transaction

    def prepare_and_commit() -> None:
        prepare()
        commit()

    connection.commit_transaction = prepare_and_commit
    try:
        yield
    finally:
        del connection.commit_transaction
