"""Runs: the jobs that one call of `schedule_jobs` put into the queue."""
