"""A notebook's cells as a script: its tables live in `__main__`, where no other process can import them.

`python workloads/notebook.py SCHEMA` prints what populate returned.
"""

import json
import os
import sys

import datajoint as dj

import djjobs

schema = dj.Schema(sys.argv[1])


@schema
class Recording(dj.Lookup):
    definition = "recording : int"
    contents = [(n,) for n in range(6)]


class Flat(Exception):
    """Raised for a recording with nothing on it."""


@schema
class Spectrum(djjobs.JobsMixin, dj.Computed):
    definition = """
    -> Recording
    ---
    pid : int
    """

    def make(self, key):
        if key["recording"] == 3:
            raise Flat("nothing on it")
        self.insert1({**key, "pid": os.getpid()})


if __name__ == "__main__":
    result = Spectrum.populate(reserve_jobs=True, processes=2, suppress_errors=True, return_exception_objects=True)
    errors = [[key, type(error).__name__, str(error)] for key, error in result["error_list"]]
    print(json.dumps({"success_count": result["success_count"], "errors": errors, "parent": os.getpid()}))
