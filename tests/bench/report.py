"""What was measured, as a Markdown table."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NOTES", "Figure", "as_lines", "as_table", "machine"]

_HEAD = ("work", "engine", "ours", "DataJoint", "ratio", "must reach", "reached?")

NOTES = """
The sides take turns, several rounds, and the median counts. Servers are private, with their default settings (every
commit reaches the disk) but 1 GB of cache. The table has a key of two attributes and a make() that inserts one row.

- New keys: an empty queue, `schedule_jobs()` and `jobs.refresh()`, in keys a second.
  The bare SQL is an INSERT ... SELECT by hand into an empty twin of our queue with the same columns and indexes: table
  name, hash (SHA-256 of the key as JSON), status and the key as JSON, without keys that are in the target or the queue.
- Again: the queues hold all keys already; DataJoint's was filled by SQL.
- make(): the queue is filled before the clock starts. Workers are processes with a connection each that were started
  earlier and begin together with `populate(reserve_jobs=True)`; the clock stops when the last one returns.
  `order="random"` for ours and for DataJoint 0.14; DataJoint 2 has no such choice.
- Claims: the median over claims made in turn from a short and from a long queue. Memory: a worker's peak after the
  same number of jobs.
- Inserts: `insert1` of one row after the other, with and without djjobs around DataJoint's methods. Acting: from the
  end of one `insert1` to its job in the queue, while all other rows have a job already.
"""


@dataclass(frozen=True)
class Figure:
    """One line: ours beside something else, the ratio of the two, and what the ratio has to be."""

    work: str
    cell: str
    ours: str
    other: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool:
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.at_most is None or self.ratio <= self.at_most

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}x"
        return "" if self.at_most is None else f"at most {self.at_most:g}x"

    def cells(self) -> tuple[str, ...]:
        ratio = f"{self.ratio:.0f}x" if self.ratio >= 20 else f"{self.ratio:.2f}x"
        return (self.work, self.cell, self.ours, self.other, ratio, self.target, "yes" if self.reached else "NO")


def as_table(figures: list[Figure]) -> str:
    return as_lines([_HEAD, *(figure.cells() for figure in figures)])


def as_lines(rows: list[tuple[str, ...]]) -> str:
    """Rows as a Markdown table; the first one is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> str:
    """The machine in one line."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({model}), {gigabytes:.0f} GB, {platform.system()} {platform.release()}"
