"""The progress bar of a run, in a terminal or a notebook."""

from __future__ import annotations

from typing import Any

from ..printable import one_line

__all__ = ["RunBar"]


class RunBar:
    """A bar over the jobs of a run that others do; shows nothing if not asked to."""

    def __init__(self, name: str, shown: bool, total: int) -> None:
        self._bar: Any = None
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=one_line(name), total=total, unit="job")

    def __enter__(self) -> RunBar:
        return self

    def show(self, over: int, errors: int, total: int) -> None:
        if self._bar is None:
            return
        if errors:
            self._bar.set_postfix(errors=errors, refresh=False)
        self._bar.n, self._bar.total = over, total
        self._bar.refresh()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
