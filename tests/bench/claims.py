"""Claims from a short and from a long queue: how long they take, the memory of a worker, and a look at a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from pipeline import Pipeline
from report import Figure
from timing import say, timed
from workers import WorkerPool

import djjobs
from djjobs.queue.claim import ORDERS, Claims
from djjobs.queue.keys import Keys
from djjobs.queue.queue import Queue

__all__ = ["claim_times", "memory", "run_looks"]

_AT_ONCE = (1, 10)


def claim_times(short: Pipeline, long: Pipeline, lengths: tuple[int, int], claims: int, cell: str) -> Iterator[Figure]:
    """The median time of a claim, with the two queues taking turns."""
    for order in ORDERS:
        for count in _AT_ONCE:
            say(f"{cell}: claims of {count}, {order}")
            takers = [_claims(pipeline, order) for pipeline in (short, long)]
            times: list[list[float]] = [[], []]
            for _ in range(claims):
                for taker, seconds in zip(takers, times, strict=True):
                    seconds.append(timed(lambda: len(taker.take(count)), expect=count))  # noqa: B023
            for pipeline in (short, long):
                _put_back(pipeline)
            first, second = (statistics.median(seconds) for seconds in times)
            yield Figure(
                f"claim {count} from {lengths[1]:,} jobs and from {lengths[0]:,}, {order}",
                cell,
                f"{second * 1000:.2f} ms",
                f"{first * 1000:.2f} ms (short)",
                second / first,
                at_most=2,
            )


def memory(short: Pipeline, long: Pipeline, lengths: tuple[int, int], settings: dict[str, Any], cell: str) -> Figure:
    """The most memory that a worker needs for the same number of jobs."""
    peaks = []
    for pipeline in (short, long):
        with WorkerPool(1, settings) as pool:
            pool.populate(1, pipeline.database, pipeline.side, max_calls=min(500, lengths[0] // 2))
            peaks.append(pool.memory())
    return Figure(
        f"memory of a worker with {lengths[1]:,} jobs and with {lengths[0]:,}",
        cell,
        f"{peaks[1]:.1f} MB",
        f"{peaks[0]:.1f} MB (short)",
        peaks[1] / peaks[0],
        at_most=1.05,
    )


def run_looks(short: Pipeline, long: Pipeline, lengths: tuple[int, int], looks: int, cell: str) -> Figure:
    """The median time of a look at a run of ten jobs, which reads the table's entries in the index: no target."""
    times: list[list[float]] = [[], []]
    runs = []
    for pipeline in (short, long):
        djjobs.settings.events = False
        pipeline.source.insert(("new", number) for number in range(10))
        djjobs.settings.events = True
        runs.append(pipeline.target.schedule_jobs("subject = 'new'", min_scheduling_interval=0))
    for _ in range(looks):
        for run, seconds in zip(runs, times, strict=True):
            seconds.append(timed(lambda: run.progress().total, expect=10))  # noqa: B023
    first, second = (statistics.median(seconds) for seconds in times)
    return Figure(
        f"progress of a run of 10 among {lengths[1]:,} jobs and among {lengths[0]:,}",
        cell,
        f"{second * 1000:.1f} ms",
        f"{first * 1000:.1f} ms (short)",
        second / first,
    )


def _claims(pipeline: Pipeline, order: str) -> Claims:
    queue = Queue.of(pipeline.connection, pipeline.database)
    return Claims(queue, Keys(pipeline.target, (), queue.engine), order)


def _put_back(pipeline: Pipeline) -> None:
    pipeline.sql(f"UPDATE {pipeline.queue_name} SET status = 'scheduled', worker_id = NULL WHERE status = 'reserved'")
