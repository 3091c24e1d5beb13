"""The command line: `djjobs --help`. One module a command; what they share is in `base`, `output` and `targets`."""

from __future__ import annotations

import sys

try:
    import click
except ImportError:  # pragma: no cover - only without the extra
    sys.exit("djjobs: The command needs its extra: pip install 'djjobs[cli]'")

from .base import Group
from .changes import cancel, cleanup, ignore, retry
from .check import check
from .demo import demo
from .jobs import jobs
from .migrate import migrate
from .runs import runs
from .schedule import schedule
from .schedule_jobs import schedule_jobs
from .scheduler import scheduler
from .status import status
from .worker import worker
from .workers import workers

__all__ = ["main"]


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="djjobs")
@click.pass_context
def main(context: click.Context) -> None:
    """A real job queue in DataJoint's ~jobs table.

    The database is the one that DataJoint is configured for, by its configuration file or by
    DJ_HOST, DJ_USER and DJ_PASS. Modules are imported as from a script in the current folder.

    Exit codes: 0 all is well; 1 there were errors in the work; 2 wrong input or set-up, and one
    line says what.

    \b
    Examples:
      djjobs demo
      djjobs check my_pipeline.analysis
      djjobs worker my_pipeline.analysis --processes 8
      djjobs status my_pipeline.analysis
      djjobs jobs my_pipeline.analysis --status error
      djjobs retry my_pipeline.analysis:Spectrum --key subject=m1
    Tab completion, for bash (or zsh, fish):
      eval "$(_DJJOBS_COMPLETE=bash_source djjobs)"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


_COMMANDS = (
    (worker, status, jobs, runs, workers),
    (schedule, scheduler, schedule_jobs, retry, ignore, cancel, cleanup),
    (check, migrate, demo),
)
for _group in _COMMANDS:
    for _command in _group:
        main.add_command(_command)
