"""Schedules: what is to be done to the tables of a pipeline from time to time. `scheduler` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from ..dj.compat import datajoint_api
from ..errors import DjJobsError
from ..queue.database import explained
from ..queue.tables import Firings, Schedules
from ..table.targets import loaded_tables, schemas_of, tables_of, upstream_first
from .fire import carry_out_here
from .rows import Schedule, Timetable
from .rule import Rule

__all__ = [
    "FiringResult",
    "add_schedule",
    "firings",
    "listed",
    "pause_schedule",
    "remove_schedule",
    "resume_schedule",
    "run_schedule_now",
    "schedules",
]

_LONGEST_NAME, _LONGEST_TEXT = 100, 255


class FiringResult(NamedTuple):
    """What came of a firing that somebody asked for, in one schema.

    Attributes
    ----------
    database : str
        The schema.
    state : str
        "done", "failed" or "skipped"; or "lost", if another scheduler has run it meanwhile.
    outcome : str
        In words.
    """

    database: str
    state: str
    outcome: str


def schedules(schema: Any) -> Schedules:
    """`~schedules` of a schema, as a DataJoint query: what is due when, and how it went the last time.

    Parameters
    ----------
    schema : dj.Schema
        An activated schema.
    """
    return _timetable_of(schema).schedules


def firings(schema: Any) -> Firings:
    """`~firings` of a schema, as a DataJoint query: the history of its schedules.

    Parameters
    ----------
    schema : dj.Schema
        An activated schema.
    """
    return _timetable_of(schema).firings


def listed(schemas: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows of `~schedules` of some schemas, where there is one, each with the `schema` and its `scheduler`.

    The latter is the host and the process that fires it, or None if none is known to be alive. `fault` says why a row
    cannot be fired; empty if it can.
    """
    rows = []
    for schema in schemas:
        timetable = Timetable.if_declared(schema.connection, schema.database)
        if timetable is not None:
            known = {schedule.name: schedule for schedule in timetable.everything()}
            leaders = timetable.living_leaders({schedule.target for schedule in known.values()})
            # A time that the driver cannot read would hide all rows.
            columns = [name for name in timetable.schedules.heading.names if name != "next_time"]
            for row in datajoint_api.dicts(timetable.schedules.proj(*columns), order_by="name"):
                schedule = known.get(row["name"])
                if schedule is not None:
                    leader = leaders.get(schedule.target)
                    about = {"scheduler": leader and leader.where, "fault": schedule.fault}
                    rows.append({"schema": schema.database, **row, "next_time": schedule.next_time, **about})
    return rows


def add_schedule(
    target: Any,
    *,
    every: Any = None,
    cron: str | None = None,
    timezone: str = "UTC",
    jobs: bool | None = None,
    cleanup: bool = False,
    name: str | None = None,
) -> str:
    """Have the jobs of some tables scheduled, or cleaned up, from time to time.

    The schedule is kept in every schema that the tables are in. `djjobs scheduler`, or a worker with
    ``--with-scheduler``, fires it.

    Parameters
    ----------
    target : str, module or class
        The tables: `module` or `module:Table`, or the module or the class itself.
    every : float or timedelta
        Due every so many seconds, for the first time after as many.
    cron : str
        Or due by a cron line of five fields, as in ``"0 3 * * *"``.
    timezone : str
        The time zone that the cron line is about, as in ``"Europe/Berlin"``. Defaults to "UTC".
    jobs : bool
        Schedule jobs. Defaults to True, or to False if `cleanup` is given.
    cleanup : bool
        Remove jobs that nothing needs any more. Defaults to False.
    name : str
        How to call the schedule. Defaults to the target and what is done.

    Returns
    -------
    str
        The name.
    """
    rule = Rule.of(every, cron, timezone)
    text = _text_of(target)
    jobs = not cleanup if jobs is None else jobs
    if not (jobs or cleanup):
        raise DjJobsError(f"The schedule for {text} would do nothing: leave out jobs=False, or say cleanup=True.")
    what = "both" if jobs and cleanup else "cleanup" if cleanup else "jobs"
    name = _checked_name(f"{text}-{what}" if name is None else name)
    for thing, words in (("target", text), ("cron line", rule.cron)):
        if len(words) > _LONGEST_TEXT:
            raise DjJobsError(f"The {thing} of a schedule may have {_LONGEST_TEXT} characters, not {len(words)}.")
    tables: list[Any] = tables_of([text])
    places = {(id(table.connection), table.database): (table.connection, table.database) for table in tables}
    _insist_on_no_transaction(tables[0].connection)
    with explained(tables[0].connection, text, "add a schedule for"):
        timetables = [Timetable.of(*place) for place in places.values()]
        _add(timetables, Schedule(name, text, what, rule, True, rule.first(timetables[0].now())))
    return name


def _add(timetables: list[Timetable], schedule: Schedule) -> None:
    """Enter it in all schemas or in none."""
    added: list[Timetable] = []
    try:
        for timetable in timetables:
            if not timetable.add(schedule):
                raise DjJobsError(
                    f"There is a schedule {schedule.name!r} in {timetable.database} already. Nothing was changed. "
                    "Remove it first, or give this one another name."
                )
            added.append(timetable)
    except BaseException:
        for timetable in added:
            timetable.remove(schedule.name)
        raise


