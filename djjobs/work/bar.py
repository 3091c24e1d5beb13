"""The progress bar of a populate: rate, errors and remaining time, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from .outcome import Outcome

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar over the jobs that are there to be done; shows nothing if not asked to.

    Parameters
    ----------
    name : str
        What stands before the bar.
    total : callable
        How many jobs there are to do; asked only if the bar is shown.
    """

    def __init__(self, name: str, shown: bool, total: Callable[[], int]) -> None:
        self._name, self._shown, self._total = name, shown, total
        self._bar: Any = None
        self._errors = 0

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=self._name, total=self._total(), unit="job")
        return self

    def update(self, outcome: Outcome) -> None:
        if self._bar is None:
            return
        if outcome.has_failed:
            self._errors += 1
            self._bar.set_postfix(errors=self._errors, refresh=False)
        if self._bar.n >= self._bar.total:
            self._bar.total += 1  # more came in meanwhile
        self._bar.update()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            # What others did meanwhile was not left undone.
            self._bar.total = self._bar.n
            self._bar.close()
