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
    #: Whether the server takes changes at the moment. A replica does not, nor does a server that is being moved.
    takes_changes: ClassVar[str]
    #: Whether a signal has no effect while the driver waits for the server.
    defers_signals: ClassVar[bool] = False
    server_time = "SELECT {now}"

    #: A lock by name, for declaring tables: take it, without waiting for longer than a second, and say whether that
    #: went well; give it back; and who has it.
    take_lock: ClassVar[str]
    give_back_lock: ClassVar[str]
    holder_of_lock: ClassVar[str]
    #: How long a name may be.
    longest_lock = 200


#: The reason to wait if there is no connection to be had because others have all of them.
CROWDED = "the server allows no more connections"
READ_ONLY = "the server is read-only at the moment"
DISK_FULL = "the disk of the server is full"
STATEMENT_TIMEOUT = "the server ends statements that take so long (statement time-out)"
LOCKED = "somebody keeps locked what is to be changed (lock time-out)"
NO_SERVER = "there is no connection to the server"


class Errors(ABC):
    """What the errors of an engine's driver mean."""

    @abstractmethod
    def reason_to_wait(self, error: BaseException) -> str | None:
        """What has to pass before the same thing can succeed, in words; None if waiting does not help."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may succeed if it is tried again."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that a new one is needed."""

    @abstractmethod
    def diagnose(self, error: BaseException) -> str | None:
        """'access', 'credentials', 'query' or 'unreachable', if the error is one of these."""
