"""Texts that other people wrote, made fit to be shown: keys, error messages, notes, names, what make() prints.

A terminal obeys control characters. With them a text could overwrite what was printed before it, or forge a line of
the log. Here they become visible instead: `\\x1b`.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

__all__ = ["as_html", "as_json", "in_log", "one_line", "printable"]

#: Control characters, separators of lines, what changes the direction of writing, and halves of characters that no
#: stream can encode. Tabs and newlines are not among them.
_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NOT_IN_A_LINE = re.compile(f"[\t\n]|{_NOT_SHOWN.pattern}")


def printable(text: str) -> str:
    """The same text with its control characters made visible. Newlines and tabs stay."""
    return _NOT_SHOWN.sub(_visible, text)


def one_line(text: str) -> str:
    """The same text in one line: newlines and tabs are made visible, too."""
    return _NOT_IN_A_LINE.sub(_visible, text)


def in_log(text: str) -> str:
    """The same text for a log. Its further lines begin with a space, so that none passes for a line of the log."""
    return re.sub(r"\n(?=\S)", "\n  ", printable(text))


def as_html(text: str) -> str:
    """The same text as HTML, in which nothing of it is taken for a tag."""
    return html.escape(printable(text))


def as_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON. Whoever reads it gets the very value back, control characters included."""
    text = json.dumps(value, indent=indent, default=str, ensure_ascii=False)
    return _NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _visible(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
