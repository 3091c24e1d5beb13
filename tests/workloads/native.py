"""DataJoint's own worker: `python -m workloads.native SCHEMA reserve` populates Square as a lab without djjobs would.

Without `reserve` it does so with no regard to jobs.
"""

from __future__ import annotations

import sys
from typing import Any

import datajoint as dj

schema = dj.Schema(sys.argv[1], create_schema=False, create_tables=False)


@schema
class Number(dj.Manual):
    definition = "n : int"


@schema
class Square(dj.Computed):
    definition = """
    -> Number
    ---
    square : bigint
    """

    def make(self, key: dict[str, Any]) -> None:
        self.insert1({**key, "square": key["n"] ** 2})


if __name__ == "__main__":
    Square.populate(reserve_jobs=sys.argv[2] == "reserve")
    assert "djjobs" not in sys.modules
