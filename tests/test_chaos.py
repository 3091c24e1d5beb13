"""Whatever happens to a worker or to its server, jobs come back by themselves, are committed once, and are not taken
from the living.

16 workers and 2,000 jobs of mixed length on a server of their own, while processes are killed, suspended and stopped,
connections are cut, some make() do what no make() should, and the server crashes or is restarted, has a spell (it is
read-only, locked, stalled, or full), and has its clock set. A run here has a sample of what can happen to the server,
by the seed; `make chaos` does all of it, for longer. The seed that a failure prints makes the same faults happen again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from chaos.options import Options
from chaos.run import run, start_server


@pytest.fixture
def own_server(engine: str) -> Iterator[Any]:
    try:
        server = start_server(engine)
    except servers.NoServer as missing:
        pytest.skip(f"needs a server of its own: {missing}")
    with server:
        yield server


@pytest.mark.quiet
def test_nothing_is_lost_nor_done_twice_whatever_happens_to_workers(own_server: Any, tmp_path: Path) -> None:
    """By default with a new seed each time; CHAOS_SEED is for the one that failed."""
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    report = run(own_server, Options(seed, jobs=2000, seconds=16), tmp_path)
    print(report)
    again = f"CHAOS_SEED={seed} makes the same faults happen; the story and the workers' logs are in {tmp_path}"
    assert not report.complaints, f"{again}\n{report}"
