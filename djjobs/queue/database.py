"""The connection a table has, seen as a queue needs it: named statements, short transactions, retries."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import datajoint as dj
from datajoint.errors import MissingTableError, QuerySyntaxError, UnknownAttributeError

from ..dj.compat import CONNECT_LIMIT, AccessError, LostConnectionError, datajoint_api
from ..dj.connecting import connect_at_next_use, let_connect, refuse_to_connect
from ..dj.connection import (
    cancel_statement,
    forget_transaction,
    has_transaction,
    keep_with,
    kept_with,
    renumber,
    shut_down,
)
from ..errors import DjJobsError
from ..settings import settings
from ..sql import Engine, engine_for
from ..sql.connection import LOCKED, NO_SERVER, READ_ONLY
from .waiting import Patience
from .watchdog import limited

__all__ = ["Database", "connect", "connected", "explained", "portions"]

_TRIES, _HURRIED_TRIES = 10, 2
#: How long a new connection may take if there is more to do.
_SHORT_LIMIT = 2.0
#: Under this name it is kept with a connection that nobody is to use any more.
_UNUSED = "unused"
#: How long to wait for the lock of somebody who declares the same tables.
LOCK_PATIENCE = 30.0
_PORTION = 5000
T = TypeVar("T")


class Database:
    """A DataJoint connection and the engine behind it.

    Parameters
    ----------
    tries_to_connect : int
        How often a statement is tried when the connection is lost.
    hurried : bool
        Whether there is more to do meanwhile, so that no statement may wait long for what others keep locked, or for
        a server that does not answer. For a connection that nobody else uses. Defaults to False.
    """

    def __init__(self, connection: Any, tries_to_connect: int = 5, hurried: bool = False) -> None:
        self.connection, self._tries_to_connect, self._hurried = connection, tries_to_connect, hurried
        self.engine: Engine = engine_for(datajoint_api.backend(connection))
        self._open = False
        self._patience = Patience()
        self._is_retrying = False
        self._user: str | None = None
        self._set_up()

    def _set_up(self) -> None:
        if self._hurried:
            self._query(self.engine.connection.wait_little)

    @property
    def user(self) -> str:
        """As whom this connection acts, and from which host."""
        if self._user is None:
            self._user = str(self.execute(self.engine.connection.own_user).fetchone()[0])
        return self._user

    # -- statements and transactions ------------------------------------------------------------------------

    def execute(self, sql: str, **parameters: Any) -> Any:
        """Run one statement and return its cursor. Outside a transaction it is tried again if the connection is lost.

        Inside a transaction, ours or the one that make() runs in, that would repeat its second half only.
        """
        if self._open or has_transaction(self.connection):
            return self._query(sql, parameters)
        return self.retry(lambda: self._query(sql, parameters))

    def _query(self, sql: str, parameters: Any = ()) -> Any:
        self._insist_on_use()
        if not self._hurried:
            return self.connection.query(sql, args=parameters, reconnect=False)
        with limited(_limit(), lambda: shut_down(self.connection)):
            return self.connection.query(sql, args=parameters, reconnect=False)

    def change(self, sql: str, **parameters: Any) -> int:
        """Run one statement in a transaction of its own and return how many rows it changed."""

        def attempt() -> int:
            with self.transaction():
                return self.execute(sql, **parameters).rowcount

        return self.retry(attempt)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A short transaction of the queue's own, under READ COMMITTED."""
        first, *rest = self.engine.connection.begin
        self.execute(first)
        self._open = True
        try:
            for statement in rest:
                self.execute(statement)
            yield
            self.execute(self.engine.connection.commit)
        except Exception:
            self.roll_back()
            raise
        except BaseException:
            self.start_afresh()
            raise
        finally:
            self._open = False

    def roll_back(self) -> None:
        """Roll back, also what DataJoint began; if that does not get through, start afresh."""
        try:
            self._query(self.engine.connection.roll_back)
        except Exception:
            self.reconnect()
        forget_transaction(self.connection)

    # -- faults of the server -------------------------------------------------------------------------------

    @contextmanager
    def patient(self, seconds: float, unless: Callable[[], bool]) -> Iterator[None]:
        """For a stretch of work: wait so long for a server that is away or refuses, unless asked to give up."""
        self._patience = Patience(seconds, unless)
        try:
            yield
        finally:
            self._patience = Patience()

    def retry(self, action: Callable[[], T]) -> T:
        """Do a whole transaction again when a fault of the server ended it: a deadlock, a lost connection.

        What only takes time (a server that is away or read-only, a full disk) is waited for as long as there is
        patience.
        """
        outermost, self._is_retrying = not self._is_retrying, True
        try:
            for tried in itertools.count():
                try:
                    result = action()
                except Exception as error:
                    if not self._may_try_again(error, tried):
                        raise
                    if self.is_lost(error):
                        self._try_to_connect(error)
                else:
                    if outermost:
                        # That a part of it has succeeded says nothing: a server that is read-only begins transactions.
                        self._patience.is_over()
                    return result
            raise AssertionError("not reached")
        finally:
            self._is_retrying = not outermost

    def _may_try_again(self, error: Exception, tried: int) -> bool:
        """Whether to do it again; if so, after a pause."""
        reason, lost = self.reason_to_wait(error), self.is_lost(error)
        if reason is not None and self._patience.is_left():
            self._patience.pause(reason, error)
            return True
        waits = reason is not None and reason != LOCKED and not lost
        if waits or not self.is_transient(error) or (lost and tried and self._patience.given_up()):
            return False
        if tried >= (self._tries_to_connect if lost else _HURRIED_TRIES if self._hurried else _TRIES) - 1:
            return False
        time.sleep(random.uniform(0, 0.01 * 2**tried))
        return True

    def _try_to_connect(self, lost: Exception) -> None:
        """Open a new connection, if there is a server; that there is none the next try will say."""
        try:
            self.recover_from(lost)
        except Exception as error:
            if self.engine.errors.diagnose(error) == "credentials":
                raise

    def recover_from(self, error: BaseException) -> None:
        """Get a connection to work again that an error ended a transaction on; wait for the server if need be."""
        if self.is_lost(error):
            self.reconnect()
        else:
            self.roll_back()
        if self.reason_to_wait(error) == READ_ONLY:
            self._wait_for_changes(error)

    def _wait_for_changes(self, error: BaseException) -> None:
        """The server takes no changes: wait until it does, or raise the error again."""

        def insist() -> None:
            if not self.execute(self.engine.connection.takes_changes).fetchone()[0]:
                raise error

        self.retry(insist)

    def reconnect(self) -> None:
        """Open a new connection; if the server has gone away, wait for it as long as there is patience."""
        while True:
            try:
                self.start_afresh()
                return
            except Exception as failure:
                reason = self.reason_to_wait(failure)
                if reason is None or not self._patience.is_left():
                    raise
                self._patience.pause(reason, failure)

    def start_afresh(self) -> None:
        """Open a new connection. An interrupt may have left the old one in the middle of an answer."""
        let_connect()
        with suppress(Exception):
            self.connection.close()
        self._insist_on_use()
        self._connect(_SHORT_LIMIT if self._hurried or self._patience.given_up() else CONNECT_LIMIT)
        forget_transaction(self.connection)
        self._set_up()

    def _connect(self, seconds: float = CONNECT_LIMIT) -> None:
        datajoint_api.reconnect(self.connection, seconds)
        with limited(seconds, lambda: shut_down(self.connection)):
            number = self.connection.query(self.engine.connection.own_connection_id, reconnect=False).fetchone()[0]
        renumber(self.connection, number)

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may succeed if it is tried again."""
        return self.is_lost(error) or self.engine.errors.is_transient(error)

    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone."""
        return isinstance(error, LostConnectionError) or self.engine.errors.is_lost(error)

    def reason_to_wait(self, error: BaseException) -> str | None:
        """What has to pass before the same thing can succeed, in words; None if waiting does not help."""
        return self.engine.errors.reason_to_wait(error) or (NO_SERVER if self.is_lost(error) else None)

    # -- a statement that is not to be waited for any longer ------------------------------------------------

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """Makes the statement that runs now return with an error, from another thread; None if a signal does."""
        if not self.engine.connection.defers_signals:
            return None
        return lambda: cancel_statement(self.connection)

    def refuse_reconnect(self) -> None:
        """Keep DataJoint from connecting again by itself, until `start_afresh` does."""
        refuse_to_connect()

    def cut(self) -> None:
        """End the statement that runs now, from another thread, even if the server does not answer."""
        self.refuse_reconnect()
        shut_down(self.connection)

    def stop_using(self) -> None:
        """The same, and from now on nobody asks anything of the server over this connection."""
        keep_with(self.connection, _UNUSED, True)
        self.cut()

    def use_again(self) -> None:
        """The server may be asked again. Whoever does that next also connects: this may take time."""
        let_connect()
        if kept_with(self.connection, _UNUSED):
            keep_with(self.connection, _UNUSED, False)
            self.connect_later()

    def connect_later(self) -> None:
        """Leave the connection closed until somebody uses it."""
        with suppress(Exception):
            self.connection.close()
        forget_transaction(self.connection)
        connect_at_next_use(self.connection, lambda _connection: self._connect())

    def _insist_on_use(self) -> None:
        if kept_with(self.connection, _UNUSED):
            raise LostConnectionError("The server did not answer, and somebody wants to stop.")

    # -- locks by name ----------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a named lock of the server. For declaring tables only: it dies with the session."""
        statements = self.engine.connection
        name = name[: statements.longest_lock]
        deadline = time.monotonic() + LOCK_PATIENCE
        while not self.execute(statements.take_lock, name=name).fetchone()[0]:
            if time.monotonic() > deadline:
                raise self._lock_is_held(name)
            time.sleep(random.uniform(0.05, 0.1))
        try:
            yield
        finally:
            self.execute(statements.give_back_lock, name=name)

    def _lock_is_held(self, name: str) -> DjJobsError:
        holder = self.execute(self.engine.connection.holder_of_lock, name=name).fetchone()
        who = holder[0] if holder and holder[0] else "an unknown connection"
        return DjJobsError(
            f"Another process holds the server's lock {name!r}, and did not give it back within {LOCK_PATIENCE:g} s: "
            f"{who}. Perhaps it is declaring or upgrading the queue of this schema. Nothing was changed. "
            "Try again later, or end that connection."
        )


