"""Run the checks and the tests over both DataJoints and every engine. Needs nothing but Python and pip.

- `python3 tests/cells.py`: everything that tests/cell_table.py says. ENGINE= and DATAJOINT= (2 or 0) choose cells,
  ALL=1 runs every file in every cell, PYTEST_ARGS= goes to pytest
- `python3 tests/cells.py check`: lint, types, and the tests that need no server
- `python3 tests/cells.py lint`: lint and types alone
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

import cell_table

ROOT = Path(__file__).resolve().parents[1]
VENVS = Path(os.environ.get("DJJOBS_VENV") or ROOT / ".venv").resolve()
LOGS = ROOT / "build" / "test"
#: So many batches run side by side. Much of the time a test waits for something, so more than there are processors.
AT_ONCE = int(os.environ.get("CELLS_AT_ONCE") or (os.cpu_count() or 2) + 1)
#: About how many seconds of tests one batch has.
BATCH = 180
SLOWEST = 10
NO_SERVER = 3  # what tests/servers.py exits with

# name: extras of this project, DataJoint
ENVIRONMENTS = {
    "dj2": ("test,demo", "datajoint>=2.3,<2.4"),
    "dj0": ("test", "datajoint>=0.14,<0.15"),
    "lint": ("lint", "datajoint>=2.3,<2.4"),
}


@dataclass
class Batch:
    """Some files of a cell, which one process of pytest runs on a server of its own."""

    name: str
    python: str
    words: list[str]
    seconds: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def report(self) -> Path:
        return LOGS / f"{self.name}.xml"


@dataclass
class Cell:
    """One DataJoint on one engine, or what needs no server; and what came of it."""

    datajoint: str
    engine: str
    outcome: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    missing: bool = False
    batches: list[Batch] = field(default_factory=list)
    #: How long each test took, and where.
    times: list[tuple[float, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"dj{self.datajoint}-{self.engine}" if self.engine else "unit"


CELLS = [Cell(*name.removeprefix("dj").split("-")) for name in cell_table.CELLS]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    command, *arguments = sys.argv[1:] or ["test"]
    if command == "test":
        return test()
    if command == "check":
        return check()
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
        if cell.engine:
            get_server(cell)
    for cell in cells:
        if not cell.missing:
            cell.batches = batches_of(cell)
    run(cells)
    return summary(cells, clean)


def check() -> int:
    """What needs no server: at most a minute."""
    unit = Cell("2", "")
    clean = lint()
    unit.batches = batches_of(unit)
    run([unit])
    return summary([unit], clean)


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
    without_server = [word.startswith("tests/unit") for word in named()]
    if all(without_server) and not engine and not datajoint:
        cells.insert(0, Cell("2", ""))
    return cells[:1] if without_server and all(without_server) else cells


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


# -- batches ------------------------------------------------------------------------------------------------------


def arguments() -> list[str]:
    return shlex.split(os.environ.get("PYTEST_ARGS", ""))


def named() -> list[str]:
    """The tests that somebody has named; these and no others run, in every cell that was chosen."""
    return [word for word in arguments() if not word.startswith("-") and (ROOT / word.split("::")[0]).exists()]


def batches_of(cell: Cell) -> list[Batch]:
    everything = bool(os.environ.get("ALL"))
    if named():
        groups: list[list[str]] = [[]]
    elif not cell.engine:
        groups = [["unit"]]
    else:
        files = cell_table.files_of(cell.name, everything)
        groups = divided(files)
        left_out = len(cell_table.files_of(cell.name, True)) - len(files)
        if left_out:
            say(f"{cell.name}: {len(files)} files; {left_out} more with ALL=1, tests/README.md tells why")
    return [batch(cell, number, group) for number, group in enumerate(groups, 1)]


def divided(files: list[str]) -> list[list[str]]:
    """Groups that take about as long as each other; the files come with the longest first."""
    count = max(1, round(sum(map(cell_table.seconds_of, files)) / BATCH))
    groups: list[list[str]] = [[] for _ in range(count)]
    for name in files:
        min(groups, key=lambda group: sum(map(cell_table.seconds_of, group))).append(name)
    return [group for group in groups if group]


def batch(cell: Cell, number: int, files: list[str]) -> Batch:
    environment = {"DATAJOINT": cell.datajoint, "DJJOBS_TEST_TURNS": str(LOGS), "PYTHONUNBUFFERED": "1"}
    if cell.engine:
        environment["ENGINE"] = cell.engine
    words = [*(f"tests/{name}" for name in files), *arguments()]
    if not os.environ.get("ALL") and not named():
        words += [f"--deselect=tests/{name}" for name in cell_table.deselected(cell.name)]
    seconds = sum(map(cell_table.seconds_of, files))
    name = f"{cell.name}-{number}" if cell.engine else cell.name
    return Batch(name, python_of(f"dj{cell.datajoint}"), words, seconds, {**os.environ, **environment})


def run(cells: list[Cell]) -> None:
    """Run the batches of all cells, a few at a time, those that take longest first."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    waiting = sorted((batch for cell in cells for batch in cell.batches), key=lambda batch: -batch.seconds)
    running: list[Batch] = []
    began = reported = time.monotonic()
    try:
        while waiting or running:
            # from this thread: a parent-death signal is tied to the thread that starts the child
            while waiting and len(running) < AT_ONCE:
                running.append(begin(waiting.pop(0)))
            time.sleep(0.1)
            for batch in [batch for batch in running if batch.process and batch.process.poll() is not None]:
                running.remove(batch)
                finish(batch, next(cell for cell in cells if batch in cell.batches), time.monotonic() - began)
            if time.monotonic() - reported > 60:
                reported = time.monotonic()
                for batch in running:
                    say(f"{batch.name}: {' '.join(tail(batch.log, 1))}")
    finally:
        end(running)


