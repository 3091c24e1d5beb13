"""Who this process is to the queue: a fresh worker id for every process, and claim numbers that only grow."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import uuid
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import datajoint as dj

from ..dj.compat import datajoint_api

__all__ = [
    "Claimant",
    "all_claims",
    "claims_of",
    "cluster_job",
    "process_id",
    "run_metadata",
    "slot_of",
    "version_metadata",
]

#: So many claims a slot can make before it would use the numbers of the next one.
_CLAIMS_OF_A_SLOT = 2**40


class Claimant:
    """Who claims jobs: a worker, with an id that no other ever has, and claim numbers that only grow.

    The slots of a worker claim in its name, each with numbers of its own.
    """

    def __init__(self, worker_id: str | None = None, slot: int = 0) -> None:
        self.worker_id = worker_id or str(uuid.uuid4())
        self.slot = slot
        #: The number that the next claim will have.
        self.upcoming = slot * _CLAIMS_OF_A_SLOT + 1

    def next_claim(self) -> int:
        number, self.upcoming = self.upcoming, self.upcoming + 1
        return number

    def for_slot(self, slot: int) -> Claimant:
        """The same worker's slot, by a number that was not used before."""
        return Claimant(self.worker_id, slot)


def claims_of(slot: int) -> tuple[int, int]:
    """The first and the last number that a slot's claims can have."""
    return slot * _CLAIMS_OF_A_SLOT + 1, (slot + 1) * _CLAIMS_OF_A_SLOT


def all_claims() -> tuple[int, int]:
    """The first and the last number that any claim can have."""
    return 0, 2**63 - 1


def slot_of(claim: int) -> int:
    """The number of the slot that made a claim."""
    return (claim - 1) // _CLAIMS_OF_A_SLOT


@cache
def _process_id(pid: int) -> str:
    return str(uuid.uuid4())


def process_id() -> str:
    """This process's id. A forked child gets one of its own."""
    return _process_id(os.getpid())


def cluster_job() -> str:
    """The cluster's number for the job that this process runs in; empty outside a cluster."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


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


@cache
def _job_version(method: str, folder: str) -> str:
    return datajoint_api.job_version()


def version_metadata(table: Any) -> dict[str, str]:
    """The version of the code as DataJoint 2's ``dj.config.jobs.version_method`` tells it; empty without one."""
    method = datajoint_api.version_method(table.connection)
    # Asked for once: a process goes on with the code that it began with.
    version = _job_version(method, os.getcwd()) if method else ""
    return {"version": version} if version else {}


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
        **version_metadata(table),
    }
