"""Texts of others, made fit to be shown: in a terminal, in a line of a log, in HTML and in JSON."""

from __future__ import annotations

import io
import json
import logging
import unicodedata

import pytest

from djjobs import telemetry
from djjobs.cli import logs, output
from djjobs.printable import as_html, as_json, one_line, printable

#: What a terminal would obey: erase the screen, go to the begin of the line, write from right to left, and more.
HOSTILE = "\x1b[2J\x1b]0;title\x07\rback\b\x00\x7f\x9b31m\u202eright to left\u2066\u2028\ud800 [red]x[/]"
FORGED = "lost\n2030-01-01 00:00:00 ERROR: all data deleted"


def is_obeyed(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in (
        *("LRE", "RLE", "LRO", "RLO", "PDF"),
        *("LRI", "RLI", "FSI", "PDI"),
    )


def assert_harmless(text: str, allowed: str = "\n\t") -> None:
    assert [character for character in text if is_obeyed(character) and character not in allowed] == []
    text.encode()


def test_control_characters_become_visible_and_the_rest_stays() -> None:
    assert printable("\x1b[31mred\r\n\tNächte \N{SNOWMAN} \x9b") == "\\x1b[31mred\\r\n\tNächte \N{SNOWMAN} \\x9b"
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert printable(printable(HOSTILE)) == printable(HOSTILE)
    assert_harmless(printable(HOSTILE))
    assert_harmless(one_line(HOSTILE + FORGED), "")
    for number in [*range(0x300), *range(0x2000, 0x2100), *range(0xD7FF, 0xE001)]:
        assert_harmless(one_line(chr(number)), "")


def test_html_has_no_tags_of_others() -> None:
    assert as_html("<b title='x\">&\x1b") == "&lt;b title=&#x27;x&quot;&gt;&amp;\\x1b"


def test_json_gives_back_the_very_text() -> None:
    text = as_json({HOSTILE: [FORGED, HOSTILE]})
    assert_harmless(text, "")
    assert json.loads(text) == {HOSTILE: [FORGED, HOSTILE]}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the log of a command says. Other tests have the loggers back as they were."""
    for name in ("djjobs", "datajoint", "py.warnings"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    return io.StringIO()


def tell_of_everything() -> None:
    """An event, a record, an exception, and one of DataJoint's, all with texts that somebody else wrote."""
    telemetry.emit(
        "job failed", "Spectrum", {"note": HOSTILE}, message=f"{HOSTILE}\n{FORGED}", retry_in=None, suppressed=True
    )
    logging.getLogger("djjobs").info("%s", HOSTILE, extra={"event": "output"})
    logging.getLogger("djjobs").warning("it said: %s", FORGED)
    for name in ("djjobs", "datajoint"):
        try:
            raise ValueError(HOSTILE + FORGED)
        except ValueError:
            logging.getLogger(name).exception("It failed: %s", HOSTILE)


def test_no_line_of_the_log_is_obeyed_or_forged(lines: io.StringIO) -> None:
    logs.set_up(stream=lines)
    tell_of_everything()
    text = lines.getvalue()
    assert_harmless(text, "\n")
    assert text.count("\\x1b[2J") >= 6 and "all data deleted" in text
    assert not any(line.startswith("2030") for line in text.splitlines())


def test_a_line_of_the_json_log_is_one_object_with_the_text_as_it_was_made_visible(lines: io.StringIO) -> None:
    logs.set_up(as_json=True, stream=lines)
    tell_of_everything()
    assert_harmless(lines.getvalue(), "\n")
    documents = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert documents[0]["key"] == {"note": HOSTILE}
    assert any("all data deleted" in document["message"] for document in documents)
    assert "ValueError" in documents[-1]["exception"]


def test_whoever_else_listens_to_our_logger_hears_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    """As in a notebook, where the handlers are the user's own."""
    caplog.set_level("DEBUG", "djjobs")
    tell_of_everything()
    ours = [record for record in caplog.records if record.name == "djjobs"]
    assert len(ours) == 4
    for record in ours:
        text = logging.Formatter().format(record)
        assert_harmless(text)
        assert not any(line.startswith("2030") for line in text.splitlines())


def test_a_table_on_the_terminal_has_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"key": {"note": HOSTILE, "n": 1}, "error": HOSTILE + FORGED, "state": "[red]"}]
    output.print_table(rows, ["key", "error", "state"], coloured="state")
    output.say(f"djjobs: {HOSTILE}{FORGED}")
    output.print_json(rows)
    shown = capsys.readouterr().out
    assert_harmless(shown, "\n")
    _, row, said, document = shown.split("\n", 3)
    assert "[red]x[/]" in row and "\\x1b[2J" in row and "all data deleted" in row
    assert said.startswith("djjobs: \\x1b")
    assert json.loads(document) == rows