def begin(batch: Batch) -> Batch:
    options = ["-o", f"cache_dir={LOGS / (batch.name + '.cache')}", f"--junitxml={batch.report}"]
    with open(batch.log, "wb") as log:
        batch.process = subprocess.Popen(
            [batch.python, "-m", "pytest", *options, *batch.words],
            cwd=ROOT,
            env=batch.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return batch


def finish(batch: Batch, cell: Cell, seconds: float) -> None:
    """Add what came of a batch to its cell."""
    assert batch.process
    failed = count(batch, cell)
    # 5: none of its tests is about this cell
    if batch.process.returncode not in (0, 5) and not failed:
        failed = 1  # pytest itself did not get through
        cell.failed += 1
    if failed:
        say("\n".join([f"---- {batch.log}", *tail(batch.log, 80), "----"]))
    cell.seconds = seconds
    cell.batches.remove(batch)
    if not cell.batches:
        tell(cell)


def count(batch: Batch, cell: Cell) -> int:
    """Count the tests of a batch; return how many have failed."""
    all_failed = 0
    if batch.report.exists():
        for suite in ElementTree.parse(batch.report).getroot().iter("testsuite"):
            tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            all_failed += failed
            cell.failed += failed
            cell.skipped += skipped
            cell.passed += tests - failed - skipped
            for case in suite.iter("testcase"):
                where = f"{cell.name} {case.get('classname', '').split('.')[-1]}::{case.get('name')}"
                cell.times.append((float(case.get("time", 0)), where))
    return all_failed


def tell(cell: Cell) -> None:
    seconds = sum(time for time, _ in cell.times)
    if cell.failed:
        how = f"failed ({cell.failed} of {cell.passed + cell.failed} tests"
    else:
        how = f"passed ({cell.passed} tests" + (f", {cell.skipped} skipped" if cell.skipped else "")
    cell.outcome = f"{how}, {seconds:.0f} s of tests, over after {cell.seconds:.0f} s)"
    say(f"{cell.name}: {cell.outcome}")


def end(batches: list[Batch]) -> None:
    """Interrupt what still runs, so that pytest tidies up; then insist."""
    running = [batch.process for batch in batches if batch.process]
    for how, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 5)):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, how)
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.1)


def summary(cells: list[Cell], clean: bool) -> int:
    """The slowest tests, the table and, alone on the last line, the numbers over all cells."""
    times = sorted((time for cell in cells for time in cell.times), reverse=True)
    say(f"\nThe {SLOWEST} slowest tests:")
    for seconds, where in times[:SLOWEST]:
        say(f"{seconds:6.1f} s  {where}")
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
