"""djjobs turns DataJoint's `~jobs` table into a real job queue.

Add the mixin to a Computed or Imported table and populate it from the queue::

    @schema
    class Spectrum(djjobs.JobsMixin, dj.Computed):
        ...

    Spectrum.populate(reserve_jobs=True, order="random")
"""

from .errors import DjJobsError, LeaseLost
from .mixin import Computed, Imported, JobsMixin
from .queue import jobs
from .run import Run
from .settings import settings

__all__ = [
    "Computed",
    "DjJobsError",
    "Imported",
    "JobsMixin",
    "LeaseLost",
    "Run",
    "jobs",
    "settings",
]
