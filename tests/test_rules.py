"""Whatever is done to a queue, in whatever order, its jobs and results are what a simple model says.

Hypothesis chooses the steps; each is taken on the real queue and in the model, and then everything is compared.
A failure prints the sequence of steps, and a decorator for `class Rules` that repeats it.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import datajoint as dj
import pytest
from datajoint.errors import IntegrityError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pipelines import INT, computed, manual
from workloads.squares import another_connection

import djjobs
from djjobs import DjJobsError, JobNotCancellable, JobTimeout, LeaseLost
from djjobs.interrupt import Stop
from djjobs.queue import claim as claiming
from djjobs.queue import judge
from djjobs.queue.cancel import cancel
from djjobs.queue.claim import ORDERS, Claims, Job
from djjobs.queue.database import Database
from djjobs.queue.finish import Failure, release_slot
from djjobs.queue.identity import Claimant
from djjobs.queue.keys import Keys
from djjobs.queue.leases import Registration, recover_once
from djjobs.queue.queue import Queue
from djjobs.queue.table_queue import TableQueue
from djjobs.work.current_job import SlotState
from djjobs.work.execute import Executor
from djjobs.work.messages import Request
from djjobs.work.outcome import Outcome
from djjobs.work.shared_memory import SharedMemory

#: An example is a sequence of steps. More of them: DJJOBS_EXAMPLES=1000
EXAMPLES = int(os.environ.get("DJJOBS_EXAMPLES", 25))
LENGTH = 40
#: To look for the shortest sequence that fails takes minutes: DJJOBS_SHRINK=1
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("DJJOBS_SHRINK") else [])]

NUMBERS = range(1, 4)
WORKERS = tuple(f"00000000-0000-0000-0000-00000000000{number}" for number in range(2))
PRIORITIES = (3, 5, 7)
#: A retry's turn is its priority less this.
AHEAD = 1000
#: What a registered worker's lease is. No step takes so long; it passes only when a step says so.
LEASE = 1000
#: The lease of whoever recovers jobs: counts for claims of workers that are not registered.
SHORT_LEASE = 60
MAX_CRASHES = 2
OVER = ("success", "error", "ignore")


class Flaky(Exception):
    """An error that the policy tries again."""


class Broken(Exception):
    """An error that stays."""


#: What the policy tries again.
RETRIED = (Flaky, JobTimeout)


# -- the model -----------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A job as the model knows it."""

    status: str
    priority: int
    turn: int | None  # none while it waits for its time
    due: bool = True
    attempt: int = 0
    kinds: list[str] = field(default_factory=list)  # how each attempt ended
    owner: tuple[str, int] | None = None
    request: str = ""
    progress: Any = None

    def end(self, status: str) -> None:
        self.status, self.owner, self.request, self.progress = status, None, "", None

    def put_back(self, due: bool = True) -> None:
        self.end("scheduled")
        self.attempt, self.due, self.turn = 0, due, self.priority if due else None


