"""What many tests need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout: float = 30, every: float = 0.05) -> T:
    """Wait until the condition is true and return what it gave; fail when it takes too long."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} was still {result!r} after {timeout} s")
        time.sleep(every)
    return result


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits for its parent to notice; it may end while it is looked at."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended meanwhile, as the backends of a server do all the time."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
