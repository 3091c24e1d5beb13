"""The connection a table has, seen as a queue needs it: named statements, short transactions, retries."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import datajoint as dj
from datajoint.errors import MissingTableError, QuerySyntaxError, UnknownAttributeError

from ..dj.compat import AccessError, LostConnectionError, datajoint_api
from ..dj.connection import driver_of, forget_transaction, has_transaction, renumber
from ..errors import DjJobsError
from ..settings import settings
from ..sql import Engine, engine_for

__all__ = ["Database", "connect", "connected", "explained", "portions"]

_TRIES, _HURRIED_TRIES = 10, 2
_PORTION = 5000
T = TypeVar("T")


class Database:
    """A DataJoint connection and the engine behind it.

    Parameters
    ----------
    tries_to_connect : int
        How often a statement is tried when the connection is lost.
    hurried : bool
        Whether there is more to do meanwhile, so that no statement may wait long for what others keep locked. For a
        connection that nobody else uses. Defaults to False.
    """

    def __init__(self, connection: Any, tries_to_connect: int = 5, hurried: bool = False) -> None:
        self.connection, self._tries_to_connect, self._hurried = connection, tries_to_connect, hurried
        self.engine: Engine = engine_for(datajoint_api.backend(connection))
        self._open = False
        self._patience = 0.0
        self._given_up: Callable[[], bool] = lambda: False
        self._user: str | None = None
        self._set_up()

    def _set_up(self) -> None:
        if self._hurried:
            self.connection.query(self.engine.connection.wait_little)

    @property
    def user(self) -> str:
        """As whom this connection acts, and from which host."""
        if self._user is None:
            self._user = str(self.execute(self.engine.connection.own_user).fetchone()[0])
        return self._user

    def execute(self, sql: str, **parameters: Any) -> Any:
        """Run one statement and return its cursor. Outside a transaction it is tried again if the connection is lost.

        Inside a transaction, ours or the one that make() runs in, that would repeat its second half only.
        """
        if self._open or has_transaction(self.connection):
            return self.connection.query(sql, args=parameters, reconnect=False)
        return self.retry(lambda: self.connection.query(sql, args=parameters, reconnect=False))

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

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """Makes the statement that runs now return with an error, from another thread; None if a signal does."""
        if not self.engine.connection.defers_signals:
            return None

        def cancel() -> None:
            with suppress(Exception):  # there may be no server, and then no statement either
                driver_of(self.connection).cancel()

        return cancel

    def roll_back(self) -> None:
        """Roll back, also what DataJoint began; if that does not get through, start afresh."""
        try:
            self.connection.query(self.engine.connection.roll_back, reconnect=False)
        except Exception:
            self.reconnect()
        forget_transaction(self.connection)

    def start_afresh(self) -> None:
        """Open a new connection. An interrupt may have left the old one in the middle of an answer."""
        with suppress(Exception):
            self.connection.close()
        datajoint_api.reconnect(self.connection)
        forget_transaction(self.connection)
        renumber(self.connection, self.connection.query(self.engine.connection.own_connection_id).fetchone()[0])
        self._set_up()

    def retry(self, action: Callable[[], T]) -> T:
        """Do a whole transaction again when a deadlock or a lost connection ended it."""
        for tried in range(_TRIES):
            try:
                return action()
            except Exception as error:
                lost = self.is_lost(error)
                tries = self._tries_to_connect if lost else _HURRIED_TRIES if self._hurried else _TRIES
                if tried >= tries - 1 or not self.is_transient(error):
                    raise
                time.sleep(random.uniform(0, 0.01 * 2**tried))
                if lost:
                    self._try_to_connect(error)
        raise AssertionError("not reached")

    def _try_to_connect(self, lost: Exception) -> None:
        """Open a new connection, if there is a server; that there is none the next try will say."""
        try:
            self.recover_from(lost)
        except Exception as error:
            if self.engine.errors.diagnose(error) == "credentials" or self._patience:
                raise

    @contextmanager
    def patient(self, seconds: float, unless: Callable[[], bool]) -> Iterator[None]:
        """For a stretch of work: wait so long for a server that has gone away, unless asked to give up."""
        self._patience, self._given_up = seconds, unless
        try:
            yield
        finally:
            self._patience, self._given_up = 0.0, lambda: False

    def recover_from(self, error: BaseException) -> None:
        """Get a connection to work again that an error ended a transaction on; wait for the server if need be."""
        if not self.is_lost(error):
            self.roll_back()
        else:
            self.reconnect()

    def reconnect(self) -> None:
        """Open a new connection; if the server has gone away, wait for it as long as there is patience."""
        deadline = time.monotonic() + self._patience
        pause = 0.05
        while True:
            try:
                self.start_afresh()
                return
            except Exception as failure:
                patient = time.monotonic() + pause <= deadline and not self._given_up()
                if not patient or self.engine.errors.diagnose(failure) != "unreachable":
                    raise
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 2, 2.0)

    def is_transient(self, error: BaseException) -> bool:
        return self.is_lost(error) or self.engine.errors.is_transient(error)

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, LostConnectionError) or self.engine.errors.is_lost(error)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a named lock of the server. For declaring tables only: it dies with the session."""
        take, give_back = self.engine.connection.lock(name)
        self.execute(take)
        try:
            yield
        finally:
            self.execute(give_back)


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
