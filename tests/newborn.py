"""What a forked process does before anything else. Must be imported before djjobs: forks heed the order of imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_first: list[Callable[[], None]] = []


@contextmanager
def does_first(act: Callable[[], None]) -> Iterator[None]:
    """Let every process that is forked in here begin with this."""
    _first.append(act)
    try:
        yield
    finally:
        _first.remove(act)


def _act() -> None:
    for act in _first:
        act()


os.register_at_fork(after_in_child=_act)
