"""Run the checks and the tests over both DataJoints and every engine. Needs nothing but Python and pip.

- `python3 tests/cells.py`: everything; ENGINE= and DATAJOINT= (2 or 0) choose, PYTEST_ARGS= goes to pytest
- `python3 tests/cells.py lint`: the checks alone
- `python3 tests/cells.py format`: let ruff put things right
- `python3 tests/cells.py venv dj2`: make an environment, or find it unchanged (dj2, dj0, lint)
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENVS = Path(os.environ.get("DJJOBS_VENV") or ROOT / ".venv").resolve()
LOGS = ROOT / "build" / "test"
AT_ONCE = int(os.environ.get("CELLS_AT_ONCE") or 2)
NO_SERVER = 3  # what tests/servers.py exits with

# name: extras of this project, DataJoint
ENVIRONMENTS = {
    "dj2": ("test,demo", "datajoint>=2.3,<2.4"),
    "dj0": ("test", "datajoint>=0.14,<0.15"),
    "lint": ("lint", "datajoint>=2.3,<2.4"),
}


@dataclass
class Cell:
    """One DataJoint on one engine, and what came of it."""

    datajoint: str
    engine: str
    outcome: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    missing: bool = False
    started: float = field(default_factory=time.monotonic)
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"dj{self.datajoint}-{self.engine}"

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def report(self) -> Path:
        return LOGS / f"{self.name}.xml"


CELLS = [
    Cell("2", "postgresql"),
    Cell("2", "mysql"),
    Cell("2", "mariadb"),
    Cell("0", "mysql"),
    Cell("0", "mariadb"),
]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    command, *arguments = sys.argv[1:] or ["test"]
    if command == "test":
        return test()
    if command == "lint":
        return 0 if lint() else 1
    if command == "format":
        ruff = [python_of("lint"), "-m", "ruff"]
        subprocess.run([*ruff, "check", "--fix", "--quiet", "."], cwd=ROOT, check=False)
        return subprocess.run([*ruff, "format", "."], cwd=ROOT, check=False).returncode
    if command == "venv":
        for name in arguments:
            python_of(name)
        return 0
    give_up(__doc__ or "")


def test() -> int:
    cells = selected()
    clean = lint()
    for cell in cells:
        get_server(cell)
    run([cell for cell in cells if not cell.missing])
    return summary(cells, clean)


def selected() -> list[Cell]:
    engine, datajoint = os.environ.get("ENGINE"), os.environ.get("DATAJOINT")
    cells = [
        cell
        for cell in CELLS
        if (not engine or cell.engine == engine) and (not datajoint or cell.datajoint == datajoint)
    ]
    if not cells:
        give_up(f"No cell has ENGINE={engine or ''} DATAJOINT={datajoint or ''}: {names(CELLS)}")
    if os.environ.get("DJJOBS_TEST_HOST") and len({cell.engine for cell in cells}) > 1:
        give_up("DJJOBS_TEST_HOST is one server: say which with ENGINE=mysql, mariadb or postgresql")
    return cells


def get_server(cell: Cell) -> None:
    if os.environ.get("DJJOBS_TEST_HOST"):
        return
    command = [python_of(f"dj{cell.datajoint}"), "tests/servers.py", cell.engine]
    environment = {**os.environ, "DJ_IGNORE_CONFIG_FILE": "true"}
    asked = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode == NO_SERVER:
        cell.missing = True
        cell.outcome = f"no such server to be had: {asked.stdout.strip()}"
        say(f"{cell.name}: {cell.outcome}")


def lint() -> bool:
    python = python_of("lint")
    clean = True
    for check in ("ruff check", "ruff format --check", "mypy"):
        brief = ["--quiet", "--output-format=concise"] if check.startswith("ruff") else []
        failed = subprocess.run([python, "-m", *check.split(), *brief], cwd=ROOT, check=False).returncode
        say(f"{check}: {'failed' if failed else 'passed'}")
        clean = clean and not failed
    return clean


def run(cells: list[Cell]) -> None:
    """Run the cells, a few at a time."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    waiting, running = list(cells), []
    reported = time.monotonic()
    try:
        while waiting or running:
            # from this thread: a parent-death signal is tied to the thread that starts the child
            while waiting and len(running) < AT_ONCE:
                running.append(begin(waiting.pop(0)))
            time.sleep(0.2)
            for cell in [cell for cell in running if cell.process and cell.process.poll() is not None]:
                running.remove(cell)
                finish(cell)
            if time.monotonic() - reported > 60:
                reported = time.monotonic()
                for cell in running:
                    say(f"{cell.name}: {' '.join(tail(cell.log, 1))}")
    finally:
        end(running)


