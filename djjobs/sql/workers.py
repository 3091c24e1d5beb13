"""The statements about workers and their leases."""

from __future__ import annotations

from typing import ClassVar


class WorkerStatements:
    """What can be done to the rows of `~workers`, and to claims whose worker is dead.

    Each statement is a transaction by itself. In a longer one, a suspended process would keep rows locked that others
    must change to show that they are alive.
    """

    enter_worker = """
        INSERT INTO {workers} (worker_id, {user}, host, pid, started, last_heartbeat, beats, lease, state, slots,
                               tables, cluster_job)
        VALUES (%(worker)s, %(user)s, %(host)s, %(pid)s, {clock}, {clock}, 1, %(lease)s, %(state)s, %(slots)s,
                %(tables)s, %(cluster_job)s) {or_skip[worker_id]}"""

    #: The time at which it is written, also if the statement had to wait.
    heartbeat: ClassVar[str] = """
        UPDATE {workers} SET last_heartbeat = {clock}, beats = beats + 1, lease = %(lease)s, state = %(state)s
        WHERE worker_id = %(worker)s"""

    leave = "DELETE FROM {workers} WHERE worker_id = %(worker)s"

    #: The dead are remembered for some time. No other worker is removed by its times: a clock may have jumped.
    forget_workers = "DELETE FROM {workers} WHERE state = 'dead' AND last_heartbeat < {now} - {seconds[interval]}"
    forget_sightings = "DELETE FROM {sightings} WHERE last_seen < {now} - {seconds[interval]}"

    #: How often somebody has asked this worker to look for requests.
    calls_for = "SELECT calls FROM {workers} WHERE worker_id = %(worker)s"

    call_workers = "UPDATE {workers} SET calls = calls + 1 WHERE worker_id IN %(workers)s"

    cancel_requests = """
        SELECT key_hash, claim, cancel_request FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s AND cancel_request <> ''"""

    # -- who is dead ----------------------------------------------------------------------------------------------

    #: All workers in the list. `beats` and `last_heartbeat` are only ever compared with what they were before.
    signs_of_life = "SELECT worker_id, beats, last_heartbeat, lease, state FROM {workers}"
    #: The same of one worker.
    sign_of_life = "SELECT beats, last_heartbeat FROM {workers} WHERE worker_id = %(worker)s"
    #: Who has jobs reserved, or finishes a run.
    holders = """
        SELECT worker_id FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id IS NOT NULL
        UNION
        SELECT finish_worker FROM {runs}
        WHERE table_name IN %(tables)s AND ended_time IS NULL AND finish_worker IS NOT NULL"""
    #: Which of some workers have a row that nobody keeps locked. The locks are gone with the statement.
    unlocked = "SELECT worker_id FROM {workers} WHERE worker_id IN %(workers)s FOR UPDATE SKIP LOCKED"
    #: It changes no row, and waits or fails where a heartbeat would.
    try_to_write = "UPDATE {workers} SET calls = calls WHERE worker_id = ''"

    #: What a worker has claimed, as far as the table knows. A table has few reserved jobs, and their index finds them.
    own_claims = """
        SELECT table_name, key_hash, claim FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s"""

    find_claims = """
        SELECT job.table_name, job.key_hash, job.{key}, job.attempt, job.priority, job.worker_id, job.claim,
               job.host, job.pid
        FROM {jobs} AS job {join_chosen}
        WHERE job.table_name IN %(tables)s AND job.status = 'reserved' AND job.worker_id IN %(workers)s"""

    mark_dead = """
        UPDATE {workers} SET state = 'dead'
        WHERE worker_id = %(worker)s AND beats = %(beats)s AND state <> 'dead'"""

    #: What the processes of a machine have seen of the workers.
    sightings = "SELECT seen FROM {sightings} WHERE boot = %(boot)s"
    note_sightings = "UPDATE {sightings} SET seen = %(seen)s, last_seen = {clock} WHERE boot = %(boot)s"
    enter_sightings = """
        INSERT INTO {sightings} (boot, seen, last_seen) VALUES (%(boot)s, %(seen)s, {clock}) {or_skip[boot]}"""

    #: Notify idle workers, and listen for that. Empty if the engine has no such thing.
    notify: ClassVar[str] = ""
    listen: ClassVar[str] = ""
