"""How an engine writes times, JSON, hashes and values."""

from __future__ import annotations

import datetime
import numbers
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

#: Texts that every server and DataJoint read as they are written; dates; times to the second.
_PLAIN = re.compile(r"(?!\s)[^'\"`\\%\x00-\x1f]*(?<!\s)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


class Dialect(ABC):
    """The expressions of an engine. Statements are made of them."""

    #: What stands before the name of a function of the server, so that it is no function of somebody else.
    catalog: ClassVar[str] = ""
    #: The time at which the statement began.
    now: ClassVar[str]
    #: The time at this moment. It differs if the statement had to wait.
    clock: ClassVar[str]
    key: ClassVar[str]
    user: ClassVar[str]
    #: What statements say so that the server chooses a good plan.
    hints: ClassVar[Mapping[str, str]] = {
        # At the end of a subquery: its expressions are computed inside, and so only once.
        "computed_once": f"LIMIT {2**63 - 1}",
        # The order of jobs without a turn, in words by which the server finds it in the index.
        "due_first": "due_time",
        # After the INSERT of a scheduling.
        "join_memory": "",
        "use_order_index": "",
        "use_primary": "",
    }

    @abstractmethod
    def or_skip(self, column: str) -> str:
        """Ends an INSERT that leaves rows alone which are already there; takes a column of the primary key."""

    @abstractmethod
    def seconds(self, parameter: str) -> str:
        """An interval of so many seconds."""

    @abstractmethod
    def microseconds(self, count: str) -> str:
        """An interval of so many microseconds."""

    @abstractmethod
    def seconds_since(self, column: str) -> str:
        """How many seconds ago a time was, as a number; 0 if it is still to come."""

    @abstractmethod
    def moment(self, parameter: str) -> str:
        """A UTC time given as a parameter."""

    def due(self, due_time: str) -> dict[str, str]:
        """When jobs are due, for `{due}` of a statement, and their turn. A job that is not due yet has no turn.

        `{turn}` comes from the parameter `priority`, `{own_turn}` from the priority that the job has.

        Parameters
        ----------
        due_time : str
            "now"; "delay" if the parameter `due_time` is a number of seconds; "moment" if it is a time.
        """
        if due_time == "now":
            return {"due": self.now, "turn": "%(priority)s", "own_turn": "priority"}
        parameter = "%(due_time)s"
        due = f"{self.now} + {self.seconds(parameter)}" if due_time == "delay" else self.moment(parameter)
        turn = f"CASE WHEN {due} <= {self.now} THEN {{priority}} END"
        return {
            "due": due,
            "turn": turn.format(priority="%(priority)s"),
            "own_turn": turn.format(priority="priority"),
        }

    @abstractmethod
    def json_text(self, columns: dict[str, tuple[str, str]]) -> str:
        """The JSON object of these columns, given as name -> (SQL, kind), as text."""

    @abstractmethod
    def json(self, text: str) -> str:
        """A JSON text, to be stored as JSON."""

    @abstractmethod
    def json_as_text(self, column: str) -> str:
        """A JSON column as text. Otherwise the driver may decode it."""

    @abstractmethod
    def in_type(self, column: str, kind: str, type_: str) -> str:
        """A column converted to this type of the heading. Its JSON is then that of the type."""

    @abstractmethod
    def hash(self, json: str) -> str:
        """The key_hash of a JSON expression. The only place where a hash is made."""

    @abstractmethod
    def key_column(self, json: str, name: str, kind: str, type_: str, declared: tuple[Any, ...]) -> str:
        """The value of a key attribute inside the JSON, as SQL that compares as the column of the table does.

        Parameters
        ----------
        type_ : str
            The type in the heading.
        declared : tuple
            What `tables.column_types` says of the column.
        """

    @abstractmethod
    def local_time(self, utc: str) -> str:
        """A UTC time in the time zone of the session. DataJoint's own tables have times in that zone."""

    @abstractmethod
    def utc_time(self, local: str) -> str:
        """A time in the time zone of the session as UTC."""

    @abstractmethod
    def json_member(self, json: str, name: str) -> str:
        """A member of a JSON column as text; NULL if there is none."""

    def version_json(self, column: str) -> str:
        """The JSON of an attempt of which only the version is known, which is in a column."""
        return self.json(self.json_text({"version": (column, "text")}))

    def shown_columns(self) -> dict[str, str]:
        """The columns of DataJoint 2's job tables that `~jobs` does not have, as SQL."""
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