def begin(cell: Cell) -> Cell:
    python = python_of(f"dj{cell.datajoint}")
    options = ["-o", f"cache_dir={LOGS / (cell.name + '.cache')}", f"--junitxml={cell.report}"]
    environment = {
        **os.environ,
        "ENGINE": cell.engine,
        "DATAJOINT": cell.datajoint,
        "DJJOBS_TEST_TURNS": str(LOGS),
        "PYTHONUNBUFFERED": "1",
    }
    cell.started = time.monotonic()
    with open(cell.log, "wb") as log:
        cell.process = subprocess.Popen(
            [python, "-m", "pytest", *options, *shlex.split(os.environ.get("PYTEST_ARGS", ""))],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    say(f"{cell.name}: running, see {cell.log.relative_to(ROOT)}")
    return cell


def finish(cell: Cell) -> None:
    assert cell.process
    if cell.report.exists():
        for suite in ElementTree.parse(cell.report).getroot().iter("testsuite"):
            tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            cell.failed += failed
            cell.skipped += skipped
            cell.passed += tests - failed - skipped
    if cell.process.returncode and not cell.failed:
        cell.failed = 1  # pytest itself did not get through
    seconds = round(time.monotonic() - cell.started)
    if cell.failed:
        cell.outcome = f"failed ({cell.failed} of {cell.passed + cell.failed} tests, {seconds} s)"
        say("\n".join([f"---- {cell.log}", *tail(cell.log, 80), "----"]))
    else:
        skipped_too = f", {cell.skipped} skipped" if cell.skipped else ""
        cell.outcome = f"passed ({cell.passed} tests{skipped_too}, {seconds} s)"
    say(f"{cell.name}: {cell.outcome}")


def end(cells: list[Cell]) -> None:
    """Interrupt what still runs, so that pytest tidies up; then insist."""
    running = [cell.process for cell in cells if cell.process]
    for how, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 5)):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, how)
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.1)


def summary(cells: list[Cell], clean: bool) -> int:
    """The table and, alone on the last line, the numbers over all cells."""
    say("")
    say(f"{'lint':16} {'passed' if clean else 'failed'}")
    for cell in cells:
        say(f"{cell.name:16} {cell.outcome}")
    missing = sum(cell.missing for cell in cells)
    failed = sum(cell.failed for cell in cells) + (not clean)
    if os.environ.get("CI") == "true":
        failed += missing
    passed, skipped = sum(cell.passed for cell in cells), sum(cell.skipped for cell in cells)
    say(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def python_of(name: str) -> str:
    """The interpreter of an environment, which is made anew when what it is made of has changed."""
    if name not in ENVIRONMENTS:
        give_up(f"No such environment: {name}. There are: {', '.join(ENVIRONMENTS)}")
    extras, datajoint = ENVIRONMENTS[name]
    folder = VENVS / name
    python, stamp = folder / "bin" / "python", folder / "stamp"
    parts = [(ROOT / "setup.cfg").read_text(), str(ROOT), extras, datajoint, sys.version]
    wanted = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    VENVS.mkdir(parents=True, exist_ok=True)
    with open(VENVS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.exists() and stamp.exists() and stamp.read_text() == wanted):
            say(f"{name}: installing {datajoint} and djjobs[{extras}] into {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            pip = new_venv(folder)
            install = [*pip, "install", "-qq", "--disable-pip-version-check", "-e", f"{ROOT}[{extras}]"]
            if subprocess.run([*install, datajoint], check=False).returncode:
                give_up(f"{name}: pip could not install the above")
            stamp.write_text(wanted)
    return str(python)


def new_venv(folder: Path) -> list[str]:
    """Make an environment; the result is how to run pip for it."""
    python = str(folder / "bin" / "python")
    # Debian keeps ensurepip in a package of its own
    if not importlib.util.find_spec("ensurepip"):
        if importlib.util.find_spec("pip"):
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            return [sys.executable, "-m", "pip", "--python", python]
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            give_up("Python has neither pip nor ensurepip here. As root: apt-get install python3-venv")
        subprocess.run(["apt-get", "-qq", "update"], check=False)
        subprocess.run(["apt-get", "-qq", "-y", "install", "python3-venv"], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return [python, "-m", "pip"]


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def tail(path: Path, lines: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-lines:]


def names(cells: list[Cell]) -> str:
    return ", ".join(cell.name for cell in cells)


def say(text: str) -> None:
    print(text, flush=True)


def give_up(text: str) -> NoReturn:
    sys.exit(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
