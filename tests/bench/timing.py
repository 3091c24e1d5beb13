"""Fair timing on a noisy machine: the sides take turns, and the median counts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["alternate", "say", "timed"]


def timed(action: Callable[[], Any], expect: Any = None) -> float:
    """The seconds that an action takes. It must return what is expected, if anything is."""
    started = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - started
    if expect is not None and result != expect:
        raise RuntimeError(f"{result} where {expect} was expected")
    return seconds


def alternate(
    sides: dict[str, Callable[[], float]], rounds: int, seldom: dict[str, int] | None = None
) -> dict[str, float]:
    """Measure each side once a round, first to last and then last to first; return the medians.

    Parameters
    ----------
    seldom : dict, optional
        The sides that take so long that they are measured only once in so many rounds.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            if number % (seldom or {}).get(name, 1) == 0:
                figures[name].append(sides[name]())
                say(f"  {name}: {figures[name][-1]:.4g}")
    return {name: statistics.median(values) for name, values in figures.items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
