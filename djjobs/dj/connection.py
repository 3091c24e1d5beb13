"""DataJoint's connections, as djjobs needs them: transactions, the driver below, and what we keep with a connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import DjJobsError

__all__ = [
    "KEPT",
    "MakeTransaction",
    "account_of",
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

_ENDS_OF_TRANSACTION = "start_transaction", "commit_transaction"

_after_rollback: list[Callable[[Any], None]] = []
#: The connections on which a make() runs now.
_used_by_make: list[Any] = []


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


class MakeTransaction:
    """The transaction that make() runs in. DataJoint begins and commits it; make() itself must not.

    Use it as a context manager around DataJoint's call of make(). DataJoint's plain make and its three-part make both
    end in `commit_transaction`.

    Parameters
    ----------
    connection
        The connection of the table.
    label : str
        The name of the table, for errors.
    prepare : callable
        Called just before the commit. If it raises, nothing is committed.
    """

    def __init__(self, connection: Any, label: str, prepare: Callable[[], None]) -> None:
        self._connection, self._label, self._prepare = connection, label, prepare
        self._replaced: dict[str, Any] = {}
        #: Whether make() itself runs now, and whether DataJoint had begun the transaction before.
        self._in_make = self._is_datajoints = False

    def __enter__(self) -> MakeTransaction:
        attributes = self._connection.__dict__
        self._begin_plainly, self._commit_plainly = (getattr(self._connection, name) for name in _ENDS_OF_TRANSACTION)
        self._replaced = {name: attributes[name] for name in _ENDS_OF_TRANSACTION if name in attributes}
        attributes.update(zip(_ENDS_OF_TRANSACTION, (self._begin, self._commit), strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        for name in _ENDS_OF_TRANSACTION:
            self._connection.__dict__.pop(name, None)
        self._connection.__dict__.update(self._replaced)

    @contextmanager
    def in_make(self) -> Iterator[None]:
        """A stretch in which make() itself runs."""
        self._in_make, self._is_datajoints = True, has_transaction(self._connection)
        _used_by_make.append(self._connection)
        try:
            yield
        finally:
            self._in_make = False
            _used_by_make.remove(self._connection)

    def _begin(self) -> None:
        if self._in_make and self._is_datajoints:
            raise self._not_allowed("connection.transaction or connection.start_transaction()")
        self._begin_plainly()

    def _commit(self) -> None:
        if not self._in_make:
            if not has_transaction(self._connection):
                raise self._not_allowed("connection.cancel_transaction()")
            self._prepare()
        elif self._is_datajoints:
            raise self._not_allowed("connection.commit_transaction()")
        # Else make() has begun this transaction itself, in a part of it that runs outside DataJoint's.
        self._commit_plainly()

    def _not_allowed(self, call: str) -> DjJobsError:
        return DjJobsError(
            f"make() of {self._label} called {call}. make() runs inside a transaction, which is committed together "
            "with the end of its job when make() returns. Remove the call."
        )


def _cut_off_copies() -> None:
    """Called in a process that make() has forked: it cannot speak on the connection of its parent.

    Both would read each other's answers, and the parent would wait for ever for one that the other has read.
    """
    for connection in _used_by_make:
        with suppress(Exception):  # it is closed already
            driver = driver_of(connection)
            number = (driver if hasattr(driver, "fileno") else driver._sock).fileno()
            closed, other_end = socket.socketpair()
            other_end.close()
            os.dup2(closed.fileno(), number)
            closed.close()


os.register_at_fork(after_in_child=_cut_off_copies)
