"""What a lab may get wrong: each gives one clear error that names the table and the way out, and changes nothing."""

from __future__ import annotations

import datetime
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import datajoint as dj
import pytest
from pipelines import Lab, computed, job_counts, rows_of, sessions, standing_lab

import djjobs
from djjobs import DjJobsError
from djjobs.dj.connection import keep_with
from djjobs.queue import tables

#: Everything that needs the queue, by name
USES: dict[str, Callable[[Any], Any]] = {
    "schedule": lambda table: table.schedule_jobs(min_scheduling_interval=0),
    "populate": lambda table: table.populate(reserve_jobs=True),
    "clean up": lambda table: table.cleanup_jobs(),
    "retry": lambda table: table.retry_jobs(),
    "ignore": lambda table: table.ignore_jobs(True),
    "cancel": lambda table: table.cancel_jobs(),
}
CHOOSING = ("schedule_jobs", "cleanup_jobs", "retry_jobs", "ignore_jobs", "cancel_jobs")


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Lab]:
    with standing_lab() as lab:
        yield lab


@pytest.fixture
def lab(standing: Lab) -> Lab:
    """Session 0 is made, 1 ignored, 2 failed, 3 and 4 are waiting; of 5 there is only the job left."""
    standing.start_over(1, 6)
    standing.Spectrum.schedule_jobs()
    standing.Spectrum.populate("session = 0", reserve_jobs=True)
    standing.Spectrum.ignore_jobs("session = 1")
    standing.set_status("error", session=2)
    (standing.Session & "session = 5").delete_quick()
    return standing


@contextmanager
def refused(lab: Lab, *says: str) -> Iterator[None]:
    """What is done inside raises a DjJobsError that says all this, and leaves queue and results as they are."""

    def all_rows() -> list[Any]:
        return [rows_of(query) for query in (djjobs.jobs(lab.schema), lab.control, lab.Spectrum(), lab.Session())]

    before = all_rows()
    with pytest.raises(DjJobsError) as raised:
        yield
    for words in says:
        assert re.search(words, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value).strip()
    assert ".. " not in str(raised.value)
    assert all_rows() == before


# -- arguments ---------------------------------------------------------------------------------------------


def test_an_interval_that_is_none(lab: Lab) -> None:
    for seconds in (-1, -0.001, float("nan"), float("inf"), "soon", [5]):
        with refused(lab, "Spectrum", "min_scheduling_interval", "zero or more", re.escape(repr(seconds))):
            lab.Spectrum.schedule_jobs(min_scheduling_interval=seconds)


def test_an_interval_that_is_none_in_the_settings(lab: Lab) -> None:
    before = dj.config["min_scheduling_interval"]
    try:
        with refused(lab, "min_scheduling_interval", "zero or more", "-5"):
            dj.config["min_scheduling_interval"] = -5
            lab.Spectrum.schedule_jobs()
    finally:
        dj.config["min_scheduling_interval"] = before


def test_an_unknown_order(lab: Lab) -> None:
    for order in ("sorted", "", None, "Random"):
        with refused(lab, "Spectrum", re.escape(repr(order)), "original, reverse, random"):
            lab.Spectrum.populate(reserve_jobs=True, order=order)


def test_a_priority_that_is_none(lab: Lab) -> None:
    for priority in (-1, 256, 1.5, "high", True):
        with refused(lab, "Spectrum", "0 to 255", re.escape(repr(priority))):
            lab.Spectrum.schedule_jobs(priority=priority, min_scheduling_interval=0)


def test_a_tables_own_priority_that_is_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "priority", "high")
    with refused(lab, "Spectrum", "0 to 255"):
        lab.Spectrum.schedule_jobs(min_scheduling_interval=0)


def test_a_due_time_that_may_mean_anything(lab: Lab) -> None:
    for due_time in (datetime.datetime(2030, 1, 1), datetime.date(2030, 1, 1), 60, "tomorrow"):
        with refused(lab, "Spectrum", "due_time", "time zone", "timedelta"):
            lab.Spectrum.schedule_jobs(due_time=due_time, min_scheduling_interval=0)


def test_a_restricted_table(lab: Lab) -> None:
    for use in USES.values():
        with refused(lab, "Spectrum", "restricted", "pass the conditions as arguments"):
            use(lab.Spectrum & "session = 2")


