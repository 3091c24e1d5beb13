"""`djjobs schedule-jobs`: one scheduling of all tables of a target, for those who keep their own cron."""

from __future__ import annotations

import datetime

import click

from ..targets import tables_of
from . import completion
from .options import Condition, Duration, explaining_targets
from .output import as_json_option, counted, print_json

__all__ = ["schedule_jobs"]


@click.command("schedule-jobs")
@click.argument("targets", nargs=-1, required=True, shell_complete=completion.modules)
@click.option("--restrict", multiple=True, type=Condition(), help="SQL condition on key_source; may be repeated.")
@click.option("--force", is_flag=True, help="Also put jobs back that are error, ignore or cancelled.")
@click.option("--priority", type=click.IntRange(0, 255), help="Priority of the new jobs; lower is more urgent.")
@click.option("--delay", type=Duration(), help="Run the new jobs only after this time, as in 2h.")
@as_json_option
@explaining_targets
def schedule_jobs(
    targets: tuple[str, ...],
    restrict: tuple[str, ...],
    force: bool,
    priority: int | None,
    delay: float | None,
    as_json: bool,
) -> None:
    """Put the keys that are still to be made into the queue, once, upstream first.

    {targets}

    \b
    Examples:
      djjobs schedule-jobs my_pipeline.analysis
      djjobs schedule-jobs my_pipeline.analysis:Spectrum --restrict "subject = 'm1'" --priority 1
    In a crontab:
      */5 * * * *  cd /lab && djjobs schedule-jobs my_pipeline.analysis
    """
    due_time = None if delay is None else datetime.timedelta(seconds=delay)
    scheduled = {}
    for table in tables_of(targets):
        run = table.schedule_jobs(  # type: ignore[attr-defined]
            *restrict, force=force, min_scheduling_interval=0, priority=priority, due_time=due_time
        )
        scheduled[table.__name__] = int(run)
    if as_json:
        print_json(scheduled)
    else:
        for name, count in scheduled.items():
            click.echo(f"{name}: {counted(count, 'job')} scheduled")
