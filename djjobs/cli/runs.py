"""`djjobs runs`: what was asked for, and how far it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..errors import DjJobsError
from ..run.rows import runs as runs_of
from ..run.run import Run
from ..run.state import STATES
from ..table.targets import schemas_of
from . import completion
from .output import as_json_option, counted, print_json, print_table, say, utc

__all__ = ["find_run", "runs"]

_COLUMNS = ("run", "name", "table", "user", "due (UTC)", "state", "over", "errors")


@click.command()
@click.argument("pipeline", shell_complete=completion.modules_and_schemas)
@click.argument("run_id", required=False, type=int)
@click.option("--state", multiple=True, type=click.Choice(STATES), help="Only runs in this state. Repeatable.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(0), help="No more than so many; 0 for all.")
@as_json_option
def runs(pipeline: str, run_id: int | None, state: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List the runs of PIPELINE, a module or the name of a schema, the latest first. All times are UTC.

    With RUN_ID: all there is to know of this run. `djjobs cancel --run` calls one off.

    \b
    Examples:
      djjobs runs my_pipeline.analysis --state running
      djjobs runs lab_ephys 4823071 --json
    """
    schemas = schemas_of(pipeline)
    if run_id is not None:
        _show(find_run(schemas, run_id), as_json)
        return
    rows = [row for schema in schemas for row in _rows(schema) if not state or row["state"] in state]
    rows.sort(key=lambda row: row["created"], reverse=True)
    shown = rows[:limit] if limit else rows
    if as_json:
        print_json([_document(row) for row in shown])
    elif shown:
        print_table([_line(row) for row in shown], _COLUMNS, coloured="state")
        if len(rows) > len(shown):
            say(f"{counted(len(rows) - len(shown), 'run')} more; --limit 0 shows all.", err=True)
    else:
        say("No runs.", err=True)


def find_run(schemas: list[Any], run_id: int) -> Run:
    """The run with this id in one of the schemas."""
    for number, schema in enumerate(schemas, 1):
        try:
            return Run.of(schema, run_id)
        except DjJobsError:
            if number == len(schemas):
                raise
    raise AssertionError("not reached")


def _rows(schema: Any) -> list[dict[str, Any]]:
    frame = runs_of(schema).status().reset_index()
    frame = frame.astype(object).where(frame.notna(), None)
    return [{"schema": schema.database, **row} for row in frame.to_dict("records")]


def _line(row: dict[str, Any]) -> dict[str, Any]:
    over = row["total"] - row["scheduled"] - row["reserved"]
    return {
        **row,
        "run": row["run_id"],
        "table": row["table_name"],
        "due (UTC)": utc(row["due_time"]),
        "over": f"{over}/{row['total']}",
        "errors": row["error"],
    }


def _document(row: dict[str, Any]) -> dict[str, Any]:
    times = {name: row[name] and f"{row[name].isoformat()}Z" for name in ("created", "due_time", "ended_time")}
    return {**row, **times}


def _show(run: Run, as_json: bool) -> None:
    times = {"created": run.created, "due": run.due_time, "ended": run.ended}
    about = {
        "run_id": run.run_id,
        "name": run.name,
        "table": run.table_name,
        "restriction": run.restriction,
        "user": run.user,
        **{name: moment and f"{moment:%Y-%m-%dT%H:%M:%S}Z" for name, moment in times.items()},
        "state": run.state,
        "progress": asdict(run.progress()),
        "details": run.details,
        "results": run.results,
        "finish_error": run.error,
    }
    if as_json:
        print_json(about)
        return
    for name, value in about.items():
        if value not in (None, ""):
            say(f"{name.replace('_', ' ') + ':':13} {_in_words(value)}")


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)