@pytest.mark.parametrize("method", [*CHOOSING, "populate"])
def test_a_restriction_that_cannot_be_understood(lab: Lab, method: str) -> None:
    options = {"populate": {"reserve_jobs": True}, "schedule_jobs": {"min_scheduling_interval": 0}}.get(method, {})
    for restriction in ("no_such_column = 1", "session = ", "'", 3.14):
        with refused(lab, "Spectrum", "restriction"):
            getattr(lab.Spectrum, method)(restriction, **options)
        assert not lab.schema.connection.in_transaction
        assert len(lab.Session()) == 5  # the connection can be used


@pytest.mark.parametrize("method", [*CHOOSING, "populate"])
def test_a_restriction_that_the_server_refuses(lab: Lab, engine: str, method: str) -> None:
    options = {"populate": {"reserve_jobs": True}, "schedule_jobs": {"min_scheduling_interval": 0}}.get(method, {})
    for restriction in (
        "no_such_function(session) = 1",
        "session = (SELECT 1 UNION SELECT 2)",
        "subject ~ '('" if engine == "postgresql" else "subject REGEXP '('",
    ):
        with refused(lab, "Spectrum", "restriction"):
            getattr(lab.Spectrum, method)(restriction, **options)


def test_what_is_not_a_schema(lab: Lab) -> None:
    for what in ("lab", None, dj.Schema(), 5):
        with pytest.raises(DjJobsError, match=r"not an activated schema.*dj\.Schema"):
            djjobs.jobs(what)


# -- transactions --------------------------------------------------------------------------------------------


def test_populate_inside_a_transaction(lab: Lab) -> None:
    connection = lab.schema.connection
    with refused(lab, "Spectrum", "inside a transaction", "outside its `with` block"), connection.transaction:
        lab.Session.insert1({"subject": "m0", "session": 77})
        lab.Spectrum.populate(reserve_jobs=True)
    assert not connection.in_transaction


@pytest.mark.parametrize("use", list(USES.values()), ids=list(USES))
def test_nothing_commits_a_transaction_that_is_not_its_own(lab: Lab, use: Callable[[Any], Any]) -> None:
    connection = lab.schema.connection
    before = rows_of(lab.Spectrum.jobs)
    connection.start_transaction()
    lab.Session.insert1({"subject": "m0", "session": 77})
    try:
        use(lab.Spectrum)
    except DjJobsError as error:
        assert re.search(r"Spectrum.*transaction", str(error))
    connection.cancel_transaction()
    assert len(lab.Session & "session = 77") == 0
    assert rows_of(lab.Spectrum.jobs) == before


def test_make_cannot_commit_half_of_itself_by_scheduling_another_table(lab: Lab, monkeypatch: Any) -> None:
    Next = computed(lab.schema, "-> Spectrum", {"Spectrum": lab.Spectrum}, "Next")

    def make(self: Any, key: dict[str, Any]) -> None:
        self.insert1({**key, "power": 0})
        Next.schedule_jobs(min_scheduling_interval=0)
        raise ValueError("later on")

    monkeypatch.setattr(lab.Spectrum, "make", make)
    done = lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    assert done["success_count"] == 0
    assert len(lab.Spectrum()) == 1  # what was there before
    assert job_counts(lab.Spectrum) == {"ignore": 1, "error": 4}
    Next().drop_quick()


# -- key_source ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, [{"subject": "m0"}], "Session", 5, int], ids=repr)
def test_a_key_source_that_is_not_a_query(lab: Lab, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "key_source", property(lambda self: source))
    for use in USES.values():
        with refused(lab, "Spectrum", "key_source"):
            use(lab.Spectrum)


def test_a_key_source_with_an_attribute_that_the_target_lacks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "key_source", property(lambda self: lab.Session.proj(animal="subject")))
    for use in USES.values():
        with refused(lab, "Spectrum", "key_source", "animal"):
            use(lab.Spectrum)


def test_a_key_source_that_breaks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Spectrum, "key_source", property(lambda self: lab.Session & "no_such_column = 1"))
    for use in USES.values():
        with refused(lab, "Spectrum", "key_source", "no_such_column"):
            use(lab.Spectrum)


# -- the queue itself --------------------------------------------------------------------------------------------


