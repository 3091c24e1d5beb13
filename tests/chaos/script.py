"""A lab's own worker: it populates in a loop until it is told to stop.

With the argument "slots" it meets poison in two processes of its own, with "tame" in this very process.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from typing import Any

READY = "ready to populate"


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM between two populates"))
    try:
        from chaos import pipeline, poison

        print(READY, flush=True)
        while True:
            made = _populate(pipeline.Square) + _populate(pipeline.Twin)
            if "slots" in arguments and len(pipeline.Poison.jobs.scheduled):
                made += _populate(pipeline.Poison, processes=2)
            if "tame" in arguments:
                made += _populate(pipeline.Poison, poison.condition(only_tame=True))
            if not made:
                # Nothing is left to do, as far as we know; whoever looks at the log sees that we have come so far.
                os.utime(1)
                time.sleep(random.uniform(0.2, 0.6))
    except SystemExit as stop:
        print(stop, flush=True)
        return 0


def _populate(table: Any, *restrictions: Any, **options: Any) -> int:
    """Populate a table; return how many jobs there were."""
    try:
        results = table.populate(*restrictions, reserve_jobs=True, suppress_errors=True, order="random", **options)
    except BaseException as raised:
        if isinstance(raised, Exception) or "SIGTERM" in str(raised):
            raise
        # What make() raised and DataJoint would not suppress either.
        print(f"{table.__name__} raised {type(raised).__name__}: {raised}", flush=True)
        return 1
    for key, message in results["error_list"]:
        print(table.__name__, key, str(message)[:1000], flush=True)
    return results["success_count"] + len(results["error_list"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
