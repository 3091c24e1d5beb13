"""Every setting in one typed object, with its default, its environment variable and its check."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, overload

from .dj.compat import config_value
from .errors import DjJobsError

__all__ = ["Settings", "check_seconds", "settings"]

T = TypeVar("T")

_PREFIX = "DJJOBS_"
#: Variables with our prefix that are not meant for djjobs itself: those of its tests, and those that Kubernetes gives
#: every container if there is a service called djjobs (DJJOBS_SERVICE_HOST, DJJOBS_PORT_80_TCP).
_NOT_SETTINGS = re.compile(r"TEST_|(\w+_)?(SERVICE|PORT)(_|$)")
#: How much of a name must be that of a setting to be taken for a typing error. (VENV and EVENTS have 0.6.)
_ALIKE = 0.7


def check_seconds(name: str, value: Any) -> float:
    """Return `value` as a number of seconds, or say what is wrong with it."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise DjJobsError(f"{name} must be a number of seconds, zero or more, not {value!r}.")
    return seconds


def _check_some_seconds(name: str, value: Any) -> float:
    seconds = check_seconds(name, value)
    if not seconds:
        raise DjJobsError(f"{name} must be more than zero seconds.")
    return seconds


def _check_count(name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise DjJobsError(f"{name} must be a whole number, one or more, not {value!r}.")
    return count


def _check_flag(name: str, value: Any) -> bool:
    words = {True: ("1", "true", "yes", "on"), False: ("0", "false", "no", "off")}
    text = str(value).strip().lower()
    for flag, spellings in words.items():
        if text in spellings:
            return flag
    raise DjJobsError(f"{name} must be true or false, not {value!r}.")


class _Setting(Generic[T]):
    """One setting: its default, and the check that every value goes through."""

    def __init__(self, default: T, check: Callable[[str, Any], T]) -> None:
        self.value, self._check = default, check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type) -> _Setting[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> _Setting[T] | T:
        return self if owner is None else self.value

    def __set__(self, owner: object, value: Any) -> None:
        self.value = self._check(self.name, value)


class _ConfigSetting(_Setting[T]):
    """A setting that is also `dj.config[name]`."""

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        config_value.install(name, self.value, self._check)

    def __get__(self, owner: object | None, kind: type) -> Any:
        return self if owner is None else self._check(self.name, config_value.get(self.name))

    def __set__(self, owner: object, value: Any) -> None:
        config_value.set(self.name, self._check(self.name, value))


class Settings:
    """The settings of djjobs.

    Each can be set as an attribute of `djjobs.settings` or, before djjobs is imported,
    by an environment variable of the same name (``DJJOBS_KEEP_COMPLETED=1``). A name that is no setting is refused: a
    variable at the first use of a queue, if it looks like the name of a setting.

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
    heartbeat_interval : float
        Every so many seconds a worker shows that it is alive. Defaults to 10.
    lease : float
        The jobs of a worker that has not shown this for so many seconds go back into the queue.
        Defaults to 60.
    max_crashes : int
        How often a job may lose its worker before it becomes an error, if its table does not say
        `max_attempts`. Defaults to 3.
    grace : float
        How many seconds a worker that is to stop lets running jobs go on, and how many a make() has to
        yield when it is interrupted. Defaults to 5.
    retention : float
        Finished jobs and runs older than so many seconds go with `cleanup_jobs`, unless they keep a key from being
        made again. Defaults to 30 days.
    reconnect_timeout : float
        How long a populate waits for a server that went away in the middle of its work. Defaults to 60.
    events : bool
        Schedule what an insert upstream of a table brings, and clean up after a delete. A table's own `events` goes
        first. Defaults to True.
    leader_expiry : float
        Another scheduler takes over when the one that fires schedules was not heard of for so many seconds.
        Defaults to 30.
    """

    min_scheduling_interval = _ConfigSetting(5.0, check_seconds)
    scheduling_timeout = _Setting(60.0, check_seconds)
    keep_completed = _Setting(False, _check_flag)
    heartbeat_interval = _Setting(10.0, _check_some_seconds)
    lease = _Setting(60.0, _check_some_seconds)
    max_crashes = _Setting(3, _check_count)
    grace = _Setting(5.0, check_seconds)
    retention = _Setting(30 * 86400.0, check_seconds)
    reconnect_timeout = _Setting(60.0, check_seconds)
    events = _Setting(True, _check_flag)
    leader_expiry = _Setting(30.0, _check_some_seconds)

    _complaint: str

    def __init__(self) -> None:
        complaints = [*self._read_environment(), *self._unknown_in_environment()]
        self._complaint = complaints[0] if complaints else ""

    def _read_environment(self) -> Iterator[str]:
        """Take the values from the environment; what is wrong with them."""
        for name in self._names():
            text = os.environ.get(_variable(name))
            if text is not None:
                try:
                    setattr(self, name, text)
                except DjJobsError as error:
                    yield f"{_variable(name)}: {error}"

    def _unknown_in_environment(self) -> Iterator[str]:
        """Variables that somebody has taken for settings.

        Not all that begin with DJJOBS_ are: others may have a use for the prefix. So only those are refused that look
        like a setting's name.
        """
        names = self._names()
        for variable in sorted(os.environ):
            name = variable.removeprefix(_PREFIX).lower()
            if variable.startswith(_PREFIX) and name not in names and not _NOT_SETTINGS.match(variable, len(_PREFIX)):
                meant = _nearest(name, names)
                if meant:
                    yield f"{variable}: there is no setting {name}. Did you mean {_variable(meant)}?"

    def __setattr__(self, name: str, value: Any) -> None:
        names = self._names()
        if name not in (*names, "_complaint"):
            meant = _nearest(name, names)
            hint = f"Did you mean {meant}?" if meant else f"The settings are {', '.join(names)}."
            raise DjJobsError(f"Nothing was set: there is no setting {name}. {hint}")
        super().__setattr__(name, value)

    def insist_on_environment(self) -> None:
        """Raise if an environment variable makes no sense. An import is no good place to say so."""
        if self._complaint:
            raise DjJobsError(self._complaint)

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, _Setting)]

    def insist_on_lease(self) -> None:
        """Raise if a worker would lose its claims between two heartbeats."""
        if self.lease <= self.heartbeat_interval:
            raise DjJobsError(
                f"The lease ({self.lease:g} s) must be longer than the heartbeat interval "
                f"({self.heartbeat_interval:g} s), better several times as long. "
                "Set djjobs.settings.lease or DJJOBS_LEASE."
            )

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names())
        return f"djjobs.settings({values})"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _nearest(name: str, names: list[str]) -> str | None:
    """The setting that is meant by a name that is none: one that looks like it, or has the same words and more."""
    words = set(name.split("_"))
    related = [one for one in names if words <= set(one.split("_")) or words >= set(one.split("_"))]
    found = get_close_matches(name, names, 1, _ALIKE) or get_close_matches(name, related, 1, 0.0)
    return found[0] if found else None


settings = Settings()
