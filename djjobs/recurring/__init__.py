"""Schedules: what is done to tables from time to time, and the scheduler that does it."""
