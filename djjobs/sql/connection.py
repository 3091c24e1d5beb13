"""What an engine's connections are told, and what their errors mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class ConnectionStatements(ABC):
    """What is said to a server about the connection itself."""

    #: Begins a transaction whose locking reads lock only the rows they return.
    begin: ClassVar[tuple[str, ...]]
    commit = "COMMIT"
    roll_back = "ROLLBACK"
    own_connection_id: ClassVar[str]
    #: The user, and on MySQL the host that the connection comes from, as DataJoint records them.
    own_user: ClassVar[str]
    #: From now on no statement of this connection waits for a lock for longer than a second.
    wait_little: ClassVar[str]
    #: Whether the driver keeps signals waiting while it waits for the server.
    defers_signals: ClassVar[bool] = False
    server_time = "SELECT {now}"

    @abstractmethod
    def lock(self, name: str) -> tuple[str, str]:
        """Statements that take and give back a lock by name, for the moments a table is declared."""


class Errors(ABC):
    """What the errors of an engine's driver mean."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may well succeed when tried again."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that only a new one will do."""

    @abstractmethod
    def diagnose(self, error: BaseException) -> str | None:
        """'access', 'credentials', 'query' or 'unreachable', if the error is one of these."""
