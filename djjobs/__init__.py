"""djjobs turns DataJoint's `~jobs` table into a real job queue.

Add the mixin to a Computed or Imported table and populate it from the queue::

    @schema
    class Spectrum(djjobs.JobsMixin, dj.Computed):
        ...

    Spectrum.populate(reserve_jobs=True, order="random")
"""

from .dj.patches import patch_when_needed
from .errors import DjJobsError, JobCancelled, JobNotCancellable, JobTimeout, LeaseLost, RunTimeout
from .events.watch import flush_events, watch
from .log_lines import write_log_lines
from .queue.policy import exponential
from .queue.queue import jobs, workers
from .recurring.api import (
    add_schedule,
    firings,
    pause_schedule,
    remove_schedule,
    resume_schedule,
    run_schedule_now,
    schedules,
)
from .run.rows import runs
from .run.run import Run
from .settings import settings
from .table.adopt import adopt
from .table.legacy_calls import heed_legacy_calls, share_with_legacy_tables
from .table.migrate import migrate
from .table.mixin import Computed, Imported, JobsMixin
from .table.table_jobs import list_in_schemas
from .views.status import status
from .work.current_job import current_job

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


def __dir__() -> list[str]:
    """The public names, and those that Python gives every module; the submodules are nobody's to look at."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})


watch()
write_log_lines()
patch_when_needed(share_with_legacy_tables, list_in_schemas, heed_legacy_calls)
