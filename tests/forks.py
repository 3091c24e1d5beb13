"""What happens at the very moment of a fork. Must be imported before djjobs: forks heed the order of imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_before: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []


@contextmanager
def _doing(acts: list[Callable[[], None]], act: Callable[[], None]) -> Iterator[None]:
    acts.append(act)
    try:
        yield
    finally:
        acts.remove(act)


def parent_does_last(act: Callable[[], None]) -> AbstractContextManager[None]:
    """Let every process that forks in here do this when all else is ready for it."""
    return _doing(_before, act)


def child_does_first(act: Callable[[], None]) -> AbstractContextManager[None]:
    """Let every process that is forked in here begin with this."""
    return _doing(_in_child, act)


os.register_at_fork(
    before=lambda: [act() for act in _before],
    after_in_child=lambda: [act() for act in _in_child],
)
