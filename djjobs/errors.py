"""What can go wrong, in words that name the table and say what to do next."""

from __future__ import annotations

from datajoint.errors import DataJointError

__all__ = ["DjJobsError", "JobCancelled", "JobNotCancellable", "JobTimeout", "LeaseLost", "RunTimeout"]


class DjJobsError(DataJointError):
    """The base of all errors raised by djjobs; a DataJointError, so existing handlers catch it."""


class LeaseLost(DjJobsError):
    """The job was given to another worker meanwhile; nothing of this attempt was committed."""


class JobCancelled(DjJobsError):
    """Somebody called this job off. Raised inside make() at its next safe point; nothing is committed."""


class JobTimeout(DjJobsError):
    """make() took longer than the table's `timeout`. Raised inside make()."""


class JobNotCancellable(DjJobsError):
    """The job is over, so there is nothing to cancel."""


class RunTimeout(DjJobsError):
    """A run is not over yet, and nobody was to wait for it any longer."""