@dataclass
class Model:
    """The queue of one table, its upstream and its results, as they ought to be."""

    source: set[int]
    keep: bool
    max_attempts: int | None
    backoff: float
    rows: dict[int, Row] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)  # who made it
    workers: dict[str, str] = field(default_factory=dict)  # the state of each that is registered
    late: set[str] = field(default_factory=set)  # those who have not been heard for their lease

    def chosen(self, n: int | None, *statuses: str) -> list[Row]:
        """The jobs of some statuses that a restriction to a number, or none, chooses."""
        among = [row for number, row in self.rows.items() if number in self.source and n in (None, number)]
        return [row for row in among if row.status in statuses]

    def new(self, n: int | None) -> list[int]:
        return [number for number in self.source - self.made.keys() - self.rows.keys() if n in (None, number)]

    def owned(self, job: Job) -> Row | None:
        """The job with this token, if it is still its owner's."""
        row = self.rows.get(job.key["n"])
        return row if row and row.owner == (job.worker_id, job.claim) else None

    # -- what is done to chosen jobs -----------------------------------------------------------------------

    def schedule(self, n: int | None, force: bool, priority: int, due: bool) -> int:
        old = self.chosen(n, "error", "ignore", "cancelled") if force else []
        for row in old:
            row.put_back(due)
        new = self.new(n)
        self.rows.update({number: Row("scheduled", priority, priority if due else None, due) for number in new})
        return len(old) + len(new)

    def retry(self, n: int | None) -> int:
        rows = self.chosen(n, "error", "cancelled")
        for row in rows:
            row.put_back()
        return len(rows)

    def ignore(self, n: int | None) -> int:
        rows, new = self.chosen(n, "scheduled", "error", "cancelled"), self.new(n)
        for row in rows:
            row.end("ignore")
        self.rows.update({number: Row("ignore", 5, 5) for number in new})
        return len(rows) + len(new)

    def cancel(self, n: int | None, how: str) -> int | None:
        """How many were cancelled or asked; None if that is an error."""
        running, waiting = self.chosen(n, "reserved"), self.chosen(n, "scheduled")
        for row in running:
            row.request = "force" if row.request == "force" else how
        for row in waiting:
            row.end("cancelled")
        if running or waiting or self.chosen(n, "cancelled"):
            return len(running) + len(waiting)
        return None if self.chosen(n, *OVER) or (n in self.source and n in self.made) else 0

    def cleanup(self, n: int | None) -> dict[str, int]:
        recovered = self.recover(n)
        among = {number: row for number, row in self.rows.items() if n in (None, number)}
        unmade = [k for k, row in among.items() if row.status == "success" and k not in self.made]
        sourceless = [
            k for k, row in among.items() if row.status not in ("success", "reserved") and k not in self.source
        ]
        for number in unmade + sourceless:
            del self.rows[number]
        counts = {"orphaned_success": len(unmade), "orphaned_incomplete": len(sourceless)}
        return {**counts, "recovered": recovered, "expired": 0, "runs": 0}

    # -- what workers do ------------------------------------------------------------------------------------

    def line_up(self) -> None:
        for row in self.rows.values():
            if row.status == "scheduled" and row.turn is None and row.due:
                row.turn = row.priority - (AHEAD if row.attempt else 0)

    def is_dead(self, row: Row) -> bool:
        return row.owner is not None and row.owner[0] in self.late

    def recover(self, n: int | None = None) -> int:
        dead = [number for number, row in self.rows.items() if n in (None, number) and self.is_dead(row)]
        # Who holds nothing matters to nobody who looks only once.
        holders = {row.owner[0] for row in self.rows.values() if row.owner}
        self.workers.update(dict.fromkeys(self.late & holders & self.workers.keys(), "dead"))
        for number in dead:
            self.crash(number)
        return len(dead)

    def crash(self, n: int) -> str:
        """The worker died over it; what the job is now."""
        row = self.rows[n]
        if n in self.made and not row.request:
            self.complete(n)
            return "success"
        crashes = [*row.kinds, "crash"][-(row.attempt + 1) :].count("crash")
        used_up, most = (crashes, MAX_CRASHES) if self.max_attempts is None else (row.attempt + 1, self.max_attempts)
        return self.fail(row, "crash", 0 if used_up < most else None)

    def wait_after(self, row: Row, error: type[Exception]) -> float | None:
        again = error in RETRIED and row.attempt + 1 < (self.max_attempts or 1)
        return self.backoff if again else None

    def fail(self, row: Row, kind: str, wait: float | None) -> str:
        """An attempt ended; what the job is now."""
        if row.request:
            row.end("cancelled")
            return row.status
        row.attempt += 1
        row.kinds = [*row.kinds, kind][-10:]
        row.end("error" if wait is None else "scheduled")
        if wait is not None:
            row.turn, row.due = (None, False) if wait else (row.priority - AHEAD, True)
        return row.status

    def complete(self, n: int) -> None:
        if self.keep:
            self.rows[n].end("success")
        else:
            del self.rows[n]

    def finish(self, job: Job, error: type[Exception] | None) -> tuple[str, float | None]:
        """make() was called and ended; what the worker is told, and how long it is until the next try."""
        n, row = job.key["n"], self.owned(job)
        if row is None:
            return "lost", None
        if n not in self.source:
            error = IntegrityError
        if row.request or error:
            wait = self.wait_after(row, error) if error else None
            called_off = self.fail(row, "error", wait) == "cancelled"
            return ("cancelled", None) if called_off else ("failed", wait)
        self.made[n] = maker(job)
        self.complete(n)
        return "made", None

    def find_made(self, job: Job) -> str:
        """The worker finds the key in the target, so that make() is not called."""
        row = self.owned(job)
        if row is None:
            return "lost"
        if row.request:
            row.end("cancelled")
            return "cancelled"
        self.complete(job.key["n"])
        return "done"

    def give_back(self, job: Job) -> int:
        row = self.owned(job)
        if row is None:
            return 0
        row.end("cancelled" if row.request else "scheduled")
        return 1


