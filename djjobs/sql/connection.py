"""What a connection is told, and what errors of the server mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class ConnectionStatements(ABC):
    """The statements about the connection itself."""

    #: These begin a transaction. Its locking reads lock only the rows that they return.
    begin: ClassVar[tuple[str, ...]]
    commit = "COMMIT"
    roll_back = "ROLLBACK"
    own_connection_id: ClassVar[str]
    #: The user, and on MySQL the host that the connection comes from, as DataJoint records them.
    own_user: ClassVar[str]
    #: After this, no statement of the connection waits longer than a second for a lock.
    wait_little: ClassVar[str]
    #: Whether a signal has no effect while the driver waits for the server.
    defers_signals: ClassVar[bool] = False
    server_time = "SELECT {now}"

    @abstractmethod
    def lock(self, name: str) -> tuple[str, str]:
        """Two statements: one takes a lock by name, one gives it back. It is for declaring tables."""


class Errors(ABC):
    """What the errors of an engine's driver mean."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may succeed if it is tried again."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that a new one is needed."""

    @abstractmethod
    def diagnose(self, error: BaseException) -> str | None:
        """'access', 'credentials', 'query' or 'unreachable', if the error is one of these."""
