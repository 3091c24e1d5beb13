"""Plain data: what may cross the border of a process, and how."""

from __future__ import annotations

import datetime
import decimal
import numbers
import pickle
import uuid
from collections.abc import Mapping
from typing import Any

from ..queue.finish import cut

__all__ = ["as_bytes", "from_bytes", "plain"]

#: What is the same in every process. Of their subclasses that cannot be said.
_PLAIN = (str, bytes, bool, int, float, type(None))
_PLAIN_IN_KEYS = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


def plain(value: Any) -> Any:
    """The same in types that every process knows; what is of another type in words."""
    if type(value) is str:
        return cut(value)
    if type(value) in _PLAIN or type(value) in _PLAIN_IN_KEYS:
        return value
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else cut(str(value))


def as_bytes(message: Any) -> bytes:
    return pickle.dumps(message)


def from_bytes(data: bytes) -> Any:
    """What was said.

    Raises
    ------
    ValueError
        If that cannot be understood.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ValueError(f"a message that cannot be read: {type(error).__name__}: {error}") from error
