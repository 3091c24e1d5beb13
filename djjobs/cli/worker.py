"""`djjobs worker`: work off the queue."""

from __future__ import annotations

import sys

import click

from ..settings import settings
from ..table.targets import tables_of
from ..worker import WorkerOptions, run_worker
from . import completion, logs
from .options import Condition, Duration, explaining_targets


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, shell_complete=completion.modules)
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Jobs to run side by side.")
@click.option(
    "--order",
    default="original",
    show_default=True,
    type=click.Choice(["original", "reverse", "random"]),
    help="Among jobs of the same priority.",
)
@click.option("--restrict", multiple=True, type=Condition(), help="Only jobs whose key fits. Repeatable.")
@click.option("--max-jobs", type=click.IntRange(1), help="Stop after so many jobs.")
@click.option("--drain", is_flag=True, help="Stop when nothing is left to do.")
@click.option("--idle-timeout", type=Duration(), help="Stop after so long without work.")
@click.option(
    "--walltime",
    type=Duration(positive=True),
    help="Begin no job that would not end in this time. Under Slurm, what is left of the allocation.",
)
@click.option("--max-jobs-per-process", type=click.IntRange(1), help="Replace a process after so many jobs.")
@click.option("--once", is_flag=True, help="Run one job, if there is one, and stop.")
@click.option(
    "--grace",
    type=Duration(),
    help=f"On SIGTERM or Ctrl-C, let running jobs go on for so long.  [default: {settings.grace:g}]",
)
@click.option("--with-scheduler", is_flag=True, help="Also fire the schedules of these tables.")
@click.option("--quiet", is_flag=True, help="Log only warnings and errors.")
@click.option("--json-logs", is_flag=True, help="Log one JSON object a line.")
@explaining_targets
def worker(
    targets: tuple[str, ...],
    processes: int,
    order: str,
    restrict: tuple[str, ...],
    max_jobs: int | None,
    drain: bool,
    idle_timeout: float | None,
    walltime: float | None,
    max_jobs_per_process: int | None,
    once: bool,
    grace: float | None,
    with_scheduler: bool,
    quiet: bool,
    json_logs: bool,
) -> None:
    """Work off the jobs of all tables of the targets, upstream first, until stopped.

    {targets}

    A duration is a number of seconds, or as in 90m, 2h, 12:00:00, 1-12:00:00. Jobs that
    run when the worker is stopped go back into the queue; nothing is counted against them. Logs go to stderr.
    Exit code 1 if jobs have failed.

    \b
    Examples:
      djjobs worker my_pipeline.analysis --processes 8
      djjobs worker my_pipeline.ephys my_pipeline.analysis:Spectrum --order random
      djjobs worker my_pipeline.analysis --drain --restrict "subject = 'm1'"
      djjobs worker my_pipeline.analysis --processes 4 --with-scheduler
      djjobs worker my_pipeline.analysis --walltime 11:50:00 --idle-timeout 10m --json-logs
    """
    logs.set_up(quiet=quiet, as_json=json_logs)
    options = WorkerOptions(
        processes=processes,
        order=order,
        restrictions=restrict,
        max_jobs=max_jobs,
        drain=drain,
        idle_timeout=idle_timeout,
        walltime=walltime,
        max_jobs_per_process=max_jobs_per_process,
        grace=grace,
        once=once,
        with_scheduler=with_scheduler,
    )
    sys.exit(run_worker(tables_of(targets), options))
