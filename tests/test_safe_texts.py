"""Texts that somebody else wrote, in everything that shows them: keys, errors, names, hosts, what make() prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datajoint as dj
import pandas as pd
import pytest
from click.testing import CliRunner
from commands import Command
from datajoint.expression import QueryExpression
from pipelines import INT, computed, manual, rows_of

import djjobs
from djjobs.cli import main
from djjobs.recurring.rows import Timetable

TAG = "<script>alert(1)</script>"
#: A tag, an order to a terminal, the markup of another library, a line that is none of ours.
HOSTILE = f"{TAG}\x1b[2J\r[/red]\n2030-01-01 00:00:00 all is lost"


def assert_harmless(text: str) -> None:
    """As on a terminal: nothing is there that it would obey, and no line begins with the words of others."""
    assert [character for character in text if not character.isprintable() and character != "\n"] == []
    assert not any(line.startswith("2030") for line in text.splitlines())


@pytest.fixture
def hostile(schema: Any) -> Iterator[Any]:
    """A table with a job that failed with a hostile text, in every other place, too, as far as the columns allow."""

    def make(self: Any, key: dict[str, Any]) -> None:
        raise ValueError(HOSTILE)

    source = manual(schema, f"name : varchar(100)  # {TAG}\nn : {INT}")
    source.insert1({"name": HOSTILE, "n": 1})
    table = computed(schema, "-> Source", {"Source": source}, make=make)
    run = table.schedule_jobs(name="harmless")
    djjobs.runs(schema).update1({"run_id": run.run_id, "name": HOSTILE, "host": HOSTILE})
    table.populate(reserve_jobs=True, suppress_errors=True)
    assert len(table.jobs.errors) == 1
    now = Timetable.of(schema.connection, schema.database).now()
    djjobs.workers(schema).insert1(
        {"worker_id": "1" * 36, "host": HOSTILE, "user": HOSTILE, "cluster_job": HOSTILE, "last_heartbeat": now}
        | {"started": now}
    )
    times = {"created": now, "next_time": now, "last_time": now}
    djjobs.schedules(schema).insert1(
        {"name": TAG, "target": HOSTILE, "what": "jobs", "every": 5.0, "last_outcome": HOSTILE, **times}
    )
    djjobs.firings(schema).insert1({"name": TAG, "fire_time": now, "state": "failed", "outcome": HOSTILE})
    table.hostile = schema
    yield table


def shown(table: Any) -> dict[str, Any]:
    """All that shows something of these texts in a notebook."""
    schema = table.hostile
    (run,) = rows_of(djjobs.runs(schema))
    return {
        "Table.jobs": table.jobs,
        "restricted": table.jobs & {"n": 1},
        "errors": table.jobs.errors,
        "projected": djjobs.jobs(schema).proj("error_message", "key"),
        "jobs": djjobs.jobs(schema),
        "workers": djjobs.workers(schema),
        "runs": djjobs.runs(schema),
        "schedules": djjobs.schedules(schema),
        "firings": djjobs.firings(schema),
        "Run": djjobs.Run.of(schema, run["run_id"]),
        "runs by state": djjobs.runs(schema).status(),
        "status": djjobs.status(schema),
    }


def test_a_notebook_shows_tags_as_text(hostile: Any) -> None:
    pages = {name: thing._repr_html_() for name, thing in shown(hostile).items()}
    assert {name for name, page in pages.items() if "<script>" in page} == set()
    for name in set(pages) - {"status"}:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in pages[name], name
    assert "\x1b" not in "".join(pages[name] for name in set(pages) - {"status", "runs by state"})


def test_a_terminal_shows_what_it_would_obey(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dj.config, "display.width", 200)
    for name, thing in shown(hostile).items():
        # A DataFrame holds the very values, and pandas shows them in its own way.
        if not isinstance(thing, pd.DataFrame):
            assert_harmless(repr(thing))
            assert TAG in repr(thing) or name == "Run", name
    assert "\\x1b[2J" in repr(hostile.jobs)


def test_previews_are_as_before_where_texts_are_harmless(schema: Any) -> None:
    """As DataJoint itself would show the same rows, but for JSON."""
    source = manual(schema, f"name : varchar(20)\nn : {INT}")
    source.insert([{"name": name, "n": n} for n, name in enumerate(["a b", "Nächte \N{SNOWMAN}", ""])])
    table = computed(schema, "-> Source", {"Source": source})
    table.schedule_jobs()
    ours = table.jobs.proj("status", "priority", "due_time")
    same = djjobs.jobs(schema).proj("status", "priority", "due_time")
    assert repr(same) == QueryExpression.preview(same)
    assert same._repr_html_() == QueryExpression._repr_html_(same)
    assert "Nächte \N{SNOWMAN}" in repr(ours) and "Nächte \N{SNOWMAN}" in ours._repr_html_()


@pytest.mark.parametrize("command", ["jobs", "workers", "runs", "status", "schedule list", "check"])
def test_a_command_prints_one_line_a_row_that_no_terminal_obeys(hostile: Any, command: str) -> None:
    words = [*command.split(), hostile.hostile.database]
    text = CliRunner().invoke(main, words)
    assert text.exit_code in (0, 1), text.stderr
    assert_harmless(text.stdout + text.stderr)
    if command not in ("status", "check"):
        assert "\\x1b[2J" in text.stdout and TAG in text.stdout
    as_json = CliRunner().invoke(main, [*words, "--json"]).stdout
    assert_harmless(as_json)
    if command == "jobs":
        assert json.loads(as_json)[0]["key"] == {"name": HOSTILE, "n": 1}


def test_a_run_by_its_number_and_what_is_wrong_are_printed_so_too(hostile: Any) -> None:
    (run,) = rows_of(djjobs.runs(hostile.hostile))
    text = CliRunner().invoke(main, ["runs", hostile.hostile.database, str(run["run_id"])])
    assert text.exit_code == 0 and TAG in text.stdout
    assert_harmless(text.stdout)
    wrong = CliRunner().invoke(main, ["schedule", "pause", hostile.hostile.database, HOSTILE])
    assert (wrong.exit_code, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert_harmless(wrong.stderr)


PRINTING = """
import datajoint as dj
import djjobs

