"""The servers that the other tests rely on: they answer, keep their data, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datajoint as dj
import psutil
import pytest
import servers
from helpers import wait_for


def connect(server: Any, password: str | None = None) -> Any:
    password = server.password if password is None else password
    use_tls = server.settings["database.use_tls"]
    return dj.Connection(server.host, server.user, password, port=server.port, use_tls=use_tls)


def processes_of(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info["cmdline"])]


def test_the_server_of_this_run_answers_here_and_in_a_child(schema: Any, engine: str) -> None:
    version = dj.conn().query("SELECT version()").fetchone()[0]
    assert ("PostgreSQL" in version) == (engine == "postgresql")
    assert ("MariaDB" in version) == (engine == "mariadb")
    code = "import datajoint as dj; print(dj.list_schemas())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert schema.database in child.stdout


def test_a_wrong_password_is_refused(server: Any) -> None:
    with pytest.raises(Exception, match=r"[Aa]ccess denied|password authentication failed"):
        connect(server, "wrong")


def test_what_was_committed_is_there_after_a_restart_and_after_a_crash(private_server: Any) -> None:
    before = connect(private_server)
    before.query("CREATE SCHEMA kept")
    before.query("CREATE TABLE kept.fact (n int)")
    before.query("INSERT INTO kept.fact VALUES (41)")
    private_server.restart()
    between = connect(private_server)
    between.query("UPDATE kept.fact SET n = n + 1")
    private_server.kill()
    private_server.start()
    assert connect(private_server).query("SELECT n FROM kept.fact").fetchone()[0] == 42


def test_a_stopped_server_leaves_no_process_and_no_folder(private_server: Any) -> None:
    assert processes_of(private_server.folder)
    private_server.stop()
    assert not processes_of(private_server.folder)
    assert not private_server.folder.exists()


def test_a_server_goes_with_the_process_that_owns_it(engine: str) -> None:
    try:
        servers.obtain(engine)
    except servers.NoServer as missing:
        pytest.skip(str(missing))
    # started in a thread that is over by then: a server must follow its process, not a thread
    code = """
import sys, threading, servers
started = []
thread = threading.Thread(target=lambda: started.append(servers.start(sys.argv[1])))
thread.start()
thread.join()
print(started[0].pid, started[0].folder, flush=True)
sys.stdin.read()
"""
    tests = str(Path(__file__).parent)
    owner = subprocess.Popen(
        [sys.executable, "-c", code, engine],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with owner:
        pid, folder = owner.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        owner.kill()
    wait_for(lambda: not psutil.pid_exists(int(pid)) and not processes_of(Path(folder)))
    wait_for(lambda: not Path(folder).exists())


@pytest.mark.parametrize("engine", servers.ENGINES)
def test_a_missing_server_says_how_to_get_one(engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(servers, "AS_ROOT", False)
    monkeypatch.setattr(servers.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(servers.get_mysql, "CACHE", tmp_path / "mysql")
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(servers.NoServer, match=r"pip install|PATH|apt-get install"):
        servers.start(engine)
