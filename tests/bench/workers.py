"""A pool of worker processes: started once, each with its own connection, and released together for every run.

Run as a script this is one worker: it reads orders from its input, one line each, and answers on its output.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["WorkerPool"]


class WorkerPool:
    """So many workers, to be used as a context manager."""

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._workers = [subprocess.Popen(command, **pipes) for _ in range(size)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            if kind:
                worker.terminate()
            worker.wait()

    def populate(self, count: int, database: str, side: str, **options: Any) -> tuple[int, float]:
        """Let `count` workers populate; return how many jobs they did, and the seconds until the last was done."""
        workers = self._workers[:count]
        for worker in workers:
            self._tell(worker, {"prepare": [database, side], "options": options})
        for worker in workers:
            self._hear(worker)
        started = time.time()
        for worker in workers:
            self._tell(worker, {"go": True})
        answers = [self._hear(worker) for worker in workers]
        return sum(answer["done"] for answer in answers), max(answer["end"] for answer in answers) - started

    def memory(self) -> float:
        """The most memory that the first worker ever had, in MB."""
        self._tell(self._workers[0], {"memory": True})
        return self._hear(self._workers[0])["memory"]

    @staticmethod
    def _tell(worker: subprocess.Popen[str], order: dict[str, Any]) -> None:
        print(json.dumps(order), file=worker.stdin, flush=True)

    @staticmethod
    def _hear(worker: subprocess.Popen[str]) -> dict[str, Any]:
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"A worker died with exit code {worker.wait()}; see above.")
        return json.loads(line)


def _serve(settings: dict[str, Any]) -> None:
    from pipeline import Pipeline, configure

    configure(settings)
    pipeline, options = None, {}
    for line in sys.stdin:
        order, answer = json.loads(line), {}
        if "prepare" in order:
            if pipeline is None or [pipeline.database, pipeline.side] != order["prepare"]:
                pipeline = Pipeline(*order["prepare"])
            options = order["options"]
        elif "go" in order:
            done = pipeline.populate(**options)
            answer = {"done": done, "end": time.time()}
        else:
            answer = {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