schema = dj.Schema("{schema}")

@schema
class Task(dj.Manual):
    definition = "n : {INT}"

@schema
class Loud(djjobs.JobsMixin, dj.Computed):
    definition = "-> Task"

    def make(self, key):
        print("\\x1b[31mred\\x1b[0m", "b\\b", "tab\\there", "[/red]")
        self.insert1(key)
        if key["n"] == 2:
            raise ValueError("{hostile}")
"""


@pytest.mark.parametrize("options", [(), ("--json-logs",)], ids=["text", "json"])
def test_what_make_prints_and_raises_reaches_the_log_of_a_worker_visibly(
    schema: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "loud_lab.py").write_text(
        PRINTING.format(schema=schema.database, INT=INT, hostile=HOSTILE.encode("unicode_escape").decode())
    )
    with open(tmp_path / "fill.py", "w") as fill:
        fill.write("import loud_lab\nloud_lab.Task.insert([{'n': 1}, {'n': 2}], skip_duplicates=True)\n")
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}:{Path(djjobs.__file__).parents[1]}"}
    filling = Command([str(tmp_path / "fill.py")], tmp_path, path)
    assert filling.end() == 0, filling.log
    worker = Command(["-m", "djjobs.cli", "worker", "loud_lab", "--drain", *options], tmp_path, path)
    try:
        assert worker.end() == 1
    finally:
        worker.clear_away()
    assert_harmless(worker.log.replace("\t", " "))
    said = worker.log.splitlines()
    messages = [json.loads(line)["message"] for line in said] if options else said
    assert sum("\\x1b[31mred\\x1b[0m b\\x08 tab\there [/red]" in message for message in messages) == 2
    assert any("ValueError: <script>" in message and "\\x1b[2J" in message for message in messages)