def _limit() -> float:
    """How long a statement of a hurried connection may take: a lease has room for several."""
    return max(1.0, min(10.0, settings.lease / 4))


def portions(items: Sequence[T], size: int | None = None) -> Iterator[tuple[T, ...]]:
    """As many at a time as one statement takes well. Defaults to 5000."""
    size = size or _PORTION
    for first in range(0, len(items), size):
        yield tuple(items[first : first + size])


@contextmanager
def explained(connection: Any, table: str, doing: str) -> Iterator[None]:
    """Turn what the server or DataJoint says into one error that names the table and the way out."""
    try:
        yield
    except DjJobsError:
        raise
    except Exception as error:
        info = connection.conn_info
        server = f"{info['host']}:{info['port']}"
        message = _explanation(error, datajoint_api.backend(connection), server, info["user"])
        if message is None:
            raise
        raise DjJobsError(f"Cannot {doing} {table}: {message}") from error


def connect() -> Any:
    """The connection that DataJoint is configured for.

    DataJoint 0.14 asks for what it is not told; where nobody can answer, that is an error.
    """
    settings.insist_on_environment()
    nameless = dj.config["database.user"] is None or dj.config["database.password"] is None
    if nameless and not sys.stdin.isatty():
        raise DjJobsError(
            "Cannot connect: DataJoint knows no user and password. "
            "Set DJ_HOST, DJ_USER and DJ_PASS, or write them into DataJoint's configuration file."
        )
    return connected()