def test_a_queue_of_a_version_to_come(schema: Any, engine: str) -> None:
    lab = sessions(schema, 1, 2)
    lab.Spectrum.schedule_jobs()
    jobs = djjobs.jobs(schema)
    mark = "djjobs queue, version 99"
    change = "COMMENT ON TABLE {} IS '{}'" if engine == "postgresql" else "ALTER TABLE {} COMMENT = '{}'"
    schema.connection.query(change.format(jobs.full_table_name, mark))
    keep_with(schema.connection, "queues", {})  # as in a process that starts now
    jobs = tables.Jobs(schema.connection, schema.database)
    before = rows_of(jobs.proj("status", "timestamp"))
    for use in (*USES.values(), lambda table: table.jobs, lambda table: djjobs.jobs(schema)):
        with pytest.raises(DjJobsError, match=rf"{schema.database}.*~jobs.*version 99.*Install the djjobs"):
            use(lab.Spectrum)
    assert rows_of(jobs.proj("status", "timestamp")) == before
    assert tables.Jobs(schema.connection, schema.database).heading.table_status["comment"] == mark


def test_a_table_of_somebody_else_in_the_place_of_the_queue(schema: Any) -> None:
    lab = sessions(schema, 1, 2)
    name = tables.Jobs(schema.connection, schema.database).full_table_name
    schema.connection.query(f"CREATE TABLE {name} (n int PRIMARY KEY)")
    schema.connection.query(f"INSERT INTO {name} VALUES (41)")
    for use in USES.values():
        with pytest.raises(DjJobsError, match=rf"{schema.database}.*~jobs.*Nothing was changed"):
            use(lab.Spectrum)
    assert schema.connection.query(f"SELECT n FROM {name}").fetchall()[0][0] == 41


# -- the server and its users ----------------------------------------------------------------------------------


class Guest:
    """A user with few rights, and the lab's tables as that user sees them."""

    def __init__(self, server: Any, lab: Lab, engine: str, *privileges: str) -> None:
        self.name, self._password = f"guest_{secrets.token_hex(4)}", secrets.token_hex(8)
        self._settings, self._admin, self._postgresql = server.settings, lab.schema.connection, engine == "postgresql"
        database, rights = lab.schema.database, ", ".join(privileges)
        if self._postgresql:
            self._admin.query(f"CREATE ROLE {self.name} LOGIN PASSWORD '{self._password}'")
            self._admin.query(f'GRANT USAGE ON SCHEMA "{database}" TO {self.name}')
            self._admin.query(f'GRANT {rights} ON ALL TABLES IN SCHEMA "{database}" TO {self.name}')
        for user in self._users():
            self._admin.query(f"CREATE USER {user} IDENTIFIED BY '{self._password}'")
            self._admin.query(f"GRANT {rights} ON `{database}`.* TO {user}")
        self.connection = self._connect(self._password)
        self.schema = dj.Schema(database, connection=self.connection, create_schema=False, create_tables=False)
        self.Spectrum = Lab(self.schema).Spectrum

    def _users(self) -> list[str]:
        # MySQL's users have hosts, and MariaDB's nameless user of localhost would go before one of any host
        return [] if self._postgresql else [f"'{self.name}'@'{host}'" for host in ("%%", "localhost")]

    def _connect(self, password: str) -> Any:
        settings = {name: self._settings[f"database.{name}"] for name in ("host", "port", "use_tls")}
        return dj.Connection(user=self.name, password=password, **settings)

    def server_checks_passwords(self) -> bool:
        try:
            self._connect("wrong").close()
        except Exception:
            return True
        return False

    def change_password(self) -> None:
        if self._postgresql:
            self._admin.query(f"ALTER ROLE {self.name} PASSWORD 'another'")
        for user in self._users():
            self._admin.query(f"ALTER USER {user} IDENTIFIED BY 'another'")

    def lose_connection(self) -> None:
        """It breaks, as it does when the server restarts."""
        own, end = "pg_backend_pid()", "SELECT pg_terminate_backend({})"
        if not self._postgresql:
            own, end = "CONNECTION_ID()", "KILL {}"
        number = self.connection.query(f"SELECT {own}").fetchone()[0]
        self._admin.query(end.format(number))

    def leave(self) -> None:
        with suppress(Exception):
            self.connection.close()
        if self._postgresql:
            self._admin.query(f"DROP OWNED BY {self.name}")
            self._admin.query(f"DROP ROLE {self.name}")
        for user in self._users():
            self._admin.query(f"DROP USER {user}")


@pytest.fixture
def guest(server: Any, engine: str) -> Iterator[Callable[..., Guest]]:
    guests: list[Guest] = []

    def invite(lab: Lab, *privileges: str) -> Guest:
        guests.append(Guest(server, lab, engine, *privileges))
        return guests[-1]

    yield invite
    for guest in guests:
        guest.leave()


