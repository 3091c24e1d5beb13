"""`djjobs demo`: a queue at work, on a server of its own."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1), help="Worker processes.")
@click.option("--sessions", default=60, show_default=True, type=click.IntRange(1), help="Sessions to analyse.")
@click.option("--keep", is_flag=True, help="Keep the server up afterwards, until Ctrl-C.")
def demo(workers: int, sessions: int, keep: bool) -> None:
    """Work off an example pipeline on a PostgreSQL server that comes and goes with the demo.

    \b
    Example:
      djjobs demo --workers 8
    """
    from ..demo import show as demonstration

    sys.exit(demonstration.run(workers=workers, sessions=sessions, keep=keep))
