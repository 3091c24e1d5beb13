"""Which servers djjobs works with, by what they say of themselves."""

from __future__ import annotations

import pytest

from djjobs.check import _MySQL, _version


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        ("5.7.44-log", "problem", "MySQL 8.0 or newer"),
        ("8.0.11", "ok", "MySQL 8.0.11"),
        ("10.5.9-MariaDB", "problem", "MariaDB 10.6 or newer"),
        ("5.5.5-10.11.6-MariaDB-1", "ok", "MariaDB"),
        ("12.0.1-MariaDB", "ok", "MariaDB"),
    ],
)
def test_servers_by_their_version(answer: str, level: str, says: str) -> None:
    server = _MySQL.__new__(_MySQL)
    server.connection = type("Connection", (), {"conn_info": {"host": "db", "port": 3306, "user": "lab"}})()
    server.ask = lambda sql: answer  # type: ignore[method-assign]
    server._variables = dict  # type: ignore[method-assign]
    (finding,) = _version(server)
    assert finding.level == level and says in f"{finding.message} {finding.remedy}"
