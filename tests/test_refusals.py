"""Statements that a server refuses for a time: what is waited for, how long, and what is said; and locks by name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from helpers import wait_for
from workloads.squares import another_connection, squares

import djjobs
from djjobs.errors import DjJobsError
from djjobs.queue import database
from djjobs.queue.database import Database
from djjobs.sql.connection import DISK_FULL, LOCKED, READ_ONLY, STATEMENT_TIMEOUT

MYSQLS = pytest.mark.only(engines=("mysql", "mariadb"))
POSTGRESQL = pytest.mark.only(engines=("postgresql",))

#: What a server says, and what has to pass then.
CODES = {
    "1021": DISK_FULL,
    "1114": DISK_FULL,
    "1205": LOCKED,
    "1792": READ_ONLY,
    "1836": READ_ONLY,
    "3024": STATEMENT_TIMEOUT,
    "1969": STATEMENT_TIMEOUT,
}
STATES = {"53100": DISK_FULL, "55P03": LOCKED, "25006": READ_ONLY, "57014": STATEMENT_TIMEOUT}


@pytest.fixture
def db(server: Any) -> Iterator[Database]:
    with closing(another_connection()) as connection:
        yield Database(connection)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "djjobs"]


def refusing(db: Database, refuse: str, seconds: float) -> Callable[[], str]:
    """Something that the server refuses for so long."""
    until = time.monotonic() + seconds

    def action() -> str:
        if time.monotonic() < until:
            db.connection.query(refuse)
        return "done"

    return action


def check_patience(db: Database, refuse: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Exception) as caught:
        db.connection.query(refuse)
    assert db.reason_to_wait(caught.value) == reason
    with caplog.at_level(logging.WARNING, "djjobs"), db.patient(30, unless=lambda: False):
        assert db.retry(refusing(db, refuse, 0.8)) == "done"
    said = lines(caplog)
    assert len(said) == 2
    assert said[0].startswith(f"Waiting: {reason}")
    assert said[1].startswith("It goes on after")


@MYSQLS
@pytest.mark.parametrize("code", CODES)
def test_what_mysql_refuses_for_a_time_is_waited_for_and_said_once(
    db: Database, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_patience(db, f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {code}", CODES[code], caplog)


@POSTGRESQL
@pytest.mark.parametrize("state", STATES)
def test_what_postgresql_refuses_for_a_time_is_waited_for_and_said_once(
    db: Database, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
    check_patience(db, refuse, STATES[state], caplog)


def test_patience_ends(db: Database, engine: str) -> None:
    refuse = refusal(engine)
    with db.patient(0.5, unless=lambda: False), pytest.raises(Exception, match=r"no|Unhandled|refused"):
        db.retry(refusing(db, refuse, 60))


def test_a_stop_ends_the_waiting(db: Database, engine: str) -> None:
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    with db.patient(float("inf"), unless=stopped.is_set), pytest.raises(Exception, match=r"no|Unhandled|refused"):
        db.retry(refusing(db, refusal(engine), 60))


def test_who_has_no_patience_hears_of_a_refusal_at_once(db: Database, engine: str) -> None:
    """A person at a notebook is to know that the server is read-only."""
    tries = []

    def action() -> None:
        tries.append(1)
        db.connection.query(refusal(engine))

    with pytest.raises(Exception, match=r"no|Unhandled|refused"):
        db.retry(action)
    assert len(tries) == 1


def refusal(engine: str) -> str:
    """SQL of a server that is read-only."""
    if engine == "postgresql":
        return "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '25006'; END $$"
    return "SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1792"


@POSTGRESQL
def test_a_statement_time_out_on_a_locked_row_is_waited_for(schema: Any) -> None:
    Square = squares(schema, 1)
    Square.schedule_jobs()
    with closing(another_connection()) as connection, locking(Square) as unlock:
        db = Database(connection)
        db.execute("SET statement_timeout = '100ms'")
        threading.Timer(0.7, unlock).start()
        with db.patient(30, unless=lambda: False):
            assert db.change(f"UPDATE {Square.jobs.full_table_name} SET progress = NULL") == 1


@contextmanager
def locking(table: Any) -> Iterator[Callable[[], None]]:
    """Somebody keeps the jobs of a table locked, until they are told to let go."""
    with closing(another_connection()) as other:
        other.query("BEGIN")
        other.query(f"SELECT * FROM {table.jobs.full_table_name} FOR UPDATE").fetchall()
        yield lambda: other.query("ROLLBACK")


# -- limits of a hurried connection ----------------------------------------------------------------------------------


def test_a_statement_of_the_monitor_is_ended_on_this_side_if_it_takes_too_long(
    server: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(djjobs.settings, "lease", 2.0)
    with closing(another_connection()) as connection:
        db = Database(connection, tries_to_connect=1, hurried=True)
        sleep = "SELECT pg_sleep(60)" if engine == "postgresql" else "SELECT SLEEP(60)"
        began = time.monotonic()
        with pytest.raises(Exception) as caught:
            db.execute(sleep)
        assert time.monotonic() - began < 30
        assert db.is_lost(caught.value)
        db.start_afresh()
        assert db.execute("SELECT 1").fetchone()[0] == 1


# -- the lock under which a queue is declared ------------------------------------------------------------------------


def test_a_queue_that_another_declares_for_too_long_is_a_clear_error_that_names_them(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_PATIENCE", 0.5)
    Square = squares(schema, 1)
    with closing(another_connection()) as other:
        holder = Database(other)
        with holder.locked(f"djjobs {schema.database}"):
            with pytest.raises(DjJobsError, match="Another process holds the server's lock") as caught:
                Square.jobs
            number = str(other.query(holder.engine.connection.own_connection_id).fetchone()[0])
            assert number in str(caught.value)
            assert "~jobs" not in " ".join(schema.list_tables())
    assert len(Square.jobs) == 0


def test_a_queue_is_declared_when_the_other_has_given_the_lock_back(schema: Any) -> None:
    Square = squares(schema, 1)
    with closing(another_connection()) as other:
        held = Database(other).locked(f"djjobs {schema.database}")
        held.__enter__()
        threading.Timer(0.5, lambda: held.__exit__(None, None, None)).start()
        assert len(Square.jobs) == 0
        wait_for(lambda: not is_held(another_connection(), f"djjobs {schema.database}"))


def is_held(connection: Any, name: str) -> bool:
    with closing(connection):
        db = Database(connection)
        holder = db.execute(db.engine.connection.holder_of_lock, name=name).fetchone()
        return bool(holder and holder[0])
