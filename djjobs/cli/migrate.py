"""`djjobs migrate`: what DataJoint's own queues hold comes into ours."""

from __future__ import annotations

import click
import datajoint as dj

from ..errors import DjJobsError
from ..table.migrate import migrate as migrate_schema
from . import completion
from .base import connect
from .output import say


@click.command()
@click.argument("schema", shell_complete=completion.schemas)
def migrate(schema: str) -> None:
    """Bring along what DataJoint's own queues of SCHEMA hold.

    A ~jobs that DataJoint 0.14 made is upgraded and keeps every row. From the queues of DataJoint 2, a table ~~name for
    each table, jobs are copied that ~jobs does not have; these queues stay as they are. It can be run again at any
    time.

    \b
    Example:
      djjobs migrate lab_ephys
    """
    connect()
    if schema not in dj.list_schemas():
        raise DjJobsError(f"There is no schema {schema!r} here. Those there are: {', '.join(dj.list_schemas())}.")
    converted = migrate_schema(schema)
    say(f"{schema}: the queue is up to date; {converted} rows were converted or copied.")
