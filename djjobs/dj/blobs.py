"""Values as DataJoint stores them in blob columns, and legacy keys as JSON."""

from __future__ import annotations

import json
from typing import Any

from datajoint import blob

__all__ = ["key_json", "pack", "unpack"]


def key_json(key: dict[str, Any]) -> str:
    """A legacy key as JSON: numbers and texts as they are, all else as DataJoint prints it."""

    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else str(value)

    # In the order of the names that the server's JSON of a key has.
    ordered = {name: key[name] for name in sorted(key, key=lambda name: (len(name), name))}
    return json.dumps(ordered, default=plain, ensure_ascii=False)


class _AnyBlob(blob.Blob):
    """0.14 refuses texts where ``dj.config["enable_python_native_blobs"]`` is off, but in its own `~jobs` has them.

    It turns the setting on for the moment; that would reach other threads, too.
    """

    def set_dj0(self) -> None:
        self.protocol = b"dj0\0"


def pack(value: Any) -> bytes:
    """What DataJoint would store in a blob column of `~jobs`."""
    return _AnyBlob().pack(value, compress=True)


def unpack(value: bytes) -> Any:
    """What DataJoint would give back of a blob column."""
    return blob.unpack(value)
