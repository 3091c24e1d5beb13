"""djjobs turns DataJoint's `~jobs` table into a real job queue.

Add the mixin to a Computed or Imported table and populate it from the queue::

    @schema
    class Spectrum(djjobs.JobsMixin, dj.Computed):
        ...

    Spectrum.populate(reserve_jobs=True, order="random")
"""

from .errors import DjJobsError, LeaseLost
from .migrate import migrate, share_with_legacy_tables
from .mixin import Computed, Imported, JobsMixin
from .pipeline import adopt
from .queue import jobs
from .run import Run
from .settings import settings
from .status import status

__all__ = [
    "Computed",
    "DjJobsError",
    "Imported",
    "JobsMixin",
    "LeaseLost",
    "Run",
    "adopt",
    "jobs",
    "migrate",
    "settings",
    "status",
]

share_with_legacy_tables()
