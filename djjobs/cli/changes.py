"""`djjobs retry`, `ignore`, `cancel` and `cleanup`: the mixin's methods for all tables of a target."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click
import datajoint as dj

from ..errors import JobNotCancellable
from ..queue.database import explained
from ..queue.keys import table_label
from ..run.run import Run
from ..table.targets import schemas_of, tables_of
from . import completion
from .options import explaining_targets
from .output import as_json_option, confirm, counted, print_json, say
from .runs import find_run
from .selection import Selection, selecting

__all__ = ["cancel", "cleanup", "ignore", "retry"]


def _changing(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the four commands have in common."""
    function = as_json_option(explaining_targets(function))
    function = click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)
    function = selecting(function)
    return click.argument("target", shell_complete=completion.modules)(function)


@click.command()
@_changing
def retry(target: str, selection: Selection, yes: bool, as_json: bool) -> None:
    """Put jobs that are `error` or `cancelled` back into the queue.

    {targets}

    \b
    Examples:
      djjobs retry my_pipeline.analysis
      djjobs retry my_pipeline.analysis:Spectrum --key subject=m1 --key session=3
      djjobs retry my_pipeline.analysis --where "error_message LIKE '%CUDA%'" --yes
    """
    change = _Change("Retry", "put back", selection, yes, as_json)
    change.run(
        target,
        lambda table: len(selection.living_jobs(table) & [{"status": "error"}, {"status": "cancelled"}]),
        lambda table, restrictions: table.retry_jobs(*restrictions),
    )


@click.command()
@_changing
def ignore(target: str, selection: Selection, yes: bool, as_json: bool) -> None:
    """Mark keys to be left alone, whether they have a job already or not.

    Jobs that are running or done stay as they are. `djjobs jobs --status ignore` shows the ignored
    ones.

    {targets}

    \b
    Examples:
      djjobs ignore my_pipeline.analysis:Spectrum --key subject=m1 --key session=3
      djjobs ignore my_pipeline.analysis:Spectrum --restrict "session_date < '2020-01-01'"
    """
    change = _Change("Ignore", "ignored", selection, yes, as_json)
    change.run(
        target,
        lambda table: _still_to_do(table, selection),
        lambda table, restrictions: table.ignore_jobs(*(restrictions or (True,))),
    )


@click.command()
@_changing
@click.option("--force", is_flag=True, help="Stop running jobs now: interrupt them, then kill.")
@click.option("--run", "run_id", type=int, help="The run with this id, and all jobs of it that are not over.")
def cancel(target: str, selection: Selection, yes: bool, as_json: bool, force: bool, run_id: int | None) -> None:
    """Call jobs off. They stay `cancelled` until they are retried.

    Scheduled jobs are cancelled at once. A running job is asked to stop and does so at its next
    safe point; with --force it is stopped now.

    {targets}

    \b
    Examples:
      djjobs cancel my_pipeline.analysis:Spectrum --key subject=m1
      djjobs cancel my_pipeline.analysis --yes --force
      djjobs cancel my_pipeline.analysis --run 4823071
    """
    if run_id is not None:
        if selection:
            raise click.UsageError("--run is about a whole run: leave out --restrict, --key and --where.")
        _cancel_run(find_run(schemas_of(target.partition(":")[0]), run_id), force, yes, as_json)
        return
    options = {"force": True} if force else {}
    change = _Change("Cancel", "cancelled or asked to stop", selection, yes, as_json)
    change.run(
        target,
        lambda table: len(selection.living_jobs(table) & [{"status": "scheduled"}, {"status": "reserved"}]),
        lambda table, restrictions: table.cancel_jobs(*restrictions, **options),
    )


@click.command()
@_changing
def cleanup(target: str, selection: Selection, yes: bool, as_json: bool) -> None:
    """Remove jobs that nothing needs any more, and bring back those of dead workers.

    Finished jobs go whose row has left the table, and unfinished ones whose key has left
    key_source. It is safe while workers run.

    {targets}

    \b
    Examples:
      djjobs cleanup my_pipeline.analysis --yes
      djjobs cleanup my_pipeline.analysis:Spectrum --key subject=m1 --json
    """
    change = _Change("Clean up among", "cleaned up", selection, yes, as_json)
    change.run(
        target,
        lambda table: len(selection.jobs(table)),
        lambda table, restrictions: table.cleanup_jobs(*restrictions),
    )


def _cancel_run(run: Run, force: bool, yes: bool, as_json: bool) -> None:
    count = run.progress().open
    if not yes and _on_terminal() and count > 1 and not confirm(f"Cancel {count} jobs?"):
        _leave_alone()
    cancelled = run.cancel(force=force)
    if as_json:
        print_json({"run_id": run.run_id, "cancelled": cancelled, "state": run.state})
    else:
        say(f"Run {run.run_id}: {counted(cancelled, 'job')} cancelled or asked to stop")


def _leave_alone() -> NoReturn:
    say("Nothing was changed.", err=True)
    sys.exit(1)


class _Change:
    """One change to the jobs of all tables of a target, with the question before and the count after."""

    def __init__(self, verb: str, done: str, selection: Selection, yes: bool, as_json: bool) -> None:
        self._verb, self._done, self._selection = verb, done, selection
        self._yes, self._as_json = yes, as_json

    def run(self, target: str, count: Callable[[Any], int], act: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        self._insist_on_a_choice()
        tables: list[Any] = tables_of([target])
        # All of them first: a condition that one of the tables does not know must not leave half of the work done.
        restrictions = [self._selection.restrictions(table) for table in tables]
        self._ask(tables, count)
        results: dict[str, Any] = {}
        over: list[JobNotCancellable] = []
        try:
            for table, conditions in zip(tables, restrictions, strict=True):
                try:
                    results[table.__name__] = act(table, conditions)
                except JobNotCancellable as error:
                    results[table.__name__] = 0
                    over.append(error)
            # One table of several may have nothing left to cancel; all of them together may not.
            if len(over) == len(tables):
                results.clear()
                raise over[0]
        finally:
            self._show(results)

    def _show(self, results: dict[str, Any]) -> None:
        """Also after an error on the way: what was done is done."""
        if results and self._as_json:
            print_json(results)
        elif results:
            for name, result in results.items():
                say(f"{name}: {self._line(result)}")

    def _insist_on_a_choice(self) -> None:
        if not (self._yes or self._selection or _on_terminal()):
            raise click.UsageError(
                "Nobody is there to confirm a change to all jobs. Choose some with --restrict, --key or --where, "
                "or say --yes."
            )

    def _ask(self, tables: list[Any], count: Callable[[Any], int]) -> None:
        if self._yes or not _on_terminal():
            return
        total = sum(count(table) for table in tables)
        names = ", ".join(table.__name__ for table in tables)
        if total > 1 and not confirm(f"{self._verb} {total} jobs of {names}?"):
            _leave_alone()

    def _line(self, result: Any) -> str:
        if isinstance(result, dict):
            return ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in result.items())
        return f"{counted(result, 'job')} {self._done}"


def _still_to_do(table: Any, selection: Selection) -> int:
    """How many keys `ignore` is about, with a job or without."""
    if selection.where:
        return len(selection.living_jobs(table))
    with explained(table.connection, table_label(table()), "find jobs of"):
        return len((table().key_source & dj.AndList(selection.restrictions(table))).proj() - table().proj())


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
