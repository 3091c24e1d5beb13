"""A trivial make() with 1, 8 and 16 worker processes."""

from __future__ import annotations

from collections.abc import Iterator

from crew import Crew
from pipeline import GENERATION, Pipeline
from report import Figure
from timing import alternate, say

__all__ = ["throughput"]

#: Workers: how many times as fast as DataJoint 2.3 we have to be.
_TARGETS = {1: 1.3, 8: 2.5, 16: 3.5}
#: The same for DataJoint 0.14.
_CLASSIC_TARGETS = {16: 15.0}


def throughput(
    crew: Crew, ours: dict[int, Pipeline], theirs: Pipeline, their_jobs: int, rounds: int, cell: str
) -> Iterator[Figure]:
    """`ours` has a pipeline for each number of jobs, of which more are needed the more workers there are."""
    targets = _TARGETS if GENERATION == 2 else _CLASSIC_TARGETS
    best, last = 0.0, 0.0
    for workers, jobs in {1: min(ours), 8: max(ours), 16: max(ours)}.items():
        say(f"{cell}: {workers} workers")
        sides = {"ours": lambda: _rate(crew, workers, ours[jobs], jobs)}  # noqa: B023
        if workers in targets:
            sides["theirs"] = lambda: _rate(crew, workers, theirs, their_jobs)  # noqa: B023
        rates = alternate(sides, rounds)
        best, last = max(best, rates["ours"]), rates["ours"]
        if workers in targets:
            yield Figure(
                f"trivial make(), {workers} worker{'s' if workers > 1 else ''}",
                cell,
                f"{rates['ours']:,.0f} jobs/s of {jobs:,}",
                f"{rates['theirs']:,.0f} jobs/s of {their_jobs:,}",
                rates["ours"] / rates["theirs"],
                targets[workers],
            )
    yield Figure(
        "our rate with 16 workers, and our best", cell, f"{last:,.0f} jobs/s", f"{best:,.0f} jobs/s (best)", last / best, 0.8
    )


def _rate(crew: Crew, workers: int, pipeline: Pipeline, jobs: int) -> float:
    pipeline.empty()
    pipeline.enqueue()
    done, seconds = crew.populate(workers, pipeline.database, pipeline.side)
    if done != jobs:
        raise RuntimeError(f"{done} of {jobs} jobs were done")
    return jobs / seconds
