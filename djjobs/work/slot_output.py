"""What a slot prints: passed on line by line, however long the lines are, and the last of them remembered."""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait

__all__ = ["SlotOutput"]

#: How many of the last lines that a slot printed are told if it dies.
_LINES_KEPT = 20
#: A line that is longer than this is passed on in pieces.
_LONGEST_LINE = 8192
_READ = 2**20


class SlotOutput:
    """The standard output and error of a slot.

    As on a terminal, what comes after a carriage return takes the place of what was there: of a progress bar the last
    state is passed on.

    Parameters
    ----------
    descriptor : int
        The end of the pipe to read from.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rest = ""

    @property
    def last_words(self) -> str:
        return "\n".join(line for line in self._lines if line.strip())

    def read(self, pass_on: Callable[[str], None]) -> bool:
        """Pass on what there is; False if there will be no more. Waits if there is nothing."""
        data = os.read(self._descriptor, _READ)
        *lines, rest = (self._rest + self._decoder.decode(data, not data)).split("\n")
        for line in lines:
            self._pass_on(_shown(line).rstrip("\r"), pass_on)
        self._rest = _shown(rest)
        if len(self._rest) > _LONGEST_LINE or (self._rest and not data):
            rest, self._rest = self._rest.rstrip("\r"), ""
            self._pass_on(rest, pass_on)
        return bool(data)

    def read_all(self, pass_on: Callable[[str], None]) -> None:
        """Pass on what is left in the pipe of a slot that has ended."""
        while wait([self._descriptor], 0) and self.read(pass_on):
            pass
        if self._rest:
            self._pass_on(self._rest.rstrip("\r"), pass_on)

    def _pass_on(self, line: str, pass_on: Callable[[str], None]) -> None:
        # An empty line is one, too.
        for begin in range(0, max(len(line), 1), _LONGEST_LINE):
            piece = line[begin : begin + _LONGEST_LINE]
            self._lines.append(piece)
            pass_on(piece)


def _shown(line: str) -> str:
    """What a terminal would still show of a line, with the carriage return at its end if there is one."""
    if "\r" not in line:
        return line
    text = line.rstrip("\r")
    return text[text.rfind("\r") + 1 :] + ("\r" if line.endswith("\r") else "")