def test_a_user_who_may_only_look_can_look(lab: Lab, guest: Callable[..., Guest]) -> None:
    # on PostgreSQL DataJoint does not see the primary keys of tables that one may only select from
    visitor = guest(lab, "SELECT", "REFERENCES")
    assert job_counts(visitor.Spectrum) == {"scheduled": 3, "ignore": 1, "error": 1}
    assert "scheduled" in repr(visitor.Spectrum.jobs)
    assert visitor.Spectrum.jobs.progress()["pending"] == 3


def test_a_user_who_may_only_look_changes_nothing(lab: Lab, guest: Callable[..., Guest]) -> None:
    visitor = guest(lab, "SELECT")
    for use in USES.values():
        with refused(lab, "Spectrum", visitor.name, "lacks a privilege", "INSERT, UPDATE and DELETE", "grant"):
            use(visitor.Spectrum)


def test_a_user_who_may_not_create_tables_needs_no_more_once_the_queue_is_there(
    lab: Lab, guest: Callable[..., Guest]
) -> None:
    worker = guest(lab, "SELECT", "INSERT", "UPDATE", "DELETE")
    lab.Session.insert1({"subject": "m0", "session": 9})
    assert int(worker.Spectrum.schedule_jobs(min_scheduling_interval=0)) == 1
    assert worker.Spectrum.cleanup_jobs()["orphaned_incomplete"] == 1
    assert worker.Spectrum.retry_jobs() == 1
    assert worker.Spectrum.populate(reserve_jobs=True)["success_count"] == 4


def test_a_user_who_may_not_create_tables_is_told_when_there_is_no_queue(
    schema: Any, guest: Callable[..., Guest]
) -> None:
    lab = sessions(schema, 1, 2)
    worker = guest(lab, "SELECT", "INSERT", "UPDATE", "DELETE")
    for use in (*USES.values(), lambda table: table.jobs, lambda table: djjobs.jobs(worker.schema)):
        with pytest.raises(DjJobsError, match=rf"{schema.database}.*{worker.name}.*privilege.*CREATE") as raised:
            use(worker.Spectrum)
        assert "~jobs" in str(raised.value)
    assert not tables.Jobs(schema.connection, schema.database).is_declared
    assert not tables.JobControl(schema.connection, schema.database).is_declared
    assert int(lab.Spectrum.schedule_jobs()) == 2


def test_a_server_that_is_gone(lab: Lab, guest: Callable[..., Guest]) -> None:
    worker = guest(lab, "SELECT", "INSERT", "UPDATE", "DELETE")
    worker.Spectrum.jobs
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        worker.lose_connection()
        worker.connection.conn_info.update(host="127.0.0.1", port=port)
        for use in (*USES.values(), lambda table: table.jobs, lambda table: djjobs.jobs(worker.schema)):
            with refused(lab, lab.schema.database, "no connection to the server", str(port), "Check that it runs"):
                use(worker.Spectrum)


def test_a_server_that_comes_back_is_used_again(lab: Lab, guest: Callable[..., Guest]) -> None:
    worker = guest(lab, "SELECT", "INSERT", "UPDATE", "DELETE")
    worker.Spectrum.jobs
    worker.lose_connection()
    assert worker.Spectrum.cancel_jobs("session = 4") == 1
    worker.lose_connection()
    assert worker.Spectrum.populate(reserve_jobs=True, max_calls=1)["success_count"] == 1


def test_a_password_that_was_changed(lab: Lab, guest: Callable[..., Guest]) -> None:
    worker = guest(lab, "SELECT", "INSERT", "UPDATE", "DELETE")
    if not worker.server_checks_passwords():
        pytest.skip("this server takes any password")
    worker.Spectrum.jobs
    worker.change_password()
    worker.lose_connection()
    with refused(lab, lab.schema.database, worker.name, "password", "database.password"):
        worker.Spectrum.schedule_jobs(min_scheduling_interval=0)


def test_a_table_that_was_dropped(schema: Any) -> None:
    lab = sessions(schema, 1, 2)
    lab.Spectrum.schedule_jobs()
    lab.Spectrum().drop_quick()
    with pytest.raises(DjJobsError, match="Spectrum"):
        lab.Spectrum.schedule_jobs(min_scheduling_interval=0)
