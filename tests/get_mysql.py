"""Get a MySQL server from the distribution's own package sources, without installing anything on the system.

Debian's releases have no MySQL, but its unstable suite has; Ubuntu's releases have it themselves. The packages of the
server and of every library that it needs, down to the C library, are unpacked into a cache folder. A small script
there starts the server with these libraries, so that they may be newer than those of the system.

`python tests/get_mysql.py` does this, or finds it done, and prints the path of that script. It takes apt's own
configuration of where packages come from, checks their signatures as apt does, and needs no special rights.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CannotGet", "Source", "found", "get", "sources"]

APT = Path("/etc/apt")
OS_RELEASE = Path("/etc/os-release")
_USUAL = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "djjobs-tests"
# Processes that tests start find it too, though they may have a HOME of their own.
CACHE = Path(os.environ.setdefault("DJJOBS_TEST_CACHE", str(_USUAL))) / "mysql"
#: By distribution: the suites to look in where the installed one has no MySQL.
NEWER_SUITES = {"debian": ["sid"], "ubuntu": ["devel"]}
#: What packages of the server are called; the first that there is.
PACKAGES = ["mysql-server-core", "mysql-server-core-8.4", "mysql-server-core-8.0"]
#: Needed by scripts beside the server, not by the server.
NOT_NEEDED = ("perl", "libperl")


class CannotGet(Exception):
    """There is no MySQL to be had in this way. The message says why."""


@dataclass(frozen=True)
class Source:
    """One place that apt takes packages from."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: str = ""

    def with_suite(self, suite: str) -> Source:
        return Source(self.uri, suite, self.components, self.options)

    def line(self) -> str:
        return f"deb {self.options and f'[{self.options}] '}{self.uri} {self.suite} {' '.join(self.components)}\n"


def found() -> str | None:
    """The script that starts the server, if it is there already."""
    script = CACHE / "mysqld"
    return str(script) if script.exists() else None


