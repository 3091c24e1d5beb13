"""How much time a worker has: as asked, or what is left of its Slurm allocation."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

__all__ = ["deadline", "seconds_of"]


def deadline(walltime: float | None) -> float | None:
    """Until when to work, by this machine's clock; under Slurm until the end of the allocation."""
    if walltime is None:
        walltime = _left_of_allocation()
    return None if walltime is None else time.monotonic() + walltime


def _left_of_allocation() -> float | None:
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        return float(end) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return seconds_of(answer.stdout.strip())


def seconds_of(text: str) -> float | None:
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds; None if it is no time, as for UNLIMITED."""
    days, _, rest = text.rpartition("-")
    with contextlib.suppress(ValueError):
        parts = [int(part) for part in rest.split(":")]
        while len(parts) < 3:
            parts.insert(0, 0)
        hours, minutes, seconds = parts
        return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
    return None
