"""`djjobs scheduler`: fire the schedules."""

from __future__ import annotations

import sys

import click

from ..recurring.scheduler import run_scheduler
from ..table.targets import tables_of
from . import completion, logs
from .options import explaining_targets


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, shell_complete=completion.modules)
@click.option("--once", is_flag=True, help="Fire what is due, wait until it is done, and stop.")
@click.option("--quiet", is_flag=True, help="Log only warnings and errors.")
@click.option("--json-logs", is_flag=True, help="Log one JSON object a line.")
@explaining_targets
def scheduler(targets: tuple[str, ...], once: bool, quiet: bool, json_logs: bool) -> None:
    """Fire the schedules of the tables of the targets, until stopped.

    Any number may run: one leads, and another takes over when it dies. `djjobs worker
    --with-scheduler` does the same beside its work.

    {targets}

    Logs go to stderr. Exit code 1 if firings have failed.

    \b
    Examples:
      djjobs scheduler my_pipeline.analysis
      djjobs scheduler my_pipeline.ephys my_pipeline.analysis --json-logs
      djjobs scheduler my_pipeline.analysis --once
    """
    logs.set_up(quiet=quiet, as_json=json_logs)
    sys.exit(run_scheduler(tables_of(targets), once=once))