def get() -> str:
    """Get the server unless it is there already; return the script that starts it."""
    for command in ("apt-get", "dpkg-deb"):
        if not shutil.which(command):
            raise CannotGet(f"there is no {command} on this machine")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with open(CACHE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return found() or _get()


def _get() -> str:
    began = time.monotonic()
    tried = []
    for source in candidates():
        say(f"MySQL: looking in the suite {source.suite} of this machine's own package source; this is done once")
        with Apt(source) as apt:
            package = apt.first_of(PACKAGES)
            if package is None:
                tried.append(source.suite)
                continue
            say(f"MySQL: getting {package} and its libraries into {CACHE}")
            unpack(apt.download(package))
        size = sum(path.stat().st_size for path in CACHE.rglob("*") if path.is_file() and not path.is_symlink())
        say(f"MySQL: unpacked {size / 1e6:.0f} MB in {time.monotonic() - began:.0f} s")
        return str(CACHE / "mysqld")
    raise CannotGet(f"none of {', '.join(PACKAGES)} is in {' or '.join(tried) or 'any source that apt knows'}")


# -- where packages come from --------------------------------------------------------------------------------------


def candidates() -> list[Source]:
    """The distribution's own source: as it is, and with a newer suite."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', OS_RELEASE.read_text(), re.MULTILINE))
    codename = release.get("VERSION_CODENAME", "")
    own = [source for source in sources() if source.suite in (codename, *NEWER_SUITES.get(release.get("ID", ""), []))]
    if not own:
        raise CannotGet(f"apt knows no source of packages for the suite {codename or '(unnamed)'}")
    first = own[0]
    newer = [suite for suite in NEWER_SUITES.get(release.get("ID", ""), []) if suite != first.suite]
    return [first, *(first.with_suite(suite) for suite in newer)]


def sources() -> list[Source]:
    """What apt is told about where packages come from, in both of its ways to write that."""
    files = [APT / "sources.list", *sorted((APT / "sources.list.d").glob("*"))]
    found = []
    for file in files:
        if file.exists() and file.suffix in (".list", ".sources"):
            read = _lines if file.suffix == ".list" else _paragraphs
            found += read(file.read_text())
    return found


def _lines(text: str) -> Iterator[Source]:
    """`deb [options] URI suite component ...`"""
    for match in re.finditer(r"^deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#\n]+)", text, re.MULTILINE):
        options, uri, suite, components = match.groups()
        yield Source(uri, suite, tuple(components.split()), (options or "").strip())


def _paragraphs(text: str) -> Iterator[Source]:
    """`Name: value` in paragraphs, several values to a name."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = re.findall(r"^([\w-]+):(.*\n?(?:[ \t].*\n?)*)", paragraph, re.MULTILINE)
        fields = {name.lower(): value.split() for name, value in pairs}
        if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
            continue
        signed = fields.get("signed-by", [])
        # A key may also be written into the file itself; apt's usual keys have to do then.
        options = f"signed-by={','.join(signed)}" if signed and all(key.startswith("/") for key in signed) else ""
        for uri in fields.get("uris", []):
            for suite in fields.get("suites", []):
                yield Source(uri, suite, tuple(fields.get("components", [])), options)


# -- getting them --------------------------------------------------------------------------------------------------


class Apt:
    """apt with one source and with folders of its own, as if nothing were installed. Use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._folder = CACHE.with_suffix(".apt")
        where = {
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": self._folder,
            "Dir::State::lists": self._folder / "lists",
            "Dir::State::status": self._folder / "status",
            "Dir::Cache": self._folder,
            "Dir::Cache::archives": self._folder / "archives",
            "Dir::Log": self._folder,
            # the folder belongs to whoever runs this
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        self._options = [word for name, value in where.items() for word in ("-o", f"{name}={value}")]

    def __enter__(self) -> Apt:
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("lists/partial", "archives/partial"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "status").touch()
        (self._folder / "sources.list").write_text(self._source.line())
        self._run("apt-get", "-qq", "update")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def first_of(self, packages: list[str]) -> str | None:
        known = self._run("apt-cache", "--names-only", "search", "mysql-server-core").splitlines()
        names = {line.split(" ")[0] for line in known}
        return next((package for package in packages if package in names), None)

    def download(self, package: str) -> list[Path]:
        """Download a package and all that it depends on."""
        self._run("apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "install", package)
        return sorted((self._folder / "archives").glob("*.deb"))

    def _run(self, command: str, *words: str) -> str:
        done = subprocess.run([command, *self._options, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            what = f"{command} {' '.join(words)} failed for the suite {self._source.suite}"
            raise CannotGet(f"{what}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def unpack(packages: list[Path]) -> None:
    """Unpack these beside the cache folder, see that the server runs, and only then let it be found."""
    unfinished = CACHE.with_suffix(".unfinished")
    for folder in (unfinished, CACHE):
        shutil.rmtree(folder, ignore_errors=True)
    (unfinished / "root").mkdir(parents=True)
    for package in packages:
        if not package.name.startswith(NOT_NEEDED):
            subprocess.run(["dpkg-deb", "-x", str(package), str(unfinished / "root")], check=True)
    script = unfinished / "mysqld"
    script.write_text(_script(unfinished / "root"))
    script.chmod(0o755)
    asked = subprocess.run([str(script), "--no-defaults", "--version"], capture_output=True, text=True, check=False)
    if asked.returncode or "Ver " not in asked.stdout:
        raise CannotGet(f"the MySQL that was unpacked does not run: {asked.stderr.strip() or asked.stdout.strip()}")
    say(f"MySQL: it is {asked.stdout[asked.stdout.index('Ver ') :].strip()}")
    unfinished.rename(CACHE)


def _script(root: Path) -> str:
    """The folders in it are relative to the script, which is moved when all is well."""
    loader = next(path for path in root.rglob("ld-linux*.so*") if path.is_file() and not path.is_symlink())
    folders = [
        path for path in (root / "usr/lib" / loader.parent.name, root / "lib" / loader.parent.name) if path.is_dir()
    ]
    libraries = ":".join(f"$here/root/{path.relative_to(root)}" for path in folders)
    texts = "".join(
        f' --lc-messages-dir="$here/root/{path.parent.relative_to(root)}"'
        f' --character-sets-dir="$here/root/{path.relative_to(root)}"'
        for path in root.glob("usr/share/mysql*/charsets")
    )
    return f"""#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
# what says where the defaults are has to come first
case "${{1:-}}" in --no-defaults|--defaults-*) first=$1; shift ;; esac
exec "$here/root/{loader.relative_to(root)}" --library-path "{libraries}" "$here/root/usr/sbin/mysqld" \\
  ${{first:+"$first"}}{texts} "$@"
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(get())
    except CannotGet as reason:
        sys.exit(f"MySQL cannot be had here: {reason}")
