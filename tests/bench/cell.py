"""Measure one DataJoint on one engine, on a private server. Prints the figures as JSON, one line each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import servers
from claims import claim_times, memory, run_looks
from events import acting, inserting
from pipeline import Pipeline, configure, dj
from report import Figure
from scheduling import schedule_again, schedule_new
from throughput import throughput
from timing import say
from workers import WorkerPool


class Sizes:
    """How much of everything."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 1 if quick else 5
        #: The fastest things need more of them to be told from the machine's moods.
        self.schedulings = 1 if quick else 11
        self.keys = 10_000 if quick else 100_000
        #: Our jobs with one worker and with several; DataJoint is slower and gets fewer.
        self.jobs, self.their_jobs = ((500, 2_000), 500) if quick else ((2_000, 6_000), 1_000)
        self.lengths = (1_000, 100_000) if quick else (1_000, 1_000_000)
        self.claims = 20 if quick else 60
        self.inserts = 1_000 if quick else 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=servers.ENGINES)
    parser.add_argument("cases", nargs="+", choices=("schedule", "throughput", "claims", "events"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with start(options.engine) as server:
        configure(server.settings)
        version = dj.conn().query("SELECT version()").fetchone()[0].split(" on ")[0]
        cell = f"DataJoint {dj.__version__}, {options.engine}"
        print(json.dumps({"cell": cell, "version": version}), flush=True)
        for case in options.cases:
            say(f"{cell}: {case}")
            for figure in CASES[case](Sizes(options.quick), server.settings, cell):
                print(json.dumps({"figure": asdict(figure)}), flush=True)
        dj.conn().close()


def start(engine: str) -> servers.PrivateServer:
    """A private server with as much cache as the server of a lab, and as careful with what is committed."""
    servers.obtain(engine)
    kind: Any = {
        "postgresql": servers.PostgresServer,
        "mysql": servers.MySQLServer,
        "mariadb": servers.MariaDBServer,
    }[engine]
    room = "--shared_buffers=1GB" if engine == "postgresql" else "--innodb-buffer-pool-size=1G"

    class Roomy(kind):
        relaxed = ()

        def _command(self) -> list[str]:
            return [*super()._command(), room]

    return Roomy()


def _schedule(sizes: Sizes, settings: dict[str, Any], cell: str) -> Iterator[Figure]:
    ours = Pipeline("bench_schedule_ours", "ours").fill(sizes.keys)
    theirs = Pipeline("bench_schedule_theirs", "datajoint").fill(sizes.keys)
    yield from schedule_new(ours, theirs, sizes.keys, sizes.schedulings, cell)
    yield from schedule_again(ours, theirs, sizes.keys, sizes.schedulings, cell)


def _throughput(sizes: Sizes, settings: dict[str, Any], cell: str) -> Iterator[Figure]:
    ours = {jobs: Pipeline(f"bench_work_{jobs}", "ours").fill(jobs) for jobs in sizes.jobs}
    theirs = Pipeline("bench_work_theirs", "datajoint").fill(sizes.their_jobs)
    with WorkerPool(16, settings) as pool:
        yield from throughput(pool, ours, theirs, sizes.their_jobs, sizes.rounds, cell)


def _claims(sizes: Sizes, settings: dict[str, Any], cell: str) -> Iterator[Figure]:
    short, long = (Pipeline(f"bench_claim_{length}", "ours").fill(length) for length in sizes.lengths)
    for pipeline in (short, long):
        pipeline.schedule()
    yield from claim_times(short, long, sizes.lengths, sizes.claims, cell)
    yield memory(short, long, sizes.lengths, settings, cell)
    yield run_looks(short, long, sizes.lengths, sizes.claims, cell)


def _events(sizes: Sizes, settings: dict[str, Any], cell: str) -> Iterator[Figure]:
    yield from inserting(Pipeline("bench_events", "ours"), sizes.inserts, sizes.rounds, cell)
    short, long = (Pipeline(f"bench_events_{length}", "ours").fill(length) for length in sizes.lengths)
    for pipeline in (short, long):
        pipeline.schedule()
    yield from acting(short, long, sizes.lengths, sizes.claims, cell)


CASES = {"schedule": _schedule, "throughput": _throughput, "claims": _claims, "events": _events}

if __name__ == "__main__":
    main()
