"""Our queue beside DataJoint's own, in one run: `make bench`, or `python3 tests/bench/run.py --help`.

Prints the table of docs/benchmarks.md; the exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
from compare import compare
from report import NOTES, Figure, as_table, machine

CELL = str(Path(__file__).resolve().with_name("cell.py"))
CASES = ("schedule", "throughput", "claims", "events")
#: DataJoint, engine, and what is measured there unless somebody asks for more.
PLAN = [("2", "mysql", CASES), ("2", "postgresql", CASES), ("0", "mysql", ("throughput",))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run on fewer keys, to see that it works")
    parser.add_argument("--engine", choices=("mysql", "postgresql", "mariadb"), help="only this engine")
    parser.add_argument("--datajoint", choices=("2", "0"), help="only this DataJoint")
    parser.add_argument("--case", choices=CASES, action="append", help="only this; may be given several times")
    parser.add_argument("--against", type=Path, help="another tree of djjobs, to be measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=5, help="how many rounds with --against; 5 unless given")
    options = parser.parse_args()
    if options.against:
        return 0 if compare(options.against, plan(options), tuple(options.case or CASES), options.rounds) else 1
    figures: list[Figure] = []
    servers: dict[str, str] = {}
    started = time.monotonic()
    for datajoint, engine, cases in plan(options):
        measure(
            datajoint,
            engine,
            [case for case in cases if case in (options.case or CASES)],
            options.quick,
            figures,
            servers,
        )
    print(f"{datetime.date.today()}, {machine()}; servers and workers share it.\n")
    for cell, version in servers.items():
        print(f"- {cell}: {version}")
    print(f"\n{as_table(figures)}\n{NOTES}\nMeasured in {time.monotonic() - started:.0f} s.")
    return 0 if figures and all(figure.reached for figure in figures) else 1


def plan(options: argparse.Namespace) -> list[tuple[str, str, tuple[str, ...]]]:
    chosen = (
        [*PLAN, ("2", "mariadb", CASES), ("0", "mariadb", ("throughput",))] if options.engine == "mariadb" else PLAN
    )
    return [entry for entry in chosen if options.engine in (None, entry[1]) and options.datajoint in (None, entry[0])]


def measure(
    datajoint: str, engine: str, cases: list[str], quick: bool, figures: list[Figure], servers: dict[str, str]
) -> None:
    """Run a cell in its own environment and take down what it says."""
    if not cases:
        return
    command = [cells.python_of(f"dj{datajoint}"), CELL, engine, *cases, *(["--quick"] if quick else [])]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            said = json.loads(line)
            if "figure" in said:
                figures.append(Figure(**said["figure"]))
                print(" | ".join(figures[-1].cells()), file=sys.stderr, flush=True)
            else:
                servers[said["cell"]] = said["version"]
    if process.returncode:
        sys.exit(f"The measurement of DataJoint {datajoint} on {engine} failed with exit code {process.returncode}.")


if __name__ == "__main__":
    sys.exit(main())
