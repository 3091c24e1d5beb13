"""A trivial make() with 1, 8 and 16 worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from pipeline import GENERATION, Pipeline
from report import Figure
from timing import alternate
from workers import WorkerPool

__all__ = ["throughput"]

#: How many workers: how many times as fast as DataJoint 2.3 we have to be.
_TARGETS = {1: 1.3, 8: 2.5, 16: 4.0}
#: The same for DataJoint 0.14.
_CLASSIC_TARGETS = {16: 15.0}


def throughput(
    pool: WorkerPool, ours: dict[int, Pipeline], theirs: Pipeline, their_jobs: int, rounds: int, cell: str
) -> Iterator[Figure]:
    """`ours` has a pipeline for each number of jobs: few for one worker, many for several."""
    targets = _TARGETS if GENERATION == 2 else _CLASSIC_TARGETS
    jobs = {workers: min(ours) if workers == 1 else max(ours) for workers in _TARGETS}
    sides: dict[str, Callable[[], float]] = {}
    for workers in _TARGETS:
        sides[f"ours {workers}"] = partial(_rate, pool, workers, ours[jobs[workers]], jobs[workers])
        if workers in targets:
            sides[f"theirs {workers}"] = partial(_rate, pool, workers, theirs, their_jobs)
    rates = alternate(sides, rounds)
    for workers, target in targets.items():
        own, other = rates[f"ours {workers}"], rates[f"theirs {workers}"]
        yield Figure(
            f"trivial make(), {workers} worker{'s' if workers > 1 else ''}",
            cell,
            f"{own:,.0f} jobs/s of {jobs[workers]:,}",
            f"{other:,.0f} jobs/s of {their_jobs:,}",
            own / other,
            target,
        )
    best, last = max(rates[f"ours {workers}"] for workers in _TARGETS), rates["ours 16"]
    yield Figure(
        "our rate with 16 workers, and our best",
        cell,
        f"{last:,.0f} jobs/s",
        f"{best:,.0f} jobs/s (best)",
        last / best,
        0.6,
    )


def _rate(pool: WorkerPool, workers: int, pipeline: Pipeline, jobs: int) -> float:
    pipeline.empty()
    pipeline.enqueue()
    done, seconds = pool.populate(workers, pipeline.database, pipeline.side)
    if done != jobs:
        raise RuntimeError(f"{done} of {jobs} jobs were done")
    return jobs / seconds