def remove_schedule(pipeline: Any, name: str) -> list[str]:
    """Remove a schedule and its history. A firing that runs goes on to its end.

    Parameters
    ----------
    pipeline : dj.Schema, module, class or str
        Where it is: a schema or a module, or the name of either, or a target as in `add_schedule`.
    name : str
        The schedule's name.

    Returns
    -------
    list of str
        The schemas that it was removed from.
    """
    with _found(pipeline, name) as found:
        return [timetable.database for timetable, _ in found if timetable.remove(name)]


def pause_schedule(pipeline: Any, name: str) -> bool:
    """Let a schedule rest until it is resumed; whether it was awake. The arguments are those of `remove_schedule`."""
    with _found(pipeline, name) as found:
        return any([timetable.pause(name) for timetable, _ in found])


def resume_schedule(pipeline: Any, name: str) -> bool:
    """Let a schedule be due again, from now on; whether it was paused. What was due meanwhile is not made up."""
    with _found(pipeline, name) as found:
        _insist_on_no_fault(found)
        return any([timetable.resume(schedule) for timetable, schedule in found])


def run_schedule_now(pipeline: Any, name: str) -> list[FiringResult]:
    """Carry out a schedule at once, in this process, whether a scheduler runs or not.

    It is an extra firing: the next due time stays. If a firing of the schedule runs already, this one is skipped. The
    tables must be imported here already, or by naming their module: what a row names is not imported.

    Parameters
    ----------
    pipeline : dj.Schema, module, class or str
        Where it is, as in `remove_schedule`.
    name : str
        The schedule's name.

    Returns
    -------
    list of FiringResult
        One a schema.
    """
    results = []
    with _found(pipeline, name) as found:
        _insist_on_no_fault(found)
        tables = [_imported_tables(timetable, schedule) for timetable, schedule in found]
        for (timetable, schedule), its_tables in zip(found, tables, strict=True):
            firing, skipped = timetable.fire_by_hand(name)
            result = ("skipped", skipped) if skipped else carry_out_here(timetable, schedule, firing, its_tables)
            results.append(FiringResult(timetable.database, *result))
    return results


# -- which schedule, and where ---------------------------------------------------------------------------------


def _timetable_of(schema: Any) -> Timetable:
    if not getattr(schema, "database", None):
        raise DjJobsError(f"{schema!r} is not an activated schema. Pass the dj.Schema object of the pipeline.")
    with explained(schema.connection, f"`{schema.database}`.`~schedules`", "use"):
        return Timetable.of(schema.connection, schema.database)


@contextmanager
def _found(pipeline: Any, name: str) -> Iterator[list[tuple[Timetable, Schedule]]]:
    """The schedules of this name in the schemas of a pipeline, at least one."""
    schemas = schemas_of(pipeline)
    if any(not getattr(schema, "database", None) for schema in schemas):
        raise DjJobsError(f"{pipeline!r} is neither an activated dj.Schema, nor a module, nor the name of one.")
    _insist_on_no_transaction(schemas[0].connection)
    with explained(schemas[0].connection, f"the schedule {name!r}", "find"):
        declared = [Timetable.if_declared(schema.connection, schema.database) for schema in schemas]
        timetables = [timetable for timetable in declared if timetable is not None]
        found = [(timetable, schedule) for timetable in timetables if (schedule := timetable.find(name)) is not None]
        if not found:
            names = sorted({schedule.name for timetable in timetables for schedule in timetable.everything()})
            there = f"There are: {', '.join(names)}." if names else "There are none."
            where = ", ".join(schema.database for schema in schemas)
            raise DjJobsError(f"There is no schedule {name!r} in {where}. {there}")
        yield found


def _insist_on_no_fault(found: list[tuple[Timetable, Schedule]]) -> None:
    for timetable, schedule in found:
        if schedule.fault:
            raise DjJobsError(
                f"The row of the schedule {schedule.name!r} in {timetable.database} means nothing: {schedule.fault} "
                "Remove it and add it again."
            )


def _imported_tables(timetable: Timetable, schedule: Schedule) -> list[Any]:
    """The tables of a schedule. They are looked for in what this process has imported, and nothing is imported."""
    tables = loaded_tables(schedule.target, timetable.database)
    if not tables:
        raise DjJobsError(
            f"The schedule {schedule.name!r} in {timetable.database} is about {schedule.target}, which names no tables "
            f"with the mixin in this schema that are imported here. If you know this target, name it in the place of "
            f"{timetable.database}, or import it first. Nothing was run."
        )
    return upstream_first(tables)


def _insist_on_no_transaction(connection: Any) -> None:
    if connection.in_transaction:
        raise DjJobsError(
            "Schedules cannot be changed or run inside a transaction, which would be committed. "
            "End the transaction first, or call this outside its `with` block and outside make()."
        )


def _text_of(target: Any) -> str:
    """A target as a scheduler can import it, which is another process."""
    if isinstance(target, ModuleType):
        text = target.__name__
    elif isinstance(target, type):
        text = f"{target.__module__}:{target.__qualname__}"
    else:
        text = str(target).strip()
    if text.partition(":")[0] == "__main__":
        raise DjJobsError(
            f"{text} is defined in a script or a notebook, where no scheduler can import it from. "
            "Put it into a module, and name that."
        )
    return text


def _checked_name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise DjJobsError(
            f"A schedule's name must be one line of up to {_LONGEST_NAME} characters, not {name!r}. Give it a name."
        )
    return name.strip()