def connected() -> Any:
    """The connection that DataJoint is configured for, or one clear error."""
    try:
        return dj.conn()
    except Exception as error:
        server = f"{dj.config['database.host']}:{dj.config['database.port']}"
        message = _explanation(error, datajoint_api.configured_backend(), server, dj.config["database.user"])
        raise DjJobsError(f"Cannot connect: {message or error}") from error


def _explanation(error: Exception, backend: str, server: str, user: str) -> str | None:
    kind = engine_for(backend).errors.diagnose(error)
    if isinstance(error, AccessError) or kind == "access":
        return (
            f"the user {user!r} lacks a privilege ({_first_line(error)}). It takes SELECT, INSERT, UPDATE and "
            "DELETE on the schema, and CREATE, ALTER and INDEX the first time a queue is used there. Ask whoever "
            "administers the server to grant them."
        )
    if kind == "credentials":
        return (
            f"the server {server} refused the password of user {user!r}. "
            'Check dj.config["database.user"] and dj.config["database.password"].'
        )
    if kind == "unreachable" or isinstance(error, LostConnectionError):
        return (
            f"no connection to the server {server} ({_first_line(error)}). Check that it runs, and "
            'dj.config["database.host"] and dj.config["database.port"]; then dj.conn(reset=True).'
        )
    if kind == "query" or isinstance(error, (QuerySyntaxError, UnknownAttributeError)):
        return f"the server does not understand the query ({_first_line(error)}). Check the restriction and key_source."
    if isinstance(error, MissingTableError):
        return f"a table is missing ({_first_line(error)}). Import the module that declares it, then try again."
    return None


def _first_line(error: Exception) -> str:
    text = " ".join(str(part) for part in error.args if str(part)) or type(error).__name__
    return text.strip().splitlines()[0][:200]
