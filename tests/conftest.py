"""One suite for every engine and both DataJoints; ENGINE says which server to start."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# only the test's own settings count, here and in the processes that tests start
os.environ["DJ_IGNORE_CONFIG_FILE"] = "true"
# the tests count what they schedule themselves; those of events turn these on
os.environ.setdefault("DJJOBS_EVENTS", "0")
# a populate that finds nothing waits for it to pass; five seconds each would take most of the time
os.environ.setdefault("DJJOBS_MIN_SCHEDULING_INTERVAL", "0.1")

import datajoint as dj
import fork_server
import forks  # noqa: F401 - before djjobs
import pytest
import quiet
import servers
from schedule_labs import Lab, standing_lab
from workloads.lives import Gate
from workloads.squares import CallLog, Standing, standing_schema

from djjobs.work import monitor, monitor_process

# requests about jobs are heard that often here and in forked processes; a second each would add up
monitor.LOOK_INTERVAL = monitor_process.LOOK_INTERVAL = 0.25

GENERATION = int(dj.__version__.split(".")[0])
ENGINE = os.environ.get("ENGINE") or ("postgresql" if GENERATION == 2 else "mysql")

# DataJoint 2 reads these from the environment
VARIABLES = {
    "database.backend": "DJ_BACKEND",
    "database.host": "DJ_HOST",
    "database.port": "DJ_PORT",
    "database.user": "DJ_USER",
    "database.password": "DJ_PASS",
    "database.use_tls": "DJ_USE_TLS",
    "loglevel": "DJ_LOG_LEVEL",
    "safemode": "DJ_SAFEMODE",
    "jobs.allow_new_pk_fields_in_computed_tables": "DJ_JOBS_ALLOW_NEW_PK_FIELDS_IN_COMPUTED_TABLES",
}


class GivenServer:
    """A server that somebody else runs, named by DJJOBS_TEST_HOST and its companions."""

    def __init__(self) -> None:
        self.host = os.environ["DJJOBS_TEST_HOST"]
        self.port = int(os.environ.get("DJJOBS_TEST_PORT") or (5432 if ENGINE == "postgresql" else 3306))
        self.user = os.environ.get("DJJOBS_TEST_USER") or ("postgres" if ENGINE == "postgresql" else "root")
        self.password = os.environ.get("DJJOBS_TEST_PASSWORD", "")
        self.settings = {
            "database.backend": "postgresql" if ENGINE == "postgresql" else "mysql",
            "database.host": self.host,
            "database.port": self.port,
            "database.user": self.user,
            "database.password": self.password,
            "database.use_tls": None if ENGINE == "mysql" else False,
        }

    def restart(self) -> None:
        pytest.skip("DJJOBS_TEST_HOST is not ours to restart")

    kill = start = restart

    has_died = False

    def stop(self) -> None:
        """Leave it as it is."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of what this DataJoint or this engine does not have."""

    def is_about_us(item: pytest.Item) -> bool:
        marks = [mark.kwargs for mark in item.iter_markers("only")]
        return all(
            mark.get("datajoint", GENERATION) == GENERATION and ENGINE in mark.get("engines", ENGINE) for mark in marks
        )

    others = [item for item in items if not is_about_us(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_about_us(item)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that keeps to a time be alone, where other cells run beside this one."""
    folder = os.environ.get("DJJOBS_TEST_TURNS")
    if not folder:
        return (yield)
    with quiet.turn(Path(folder), alone=item.get_closest_marker("quiet") is not None):
        return (yield)


@pytest.fixture(scope="session")
def engine() -> str:
    """postgresql, mysql or mariadb."""
    return ENGINE


@pytest.fixture(scope="session")
def datajoint_generation() -> int:
    """2 or 0."""
    return GENERATION


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The database server of this run; DataJoint is set up for it here and in child processes."""
    fork_server.begin()
    server = GivenServer() if os.environ.get("DJJOBS_TEST_HOST") else servers.start(ENGINE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            configure(server.settings, patch, tmp_path_factory.mktemp("home"))
            yield server
            dj.conn().close()
    finally:
        if server.has_died:
            print(f"The server died during the tests. Its last words:\n{server.last_words}", file=sys.stderr)
        server.stop()


@pytest.fixture
def schema(server: Any) -> Iterator[Any]:
    """A fresh schema, dropped after the test."""
    schema = dj.Schema(f"djjobs_test_{secrets.token_hex(4)}")
    yield schema
    connection = schema.connection
    if not connection.is_connected:
        connection.connect()
    if connection.in_transaction:
        connection.cancel_transaction()
    schema.drop()


@pytest.fixture
def private_server(server: Any) -> Iterator[Any]:
    """A second server, for this test alone. DataJoint stays connected to the first."""
    with _another_server() as private:
        yield private


@pytest.fixture(scope="module")
def clocked_server(server: Any) -> Iterator[Any]:
    """A second server whose clock a test can turn, for a whole file. DataJoint stays connected to the first."""
    with _another_server(own_clock=True) as private:
        yield private


def _another_server(**options: Any) -> Any:
    try:
        return servers.start(ENGINE, **options)
    except servers.NoServer as missing:
        pytest.skip(f"needs a server of its own: {missing}")


def configure(settings: dict[str, Any], patch: pytest.MonkeyPatch, home: Path) -> None:
    """Tell DataJoint in this process, and in those to come, where the server is."""
    settings = {**settings, "safemode": False, "loglevel": "ERROR"}
    if GENERATION == 2:
        settings["jobs.allow_new_pk_fields_in_computed_tables"] = True
    else:
        # 0.14 takes neither port nor TLS from the environment, only from a file in the home folder
        del settings["database.backend"]
        (home / ".datajoint_config.json").write_text(json.dumps(settings))
        patch.setenv("HOME", str(home))
    for name, value in settings.items():
        dj.config[name] = value
        if value is not None:
            patch.setenv(VARIABLES[name], str(value))


# -- what many tests begin with ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standing(server: Any) -> Iterator[Standing]:
    """A schema with the tables of `workloads.squares`, for a whole file."""
    with standing_schema() as standing:
        yield standing


@pytest.fixture
def start(standing: Standing) -> Callable[..., Any]:
    """Gives Square as if new."""
    return standing.start_over


@pytest.fixture
def log(tmp_path: Path) -> CallLog:
    return CallLog(tmp_path / "calls")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture(scope="module")
def lab_with_schedules(server: Any) -> Iterator[Lab]:
    """One schema for a whole file, with the tables that the tests of schedules use."""
    with standing_lab() as lab:
        yield lab


@pytest.fixture
def lab(lab_with_schedules: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The same as if it were new, and a folder of its own."""
    monkeypatch.setenv("SCHEDULE_LAB_FOLDER", str(tmp_path))
    return lab_with_schedules.start_over(tmp_path)
