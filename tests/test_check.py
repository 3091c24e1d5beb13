"""What `djjobs check` finds, and how it says to mend it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import datajoint as dj
import pytest
from click.testing import CliRunner
from pipelines import Lab, sessions

import djjobs
from djjobs.check import Finding, _MySQL, _server_of, check
from djjobs.cli import main
from djjobs.queue.tables import Jobs, Workers


def of(findings: list[Finding], subject: str) -> Finding:
    """The finding about this subject; its level must be one there is."""
    assert {finding.level for finding in findings} <= {"ok", "warning", "problem"}
    (finding,) = (finding for finding in findings if finding.subject.startswith(subject))
    return finding


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


# -- a set-up that works ---------------------------------------------------------------------------------------


def test_all_is_well(schema: Any, engine: str) -> None:
    findings = check(schema)
    assert problems(findings) == []
    assert of(findings, "server").message.lower().startswith(engine)
    assert dj.__version__ in of(findings, "DataJoint").message
    assert "has it" in of(findings, "SKIP LOCKED").message
    assert "READ COMMITTED" in of(findings, "transactions").message
    assert "in use" in of(findings, "connections").message
    assert "the server's" in of(findings, "clock").message
    assert "none yet" in of(findings, "queue").message
    assert dj.config["database.user"] in of(findings, "rights").message


def test_checking_changes_nothing(schema: Any) -> None:
    check(schema)
    assert not Jobs(schema.connection, schema.database).is_declared
    assert not schema.connection.in_transaction


def test_without_a_pipeline_only_the_server_is_looked_at(server: Any) -> None:
    assert {finding.subject for finding in check()} == {
        "DataJoint",
        "settings",
        "server",
        "SKIP LOCKED",
        "transactions",
        "connections",
        "clock",
    }


def test_the_queue_and_its_workers_are_counted(schema: Any) -> None:
    lab = sessions(schema)
    lab.Spectrum.schedule_jobs()
    djjobs.workers(schema).insert(
        [
            {"worker_id": "a" * 36, "slots": 8, "state": "working"},
            {"worker_id": "b" * 36, "slots": 1, "state": "stopping"},
            {"worker_id": "c" * 36, "slots": 64, "state": "dead"},
        ]
    )
    findings = check(schema)
    assert "12 jobs" in of(findings, "queue").message
    assert "2 workers here take up to 13" in of(findings, "connections").message


# -- what can be wrong ------------------------------------------------------------------------------------------


def test_a_lease_that_one_late_heartbeat_ends(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = djjobs.settings.lease
    djjobs.settings.lease = 1.5 * djjobs.settings.heartbeat_interval
    try:
        finding = of(check(), "settings")
    finally:
        djjobs.settings.lease = before
    assert finding.level == "problem" and "DJJOBS_LEASE" in finding.remedy


def test_a_queue_that_datajoint_made(schema: Any, engine: str) -> None:
    jobs = Jobs(schema.connection, schema.database)
    columns = (
        "table_name varchar(255), key_hash char(32), status varchar(8), {q}key{q} varchar(9), "
        "error_message varchar(9), error_stack varchar(9), {q}user{q} varchar(9), host varchar(9), pid int, "
        "connection_id int, {q}timestamp{q} timestamp, PRIMARY KEY (table_name, key_hash)"
    ).format(q='"' if engine == "postgresql" else "`")
    schema.connection.query(f"CREATE TABLE {jobs.full_table_name} ({columns})")
    finding = of(check(schema), "queue")
    assert finding.level == "problem" and finding.remedy == f"Type: djjobs migrate {schema.database}"
    schema.connection.query(f"DROP TABLE {jobs.full_table_name}")
    schema.connection.query(f"CREATE TABLE {jobs.full_table_name} (n int PRIMARY KEY)")
    finding = of(check(schema), "queue")
    assert finding.level == "problem" and "rename" in finding.remedy


def test_a_server_with_few_connections_left(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(_server_of(schema.connection))
    monkeypatch.setattr(kind, "connections", lambda self: (100, 85))
    assert of(check(schema), "connections").level == "warning"
    djjobs.workers(schema).insert([{"worker_id": letter * 36, "slots": 32} for letter in "abc"])
    finding = of(check(schema), "connections")
    assert finding.level == "problem" and "up to 102" in finding.message and "max_connections" in finding.remedy


def test_transactions_that_lock_what_they_read(server: Any, engine: str) -> None:
    connection = dj.conn()
    change, back = "SET SESSION TRANSACTION ISOLATION LEVEL {}", "REPEATABLE READ"
    if engine == "postgresql":
        change, back = "SET default_transaction_isolation = '{}'", "read committed"
    connection.query(change.format("SERIALIZABLE"))
    try:
        finding = of(check(), "transactions")
    finally:
        connection.query(change.format(back))
    assert finding.level == "warning" and "SERIALIZABLE" in finding.message


@pytest.mark.only(engines=("mysql", "mariadb"))
def test_transactions_that_the_servers_log_forbids(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = _MySQL._variables
    variables = {"log_bin": "ON", "binlog_format": "STATEMENT", "autocommit": "OFF"}
    monkeypatch.setattr(_MySQL, "_variables", lambda self: {**told(self), **variables})
    found = [finding for finding in check() if finding.level == "problem"]
    assert [finding.subject for finding in found] == ["transactions", "transactions"]
    assert "autocommit" in found[0].message and "binlog_format to ROW" in found[1].remedy


def test_a_server_that_takes_no_changes(server: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = _MySQL._variables
    # there it is a switch for all users of the server, who may be others too
    monkeypatch.setattr(_MySQL, "_variables", lambda self: {**told(self), "read_only": "ON"})
    if engine == "postgresql":
        dj.conn().query("SET default_transaction_read_only = on")
    try:
        findings = [finding for finding in check() if finding.subject == "server"]
    finally:
        if engine == "postgresql":
            dj.conn().query("SET default_transaction_read_only = off")
    assert [finding.level for finding in findings] == ["ok", "problem"]


def test_a_question_that_a_server_does_not_answer(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(self: Any) -> tuple[int, int]:
        raise dj.DataJointError("ask somebody else\nplease")

    monkeypatch.setattr(type(_server_of(schema.connection)), "connections", no)
    findings = check(schema)
    finding = of(findings, "connections")
    assert finding.level == "warning" and finding.message.endswith("ask somebody else")
    assert of(findings, "rights").level == "ok"


# -- rights --------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen_by(server: Any, engine: str, schema: Any) -> Iterator[Callable[..., Any]]:
    """The schema as users with few rights see it."""
    admin, made = schema.connection, []
    postgresql = engine == "postgresql"

    def user(*rights: str, create: bool = False) -> Any:
        name, password = f"guest_{secrets.token_hex(4)}", secrets.token_hex(8)
        granted = ", ".join(rights)
        if postgresql:
            admin.query(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
            admin.query(f'GRANT USAGE{", CREATE" if create else ""} ON SCHEMA "{schema.database}" TO {name}')
            admin.query(f'GRANT {granted} ON ALL TABLES IN SCHEMA "{schema.database}" TO {name}')
            made.append(name)
        else:
            if create:
                granted += ", CREATE, ALTER, INDEX"
            for host in ("%%", "localhost"):
                admin.query(f"CREATE USER '{name}'@'{host}' IDENTIFIED BY '{password}'")
                admin.query(f"GRANT {granted} ON `{schema.database}`.* TO '{name}'@'{host}'")
                made.append(f"'{name}'@'{host}'")
        settings = {option: server.settings[f"database.{option}"] for option in ("host", "port", "use_tls")}
        connection = dj.Connection(user=name, password=password, **settings)
        return dj.Schema(schema.database, connection=connection, create_schema=False, create_tables=False)

    yield user
    for name in made:
        if postgresql:
            admin.query(f"DROP OWNED BY {name}")
        admin.query(f"DROP {'ROLE' if postgresql else 'USER'} {name}")


@pytest.fixture
def lab(schema: Any) -> Lab:
    return sessions(schema, 1, 2)


def test_a_worker_needs_no_right_to_create_once_the_queue_is_there(lab: Lab, seen_by: Callable[..., Any]) -> None:
    worker = seen_by("SELECT", "INSERT", "UPDATE", "DELETE")
    finding = of(check(worker), "rights")
    assert finding.level == "problem" and "CREATE on the schema" in finding.message.replace(", ALTER, INDEX", "")
    lab.Spectrum.schedule_jobs()
    worker = seen_by("SELECT", "INSERT", "UPDATE", "DELETE")
    assert problems(check(worker)) == []


def test_who_may_create_needs_no_queue(lab: Lab, seen_by: Callable[..., Any]) -> None:
    assert problems(check(seen_by("SELECT", "INSERT", "UPDATE", "DELETE", create=True))) == []
    assert not Jobs(lab.schema.connection, lab.schema.database).is_declared


def test_who_may_only_look(lab: Lab, seen_by: Callable[..., Any]) -> None:
    lab.Spectrum.schedule_jobs()
    visitor = seen_by("SELECT", "REFERENCES")
    finding = of(check(visitor), "rights")
    assert finding.level == "problem"
    for table in ("~jobs", "~jobs_control", "~workers", "~sightings", "~runs"):
        assert f"INSERT, UPDATE, DELETE on {table}" in finding.message
    assert "GRANT SELECT, INSERT, UPDATE, DELETE" in finding.remedy and lab.schema.database in finding.remedy
    assert visitor.connection.conn_info["user"] in finding.remedy
    assert len(Workers(lab.schema.connection, lab.schema.database)) == 0
    assert len(djjobs.jobs(lab.schema)) == 2


# -- the command -------------------------------------------------------------------------------------------------


def test_the_command_shows_a_line_for_each_and_exits_1_for_problems(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(main, ["check", schema.database])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == len(check(schema)) and all(line.startswith("ok ") for line in lines)
    monkeypatch.setattr(type(_server_of(schema.connection)), "is_read_only", lambda self: True)
    done = CliRunner().invoke(main, ["check", schema.database, "--json"])
    assert done.exit_code == 1
    (problem,) = (finding for finding in json.loads(done.stdout) if finding["level"] == "problem")
    assert problem["subject"] == "server" and "primary" in problem["remedy"]
