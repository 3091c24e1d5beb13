"""Which tests run in which cell, and why. A cell is one DataJoint on one engine.

`make test` follows this table; `make test ALL=1` runs every test in every cell. The table in tests/README.md is this
one, and a test compares the two: `python3 tests/cell_table.py` prints it. A file that is missing here runs everywhere.
A single test may have a row of its own, after that of its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CELLS", "TABLE", "Row", "deselected", "files_of", "markdown", "seconds_of"]

TESTS = Path(__file__).resolve().parent
CELLS = ("dj2-postgresql", "dj2-mysql", "dj2-mariadb", "dj0-mysql", "dj0-mariadb")

EVERYWHERE = CELLS
#: Every engine with DataJoint 2, and DataJoint 0.14 once: the statements are ours, whichever DataJoint sends them.
ENGINES = ("dj2-postgresql", "dj2-mysql", "dj2-mariadb", "dj0-mysql")
#: Both dialects of SQL and both DataJoints; MariaDB has no statements of its own there.
DIALECTS = ("dj2-postgresql", "dj2-mysql", "dj0-mysql")
#: Both DataJoints and both drivers: psycopg2 and pymysql.
GENERATIONS = ("dj2-postgresql", "dj0-mysql")
FAMILIES = ("dj2-postgresql", "dj2-mysql")
SERVERS = ("dj2-postgresql", "dj2-mysql", "dj2-mariadb")
MYSQLS = ("dj2-mysql", "dj2-mariadb", "dj0-mysql", "dj0-mariadb")
ONCE = ("dj2-postgresql",)


@dataclass(frozen=True)
class Row:
    """Where a file or a test runs.

    Attributes
    ----------
    seconds : int
        About how long it takes in one cell, so that the longest begin first. It need not be exact.
    why : str
        What can differ between the cells; or why nothing can.
    """

    cells: tuple[str, ...]
    seconds: int
    why: str


TABLE = {
    "test_as_natively.py": Row(ENGINES, 13, "workers of both DataJoints beside ours"),
    "test_bad_input.py": Row(ENGINES, 8, "what a server refuses, and in which words"),
    "test_cancel.py": Row(DIALECTS, 30, "statements of requests; a driver may put off an interrupt"),
    "test_chaos.py": Row(FAMILIES, 35, "everything under faults, once for each dialect; others have the same queue"),
    "test_check.py": Row(EVERYWHERE, 2, "what a server tells of itself"),
    "test_claims.py": Row(ENGINES, 6, "the plan and the locks of a claim"),
    "test_cleanup.py": Row(ENGINES, 5, "the statements that move and remove jobs"),
    "test_cli.py": Row(GENERATIONS, 20, "what a command prints comes from DataJoint, not from the engine"),
    "test_concurrency.py": Row(ENGINES, 20, "locks under load"),
    "test_drop_in.py": Row(EVERYWHERE, 5, "the job tables of both DataJoints"),
    "test_events.py": Row(ENGINES, 25, "inserts and deletes of both DataJoints, in the engines' transactions"),
    "test_examples.py": Row(GENERATIONS, 25, "DataJoint's types; notebooks and examples have no SQL of their own"),
    "test_finds_work.py": Row(DIALECTS, 22, "when populate looks again; the statement itself is in test_schedule.py"),
    "test_jobs_view.py": Row(EVERYWHERE, 3, "queries on the columns of the queue, JSON among them"),
    "test_judging.py": Row(SERVERS, 85, "locks, read-only spells, stalls and clocks of the servers"),
    "test_keyed_jobs.py": Row(EVERYWHERE, 8, "JSON and types of keys, as each engine has them"),
    "test_keys.py": Row(EVERYWHERE, 12, "JSON and types of keys, as each engine has them"),
    "test_leases.py": Row(DIALECTS, 60, "statements of heartbeats and recovery; connections that are cut"),
    "test_leases.py::test_a_job_much_longer_than_the_lease_is_never_taken_from_a_live_worker": Row(
        GENERATIONS, 0, "processes and drivers"
    ),
    "test_migrate.py": Row(MYSQLS, 5, "DataJoint 0.14 has left its queue on these only"),
    "test_poison.py": Row(GENERATIONS, 35, "make() inside the transactions of both DataJoints; drivers beside forks"),
    "test_policy.py": Row(ONCE, 3, "nothing: a policy is checked before a server is asked"),
    "test_populate.py": Row(ENGINES, 22, "make() inside the transactions of both DataJoints"),
    "test_processes.py": Row(GENERATIONS, 17, "drivers beside processes and signals"),
    "test_queue_table.py": Row(EVERYWHERE, 7, "how the queue is declared"),
    "test_races_claims.py": Row(ENGINES, 8, "two connections at one statement: locks are the engine's own"),
    "test_races_leases.py": Row(ENGINES, 8, "two connections at one statement: locks are the engine's own"),
    "test_races_runs.py": Row(ENGINES, 8, "two connections at one statement: locks are the engine's own"),
    "test_races_schedules.py": Row(ENGINES, 8, "two connections at one statement: locks are the engine's own"),
    "test_races_scheduling.py": Row(ENGINES, 8, "two connections at one statement: locks are the engine's own"),
    "test_reconcile.py": Row(DIALECTS, 20, "the plan of the comparison; processes beside both drivers"),
    "test_refusals.py": Row(ENGINES, 15, "what a server refuses for a time, and its locks by name"),
    "test_retention.py": Row(ENGINES, 2, "the statements that remove old jobs"),
    "test_retries.py": Row(ENGINES, 20, "faults of the server: deadlocks, lock waits, lost connections"),
    "test_rules.py": Row(ENGINES, 14, "all the statements of the queue, in any order"),
    "test_run_hooks.py": Row(DIALECTS, 45, "the statements of marks; who dies is the same everywhere"),
    "test_runs.py": Row(ENGINES, 12, "the statements and plans of runs"),
    "test_safe_schedules.py": Row(FAMILIES, 35, "what columns can hold, and locks; who imports what is the same"),
    "test_safe_texts.py": Row(GENERATIONS, 15, "DataJoint's previews, and what a command prints"),
    "test_schedule.py": Row(EVERYWHERE, 20, "the one statement that schedules, for every kind of key_source"),
    "test_scheduler.py": Row(DIALECTS, 50, "who leads is decided by a statement"),
    "test_schedules.py": Row(ENGINES, 10, "the rows and statements of schedules"),
    "test_search_path.py": Row(ONCE, 10, "only PostgreSQL has a search_path"),
    "test_servers.py": Row(SERVERS, 12, "the servers that the tests start"),
    "test_signals.py": Row(GENERATIONS, 12, "drivers: psycopg2 puts signals off, pymysql does not"),
    "test_slots_end.py": Row(GENERATIONS, 40, "faults of the server while the end of a job is recorded"),
    "test_stalls.py": Row(GENERATIONS, 95, "drivers that wait for a server, and how each DataJoint connects again"),
    "test_switching.py": Row(EVERYWHERE, 10, "the job tables of both DataJoints"),
    "test_telemetry.py": Row(
        GENERATIONS, 12, "what is told of a job does not come from the server, but its waiting time"
    ),
    "test_timeouts.py": Row(GENERATIONS, 45, "drivers: how a statement is interrupted"),
    "test_worker.py": Row(GENERATIONS, 75, "drivers beside processes and signals; PostgreSQL wakes workers up"),
    "test_worker.py::test_an_idle_worker_asks_at_most_once_a_second_then_less_on_few_connections": Row(
        ONCE, 0, "nothing: when to ask is decided in Python"
    ),
    "test_worker.py::test_a_worker_that_waits_for_a_retry_asks_no_more_often_than_an_idle_one": Row(
        ONCE, 0, "nothing: when to ask is decided in Python"
    ),
}


def files_of(cell: str, everything: bool = False) -> list[str]:
    """The files of a cell, those that take longest first."""
    present = sorted(path.name for path in TESTS.glob("test_*.py"))
    chosen = [name for name in present if everything or name not in TABLE or cell in TABLE[name].cells]
    return sorted(chosen, key=lambda name: -seconds_of(name))


def deselected(cell: str) -> list[str]:
    """The single tests of this cell's files that run in other cells only."""
    return [name for name, row in TABLE.items() if "::" in name and cell not in row.cells]


def seconds_of(name: str) -> int:
    return TABLE[name].seconds if name in TABLE else 10


def markdown() -> str:
    """The table as tests/README.md shows it."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"| tests | {' | '.join(CELLS)} | what can differ |"
    yield f"|---|{':-:|' * len(CELLS)}---|"
    for name, row in TABLE.items():
        marks = (" x " if cell in row.cells else "   " for cell in CELLS)
        yield f"| {name.replace('::', ' ')} |{'|'.join(marks)}| {row.why} |"


if __name__ == "__main__":
    print(markdown())
