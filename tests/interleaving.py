"""Two connections at one point: what another one does just before, or just after, a chosen statement of ours.

Everything here is real: the statements go to the server, over connections of their own. What is chosen is only the
moment, so that a race always comes out the same way.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datajoint as dj
from helpers import wait_for
from workloads.lives import cut, is_postgresql, own_number
from workloads.squares import another_connection, rows_by_number, squares

from djjobs.queue.claim import Claims
from djjobs.queue.enqueue import insert_new
from djjobs.queue.finish import Finisher, release_slot
from djjobs.queue.identity import Claimant
from djjobs.queue.judge import find_dead_at_once
from djjobs.queue.keys import Keys
from djjobs.queue.leases import Registration, recover
from djjobs.queue.queue import Queue

# -- the ways into djjobs that these tests take, so that a change of them is a change here --------------------------


def connection_of(whose: Any) -> Any:
    """The connection of a table; a connection itself is its own."""
    return whose().connection if isinstance(whose, type) else whose


def queue_of(table: Any) -> Queue:
    return Queue.of(table().connection, table.database)


def claims_of(table: Any, *restrictions: Any, claimant: Claimant | None = None, order: str = "original") -> Claims:
    """What a worker of this id would claim of a table."""
    queue = queue_of(table)
    return Claims(queue, Keys(table(), restrictions, queue.engine), order, claimant=claimant)


def finisher_of(table: Any) -> Finisher:
    """What ends the jobs of a table."""
    queue = queue_of(table)
    return Finisher(queue, Keys(table(), (), queue.engine), bool(table.keep_completed))


def registration_of(table: Any, worker_id: str) -> Registration:
    """A worker on this table, as `~workers` knows it."""
    return Registration(queue_of(table), worker_id, [table.table_name], 1)


def give_back_slot(table: Any, worker_id: str, slot: int = 0) -> int:
    """Give back what a slot of a worker has claimed of a table, and the runs that it was finishing; how many jobs."""
    return release_slot(queue_of(table), [table.table_name], worker_id, slot)


def recover_all(table: Any, between: Callable[[], None]) -> int:
    """Put back the jobs of dead workers, with a pause after each; how many."""
    queue = queue_of(table)
    dead = find_dead_at_once(queue, [table.table_name])
    return recover(queue, {table.table_name: finisher_of(table)}, dead, between)


def schedule_automatically(table: Any, *restrictions: Any) -> int:
    """Put keys into the queue as an event does; how many."""
    queue = queue_of(table)
    return insert_new(queue, Keys(table(), restrictions, queue.engine), "scheduled", 5, automatic=True)


# -- moments --------------------------------------------------------------------------------------------------------


@contextmanager
def just(when: str, whose: Any, statement: str, act: Callable[[], Any], times: int = 1) -> Iterator[list[str]]:
    """Do something just before or after a statement of a connection; a test in which it never comes fails.

    Parameters
    ----------
    when : str
        "before" or "after".
    whose
        The connection, or a table that is on it.
    statement : str
        A pattern of its SQL, in which every space is a single one.
    act : callable
        What another one does. If it raises, that is what comes of the statement.
    times : int
        How often, if the statement comes again. Defaults to 1.

    Yields
    ------
    list of str
        The statements that it was done at.
    """
    seen: list[str] = []

    def interleaved(query: Any, sql: str, *arguments: Any, **options: Any) -> Any:
        text = " ".join(sql.split())
        is_now = len(seen) < times and re.search(statement, text)
        if is_now:
            seen.append(text)
        if is_now and when == "before":
            act()
        answer = query(sql, *arguments, **options)
        if is_now and when == "after":
            act()
        return answer

    with _in_between(connection_of(whose), interleaved):
        yield seen
    assert seen, f"no statement like {statement!r} came"


@contextmanager
def _in_between(connection: Any, act: Callable[..., Any]) -> Iterator[None]:
    """Let every statement of a connection go through this function, whose first argument sends it."""
    query, before = connection.query, connection.__dict__.get("query")
    connection.query = functools.partial(act, query)
    try:
        yield
    finally:
        del connection.query
        if before is not None:
            connection.query = before


@contextmanager
def commit_without_answer(table: Any, statement: str) -> Iterator[None]:
    """Lose the connection at the first commit after a statement: the server has committed, and we do not hear of it."""
    connection = connection_of(table)
    seen: list[str] = []

    def cut_off(query: Any, sql: str, *arguments: Any, **options: Any) -> Any:
        answer = query(sql, *arguments, **options)
        if re.search(statement, " ".join(sql.split())) and not seen:
            seen.append("statement")
        if sql == "COMMIT" and seen == ["statement"]:
            seen.append("commit")
            cut(own_number(connection))
            return query("SELECT 1", reconnect=False)  # the driver finds out here
        return answer

    with _in_between(connection, cut_off):
        yield
    assert seen == ["statement", "commit"], f"no commit came after {statement!r}"


# -- another one ------------------------------------------------------------------------------------------------------


@contextmanager
def another(table: Any, connection: Any = None, **members: Any) -> Iterator[Any]:
    """The same Square for somebody else, over a connection of their own, who waits for locks two seconds at most."""
    connection = connection or another_connection()
    is_pg = is_postgresql(connection)
    connection.query("SET lock_timeout = '2s'" if is_pg else "SET innodb_lock_wait_timeout = 2")
    try:
        yield squares(dj.Schema(table.database, connection=connection), 0, **members)
    finally:
        connection.close()


@contextmanager
def impatient(table: Any) -> Iterator[None]:
    """A statement of a table that has to wait for a lock soon fails, so that a test does not take for ever."""
    connection = connection_of(table)
    is_pg = is_postgresql(connection)
    connection.query("SET lock_timeout = '100ms'" if is_pg else "SET innodb_lock_wait_timeout = 1")
    try:
        yield
    finally:
        connection.query("RESET lock_timeout" if is_pg else "SET innodb_lock_wait_timeout = DEFAULT")


@contextmanager
def job_locked(table: Any, n: int) -> Iterator[None]:
    """The job of a number, which another one keeps locked meanwhile."""
    where = f"table_name = '{table.table_name}' AND key_hash = '{rows_by_number(table)[n]['key_hash']}'"
    connection = another_connection()
    try:
        for statement in queue_of(table).engine.connection.begin:
            connection.query(statement)
        connection.query(f"SELECT * FROM {table.jobs.full_table_name} WHERE {where} FOR UPDATE").fetchall()
        yield
    finally:
        connection.query("ROLLBACK")
        connection.close()


class Beside:
    """Something that another one does in a thread, over a connection of its own, and that may have to wait for us.

    Parameters
    ----------
    connection
        The connection that it uses.
    act : callable
        What it does.
    """

    def __init__(self, connection: Any, act: Callable[[], Any]) -> None:
        self._number, self._act = own_number(connection), act
        self._onlooker = another_connection()
        self._thread = threading.Thread(target=self._run)
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.had_to_wait = False

    def _run(self) -> None:
        try:
            self._outcome = self._act()
        except BaseException as error:
            self._error = error

    def start_and_wait(self) -> None:
        """Let it begin, and come back when it waits for a lock, or is over."""
        self._thread.start()
        # MySQL tells the same again to who asks too often.
        wait_for(lambda: self._waits() or not self._thread.is_alive(), every=0.15)
        self.had_to_wait = self._thread.is_alive()

    def _waits(self) -> bool:
        if is_postgresql(self._onlooker):
            sql = f"SELECT 1 FROM pg_stat_activity WHERE pid = {self._number} AND wait_event_type = 'Lock'"
        else:
            sql = f"""SELECT 1 FROM information_schema.innodb_trx
                      WHERE trx_mysql_thread_id = {self._number} AND trx_state = 'LOCK WAIT'
                      UNION SELECT 1 FROM information_schema.processlist
                      WHERE id = {self._number} AND state LIKE 'Waiting for table%%'"""
        return bool(self._onlooker.query(sql).fetchall())

    def result(self) -> Any:
        """What came of it."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._outcome

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._thread.join(30)
        self._onlooker.close()
