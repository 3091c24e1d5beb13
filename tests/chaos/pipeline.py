"""The pipeline of the fault test: numbers, their squares, the twins of the even ones, and poison.

Workers import it; the schema's name comes from CHAOS_SCHEMA.
"""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from typing import Any

import datajoint as dj
from pipelines import BIGINT, INT

import djjobs
from chaos import poison
from chaos.options import GRIPPING, Options

schema = dj.Schema(os.environ["CHAOS_SCHEMA"])

OPTIONS = Options(0, lease=djjobs.settings.lease)


@schema
class Number(dj.Manual):
    definition = f"n : {INT}"


@schema
class Entry(dj.Manual):
    """What make() writes beside its result, in the same transaction: two rows of a key were two commits."""

    definition = f"""
    entry : char(32)
    ---
    made : varchar(16)
    n : {INT}
    """


def enter(made: str, n: int) -> None:
    Entry.insert1({"entry": uuid.uuid4().hex, "made": made, "n": n})


def linger(n: int) -> None:
    length = OPTIONS.length(n)
    if n % 500 == GRIPPING:
        ctypes.PyDLL(None).usleep(int(1e6 * length))
    else:
        time.sleep(length)


class Patient(djjobs.JobsMixin):
    """Crashes alone make no errors here."""

    max_attempts = 50
    backoff = 0
    keep_completed = True


@schema
class Square(Patient, dj.Computed):
    definition = f"""
    -> Number
    ---
    square : {BIGINT}
    """

    def make(self, key: dict[str, Any]) -> None:
        n = key["n"]
        if n % 3:
            linger(n)
        enter("Square", n)
        # The primary key must not be what keeps a second commit out.
        self.insert1({**key, "square": n**2}, skip_duplicates=True)
        if not n % 3:
            # A worker that is suspended now holds locks.
            linger(n)


@schema
class Twin(Patient, dj.Computed):
    """A make() in three parts, for jobs that come to be while others are done."""

    definition = f"""
    -> Square
    ---
    twin : {BIGINT}
    """

    @property
    def key_source(self) -> Any:
        return Square & "MOD(n, 2) = 0"

    def make_fetch(self, key: dict[str, Any]) -> tuple[int]:
        return ((Square & key).fetch1("square"),)

    def make_compute(self, key: dict[str, Any], square: int) -> tuple[int]:
        linger(key["n"] // 2)
        return (square,)

    def make_insert(self, key: dict[str, Any], twin: int) -> None:
        enter("Twin", key["n"])
        self.insert1({**key, "twin": twin}, skip_duplicates=True)


@schema
class Poison(djjobs.JobsMixin, dj.Computed):
    """For a few numbers make() does what no make() should."""

    definition = """
    -> Number
    ---
    name : varchar(16)
    """
    max_attempts = poison.MAX_ATTEMPTS
    retry_on = BaseException
    backoff = 0
    keep_completed = True

    @property
    def key_source(self) -> Any:
        return Number & poison.condition() & (os.environ.get("CHAOS_POISON") == "1" or "FALSE")

    def make(self, key: dict[str, Any]) -> None:
        kind = poison.kind_of(key["n"])
        assert kind
        poison.write(n=key["n"])
        enter("Poison", key["n"])
        kind.act()
        self.insert1({**key, "name": kind.name}, skip_duplicates=True)
