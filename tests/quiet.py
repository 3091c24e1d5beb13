"""Tests that keep to a time have the machine to themselves, while cells run side by side."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["turn"]


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until nobody is alone, and to be `alone` until everybody else pauses; locks in the folder say so.

    The door lets in one at a time, so that who waits to be alone is not overtaken for ever.
    """
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
