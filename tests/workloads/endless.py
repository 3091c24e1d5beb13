"""A worker whose make() never ends by itself, for tests that end it.

`python -m workloads.endless SCHEMA LOG PROCESSES` records in the file LOG the number and the process of
each make() that has begun, and finally what populate raised and what came after.
"""

import os
import sys
import time
from pathlib import Path

import datajoint as dj

from workloads.squares import CallLog, squares


def main(database: str, path: str, processes: int) -> None:
    log = CallLog(Path(path))

    def make(self, key):
        log.record(key["n"], os.getpid())
        while True:
            time.sleep(60)

    Square = squares(dj.Schema(database), 0, make)
    try:
        Square.populate(reserve_jobs=True, processes=processes)
    except BaseException as error:
        log.record("raised", type(error).__name__)
        log.record("reserved", len(Square.jobs.reserved))
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
