"""The statements about jobs that nobody works on: changing, looking, cleaning up."""

from __future__ import annotations

from typing import ClassVar


class JobStatements:
    """What can be done to many rows of `~jobs` at once."""

    # -- changing jobs that are not running -------------------------------------------------------

    #: `{changes}` to those jobs of some statuses whose key is among `{chosen}`, if `{also}` holds.
    change_chosen: ClassVar[str]
    #: The same to jobs that are known by their hashes: no other is locked on the way there.
    change_these = """
        UPDATE {jobs} AS job SET {changes}
        WHERE job.table_name = %(table)s AND job.key_hash IN %(hashes)s AND job.status IN %(statuses)s {also}"""

    put_back = """status = 'scheduled', timestamp = {now}, due_time = {due}, turn = {own_turn}, attempt = 0,
               worker_id = NULL"""
    #: The same into another run.
    put_back_in_run = put_back + ", run_id = %(run)s"

    #: How many of the chosen jobs each worker was asked to stop, and the chosen jobs by status.
    asked_to_stop = """
        SELECT job.worker_id, COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'reserved' AND job.cancel_request <> ''
        GROUP BY job.worker_id"""
    #: Whether some of them can still be called off.
    has_uncalled = """
        SELECT EXISTS (SELECT 1 FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
                       WHERE job.table_name = %(table)s {also}
                         AND (job.status = 'scheduled' OR (job.status = 'reserved' AND job.cancel_request = ''
                                                           AND job.worker_id IS NOT NULL)))"""
    statuses_of = """
        SELECT job.status, COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s GROUP BY job.status"""
    #: DataJoint 0.14 itself would not heed it.
    has_worker = "AND job.worker_id IS NOT NULL"
    request_cancel = "cancel_request = CASE WHEN cancel_request = 'force' THEN 'force' ELSE %(how)s END"
    set_status = "status = '{status}', timestamp = {now}"

    # -- cleaning up --------------------------------------------------------------------------------

    #: The jobs of some statuses whose key is not among `{living}`, and the moment this was true. A plain SELECT
    #: sees the jobs and the tables they are about in one state; a DELETE with this subquery would, on MySQL, lock
    #: the target, wait for its workers, and take a job that succeeds meanwhile for orphaned.
    find_orphans = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job LEFT JOIN ({living}) AS living ON living.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s AND living.key_hash IS NULL {also}"""
    #: As `{also}`: those that have been there for a while.
    created_before = "AND job.created_time < {now} - {seconds[age]}"
    join_chosen = "JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash"

    #: The finished jobs that are older than the retention and whose result is there: no key comes back without them.
    find_expired = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s
          AND job.timestamp < {now} - {seconds[retention]}"""

    #: Errors that DataJoint 0.14 itself has recorded, which counts no attempts, and whose result is there.
    find_overtaken = """
        SELECT job.key_hash FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'error' AND job.attempt = 0"""

    #: Remove them, unless they have changed since.
    delete_orphans = """
        DELETE FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status IN %(statuses)s AND timestamp <= %(seen)s"""

    # -- looking ------------------------------------------------------------------------------------

    count_by_status = "SELECT table_name, status, COUNT(*) FROM {jobs} GROUP BY table_name, status"
    #: The same of one table.
    count_of_table = "SELECT status, COUNT(*) FROM {jobs} WHERE table_name = %(table)s GROUP BY status"

    #: Whether jobs wait for their next try; `{join_chosen}` keeps to those of a restriction.
    has_retries = """
        SELECT EXISTS (SELECT 1 FROM {jobs} AS job {join_chosen}
                       WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NULL
                         AND job.attempt > 0)"""
