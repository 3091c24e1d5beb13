"""Whatever happens to a worker, its job comes back by itself, is committed once, and is not taken from the living.

16 workers and 2,000 jobs of mixed length on a server of their own, while processes are killed, suspended and stopped,
connections are cut, and the server is restarted and crashes. `make chaos` does more of it for longer; the seed that a
failure prints makes the same faults happen again.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from chaos.options import Options
from chaos.run import run


@pytest.mark.quiet
def test_nothing_is_lost_nor_done_twice_whatever_happens_to_workers(private_server: Any, tmp_path: Path) -> None:
    """By default with a new seed each time; CHAOS_SEED is for the one that failed."""
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    report = run(private_server, Options(seed, jobs=2000, seconds=20), tmp_path)
    print(report)
    again = f"CHAOS_SEED={seed} makes the same faults happen; the story and the workers' logs are in {tmp_path}"
    assert not report.complaints, f"{again}\n{report}"
