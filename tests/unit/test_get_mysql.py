"""Where MySQL is looked for: apt's own sources, in both ways to write them, and a newer suite of the same mirror."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import get_mysql
import pytest
from get_mysql import CannotGet, Source

OLD = """\
# deb http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/own.gpg] http://mirror.example/debian bookworm main contrib # ours
deb-src http://mirror.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
"""
NEW = """\
Types: deb deb-src
# how it was
URIs: http://mirror.example/ubuntu
Suites: noble noble-updates
Components: main
 universe
Signed-By: /usr/share/keyrings/ubuntu.gpg

Types: deb
Enabled: no
URIs: http://other.example/
Suites: noble
Components: main

Types: deb
URIs: http://keys.example/
Suites: stable
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's /etc, with nothing in it."""
    monkeypatch.setattr(get_mysql, "APT", tmp_path / "apt")
    monkeypatch.setattr(get_mysql, "OS_RELEASE", tmp_path / "os-release")
    monkeypatch.setattr(get_mysql, "CACHE", tmp_path / "cache" / "mysql")
    (tmp_path / "apt" / "sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian 12"\n')
    return tmp_path


def test_sources_of_one_line_each(machine: Path) -> None:
    (machine / "apt" / "sources.list").write_text(OLD)
    first, second = get_mysql.sources()
    options = "arch=amd64 signed-by=/usr/share/keyrings/own.gpg"
    assert first == Source("http://mirror.example/debian", "bookworm", ("main", "contrib"), options)
    assert first.line() == f"deb [{options}] http://mirror.example/debian bookworm main contrib\n"
    assert second.suite == "bookworm-security" and second.line().startswith(
        "deb http://mirror.example/debian-security "
    )


def test_sources_in_paragraphs(machine: Path) -> None:
    (machine / "apt" / "sources.list.d" / "ubuntu.sources").write_text(NEW)
    (machine / "apt" / "sources.list.d" / "ubuntu.sources.save").write_text(OLD)
    noble, updates, keys = get_mysql.sources()
    signed = "signed-by=/usr/share/keyrings/ubuntu.gpg"
    assert noble == Source("http://mirror.example/ubuntu", "noble", ("main", "universe"), signed)
    assert updates == noble.with_suite("noble-updates")
    assert (keys.uri, keys.options) == ("http://keys.example/", "")


def test_the_installed_suite_is_tried_first_and_then_a_newer_one_of_the_same_mirror(machine: Path) -> None:
    (machine / "apt" / "sources.list").write_text(OLD)
    own, newer = get_mysql.candidates()
    assert (own.suite, newer.suite) == ("bookworm", "sid")
    assert own.with_suite("sid") == newer


def test_a_machine_without_sources_of_its_own_distribution_says_so(machine: Path) -> None:
    (machine / "apt" / "sources.list").write_text("deb http://mirror.example/other stable main\n")
    with pytest.raises(CannotGet, match="suite bookworm"):
        get_mysql.candidates()


def test_a_machine_without_apt_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(CannotGet, match="no apt-get"):
        get_mysql.get()


def test_what_is_there_already_is_not_got_again(machine: Path) -> None:
    assert get_mysql.found() is None
    (machine / "cache" / "mysql").mkdir(parents=True)
    (machine / "cache" / "mysql" / "mysqld").touch()
    assert get_mysql.found() == str(machine / "cache" / "mysql" / "mysqld")


def test_a_mirror_that_does_not_answer_is_named_with_what_apt_said(machine: Path) -> None:
    if not shutil.which("apt-get"):
        pytest.skip("no apt here")
    (machine / "apt" / "sources.list").write_text(f"deb file:{machine}/nowhere bookworm main\n")
    with pytest.raises(CannotGet, match=r"apt-get -qq update failed for the suite bookworm: .*nowhere"):
        get_mysql.get()
    assert get_mysql.found() is None


def test_the_script_hands_its_arguments_on_with_the_defaults_first(tmp_path: Path) -> None:
    """The loader is replaced by a script that tells what it is given."""
    libraries = tmp_path / "root" / "usr" / "lib" / "some-linux-gnu"
    libraries.mkdir(parents=True)
    (tmp_path / "root" / "usr" / "share" / "mysql" / "charsets").mkdir(parents=True)
    loader = libraries / "ld-linux-some.so.2"
    loader.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script = tmp_path / "mysqld"
    script.write_text(get_mysql._script(tmp_path / "root"))
    for path in (loader, script):
        path.chmod(0o755)
    command = [str(script), "--no-defaults", "--datadir=/a b", "--port=1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout.splitlines()
    assert told[:4] == ["--library-path", str(libraries), f"{tmp_path}/root/usr/sbin/mysqld", "--no-defaults"]
    assert told[-2:] == ["--datadir=/a b", "--port=1"]
    assert f"--lc-messages-dir={tmp_path}/root/usr/share/mysql" in told
