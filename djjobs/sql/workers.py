"""The statements about workers and their leases."""

from __future__ import annotations

from typing import ClassVar


class WorkerStatements:
    """What can be done to the rows of `~workers`, and to claims whose worker is dead.

    Each statement is a transaction by itself. In a longer one, a suspended process would keep rows locked that others
    must change to show that they are alive.
    """

    enter_worker = """
        INSERT INTO {workers} (worker_id, {user}, host, pid, started, last_heartbeat, lease, state, slots, tables,
                               cluster_job)
        VALUES (%(worker)s, %(user)s, %(host)s, %(pid)s, {now}, {now}, %(lease)s, %(state)s, %(slots)s, %(tables)s,
                %(cluster_job)s) {or_skip[worker_id]}"""

    heartbeat = """
        UPDATE {workers} SET last_heartbeat = {now}, lease = %(lease)s, state = %(state)s
        WHERE worker_id = %(worker)s"""

    leave = "DELETE FROM {workers} WHERE worker_id = %(worker)s"

    #: The tables that living workers work on.
    tables_of_living = """
        SELECT tables FROM {workers} WHERE last_heartbeat >= {now} - {seconds_in[lease]}"""

    forget_workers = "DELETE FROM {workers} WHERE last_heartbeat < {now} - {seconds[interval]}"
    mark_dead = """
        UPDATE {workers} SET state = 'dead' WHERE state <> 'dead' AND last_heartbeat < {now} - {seconds_in[lease]}"""

    #: How often somebody has asked this worker to look for requests.
    calls_for = "SELECT calls FROM {workers} WHERE worker_id = %(worker)s"

    call_workers = "UPDATE {workers} SET calls = calls + 1 WHERE worker_id IN %(workers)s"

    cancel_requests = """
        SELECT key_hash, claim, cancel_request FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s AND cancel_request <> ''"""

    #: What a worker has claimed, as far as the table knows. A table has few reserved jobs, and their index finds them.
    own_claims = """
        SELECT table_name, key_hash, claim FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s"""

    #: Claims whose worker has sent no heartbeat for its lease, or is gone.
    find_dead_claims = """
        SELECT job.table_name, job.key_hash, job.{key}, job.attempt, job.priority, job.worker_id, job.claim,
               job.host, job.pid
        FROM {jobs} AS job LEFT JOIN {workers} AS worker ON worker.worker_id = job.worker_id {join_chosen}
        WHERE job.table_name IN %(tables)s AND job.status = 'reserved' AND job.worker_id IS NOT NULL
          AND CASE WHEN worker.worker_id IS NULL THEN job.timestamp < {now} - {seconds[lease]}
                   ELSE worker.last_heartbeat < {now} - {seconds_in[worker.lease]} {surely} END"""

    #: If the server was away, workers could not send heartbeats. This notes who has sent none since the server is back.
    note_missing = """
        UPDATE {workers} SET missed = {now}
        WHERE last_heartbeat < {now} - {seconds_in[lease]} AND last_heartbeat < {now} - {seconds[uptime]}
          AND (missed IS NULL OR missed < {now} - {seconds[uptime]})"""
    #: As `{surely}`: the server was there all the time since the last heartbeat, or for a lease since the worker was
    #: noted as missing.
    surely_missing = """
        AND (worker.last_heartbeat > {now} - {seconds[uptime]}
             OR worker.missed BETWEEN {now} - {seconds[uptime]} AND {now} - {seconds_in[worker.lease]})"""

    #: Whether a worker has still sent no heartbeat for its lease.
    is_dead = "SELECT last_heartbeat < {now} - {seconds_in[lease]} FROM {workers} WHERE worker_id = %(worker)s"

    #: Seconds since the server was started.
    uptime: ClassVar[str]

    #: Notify idle workers, and listen for that. Empty if the engine has no such thing.
    notify: ClassVar[str] = ""
    listen: ClassVar[str] = ""