def maker(job: Job) -> str:
    return f"{job.worker_id} {job.claim}"


# -- the real thing ----------------------------------------------------------------------------------------------


@dataclass
class Script:
    """What the next make() does, and what it did."""

    maker: str = ""
    error: type[Exception] | None = None
    meanwhile: Callable[[], None] = lambda: None
    was_called: bool = False
    surprise: BaseException | None = None
    cleaned: list[int] = field(default_factory=list)


class World:
    """A schema with a table whose jobs are worked off, and one whose jobs are nobody's business."""

    def __init__(self, schema: Any) -> None:
        self.script = script = Script()

        def make(table: Any, key: dict[str, Any]) -> None:
            script.was_called = True
            try:
                table.insert1({**key, "maker": script.maker})
            finally:
                try:
                    script.meanwhile()
                except BaseException as error:
                    script.surprise = error
            if script.error is not None:
                raise script.error("said make()")

        def on_cancel(table: Any, key: dict[str, Any]) -> None:
            script.cleaned.append(key["n"])

        self.Number = manual(schema, f"n : {INT}", "Number")
        self.Other = manual(schema, f"n : {INT}", "Other")
        definition = "-> Number\n---\nmaker : varchar(64)"
        members = {"make": make, "on_cancel": on_cancel, "retry_on": RETRIED}
        # DataJoint's own key_source asks the server about the upstream table each time.
        members["key_source"] = self.Number()
        self.Square = computed(schema, definition, {"Number": self.Number}, "Square", **members)
        self.Cube = computed(schema, "-> Other", {"Other": self.Other}, "Cube")
        self.queue = Queue.of(schema.connection, schema.database)
        self._second_connection = another_connection()
        #: For what others do while make() is in the middle of its transaction.
        self.elsewhere = self.queue.on(Database(self._second_connection))
        self._set_up_bystanders()

    def close(self) -> None:
        self._second_connection.close()

    def sql(self, statement: str, queue: Queue | None = None, **parameters: Any) -> Any:
        queue = queue or self.queue
        times = {
            "back": queue.engine.dialect.seconds(str(2 * LEASE)),
        }
        tables = {"square": self.Square().full_table_name}
        return queue.db.execute(queue.sql(statement, **times, **tables), **parameters)

    def _set_up_bystanders(self) -> None:
        """Jobs of every kind, for the same keys and thus with the same hashes, held by the same workers."""
        self.Other.insert([{"n": n} for n in NUMBERS])
        self.Cube.schedule_jobs(min_scheduling_interval=0)
        claimed = f"status = 'reserved', worker_id = '{WORKERS[0]}', claim = 1, timestamp = {{now}} - {{back}}"
        kinds = {
            "reserved": claimed,
            "called_off": f"{claimed}, cancel_request = 'cancel'",
            "error": "status = 'error', error_message = 'of old', attempt = 1",
            "success": "status = 'success'",
            "waiting": "turn = NULL, attempt = 1, due_time = {now} - {back}",
            "ignore": "status = 'ignore'",
            "cancelled": "status = 'cancelled'",
        }
        columns = "key_hash, status, {key}, priority, turn, due_time, timestamp"
        for kind, changes in kinds.items():
            names = {"table": kind, "cube": self.Cube.table_name}
            select = f"SELECT %(table)s, {columns} FROM {{jobs}} WHERE table_name = %(cube)s"
            self.sql(f"INSERT INTO {{jobs}} (table_name, {columns}) {select}", **names)
            self.sql(f"UPDATE {{jobs}} SET {changes} WHERE table_name = %(table)s", **names)
        self.bystanders = self.look()[1]

    def start_over(self, source: set[int]) -> None:
        self.queue.db.roll_back()
        self.Square().delete_quick()
        self.sql("DELETE FROM {jobs} WHERE table_name = %(table)s", table=self.Square.table_name)
        self.sql("DELETE FROM {workers}")
        self.sql("DELETE FROM {sightings}")
        self.Number().delete_quick()
        self.Number.insert([{"n": n} for n in sorted(source)])

    def look(self) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
        """What there is to know of the table's jobs, and the whole rows of the others."""
        own, others = [], []
        cursor = self.sql("SELECT due_time <= {now} AS due, job.* FROM {jobs} AS job ORDER BY table_name, key_hash")
        names = [column[0] for column in cursor.description]
        for values in cursor.fetchall():
            row = dict(zip(names, values, strict=True))
            if row["table_name"] != self.Square.table_name:
                others.append(values)
                continue
            for name in ("key", "attempts", "progress"):
                row[name] = json.loads(row[name]) if isinstance(row[name], str) else row[name]
            own.append(row)
        return own, others

    def results(self) -> dict[int, str]:
        """Who made what."""
        return dict(self.sql("SELECT n, maker FROM {square}").fetchall())

    def workers(self) -> dict[str, str]:
        """The state of each."""
        return dict(self.sql("SELECT worker_id, state FROM {workers}").fetchall())

    def age(self, row_hash: str, column: str, queue: Queue | None = None, to: str = "{now} - {back}") -> None:
        where = "table_name = %(table)s AND key_hash = %(hash)s"
        table = self.Square.table_name
        self.sql(f"UPDATE {{jobs}} SET {column} = {to} WHERE {where}", queue, table=table, hash=row_hash)


