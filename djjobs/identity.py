"""Who this process is to the queue: a fresh worker id for every process, and claim numbers that only grow."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
import uuid
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import datajoint as dj

__all__ = ["next_claim", "run_metadata", "worker_id"]


@cache
def _identity(pid: int) -> tuple[str, itertools.count[int]]:
    return str(uuid.uuid4()), itertools.count(1)


def worker_id() -> str:
    """This process's id. A forked child gets one of its own."""
    return _identity(os.getpid())[0]


def next_claim() -> int:
    """The next claim's number."""
    return next(_identity(os.getpid())[1])


@lru_cache(maxsize=1)
def _djjobs_version() -> str:
    try:
        return version("djjobs")
    except PackageNotFoundError:
        return "unknown"


@cache
def _code_version(folder: str) -> str | None:
    """The commit that the folder is at, if git knows it."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def run_metadata(table: Any) -> dict[str, Any]:
    """The version of the table's code, and versions and machine around it, as kept with a job."""
    source = getattr(sys.modules.get(type(table).__module__), "__file__", None)
    folder = os.path.dirname(os.path.abspath(source)) if source else os.getcwd()
    cluster = {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID") if name in os.environ}
    return {
        "code_version": _code_version(folder),
        "python": platform.python_version(),
        "datajoint": dj.__version__,
        "djjobs": _djjobs_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        **cluster,
    }
