"""`djjobs schedule`: add, list, pause, resume, remove schedules, and run them now."""

from __future__ import annotations

import datetime
import shlex
import sys
from typing import Any

import click
import datajoint as dj

from ..errors import DjJobsError
from ..recurring.api import add_schedule, listed, pause_schedule, remove_schedule, resume_schedule, run_schedule_now
from ..recurring.rule import Rule, in_zone
from ..table.targets import schemas_of
from . import completion
from .base import connect
from .options import Duration, explaining_targets
from .output import as_json_option, confirm, print_json, print_table, say

__all__ = ["schedule"]

_COLUMNS = ("schema", "name", "target", "what", "when", "next", "scheduler", "last", "state", "outcome")
_pipeline = click.argument("pipeline", shell_complete=completion.modules_and_schemas)
_name = click.argument("name", shell_complete=completion.schedules)


@click.group()
def schedule() -> None:
    """Schedule or clean up jobs from time to time.

    Schedules are kept in the database. `djjobs scheduler`, or `djjobs worker --with-scheduler`,
    fires them.

    \b
    Examples:
      djjobs schedule add my_pipeline.analysis --every 5m
      djjobs schedule add my_pipeline.analysis --cron "0 3 * * *" --timezone Europe/Berlin --cleanup
      djjobs schedule list
      djjobs schedule run-now my_pipeline.analysis my_pipeline.analysis-cleanup
      djjobs schedule remove my_pipeline.analysis my_pipeline.analysis-cleanup
    """


@schedule.command()
@click.argument("target", shell_complete=completion.modules)
@click.option("--every", type=Duration(), help="Due every so often, as in 5m.")
@click.option("--cron", help='Due by a cron line of five fields, as in "0 3 * * *".')
@click.option(
    "--timezone",
    default="UTC",
    show_default=True,
    shell_complete=completion.timezones,
    help="The time zone of the cron line, as in Europe/Berlin.",
)
@click.option("--cleanup", is_flag=True, help="Remove jobs that nothing needs any more, instead of scheduling jobs.")
@click.option("--jobs", is_flag=True, help="Schedule jobs; the default without --cleanup, and besides it with both.")
@click.option("--name", help="How to call it.  [default: the target and what is done]")
@explaining_targets
def add(
    target: str, every: float | None, cron: str | None, timezone: str, cleanup: bool, jobs: bool, name: str | None
) -> None:
    """Have the jobs of TARGET scheduled or cleaned up from time to time.

    {targets}

    \b
    Examples:
      djjobs schedule add my_pipeline.analysis --every 5m
      djjobs schedule add my_pipeline.analysis --cron "0 3 * * *" --cleanup
      djjobs schedule add my_pipeline.analysis:Spectrum --cron "30 7 * * MON-FRI" --timezone Europe/Berlin
    """
    name = add_schedule(
        target, every=every, cron=cron, timezone=timezone, jobs=jobs or None, cleanup=cleanup, name=name
    )
    rows = [row for row in listed(schemas_of(target)) if row["name"] == name]
    for row in rows:
        say(f"{name} in {row['schema']}: next {_moment(row, 'next_time')}")
    _warn_if_nobody_fires(rows)


@schedule.command("list")
@click.argument("pipeline", required=False, shell_complete=completion.modules_and_schemas)
@as_json_option
def list_(pipeline: str | None, as_json: bool) -> None:
    """List the schedules of PIPELINE: a module, or the name of a schema. Without it, of all schemas.

    Times are in the schedule's own time zone.

    \b
    Examples:
      djjobs schedule list
      djjobs schedule list my_pipeline.analysis
      djjobs schedule list lab_ephys --json
    """
    rows = listed(schemas_of(pipeline) if pipeline else _all_schemas())
    if as_json:
        print_json([_document(row) for row in rows])
        return
    if not rows:
        say("No schedules.", err=True)
        return
    print_table([_line(row) for row in rows], _COLUMNS, coloured="state")
    _warn_if_nobody_fires(rows)


