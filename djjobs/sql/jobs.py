"""The statements about jobs that no worker holds: change, count, clean up."""

from __future__ import annotations

from typing import ClassVar


class JobStatements:
    """What can be done to many rows of `~jobs` at once."""

    # -- changing jobs that are not running -------------------------------------------------------

    #: Make `{changes}` to the jobs of some statuses whose hash is among `{chosen}`, if `{also}` is true.
    change_chosen: ClassVar[str]
    #: The same for jobs whose hashes are known. No other row is locked.
    change_these = """
        UPDATE {jobs} AS job SET {changes}
        WHERE job.table_name = %(table)s AND job.key_hash IN %(hashes)s AND job.status IN %(statuses)s {also}"""

    put_back = """status = 'scheduled', timestamp = {now}, due_time = {due}, turn = {own_turn}, attempt = 0,
               worker_id = NULL"""
    #: The same, and move them to another run.
    put_back_in_run = put_back + ", run_id = %(run)s"

    #: How many of the chosen jobs each worker was asked to stop.
    asked_to_stop = """
        SELECT job.worker_id, {catalog}COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'reserved' AND job.cancel_request <> ''
        GROUP BY job.worker_id"""
    #: Whether some of the chosen jobs can still be cancelled.
    has_cancellable = """
        SELECT EXISTS (SELECT 1 FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
                       WHERE job.table_name = %(table)s {also}
                         AND (job.status = 'scheduled' OR (job.status = 'reserved' AND job.cancel_request = ''
                                                           AND job.worker_id IS NOT NULL)))"""
    #: How many of the chosen jobs have which status.
    statuses_of = """
        SELECT job.status, {catalog}COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s GROUP BY job.status"""
    #: A job that DataJoint 0.14 itself has reserved has no worker of ours. Nobody would act on a request there.
    has_worker = "AND job.worker_id IS NOT NULL"
    request_cancel = "cancel_request = CASE WHEN cancel_request = 'force' THEN 'force' ELSE %(how)s END"
    set_status = "status = '{status}', timestamp = {now}"

    # -- cleaning up --------------------------------------------------------------------------------

    #: The jobs of some statuses whose hash is not among `{living}`, and the time at which this was true. A plain SELECT
    #: sees the queue and the other tables in one state. A DELETE with the same subquery would, on MySQL, lock the
    #: target, wait for its workers, and then take a job that has just succeeded for an orphan.
    find_orphans = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job LEFT JOIN ({living}) AS living ON living.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s AND living.key_hash IS NULL {also}"""
    #: As `{also}`: only jobs of some age.
    created_before = "AND job.created_time < {now} - {seconds[age]}"
    #: As `{join_chosen}`: only the chosen jobs.
    join_chosen = "JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash"

    #: The finished jobs that are older than the retention, and whose result is there. Their keys need no job any more.
    find_expired = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s
          AND job.timestamp < {now} - {seconds[retention]}"""

    #: Errors that DataJoint 0.14 itself has recorded, for keys whose result is there. It counts no attempts.
    find_overtaken = """
        SELECT job.key_hash FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'error' AND job.attempt = 0"""

    #: Remove jobs that were found, unless they have changed since then.
    delete_orphans = """
        DELETE FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status IN %(statuses)s AND timestamp <= %(seen)s"""

    # -- looking ------------------------------------------------------------------------------------

    count_by_status = "SELECT table_name, status, {catalog}COUNT(*) FROM {jobs} GROUP BY table_name, status"
    #: The same of one table.
    count_of_table = "SELECT status, {catalog}COUNT(*) FROM {jobs} WHERE table_name = %(table)s GROUP BY status"

    #: Whether jobs wait for their next attempt.
    has_retries = """
        SELECT EXISTS (SELECT 1 FROM {jobs} AS job {join_chosen}
                       WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NULL
                         AND job.attempt > 0)"""
