"""`djjobs schedule-jobs`: one scheduling of all tables of a target, for those who keep their own cron."""

from __future__ import annotations

import datetime
import sys
from dataclasses import asdict
from typing import Any

import click

from ..run.run import Run
from ..table.targets import tables_of
from . import completion
from .options import Condition, Duration, Moment, explaining_targets
from .output import as_json_option, counted, print_json, say

__all__ = ["schedule_jobs"]


@click.command("schedule-jobs")
@click.argument("targets", nargs=-1, required=True, shell_complete=completion.modules)
@click.option("--restrict", multiple=True, type=Condition(), help="SQL condition on key_source; may be repeated.")
@click.option("--force", is_flag=True, help="Also put jobs back that are error, ignore or cancelled.")
@click.option("--priority", type=click.IntRange(0, 255), help="Priority of the new jobs; lower is more urgent.")
@click.option("--delay", type=Duration(), help="Run the new jobs only after this time, as in 2h.")
@click.option("--due", type=Moment(), help="Run them only from this time on, as in 2030-01-31T18:00+01:00.")
@click.option("--name", help="What to call the run; one with a name is kept even if there is nothing to do.")
@click.option("--wait", is_flag=True, help="Wait until workers have done all of it.")
@as_json_option
@explaining_targets
def schedule_jobs(
    targets: tuple[str, ...],
    restrict: tuple[str, ...],
    force: bool,
    priority: int | None,
    delay: float | None,
    due: datetime.datetime | None,
    name: str | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Put the keys that are still to be made into the queue, once, upstream first.

    {targets}

    \b
    Examples:
      djjobs schedule-jobs my_pipeline.analysis
      djjobs schedule-jobs my_pipeline.analysis:Spectrum --restrict "subject = 'm1'" --priority 1
      djjobs schedule-jobs my_pipeline.analysis:Spectrum --name "rerun m1" --force --wait
    In a crontab:
      */5 * * * *  cd /lab && djjobs schedule-jobs my_pipeline.analysis
    """
    if delay is not None and due is not None:
        raise click.UsageError("--delay and --due say the same thing: give one of them.")
    due_time = due if delay is None else datetime.timedelta(seconds=delay)
    options = {"force": force, "min_scheduling_interval": 0, "priority": priority, "due_time": due_time, "name": name}
    runs: dict[str, Run] = {}
    for table in tables_of(targets):
        runs[table.__name__] = table.schedule_jobs(*restrict, **options)  # type: ignore[attr-defined]
    if not as_json:
        for table_name, run in runs.items():
            number = f" (run {run.run_id})" if name else ""
            say(f"{table_name}: {counted(run.scheduled, 'job')} scheduled{number}")
    if wait:
        for run in runs.values():
            run.wait(display_progress=sys.stderr.isatty())
    if as_json:
        print_json({table_name: _document(run, wait) for table_name, run in runs.items()})
    if wait and any(run.progress().error for run in runs.values()):
        sys.exit(1)


def _document(run: Run, waited: bool) -> dict[str, Any]:
    progress = {"state": run.state, **asdict(run.progress())} if waited else {}
    return {"run_id": run.run_id, "jobs_scheduled": run.scheduled, **progress}