@schedule.command()
@_pipeline
@_name
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def remove(pipeline: str, name: str, yes: bool) -> None:
    """Remove the schedule NAME of PIPELINE, a module or the name of a schema, and its history.

    \b
    Examples:
      djjobs schedule remove my_pipeline.analysis nightly
      djjobs schedule remove lab_ephys nightly --yes
    """
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError("Nobody is there to confirm. Say --yes.")
        if not confirm(f"Remove the schedule {name}?"):
            say("Nothing was changed.", err=True)
            sys.exit(1)
    for database in remove_schedule(pipeline, name):
        say(f"{name} removed from {database}")


@schedule.command("run-now")
@_pipeline
@_name
@as_json_option
def run_now(pipeline: str, name: str, as_json: bool) -> None:
    """Carry out the schedule NAME of PIPELINE at once, in this process. Its next time stays.

    It is skipped if it runs already. Exit code 1 if it failed or was skipped.

    \b
    Examples:
      djjobs schedule run-now my_pipeline.analysis nightly
    """
    results = run_schedule_now(pipeline, name)
    if as_json:
        print_json([{"schema": result.database, **result._asdict()} for result in results])
    else:
        for result in results:
            say(f"{name} in {result.database} {result.state}: {result.outcome}")
    sys.exit(any(result.state != "done" for result in results))


@schedule.command()
@_pipeline
@_name
def pause(pipeline: str, name: str) -> None:
    """Let the schedule NAME of PIPELINE rest until it is resumed.

    \b
    Examples:
      djjobs schedule pause my_pipeline.analysis nightly
    """
    say(f"{name} is paused" if pause_schedule(pipeline, name) else f"{name} was paused already")


@schedule.command()
@_pipeline
@_name
def resume(pipeline: str, name: str) -> None:
    """Let the schedule NAME of PIPELINE be due again. What was due meanwhile is not made up.

    \b
    Examples:
      djjobs schedule resume my_pipeline.analysis nightly
    """
    say(f"{name} is resumed" if resume_schedule(pipeline, name) else f"{name} was not paused")


# -- what is shown ---------------------------------------------------------------------------------------------


def _all_schemas() -> list[Any]:
    connect()
    return [dj.Schema(name, create_schema=False) for name in dj.list_schemas()]


def _line(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "when": str(Rule(row["every"], row["cron"], row["timezone"]))
        if row["every"] is not None or row["cron"]
        else "",
        "next": _moment(row, "next_time") if row["enabled"] else "paused",
        "scheduler": row["scheduler"] or "none",
        "last": _moment(row, "last_time"),
        "state": "failed" if row["fault"] else row["last_state"],
        "outcome": row["fault"] or row["last_outcome"],
    }


def _moment(row: dict[str, Any], which: str) -> str:
    """A time as the clocks of the schedule's zone show it, and the zone."""
    return "" if row[which] is None else f"{_local(row, which):%Y-%m-%d %H:%M:%S} {row['timezone']}"


def _local(row: dict[str, Any], which: str) -> datetime.datetime:
    try:
        return in_zone(row[which], row["timezone"])
    except DjJobsError:
        return row[which].replace(tzinfo=datetime.timezone.utc)


def _document(row: dict[str, Any]) -> dict[str, Any]:
    times = {name: row[name] and _local(row, name).isoformat() for name in ("next_time", "last_time", "created")}
    return {**row, "enabled": bool(row["enabled"]), **times}


def _warn_if_nobody_fires(rows: list[dict[str, Any]]) -> None:
    idle = {row["target"].partition(":")[0] for row in rows if not row["scheduler"]}
    if idle:
        # A target may be anything, also to the shell that somebody copies this to.
        say(f"No scheduler runs: {shlex.join(['djjobs', 'scheduler', *sorted(idle)])}", err=True)
