"""`djjobs check`: what is wrong with a set-up."""

from __future__ import annotations

import dataclasses
import sys

import click

from ..check import check as findings_of
from ..table.targets import module_or_schema
from . import completion
from .base import connect
from .output import as_json_option, print_json, print_table


@click.command()
@click.argument("pipeline", required=False, shell_complete=completion.modules_and_schemas)
@as_json_option
def check(pipeline: str | None, as_json: bool) -> None:
    """Say what is wrong with a set-up, and how to mend it. Nothing is changed.

    Looks at the server, and at the queue and the rights in the schemas of PIPELINE, a module or
    the name of a schema. Exit code 1 if there are problems, 2 if the server cannot be reached.

    \b
    Examples:
      djjobs check
      djjobs check my_pipeline.analysis
      djjobs check lab_ephys --json
    """
    found = module_or_schema(pipeline) if pipeline else None
    connect()
    findings = findings_of(found)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        rows = [
            {"level": finding.level, "what": finding.subject, "finding": f"{finding.message} {finding.remedy}".strip()}
            for finding in findings
        ]
        print_table(rows, ("level", "what", "finding"), coloured="level")
    sys.exit(any(finding.level == "problem" for finding in findings))
