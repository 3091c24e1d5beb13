"""Every setting in one typed object, with its default, its environment variable and its check."""

from __future__ import annotations

import os
from typing import Any

from .compat import config_value
from .errors import DjJobsError

__all__ = ["Settings", "check_seconds", "settings"]


def check_seconds(name: str, value: Any) -> float:
    """Return `value` as a number of seconds, or say what is wrong with it."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise DjJobsError(f"{name} must be a number of seconds, zero or more, not {value!r}.")
    return seconds


def _check_flag(name: str, value: Any) -> bool:
    flags = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    flag = flags.get(str(value).strip().lower())
    if flag is None:
        raise DjJobsError(f"{name} must be true or false, not {value!r}.")
    return flag


class Settings:
    """The settings of djjobs.

    Each can be set as an attribute of `djjobs.settings` or, before djjobs is imported,
    by an environment variable of the same name (``DJJOBS_KEEP_COMPLETED=1``).

    Attributes
    ----------
    min_scheduling_interval : float
        A table is scheduled again only after this many seconds; 0 means always. The same value
        as ``dj.config["min_scheduling_interval"]``. Defaults to 5.
    scheduling_timeout : float
        How long a scheduling that was started keeps others from starting one, in seconds.
        If the process that started it dies, others go on after this time. Defaults to 60.
    keep_completed : bool
        Keep finished jobs as `success` rows with their duration and metadata. A table's own
        `keep_completed` goes first. Defaults to False.
    """

    def __init__(self) -> None:
        config_value.install("min_scheduling_interval", 5.0, check_seconds)
        self._scheduling_timeout = 60.0
        self._keep_completed = False
        for name in self._names():
            text = os.environ.get(f"DJJOBS_{name.upper()}")
            if text is not None:
                setattr(self, name, text)

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, property)]

    @property
    def min_scheduling_interval(self) -> float:
        return check_seconds("min_scheduling_interval", config_value.get("min_scheduling_interval"))

    @min_scheduling_interval.setter
    def min_scheduling_interval(self, value: float) -> None:
        config_value.set("min_scheduling_interval", check_seconds("min_scheduling_interval", value))

    @property
    def scheduling_timeout(self) -> float:
        return self._scheduling_timeout

    @scheduling_timeout.setter
    def scheduling_timeout(self, value: float) -> None:
        self._scheduling_timeout = check_seconds("scheduling_timeout", value)

    @property
    def keep_completed(self) -> bool:
        return self._keep_completed

    @keep_completed.setter
    def keep_completed(self, value: bool) -> None:
        self._keep_completed = _check_flag("keep_completed", value)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names())
        return f"djjobs.settings({values})"


settings = Settings()
