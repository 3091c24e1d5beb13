"""A pipeline over two schemas that is to fill itself: sessions, their spectra, and the bands of these.

In a process of its own its tables are found in the schemas that FILLING names, with a comma between them.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import datajoint as dj
from pipelines import INT, MODERN

import djjobs

#: The session whose make() fails, after it has inserted.
BAD = 13


def declare(schema: Any, other: Any) -> SimpleNamespace:
    @schema
    class Subject(dj.Manual):
        definition = "subject : varchar(16)"

    @schema
    class Session(dj.Manual):
        definition = f"""
        -> Subject
        session : {INT}
        ---
        session_date = null : date
        """

        class Channel(dj.Part):
            definition = f"""
            -> master
            channel : {INT}
            """

    @schema
    class Planned(dj.Manual):
        definition = f"""
        subject : varchar(16)
        session : {INT}
        """

    @schema
    class Note(dj.Manual):
        definition = f"note : {INT}"

    @schema
    class Spectrum(djjobs.JobsMixin, dj.Computed):
        definition = "-> Session"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)
            Note.insert1({"note": key["session"]}, skip_duplicates=True)
            if key["session"] == BAD:
                raise ValueError("a bad session")

    @schema
    class Reply(djjobs.JobsMixin, dj.Computed):
        definition = "-> Note"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    @other
    class Band(djjobs.JobsMixin, dj.Computed):
        definition = "-> Spectrum"

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    # The tests that are about these turn them on.

    @schema
    class Wired(djjobs.JobsMixin, dj.Computed):
        """Sessions that have channels: a key_source of its own, on a part table."""

        definition = "-> Session"
        events = False

        @property
        def key_source(self) -> Any:
            return Session & Session.Channel

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    @schema
    class Chosen(djjobs.JobsMixin, dj.Computed):
        """The same sessions, as Python code has fetched them."""

        definition = "-> Session"
        events = False

        @property
        def key_source(self) -> Any:
            return Session & (Session.Channel.keys() if MODERN else Session.Channel.fetch("KEY"))

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    @schema
    class Pair(djjobs.JobsMixin, dj.Computed):
        """Two sessions of a subject: the second has another name for its number."""

        definition = """
        -> Session
        -> Session.proj(other_session="session")
        """
        events = False

        def make(self, key: dict[str, Any]) -> None:
            self.insert1(key)

    tables = {name: table for name, table in locals().items() if isinstance(table, type)}
    return SimpleNamespace(**tables)


if os.environ.get("FILLING"):
    lab = declare(*map(dj.Schema, os.environ["FILLING"].split(",")))
    for _name, _table in vars(lab).items():
        globals()[_name] = _table
