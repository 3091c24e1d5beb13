"""`djjobs jobs`: a list of jobs."""

from __future__ import annotations

from typing import Any, NamedTuple

import click
import datajoint as dj

from ..dj.compat import datajoint_api
from ..queue.queue import jobs as jobs_of
from ..queue.tables import STATUSES
from ..table.targets import module_or_schema, tables_of
from . import completion
from .options import explaining_targets
from .output import as_json_option, counted, print_json, print_table, say, utc
from .selection import Selection, selecting

_FETCHED = (
    "key status attempt priority due_time user host pid timestamp run_duration error_message cancel_request".split()
)
_COLUMNS = ("table", "key", "status", "attempt", "host", "when (UTC)", "error message")


@click.command()
@click.argument("target", shell_complete=completion.modules_and_schemas)
@click.option("--status", multiple=True, type=click.Choice(STATUSES), help="Only jobs of this status. Repeatable.")
@selecting
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(0),
    help="No more than so many, the latest; 0 for all.",
)
@as_json_option
@explaining_targets
def jobs(target: str, status: tuple[str, ...], selection: Selection, limit: int, as_json: bool) -> None:
    """List the jobs of TARGET, those that changed last first. All times are UTC.

    TARGET may also be the name of a schema, for all jobs in it.

    {targets}

    \b
    Examples:
      djjobs jobs my_pipeline.analysis --status error
      djjobs jobs my_pipeline.analysis:Spectrum --key subject=m1
      djjobs jobs lab_ephys --where "error_message LIKE '%CUDA%'" --json
    """
    queries = _listed(target, selection)
    if status:
        queries = [one._replace(query=one.query & [{"status": name} for name in status]) for one in queries]
    rows = _latest(queries, limit)
    if as_json:
        print_json([_document(row) for row in rows])
        return
    if not rows:
        say("No jobs.", err=True)
        return
    print_table([_line(row) for row in rows], _COLUMNS, coloured="status")
    left_out = sum(len(one.query) for one in queries) - len(rows)
    if left_out > 0:
        say(f"{counted(left_out, 'job')} more; --limit 0 shows all.", err=True)


class _Listed(NamedTuple):
    """Jobs to list: of one table, or of a schema, whose rows say the table."""

    table: str
    query: Any
    primary_key: list[str]


def _listed(target: str, selection: Selection) -> list[_Listed]:
    """The jobs to list."""
    found = None if ":" in target else module_or_schema(target)
    if not isinstance(found, dj.Schema):
        tables: list[Any] = tables_of([target])
        return [_Listed(table.__name__, selection.jobs(table).as_stored(), table().primary_key) for table in tables]
    if selection.restrict or selection.key:
        raise click.UsageError(
            f"{target} is a schema: for --restrict and --key name the module of its tables, or use --where."
        )
    return [_Listed("", jobs_of(found) & dj.AndList(selection.where), [])]


def _latest(queries: list[_Listed], limit: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for table, query, primary_key in queries:
        options = {"limit": limit} if limit else {}
        for row in datajoint_api.dicts(query.proj(*_FETCHED), order_by="timestamp DESC", **options):
            key = {name: row["key"][name] for name in primary_key if name in (row["key"] or {})}
            rows.append({**row, "key": key or row["key"], "table": table or row["table_name"]})
    rows.sort(key=lambda row: row["timestamp"], reverse=True)
    return rows[:limit] if limit else rows


def _line(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "when (UTC)": utc(row["timestamp"]), "error message": row["error_message"]}


def _document(row: dict[str, Any]) -> dict[str, Any]:
    # The hash means nothing outside the queue, but finds the row again.
    times = {name: row[name] and f"{row[name].isoformat()}Z" for name in ("timestamp", "due_time")}
    return {"table": row["table"], **{name: row[name] for name in ("key", "key_hash")}, **row, **times}
