"""The command line: `djjobs --help`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

try:
    import click
except ImportError:  # pragma: no cover - only without the extra
    sys.exit("The djjobs command needs its extra: pip install 'djjobs[cli]'")

import datajoint as dj

from .database import connected
from .errors import DjJobsError
from .migrate import migrate as migrate_schema
from .status import status as status_of

__all__ = ["main"]


class _Group(click.Group):
    """Turns the errors that a user can mend into one line and exit code 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except DjJobsError as error:
            click.echo(f"djjobs: {error}", err=True)
            context.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="djjobs")
def main() -> None:
    """A real job queue in DataJoint's ~jobs table.

    The database is the one that DataJoint is configured for, by its configuration file or by
    DJ_HOST, DJ_USER and DJ_PASS.

    \b
    Examples:
      djjobs demo
      djjobs status my_pipeline.analysis
      djjobs migrate lab_ephys
    Tab completion, for bash (or zsh, fish):
      eval "$(_DJJOBS_COMPLETE=bash_source djjobs)"
    """


@main.command()
@click.argument("schema")
def migrate(schema: str) -> None:
    """Upgrade the ~jobs of SCHEMA that DataJoint 0.14 made.

    Every row is kept. It can be run again at any time.

    \b
    Example:
      djjobs migrate lab_ephys
    """
    connected()
    if schema not in dj.list_schemas():
        raise DjJobsError(f"There is no schema {schema!r} here. Those there are: {', '.join(dj.list_schemas())}.")
    converted = migrate_schema(schema)
    click.echo(f"{schema}: the queue is up to date; {converted} rows were converted.")


@main.command()
@click.argument("pipeline")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def status(pipeline: str, as_json: bool) -> None:
    """Show how far PIPELINE is: a module, or the name of a schema.

    \b
    Examples:
      djjobs status my_pipeline.analysis
      djjobs status lab_ephys --json
    """
    connected()
    frame = status_of(_module_or_schema(pipeline))
    if as_json:
        click.echo(json.dumps(json.loads(frame.to_json(orient="index")), indent=2))
    else:
        click.echo(frame.to_string(na_rep=""))


@main.command()
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1), help="Worker processes.")
@click.option("--sessions", default=60, show_default=True, type=click.IntRange(1), help="Sessions to analyse.")
@click.option("--keep", is_flag=True, help="Keep the server up afterwards, until Ctrl-C.")
def demo(workers: int, sessions: int, keep: bool) -> None:
    """Work off an example pipeline on a PostgreSQL server that comes and goes with the demo.

    \b
    Example:
      djjobs demo --workers 8
    """
    from . import demo as demonstration

    sys.exit(demonstration.run(workers=workers, sessions=sessions, keep=keep))


def _module_or_schema(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    module = _module(name)
    if module is not None:
        return module
    if name in dj.list_schemas():
        return dj.Schema(name, create_schema=False)
    raise DjJobsError(f"{name!r} is neither a module that can be imported from here nor a schema on the server.")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise DjJobsError(f"The module {name} does not import: {type(error).__name__}: {error}.") from error
    except Exception as error:
        raise DjJobsError(f"The module {name} does not import: {type(error).__name__}: {error}.") from error


if __name__ == "__main__":
    main()
