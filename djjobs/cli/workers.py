"""`djjobs workers`: who is at work."""

from __future__ import annotations

from typing import Any

import click

from ..dj.compat import datajoint_api
from ..queue.queue import workers as workers_of
from ..table.targets import schemas_of
from . import completion
from .output import as_json_option, print_json, print_table, say, utc

_COLUMNS = (
    "schema",
    "host",
    "pid",
    "user",
    "state",
    "slots",
    "started (UTC)",
    "heartbeat (UTC)",
    "cluster job",
    "tables",
)


@click.command()
@click.argument("pipeline", shell_complete=completion.modules_and_schemas)
@as_json_option
def workers(pipeline: str, as_json: bool) -> None:
    """List the workers of PIPELINE: a module, or the name of a schema. All times are UTC.

    \b
    Examples:
      djjobs workers my_pipeline.analysis
      djjobs workers lab_ephys --json
    """
    rows = [
        {"schema": schema.database, **row}
        for schema in schemas_of(pipeline)
        for row in datajoint_api.dicts(workers_of(schema), order_by="started")
    ]
    if as_json:
        print_json([_document(row) for row in rows])
    elif rows:
        print_table([_line(row) for row in rows], _COLUMNS, coloured="state")
    else:
        say("No workers.", err=True)


def _line(row: dict[str, Any]) -> dict[str, Any]:
    tables = row["tables"]
    return {
        **row,
        "started (UTC)": utc(row["started"]),
        "heartbeat (UTC)": utc(row["last_heartbeat"]),
        "cluster job": row["cluster_job"],
        "tables": ", ".join(map(str, tables)) if isinstance(tables, (list, tuple)) else tables,
    }


def _document(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: row[name] and f"{row[name].isoformat()}Z" for name in ("started", "last_heartbeat")}}
