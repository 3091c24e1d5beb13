"""The statements of users who do a worker's work themselves."""

from __future__ import annotations


class ByHandStatements:
    """What a user does to single jobs. A job that is reserved so has no worker; one that a worker has is left to it."""

    _by_hand = "WHERE table_name = %(table)s AND key_hash = %(key_hash)s AND "
    _no_workers = "(status <> 'reserved' OR worker_id IS NULL)"

    reserve_by_hand = (
        """
        UPDATE {jobs} SET status = 'reserved', worker_id = NULL, {user} = %(user)s, host = %(host)s, pid = %(pid)s,
               connection_id = %(connection_id)s, timestamp = {now}, run_metadata = %(metadata)s """
        + _by_hand
        + "status = 'scheduled' AND due_time <= {now}"
    )
    complete_by_hand = "DELETE FROM {jobs} " + _by_hand + _no_workers
    keep_by_hand = (
        """
        UPDATE {jobs} SET status = 'success', timestamp = {now}, run_duration = %(duration)s, error_message = '',
               error_stack = NULL """
        + _by_hand
        + _no_workers
    )
    fail_by_hand = (
        "UPDATE {jobs} SET status = 'error', timestamp = {now}, error_message = %(message)s, error_stack = %(stack)s "
        + _by_hand
        + _no_workers
    )
    delete_by_hand = """
        DELETE FROM {jobs} WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = %(status)s"""

    #: Take jobs away from workers that have had them for too long.
    release_older = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}, progress = NULL,
               priority = COALESCE(%(priority)s, priority), turn = COALESCE(%(priority)s, priority)
        WHERE table_name = %(table)s AND status = 'reserved' AND timestamp < {now} - {seconds[age]}"""