@contextmanager
def lease(seconds: float) -> Iterator[None]:
    before = djjobs.settings.lease
    djjobs.settings.lease = seconds
    try:
        yield
    finally:
        djjobs.settings.lease = before


@pytest.fixture(scope="module")
def world(server: Any) -> Iterator[World]:
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    world = World(schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(djjobs.settings, "max_crashes", MAX_CRASHES)
        # Who seems to be dead has so long to be heard.
        patch.setattr(djjobs.settings, "heartbeat_interval", 0.01)
        yield world
    world.close()
    world.queue.db.roll_back()
    schema.drop()


# -- the steps -------------------------------------------------------------------------------------------------

ONE = st.sampled_from(NUMBERS)
ONE_OR_ALL = st.none() | ONE
WORKER = st.sampled_from(WORKERS)
TOKEN = st.integers(0, 3)
MOSTLY = st.sampled_from([True, True, True, False])
PRIORITY = st.sampled_from(PRIORITIES)
#: The steps by name: how often each is taken, and what its arguments can be.
STEPS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {}


def step(often: int, **arguments: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """A method is a step.

    As rules of their own, Hypothesis would leave half of them out of each example; but what matters takes many:
    a job is scheduled, claimed, lost, claimed again, and then its first owner comes back.
    """

    def enter(method: Any) -> Any:
        STEPS[method.__name__] = often, arguments
        return method

    return enter


class Step:
    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name, self.arguments = name, arguments

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@st.composite
def steps(draw: Callable[[Any], Any]) -> Step:
    names = [name for name, (often, _) in STEPS.items() for _ in range(often)]
    name = draw(st.sampled_from(names))
    return Step(name, {argument: draw(strategy) for argument, strategy in STEPS[name][1].items()})


def restrictions(n: int | None) -> tuple[Any, ...]:
    return () if n is None else ({"n": n},)


def told(outcome: Outcome) -> str:
    if outcome.made or outcome.cancelled:
        return "made" if outcome.made else "cancelled"
    if outcome.error is None:
        return "done"
    return "lost" if isinstance(outcome.error, LeaseLost) else "failed"


class Rules(RuleBasedStateMachine):
    """Each rule takes one step on both sides and compares what it returned."""

    world: World

    @initialize(
        source=st.sets(ONE, min_size=2),
        max_attempts=st.sampled_from([None, 1, 2, 3, 3]),
        backoff=st.sampled_from([0, LEASE]),
        keep=st.booleans(),
    )
    def begin(self, source: set[int], max_attempts: int | None, backoff: float, keep: bool) -> None:
        world = self.world
        self.Square = world.Square
        for name, value in (("max_attempts", max_attempts), ("backoff", backoff), ("keep_completed", keep)):
            setattr(self.Square, name, value)
        world.start_over(source)
        self.model = Model(source, keep, max_attempts, backoff)
        self.claimants = {worker: Claimant(worker) for worker in WORKERS}
        self.registrations: dict[str, Registration] = {}
        self.called: set[str] = set()
        #: Every job that was claimed, by whom it was claimed; most of them are no longer their owner's.
        self.tokens: list[Job] = []
        self.jobs = TableQueue(self.Square(), world.queue, self._keys())
        self.finisher = self.jobs.finisher
        self._seen: dict[int, dict[str, Any]] = {}
        self._begin_again()

    def _keys(self, *restrictions: Any) -> Keys:
        return Keys(self.Square(), restrictions, self.world.queue.engine)

    def _token(self, which: int, owned: bool) -> Job:
        """One of the tokens, of those that are still their owner's or of all."""
        if owned and not self._owned():
            self._begin_again()
        tokens = (self._owned() if owned else []) or self.tokens
        return tokens[-1 - which % len(tokens)]

    def _owned(self) -> list[Job]:
        return [job for job in self.tokens if self.model.owned(job)]

    def _begin_again(self) -> None:
        """Sooner or later all jobs are done or called off. Let them be claimed again."""
        if not any(row.status == "scheduled" for row in self.model.rows.values()):
            for n in NUMBERS:
                self.change_tables(n, "delete result")
            self.change_jobs(None, "clean up")
            self.schedule(None, True, 5, True)
        self.all_is_as_in_the_model()
        self.claim(WORKERS[len(self.tokens) % 2], len(self.tokens) % 3 == 0, 2, "original", None, None, 0)
        self.all_is_as_in_the_model()

    @rule(step=steps())
    def take(self, step: Step) -> None:
        getattr(self, step.name)(**step.arguments)

    # -- somebody at a notebook ----------------------------------------------------------------------------

    @step(3, n=ONE_OR_ALL, force=st.booleans(), priority=PRIORITY, due=MOSTLY)
    def schedule(self, n: int | None, force: bool, priority: int, due: bool) -> None:
        options = {"force": force, "priority": priority, "due_time": None if due else datetime.timedelta(hours=1)}
        run = self.Square.schedule_jobs(*restrictions(n), min_scheduling_interval=0, **options)
        assert int(run) == self.model.schedule(n, force, priority, due)

    @step(4, n=ONE_OR_ALL, what=st.sampled_from(["cancel", "cancel by force", "retry", "retry", "ignore", "clean up"]))
    def change_jobs(self, n: int | None, what: str) -> None:
        model = self.model
        if what == "clean up":
            with lease(SHORT_LEASE):
                assert self.Square.cleanup_jobs(*restrictions(n)) == model.cleanup(n)
        elif n is not None and n not in model.source:
            method = {"retry": self.Square.retry_jobs, "ignore": self.Square.ignore_jobs}.get(what)
            with pytest.raises(DjJobsError, match="not in the key_source"):
                (method or self.Square.cancel_jobs)({"n": n})
        elif what == "retry":
            assert self.Square.retry_jobs(*restrictions(n)) == model.retry(n)
        elif what == "ignore":
            assert self.Square.ignore_jobs(*restrictions(n) or (True,)) == model.ignore(n)
        else:
            force = what == "cancel by force"
            self._cancel(n, force, lambda: self.Square.cancel_jobs(*restrictions(n), force=force))

    def _cancel(self, n: int | None, force: bool, action: Callable[[], int]) -> None:
        holders = {row.owner[0] for row in self.model.chosen(n, "reserved") if row.owner and not row.request}
        self.called |= holders & self.model.workers.keys()
        expected = self.model.cancel(n, "force" if force else "cancel")
        if expected is None:
            with pytest.raises(JobNotCancellable):
                action()
        else:
            assert action() == expected

    @step(3, n=ONE, what=st.sampled_from(["delete result", "insert upstream", "delete upstream", "make by hand"]))
    def change_tables(self, n: int, what: str) -> None:
        model = self.model
        if what == "make by hand" and n in model.source and n not in model.made:
            self.Square.insert1({"n": n, "maker": "by hand"}, allow_direct_insert=True)
            model.made[n] = "by hand"
        if what in ("delete result", "delete upstream"):
            # As DataJoint deletes: what was made of an upstream row goes first.
            (self.Square & {"n": n}).delete_quick()
            model.made.pop(n, None)
        if what == "delete upstream":
            (self.world.Number & {"n": n}).delete_quick()
            model.source.discard(n)
        if what == "insert upstream":
            self.world.Number.insert1({"n": n}, skip_duplicates=True)
            model.source.add(n)

    # -- time ------------------------------------------------------------------------------------------------

    @step(
        3,
        worker=WORKER,
        what=st.sampled_from(["due times", "due times", "some time", "a lease", "a lease"]),
        then_recover=st.booleans(),
    )
    def let_time_pass(self, worker: str, what: str, then_recover: bool) -> None:
        """Jobs become due, or a worker is not heard of for a while or for its lease."""
        queue, model = self.world.queue, self.model
        if what == "due times":
            for n, row in model.rows.items():
                if row.status == "scheduled" and row.turn is None:
                    self.world.age(self._seen[n]["key_hash"], "due_time")
                    row.due = True
        if what == "some time" and worker in model.workers and worker not in model.late:
            # Longer than the lease of whoever recovers jobs, but not than the worker's own.
            self._see(worker, LEASE // 2, queue)
        if what == "a lease":
            self._let_lease_end(worker, queue)
        if then_recover:
            assert self._recover(queue) == model.recover()

    def _let_lease_end(self, worker: str, queue: Queue) -> None:
        self._see(worker, 2 * LEASE, queue)
        self.model.late.add(worker)

    def _see(self, worker: str, seconds: float, queue: Queue) -> None:
        """Somebody saw so long ago that a worker had sent the heartbeat that it has sent last."""
        signs, sightings = judge._signs(queue, [self.Square.table_name]), judge.Sightings(queue)
        seen = sightings.load()
        seen[worker] = signs[worker].heartbeat if worker in signs else "", time.monotonic() - seconds
        sightings.save(seen, signs)

    # -- workers and their leases -------------------------------------------------------------------------------

    @step(2, worker=WORKER, what=st.sampled_from(["beat", "beat", "listen", "leave"]))
    def go_on(self, worker: str, what: str) -> None:
        """A worker shows that it is alive, hears of requests to its jobs, or goes, and may leave claims behind."""
        registration = self.registrations.get(worker)
        if what == "beat":
            if registration is None:
                tables = [self.Square.table_name]
                registration = self.registrations[worker] = Registration(self.world.queue, worker, tables, slots=1)
            with lease(LEASE):
                registration.beat()
            self._see(worker, 0, self.world.queue)
            self.model.workers[worker] = "working"
            self.model.late.discard(worker)
        elif registration is not None and what == "listen":
            is_called = registration.is_called()
            assert is_called or worker not in self.called
            self.called.discard(worker)
            assert self._requests(worker) == self._expected_requests(worker)
        elif registration is not None:
            registration.leave()
            for known in (self.registrations, self.model.workers):
                del known[worker]
            self.model.late.discard(worker)
            self.called.discard(worker)

    def _recover(self, queue: Queue) -> int:
        with lease(SHORT_LEASE):
            return recover_once(queue, {self.Square.table_name: self.finisher.on(queue)})

    def _requests(self, worker: str) -> set[tuple[str, int, str]]:
        registration = Registration(self.world.queue, worker, [self.Square.table_name], slots=1)
        return {tuple(request) for request in registration.requests()}

    def _expected_requests(self, worker: str) -> set[tuple[str, int, str]]:
        rows = [(n, row, row.owner) for n, row in self.model.rows.items() if row.request]
        return {(self._seen[n]["key_hash"], own[1], row.request) for n, row, own in rows if own and own[0] == worker}

    # -- jobs ----------------------------------------------------------------------------------------------------

    @step(
        5,
        worker=WORKER,
        registers=st.booleans(),
        count=st.integers(1, 4),
        order=st.sampled_from(ORDERS),
        at_most=st.none() | ONE,
        priority=st.none() | PRIORITY,
        start=st.integers(0, 2**128 - 1),
    )
    def claim(
        self,
        worker: str,
        registers: bool,
        count: int,
        order: str,
        at_most: int | None,
        priority: int | None,
        start: int,
    ) -> None:
        if registers:
            self.go_on(worker, "beat")
        keys = self._keys() if at_most is None else self._keys(f"n <= {at_most}")
        self.model.line_up()
        fitting = {
            n: row
            for n, row in self.model.rows.items()
            if row.status == "scheduled"
            and row.turn is not None
            and (at_most is None or (n <= at_most and n in self.model.source))
            and (priority is None or row.priority <= priority)
        }
        with pytest.MonkeyPatch.context() as patch:
            # The random place is drawn too, so that a failure can be repeated.
            patch.setattr(claiming, "secrets", SimpleNamespace(token_hex=lambda _: f"{start:032x}"))
            jobs = Claims(self.world.queue, keys, order, priority, self.claimants[worker]).take(count)
        assert len(jobs) == min(count, len(fitting))
        assert len({job.key["n"] for job in jobs}) == len(jobs)

        def place(n: int) -> tuple[Any, ...]:
            seen, turn = self._seen[n], fitting[n].turn
            due, before = seen["due_time"].timestamp(), seen["key_hash"] < f"{start:032x}"
            if order == "random":
                # From the random place on; what is before it is rare enough to go in order, unless it was looked up.
                return turn, before, due if before and at_most is None else seen["key_hash"]
            return turn, -due if order == "reverse" else due

        places = [place(job.key["n"]) for job in jobs]
        assert places == sorted(places)
        left = [place(n) for n in fitting.keys() - {job.key["n"] for job in jobs}]
        assert not left or not places or max(places) <= min(left)
        self._take_over(jobs, worker)

    def _take_over(self, jobs: list[Job], worker: str) -> None:
        # The numbers of a worker's claims only grow.
        last = max((job.claim for job in self.tokens if job.worker_id == worker), default=0)
        for job in jobs:
            row = self.model.rows[job.key["n"]]
            assert (job.worker_id, job.attempt, job.priority) == (worker, row.attempt, row.priority)
            assert job.claim > last
            row.status, row.owner = "reserved", (worker, job.claim)
            self.tokens.append(job)

    @step(
        6,
        which=TOKEN,
        owned=MOSTLY,
        error=st.sampled_from([None, None, Flaky, Flaky, Broken]),
        listens=st.booleans(),
        meanwhile=st.sampled_from(["nothing", "nothing", "nothing", "cancel", "recover", "take over"]),
        other=WORKER,
    )
    def run(
        self, which: int, owned: bool, error: type[Exception] | None, listens: bool, meanwhile: str, other: str
    ) -> None:
        """A worker makes a job, be it still its own or not, and others do something meanwhile."""
        job, script, model = self._token(which, owned), self.world.script, self.model
        n = job.key["n"]
        script.maker, script.error, script.was_called, script.surprise = maker(job), error, False, None
        script.meanwhile = lambda: self._meanwhile(meanwhile, job, other)
        script.cleaned.clear()
        called_off = (job.key_hash, job.claim) in {request[:2] for request in self._expected_requests(job.worker_id)}
        was_made, stop = n in model.made, Stop()
        state = SlotState(SharedMemory(), stop)
        if listens:
            for key_hash, claim, how in self._requests(job.worker_id):
                state.ask(Request(how, key_hash, claim))
        # A copy: no worker runs the same job twice, and one who does would be right to take it for done.
        outcome = Executor(self.jobs, None, state).run(replace(job), stop)
        if script.surprise is not None:
            raise script.surprise
        if listens and called_off:
            model.rows[n].end("cancelled")
            expected: tuple[str, float | None] = "cancelled", None
        else:
            expected = (model.find_made(job), None) if was_made else model.finish(job, error)
        assert script.was_called == (not was_made and not (listens and called_off))
        assert (told(outcome), outcome.retry_in) == expected
        assert script.cleaned == ([n] if expected[0] == "cancelled" else [])

    def _meanwhile(self, what: str, job: Job, other: str) -> None:
        """On another connection, while make() has inserted its row and not committed it."""
        queue, n = self.world.elsewhere, job.key["n"]
        if what == "cancel" and n in self.model.source:
            self._cancel(n, False, lambda: cancel(queue, self._keys({"n": n})))
        if what in ("recover", "take over"):
            self._let_lease_end(job.worker_id, queue)
            assert self._recover(queue) == self.model.recover()
        if what == "take over" and n in self.model.source:
            self.model.line_up()
            row = self.model.rows.get(n)
            jobs = Claims(queue, self._keys({"n": n}), claimant=self.claimants[other]).take(1)
            assert bool(jobs) == (row is not None and row.status == "scheduled" and row.turn is not None)
            self._take_over(jobs, other)

    @step(
        5,
        which=TOKEN,
        owned=st.booleans(),
        what=st.sampled_from(["give back", "give back some", "give back the rest", "crash", "timeout", "progress"]),
    )
    def say(self, which: int, owned: bool, what: str) -> None:
        """What else a worker says of a job, be it still its own or not."""
        job, model, table_name = self._token(which, owned), self.model, self.Square.table_name
        row, tokens = model.owned(job), [token for token in self.tokens if token.worker_id == job.worker_id]
        if what == "crash":
            expected = model.crash(job.key["n"]) if row else None
            assert self.finisher.crashed(job, Failure("crash", "It died.")) == expected
        elif what == "timeout":
            expected = model.fail(row, "timeout", model.wait_after(row, JobTimeout)) if row else None
            assert self.finisher.killed(job, Failure("timeout", "It took too long.")) == expected
        elif what in ("give back", "give back some"):
            some = [job] if what == "give back" else tokens[: 1 + which]
            assert self.finisher.give_back(some) == sum(map(model.give_back, some))
        elif what == "give back the rest":
            # A slot has died over this job; the others that it had claimed were not begun.
            release_slot(self.world.queue, [table_name], job.worker_id, 0, job.key_hash)
            for token in tokens:
                if token.key_hash != job.key_hash:
                    model.give_back(token)
        else:
            registration = Registration(self.world.queue, job.worker_id, [table_name], slots=1)
            registration.save_progress(table_name, job.key_hash, job.claim, json.dumps({"done": which}))
            if row:
                row.progress = {"done": which}

    # -- after each step -------------------------------------------------------------------------------------------

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        (rows, others), model = self.world.look(), self.model
        assert len({row["key_hash"] for row in rows}) == len({row["key"]["n"] for row in rows}) == len(rows)
        self._seen = {row["key"]["n"]: row for row in rows}
        seen = {n: _as_seen(row) for n, row in self._seen.items()}
        assert seen == {n: _as_expected(row) for n, row in model.rows.items()}
        assert self.world.results() == model.made
        assert self.world.workers() == model.workers
        assert others == self.world.bystanders


def _as_seen(row: dict[str, Any]) -> dict[str, Any]:
    kinds = [attempt["kind"] for attempt in row["attempts"] or []]
    seen = {name: row[name] for name in ("status", "attempt", "priority", "progress")}
    seen |= {"kinds": kinds, "request": row["cancel_request"], "has_message": bool(row["error_message"])}
    if row["status"] == "reserved":
        seen["owner"] = row["worker_id"], row["claim"]
    if row["status"] == "scheduled":
        seen |= {"owner": row["worker_id"], "turn": row["turn"], "due": bool(row["due"])}
    return seen


def _as_expected(row: Row) -> dict[str, Any]:
    expected = {name: getattr(row, name) for name in ("status", "attempt", "priority", "progress", "kinds", "request")}
    expected["has_message"] = bool(row.kinds) and row.status != "success"
    if row.status == "reserved":
        expected["owner"] = row.owner
    if row.status == "scheduled":
        expected |= {"owner": None, "turn": row.turn, "due": row.due}
    return expected


def test_no_sequence_of_steps_breaks_the_rules(world: World) -> None:
    Rules.world = world
    run_state_machine_as_test(
        Rules,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=LENGTH,
            deadline=None,
            derandomize=False,
            print_blob=True,
            database=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
