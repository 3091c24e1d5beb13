"""djjobs turns DataJoint's `~jobs` table into a real job queue.

Add the mixin to a Computed or Imported table and populate it from the queue::

    @schema
    class Spectrum(djjobs.JobsMixin, dj.Computed):
        ...

    Spectrum.populate(reserve_jobs=True, order="random")
"""

from .errors import DjJobsError, JobCancelled, JobNotCancellable, JobTimeout, LeaseLost, RunTimeout
from .events import flush_events, watch
from .legacy_calls import heed_legacy_calls
from .migrate import migrate, share_with_legacy_tables
from .mixin import Computed, Imported, JobsMixin
from .pipeline import adopt
from .policy import exponential
from .queue import jobs, workers
from .run import Run
from .run_rows import runs
from .running import current_job
from .schedules import (
    add_schedule,
    firings,
    pause_schedule,
    remove_schedule,
    resume_schedule,
    run_schedule_now,
    schedules,
)
from .settings import settings
from .status import status
from .views import list_in_schemas

__all__ = [
    "Computed",
    "DjJobsError",
    "Imported",
    "JobCancelled",
    "JobNotCancellable",
    "JobTimeout",
    "JobsMixin",
    "LeaseLost",
    "Run",
    "RunTimeout",
    "add_schedule",
    "adopt",
    "current_job",
    "exponential",
    "firings",
    "flush_events",
    "jobs",
    "migrate",
    "pause_schedule",
    "remove_schedule",
    "resume_schedule",
    "run_schedule_now",
    "runs",
    "schedules",
    "settings",
    "status",
    "workers",
]

share_with_legacy_tables()
list_in_schemas()
heed_legacy_calls()
watch()
