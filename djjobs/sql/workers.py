"""The statements about workers and their leases."""

from __future__ import annotations

from typing import ClassVar


class WorkerStatements:
    """What can be done to the rows of `~workers`, and to claims whose worker is dead.

    Each of these is a transaction by itself: a process that is suspended in the middle of one would keep a row
    locked that others have to write to show that they are alive.
    """

    enter_worker = """
        INSERT INTO {workers} (worker_id, {user}, host, pid, started, last_heartbeat, lease, state, slots, tables,
                               cluster_job)
        VALUES (%(worker)s, %(user)s, %(host)s, %(pid)s, {now}, {now}, %(lease)s, %(state)s, %(slots)s, %(tables)s,
                %(cluster_job)s) {or_skip[worker_id]}"""

    beat = """
        UPDATE {workers} SET last_heartbeat = {now}, lease = %(lease)s, state = %(state)s
        WHERE worker_id = %(worker)s"""

    leave = "DELETE FROM {workers} WHERE worker_id = %(worker)s"

    #: What the workers that are alive work on.
    tables_of_the_living = """
        SELECT tables FROM {workers} WHERE last_heartbeat >= {now} - {seconds_in[lease]}"""

    forget_workers = "DELETE FROM {workers} WHERE last_heartbeat < {now} - {seconds[interval]}"
    mark_dead = """
        UPDATE {workers} SET state = 'dead' WHERE state <> 'dead' AND last_heartbeat < {now} - {seconds_in[lease]}"""

    #: How often somebody has called for this worker's attention.
    calls_for = "SELECT calls FROM {workers} WHERE worker_id = %(worker)s"

    call_workers = "UPDATE {workers} SET calls = calls + 1 WHERE worker_id IN %(workers)s"

    cancel_requests = """
        SELECT key_hash, claim, cancel_request FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s AND cancel_request <> ''"""

    #: Claims whose worker has not been heard of for its lease, or has left without them.
    find_dead_claims = """
        SELECT job.table_name, job.key_hash, job.{key}, job.attempt, job.priority, job.worker_id, job.claim,
               job.host, job.pid
        FROM {jobs} AS job LEFT JOIN {workers} AS worker ON worker.worker_id = job.worker_id {join_chosen}
        WHERE job.table_name IN %(tables)s AND job.status = 'reserved' AND job.worker_id IS NOT NULL
          AND CASE WHEN worker.worker_id IS NULL THEN job.timestamp < {now} - {seconds[lease]}
                   ELSE worker.last_heartbeat < {now} - {seconds_in[worker.lease]} {surely} END"""

    #: The server may have been away when a worker was to be heard. This notes who was missed since it is back.
    miss_workers = """
        UPDATE {workers} SET missed = {now}
        WHERE last_heartbeat < {now} - {seconds_in[lease]} AND last_heartbeat < {now} - {seconds[uptime]}
          AND (missed IS NULL OR missed < {now} - {seconds[uptime]})"""
    #: The server was there all the time since the last heartbeat, or as long as a lease since the worker was missed.
    was_surely_missed = """
        AND (worker.last_heartbeat > {now} - {seconds[uptime]}
             OR worker.missed BETWEEN {now} - {seconds[uptime]} AND {now} - {seconds_in[worker.lease]})"""

    #: Whether a worker is still as dead as it looked.
    is_dead = "SELECT last_heartbeat < {now} - {seconds_in[lease]} FROM {workers} WHERE worker_id = %(worker)s"

    #: Seconds since the server was started.
    uptime: ClassVar[str]

    #: Wakes up idle workers, where the engine can.
    notify: ClassVar[str] = ""
    listen: ClassVar[str] = ""
