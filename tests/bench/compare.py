"""This tree beside another one, such as an earlier version: `make bench ARGS="--against FOLDER"`.

Each tree measures itself with its own tests/bench, briefly and in turns, so that the machine's moods meet both.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import cells
from report import as_lines

__all__ = ["compare"]

_NUMBER = re.compile(r"([\d,.]+) (\S+)")
#: A median that is worse by more than this is worth a look.
_TOLERATED = 1.1


def compare(other: Path, entries: list[tuple[str, str, tuple[str, ...]]], cases: tuple[str, ...], rounds: int) -> bool:
    """Measure both trees and print the medians; whether none of ours is worse than tolerated."""
    rows, good = [("work", "engine", "before", "now", "now/before", "rounds")], True
    for datajoint, engine, known in entries:
        figures: dict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[], []])
        units: dict[tuple[str, str], str] = {}
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                tree = (other, cells.ROOT)[side]
                print(f"{engine}, round {number + 1} of {rounds}: {tree}", file=sys.stderr, flush=True)
                for work, cell, value, unit in _measure(tree, datajoint, engine, [c for c in known if c in cases]):
                    figures[work, cell][side].append(value)
                    units[work, cell] = unit
        for (work, cell), (before, now) in figures.items():
            if before and now:
                unit, medians = units[work, cell], (statistics.median(before), statistics.median(now))
                ratio = medians[1] / medians[0]
                worse = 1 / ratio if unit.endswith("/s") else ratio
                good = good and worse <= _TOLERATED
                told = f"{ratio:.2f}x" + ("" if worse <= _TOLERATED else ", WORSE")
                rows.append((work, cell, *(f"{median:,.4g} {unit}" for median in medians), told, str(len(now))))
    print(as_lines(rows))
    return good


def _measure(tree: Path, datajoint: str, engine: str, cases: list[str]) -> list[tuple[str, str, float, str]]:
    command = [cells.python_of(f"dj{datajoint}"), str(tree / "tests" / "bench" / "cell.py"), engine, *cases, "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore::UserWarning"}
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    found = []
    for line in answer.stdout.splitlines():
        figure = json.loads(line).get("figure")
        number = figure and _NUMBER.match(figure["ours"])
        if number:
            found.append((figure["work"], figure["cell"], float(number[1].replace(",", "")), number[2]))
    return found
