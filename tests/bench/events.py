"""What events cost: inserts that are watched and inserts that are not, and acting on one row of few and of many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from datajoint.connection import Connection
from datajoint.table import Table
from pipeline import Pipeline
from report import Figure
from timing import alternate, timed

import djjobs

__all__ = ["acting", "inserting"]

_WATCHED = ((Table, ("insert", "delete_quick")), (Connection, ("query",)))


def inserting(pipeline: Pipeline, rows: int, rounds: int, cell: str) -> Iterator[Figure]:
    """So many calls of insert1, with DataJoint's own methods and with ours around them."""
    catching_up: list[float] = []

    def insert(djjobs_watches: bool) -> float:
        pipeline.start_over()
        seconds = timed(lambda: [pipeline.source.insert1({"subject": "mouse", "session": n}) for n in range(rows)])
        if djjobs_watches:
            catching_up.append(timed(djjobs.flush_events, expect=True))
            scheduled = len(pipeline.target.jobs)
            if scheduled != rows:
                raise RuntimeError(f"{scheduled} of {rows} rows were scheduled")
        return seconds

    def insert_without() -> float:
        with _unwatched():
            return insert(djjobs_watches=False)

    seconds = alternate({"with": lambda: insert(djjobs_watches=True), "without": insert_without}, rounds)
    late = statistics.median(catching_up)
    yield Figure(
        f"insert {rows:,} single rows, and without djjobs (all scheduled {late:.2f} s later)",
        cell,
        f"{seconds['with']:.2f} s",
        f"{seconds['without']:.2f} s (without)",
        seconds["with"] / seconds["without"],
        at_most=1.3,
    )


def acting(short: Pipeline, long: Pipeline, lengths: tuple[int, int], count: int, cell: str) -> Iterator[Figure]:
    """From the insert of one row to its job in the queue, with the two tables taking turns."""
    times: list[list[float]] = [[], []]
    for number in range(count):
        for pipeline, seconds in zip((short, long), times, strict=True):
            pipeline.source.insert1({"subject": "new", "session": number})
            seconds.append(timed(djjobs.flush_events, expect=True))
    first, second = (statistics.median(seconds) for seconds in times)
    yield Figure(
        f"act on a row inserted into {lengths[1]:,} and into {lengths[0]:,}",
        cell,
        f"{second * 1000:.2f} ms",
        f"{first * 1000:.2f} ms (short)",
        second / first,
        at_most=2,
    )


@contextmanager
def _unwatched() -> Iterator[None]:
    """DataJoint's methods as they were before djjobs was imported."""
    watched: list[tuple[Any, str, Callable[..., Any]]] = [
        (owner, name, getattr(owner, name)) for owner, names in _WATCHED for name in names
    ]
    for owner, name, method in watched:
        setattr(owner, name, method.__wrapped__)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for owner, name, method in watched:
            setattr(owner, name, method)
