"""`djjobs status`: how far a pipeline is."""

from __future__ import annotations

import json

import click

from ..printable import printable
from ..table.targets import module_or_schema
from ..views.status import status as status_of
from . import completion
from .base import connect
from .output import as_json_option, print_json


@click.command()
@click.argument("pipeline", shell_complete=completion.modules_and_schemas)
@as_json_option
def status(pipeline: str, as_json: bool) -> None:
    """Show how far PIPELINE is: a module, or the name of a schema.

    \b
    Examples:
      djjobs status my_pipeline.analysis
      djjobs status lab_ephys --json
    """
    found = module_or_schema(pipeline)
    connect()
    frame = status_of(found)
    if as_json:
        print_json(json.loads(frame.to_json(orient="index")))
    else:
        click.echo(printable(frame.to_string(na_rep="")))
