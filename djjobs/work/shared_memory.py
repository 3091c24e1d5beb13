"""The memory that a slot and its monitor share.

The slot writes there what it is working on. That costs no system call, and it can be read after the slot was killed.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass

__all__ = ["LONGEST_PROGRESS", "SharedMemory", "Started"]

_SIZE = 8192
_RECORD = struct.Struct("<dq32si")  # since when, claim, hash, which table
_RECORDS = (8, 8 + _RECORD.size)
#: Native and aligned, so that it is written at once: nobody reads half a number.
_HOLDING, _NUMBER = 512, struct.Struct("@q")
_PROGRESS = (1024, 1024 + 3072)
_LENGTH = struct.Struct("<I")
#: How many characters a progress may have.
LONGEST_PROGRESS = _PROGRESS[1] - _PROGRESS[0] - _LENGTH.size


@dataclass(frozen=True)
class Started:
    """A job that a slot has begun."""

    since: float
    claim: int
    key_hash: str
    table: int


class SharedMemory:
    """What a slot writes and its monitor reads. Each part is written beside its last version, which then counts."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)

    def write(self, started: Started | None) -> None:
        memory = self._memory
        if started is None:
            memory[0] = 0
            return
        which = 2 if memory[0] == 1 else 1
        values = started.since, started.claim, started.key_hash.encode(), started.table
        _RECORD.pack_into(memory, _RECORDS[which - 1], *values)
        memory[1] = memory[2] = 0
        memory[0] = which

    def read(self) -> Started | None:
        which = self._memory[0]
        if not which:
            return None
        since, claim, key_hash, table = _RECORD.unpack_from(self._memory, _RECORDS[which - 1])
        return Started(since, claim, key_hash.decode(), table)

    def write_holding(self, first_claim: int, any_later: bool = False) -> None:
        """From now on the slot holds no claim with a smaller number than this.

        Parameters
        ----------
        any_later : bool
            Whether it may hold claims with this number or a larger one. Defaults to False.
        """
        _NUMBER.pack_into(self._memory, _HOLDING, first_claim)
        self._memory[3] = any_later

    def read_holding(self) -> int:
        """The smallest number that a claim which the slot still holds can have; 0 before its first claim.

        Read it before the rows of the queue: a reserved row with a smaller number than this is one that the slot has
        forgotten.
        """
        return _NUMBER.unpack_from(self._memory, _HOLDING)[0]

    @property
    def may_hold(self) -> bool:
        """Whether the slot may hold claims. It still says so if the slot has ended without giving them back."""
        return bool(self._memory[3] or self._memory[0])

    @property
    def has_yielded(self) -> bool:
        """Whether make() has ended after an interrupt. What follows is not the work of make()."""
        return bool(self._memory[2])

    def write_yielded(self) -> None:
        self._memory[2] = 1

    def write_progress(self, text: str) -> None:
        """Keep this text, which is JSON in ASCII, and not longer than `LONGEST_PROGRESS`."""
        data = text.encode("ascii")
        assert len(data) <= LONGEST_PROGRESS, len(data)
        which = 2 if self._memory[1] == 1 else 1
        place = _PROGRESS[which - 1]
        _LENGTH.pack_into(self._memory, place, len(data))
        self._memory[place + _LENGTH.size : place + _LENGTH.size + len(data)] = data
        self._memory[1] = which

    def read_progress(self) -> str | None:
        """How far the job is, as JSON; None if it has not said, or if several say so at the same moment."""
        which = self._memory[1]
        if not which:
            return None
        place = _PROGRESS[which - 1]
        (length,) = _LENGTH.unpack_from(self._memory, place)
        text = self._memory[place + _LENGTH.size : place + _LENGTH.size + length].decode("ascii", "replace")
        return text if _is_json(text) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
