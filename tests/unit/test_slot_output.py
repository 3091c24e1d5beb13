"""What slots print is passed on in linear time and bounded memory, whatever the lines look like."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from djjobs.work.slot_output import SlotOutput

MEGABYTES = 80
CHUNKS = {"no end of line": b"x" * 2**16, "a progress bar": b"\r 50 % |=====     |" * 3640}


def passed_on(text: bytes) -> list[str]:
    """The lines that come of a text, read byte by byte."""
    lines: list[str] = []
    for step in (1, 7, 2**20):
        reader, writer = os.pipe()
        output, again = SlotOutput(reader), []
        for begin in range(0, len(text), step):
            os.write(writer, text[begin : begin + step])
            output.read(again.append)
        os.close(writer)
        output.read_all(again.append)
        os.close(reader)
        assert not lines or again == lines, "it does not matter in which parts it came"
        lines = again
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\n\nlast", ["one", "", "last"]),
        ("Windows\r\nlines\r\n", ["Windows", "lines"]),
        ("\r10 %\r50 %\r100 %\ndone\n", ["100 %", "done"]),
        ("10 %\r50 %\r", ["50 %"]),
        ("ä\N{SNOWMAN}\n", ["ä\N{SNOWMAN}"]),
        ("", []),
    ],
)
def test_lines_are_passed_on_as_a_terminal_would_show_them(text: str, lines: list[str]) -> None:
    assert passed_on(text.encode()) == lines


def test_a_long_line_is_passed_on_in_pieces_and_nothing_is_lost() -> None:
    text = "".join(f"{n:07}," for n in range(10_000))
    reader, writer = os.pipe()
    output, pieces = SlotOutput(reader), []
    thread = threading.Thread(target=lambda: (os.write(writer, text.encode()), os.close(writer)))
    thread.start()
    while output.read(pieces.append):
        pass
    thread.join()
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 8192
    assert len(output.last_words) < 20 * 8200


def drain(chunk: bytes, read: Callable[[int], Any]) -> float:
    """How long it takes to read so much of this from a pipe."""
    reader, writer = os.pipe()

    def write() -> None:
        for _ in range(MEGABYTES * 2**20 // len(chunk)):
            os.write(writer, chunk)
        os.close(writer)

    pid = os.fork()
    if not pid:
        os.close(reader)
        write()
        os._exit(0)
    os.close(writer)
    began = time.monotonic()
    read(reader)
    took = time.monotonic() - began
    os.close(reader)
    os.waitpid(pid, 0)
    return took


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_eighty_megabytes_without_an_end_of_line_take_hardly_longer_than_a_plain_pipe(chunk: bytes) -> None:
    def plainly(reader: int) -> None:
        while os.read(reader, 2**20):
            pass

    def as_output(reader: int) -> None:
        output = SlotOutput(reader)
        while output.read(lambda _line: None):
            assert len(output._rest) <= 8192

    assert drain(chunk, as_output) < drain(chunk, plainly) + 2.0
