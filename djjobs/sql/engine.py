"""What an engine must say for itself, and the named statements that all of them share.

A statement is a template: `{jobs}`, `{control}`, `{workers}` and `{runs}` are the queue's tables, `{now}` the server's
UTC time, `{key}` and `{user}` columns whose names need quotes; `%(...)s` are parameters.
"""

from __future__ import annotations

import datetime
import numbers
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .jobs import JobStatements
from .native import NativeStatements
from .runs import RunStatements
from .schedules import ScheduleStatements
from .workers import WorkerStatements

#: Texts that every server and DataJoint itself read as they are written, and dates and times to the second.
_PLAIN = re.compile(r"(?!\s)[^'\"`\\%\x00-\x1f]*(?<!\s)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


class Engine(JobStatements, RunStatements, WorkerStatements, ScheduleStatements, NativeStatements, ABC):
    """One database engine: its statements, its JSON and hash expressions, its kinds of error."""

    now: ClassVar[str]
    key: ClassVar[str]
    user: ClassVar[str]
    #: Begins a transaction whose locking reads lock only the rows they return.
    begin: ClassVar[tuple[str, ...]]
    #: Which tables of these names a schema has, and the comment of each.
    find_tables: ClassVar[str]
    #: Run once after `~jobs` was declared: what a DataJoint definition cannot say.
    after_declare: ClassVar[str]
    #: Run once after another table was declared, so that its texts can be of any language and differ by every letter.
    any_language: ClassVar[str] = ""
    #: How text columns are declared: those that hold no text of any language, and the others.
    ascii: ClassVar[str] = ""
    unicode: ClassVar[str] = ""
    use_order_index: ClassVar[str] = ""
    use_primary: ClassVar[str] = ""
    #: Which jobs of the queue keys are compared with: one by one, and all at once.
    these_queued: ClassVar[str] = "queued.table_name = %(table)s"
    all_queued: ClassVar[str] = these_queued
    #: Ends a subquery that is to be asked anew for each of a few rows, whatever the engine thinks of its table.
    one_by_one: ClassVar[str] = ""
    #: Ends a subquery whose expressions are not to be moved out of it.
    computed_once: ClassVar[str] = f"LIMIT {2**63 - 1}"
    hint: ClassVar[str] = ""
    #: Where the keys get their places in line: all of them, inside, or only those that are new, outside.
    numbered: ClassVar[str] = ""
    place: ClassVar[str] = "ROW_NUMBER() OVER (ORDER BY {order})"
    #: The keys that are neither in the target nor, by their values, in the queue, so that only new ones are hashed;
    #: empty where that is no faster.
    new_by_value: ClassVar[str] = ""
    #: From now on to the end of the transaction the comparison of many keys has room to work in.
    room_to_compare: ClassVar[str] = ""
    #: The order of waiting jobs, said so that the engine finds it in the index.
    due_first: ClassVar[str] = "due_time"

    #: Whether the engine takes the queue for shorter than what was just put into it, and how to have it look; empty
    #: where it finds out by itself in time.
    underestimates: ClassVar[str] = ""
    look_at_queue: ClassVar[str] = ""

    own_connection_id: ClassVar[str]
    #: From now on no statement of this connection waits for a lock for longer than a second.
    wait_little: ClassVar[str]
    #: Whether the user may write the queue, where a user who may not does not even see what DataJoint looks for.
    may_write: ClassVar[str] = ""
    #: Whether the driver keeps signals waiting while it waits for the server.
    defers_signals: ClassVar[bool] = False

    # -- migrating a `~jobs` of an earlier version

    add_column: ClassVar[str] = "ALTER TABLE {jobs} ADD COLUMN {column}"
    set_comment: ClassVar[str]

    # -- migrating a `~jobs` of DataJoint 0.14, which only MySQL can have ---------------------------------

    lock_jobs: ClassVar[str]
    unlock_jobs: ClassVar[str]
    add_json_key: ClassVar[str]
    legacy_keys: ClassVar[str]
    store_json_key: ClassVar[str]
    replace_legacy_columns: ClassVar[str]
    #: The stored JSON of a key, as the text that is hashed.
    stored_key: ClassVar[str] = ""
    #: Legacy rows have a hash of DataJoint's own; a table that gets the mixin takes them over.
    rehash_legacy_rows: ClassVar[str] = ""

    # -- expressions -----------------------------------------------------------------------------------

    @abstractmethod
    def seconds(self, parameter: str) -> str:
        """An interval of so many seconds."""

    @abstractmethod
    def microseconds(self, count: str) -> str:
        """An interval of so many microseconds."""

    @abstractmethod
    def moment(self, parameter: str) -> str:
        """A UTC time given as a parameter."""

    @abstractmethod
    def json_text(self, columns: dict[str, tuple[str, str]]) -> str:
        """The JSON object of these columns, given as name -> (SQL, kind), as text."""

    @abstractmethod
    def json(self, text: str) -> str:
        """A JSON text, to be stored as JSON."""

    @abstractmethod
    def json_as_text(self, column: str) -> str:
        """The text of a JSON column, which the driver might else have read already."""

    @abstractmethod
    def in_type(self, column: str, kind: str, type_: str) -> str:
        """A column converted to this type of the heading, so that its JSON is that of the type."""

    @abstractmethod
    def hash(self, json: str) -> str:
        """The key_hash of a JSON expression. The only place where a hash is made."""

    #: How the server itself declares the columns of a table: name, and what `key_column` takes.
    column_types: ClassVar[str]

    @abstractmethod
    def key_column(self, json: str, name: str, kind: str, type_: str, declared: tuple[Any, ...]) -> str:
        """The value of a key attribute inside the JSON, as SQL that compares as the column of the table does.

        Parameters
        ----------
        type_ : str
            The type in the heading.
        declared : tuple
            What `column_types` says of the column.
        """

    @abstractmethod
    def local_time(self, utc: str) -> str:
        """A UTC time in the time zone of the session, which the times of DataJoint's own tables are in."""

    @abstractmethod
    def utc_time(self, local: str) -> str:
        """The other way round."""

    @abstractmethod
    def json_member(self, json: str, name: str) -> str:
        """The text of a member of a JSON column; NULL if there is none."""

    def shown_columns(self) -> dict[str, str]:
        """The columns of DataJoint 2's job tables that `~jobs` has otherwise, as SQL."""
        began = f"timestamp - {self.seconds('run_duration')}"
        return {
            "created_time": self.local_time("created_time"),
            "scheduled_time": self.local_time("due_time"),
            "reserved_time": f"CASE WHEN status = 'reserved' THEN {self.local_time('timestamp')} "
            f"WHEN status IN ('success', 'error') THEN {self.local_time(began)} END",
            "completed_time": f"CASE WHEN status IN ('success', 'error') THEN {self.local_time('timestamp')} END",
            "duration": "run_duration",
            "version": f"COALESCE({self.json_member('run_metadata', 'version')}, '')",
        }

    def read_back(self, json: str, name: str, type_: str) -> str:
        """The same as SQL of the heading's type, whatever its length; empty if there is no saying it."""
        return ""

    @abstractmethod
    def to_driver(self, kind: str, value: Any) -> Any:
        """What the driver would have returned for a key attribute with this JSON value."""

    def literal(self, kind: str, value: Any) -> str | None:
        """A key's value in SQL; None if the server may have stored it otherwise than it was given."""
        text = str(value)
        if kind == "int" and isinstance(value, numbers.Integral):
            return str(int(value))
        if kind == "bool" and isinstance(value, bool):
            return text.upper()
        plain = (
            (kind == "text" and isinstance(value, str) and _PLAIN.fullmatch(text))
            or (kind == "date" and isinstance(value, (str, datetime.date)) and _DATE.fullmatch(text))
            or (kind == "datetime" and isinstance(value, (str, datetime.datetime)) and _DATETIME.fullmatch(text))
            or (kind == "uuid" and isinstance(value, uuid.UUID))
        )
        return self.quoted(kind, text) if plain else None

    def quoted(self, kind: str, text: str) -> str:
        """A text without special characters, as a value of this kind."""
        return f"'{text}'"

    @abstractmethod
    def lock(self, name: str) -> tuple[str, str]:
        """Statements that take and give back a lock by name, for the moments a table is declared."""

    # -- errors --------------------------------------------------------------------------------------

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may well succeed when tried again."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that only a new one will do."""

    @abstractmethod
    def diagnose(self, error: BaseException) -> str | None:
        """'access', 'credentials', 'query' or 'unreachable', if the error is one of these."""

    def render(self, statement: str, **parts: str) -> str:
        """Fill a statement's template."""
        own = (
            "now",
            "key",
            "user",
            "or_skip",
            "computed_once",
            "hint",
            "due_first",
            "use_order_index",
            "use_primary",
        )
        return statement.format(**{**{name: getattr(self, name) for name in own}, **parts})

    #: Ends an INSERT that leaves rows alone which are already there; by a column of the primary key.
    or_skip: ClassVar[Mapping[str, str]]
