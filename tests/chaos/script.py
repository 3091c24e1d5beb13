"""A lab's own worker: it populates in a loop until it is told to stop."""

from __future__ import annotations

import logging
import random
import signal
import sys
import time

READY = "ready to populate"


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM between two populates"))
    try:
        from chaos.pipeline import Square, Twin

        print(READY, flush=True)
        while True:
            made = 0
            for table in (Square, Twin):
                results = table.populate(reserve_jobs=True, suppress_errors=True, order="random")
                made += results["success_count"]
                for key, message in results["error_list"]:
                    print(table.__name__, key, message, flush=True)
            if not made:
                time.sleep(random.uniform(0.2, 0.6))
    except SystemExit as stop:
        print(stop, flush=True)
        return 0


if __name__ == "__main__":
    sys.exit(main())
