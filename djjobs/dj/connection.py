"""DataJoint's connections, as djjobs needs them: transactions, the driver below, and what we keep with a connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

__all__ = [
    "KEPT",
    "account_of",
    "before_commit",
    "cancel_statement",
    "connection_of",
    "driver_of",
    "forget_transaction",
    "has_transaction",
    "keep_with",
    "kept_with",
    "put_driver",
    "renumber",
    "server_of",
    "share_schemas",
    "shut_down",
    "tell_of_rollback",
    "when_rolled_back",
]

T = TypeVar("T")

#: The first bytes of a client of PostgreSQL that wants TLS.
_HAS_TLS = bytes([0, 0, 0, 8, 4, 210, 22, 47])
#: How long a server may take to answer them.
_ANSWERS_WITHIN = 1.0

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


def put_driver(connection: Any, driver: Any) -> None:
    """Let a connection use this one of the driver."""
    connection._conn = driver


def shut_down(connection: Any) -> None:
    """Make the statement that waits on a connection return with an error, whatever the server does.

    Called from another thread. The connection is lost.
    """
    driver = driver_of(connection)
    with suppress(Exception):  # it may be closed already, or just be opened
        number = driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno()
        # On a copy of the descriptor, so that the driver closes its own one when it has seen the end.
        with socket.socket(fileno=os.dup(number)) as line:
            line.shutdown(socket.SHUT_RDWR)


def cancel_statement(connection: Any) -> None:
    """Ask PostgreSQL to end the statement that runs on a connection; not if it does not answer.

    The driver keeps Python's lock while it asks, so that this process would stand still together with the server.
    """
    driver = driver_of(connection)
    with suppress(Exception):  # there may be no server, and then no statement either
        if _answers(driver.info.host, driver.info.port):
            driver.cancel()


def _answers(host: str, port: int) -> bool:
    """Whether a PostgreSQL server says something when it is asked whether it has TLS."""
    with _line_to(host, port) as line:
        line.sendall(_HAS_TLS)
        return bool(line.recv(1))


def _line_to(host: str, port: int) -> socket.socket:
    if not host.startswith("/"):
        return socket.create_connection((host, port), _ANSWERS_WITHIN)
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(_ANSWERS_WITHIN)
    line.connect(f"{host}/.s.PGSQL.{port}")
    return line


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
