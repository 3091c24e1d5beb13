"""What many tests need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout: float = 30, every: float = 0.05) -> T:
    """Wait until the condition is true and return what it gave; fail when it takes too long."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} was still {result!r} after {timeout} s")
        time.sleep(every)
    return result
