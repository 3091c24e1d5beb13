"""The statements about claimed jobs: their progress, and how an attempt ends."""

from __future__ import annotations


class AttemptStatements:
    """What a worker does to the jobs that it has claimed.

    The token of the claim guards each statement: if the claim was taken away, nothing changes.
    """

    _mine = """
        WHERE table_name = %(table)s AND key_hash = %(key_hash)s AND status = 'reserved'
          AND worker_id = %(worker)s AND claim = %(claim)s"""

    #: A job that somebody has cancelled is not completed.
    _mine_and_wanted = _mine + " AND cancel_request = ''"

    complete = "DELETE FROM {jobs}" + _mine_and_wanted

    complete_and_keep = (
        """
        UPDATE {jobs} SET status = 'success', timestamp = {now}, run_duration = %(duration)s,
               run_metadata = %(metadata)s, error_message = '', error_stack = NULL, progress = NULL"""
        + _mine_and_wanted
    )

    claimed_key = "SELECT {key}, attempt, priority FROM {jobs}" + _mine

    #: What must be known of a claimed job before its attempt ends. The row stays locked until then.
    look_at_claim = "SELECT attempt, attempts, cancel_request, {now} FROM {jobs}" + _mine + " FOR UPDATE"
    #: The same for the job of a dead worker. If the worker is only asleep, it may hold the lock of the row, on the way
    #: to a commit. Then the job is left alone.
    look_at_dead_claim = look_at_claim + " SKIP LOCKED"

    _attempt_ended = """
        UPDATE {jobs} SET timestamp = {now}, attempt = attempt + 1, attempts = %(attempts)s, progress = NULL,
               error_message = %(message)s, error_stack = %(stack)s,
               run_duration = %(duration)s, run_metadata = %(metadata)s, """

    fail = _attempt_ended + "status = 'error'" + _mine

    #: A job that has to wait gets no turn. A job without a wait gets a turn before all new jobs.
    try_again = (
        _attempt_ended
        + """status = 'scheduled', worker_id = NULL, due_time = {now} + {seconds[wait]},
               turn = CASE WHEN %(wait)s > 0 THEN NULL ELSE priority - 1000 END"""
        + _mine
    )

    cancel_claimed = (
        """
        UPDATE {jobs} SET status = 'cancelled', timestamp = {now}, cancel_request = '', progress = NULL"""
        + _mine
    )

    #: Give claimed jobs back as they were. They keep their turn.
    _given_back = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}, progress = NULL
        WHERE cancel_request = '' AND """
    #: Jobs that were cancelled meanwhile do not go back.
    _cancelled = """
        UPDATE {jobs} SET status = 'cancelled', timestamp = {now}, progress = NULL, cancel_request = ''
        WHERE cancel_request <> '' AND """
    _these = """table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'reserved'
          AND worker_id = %(worker)s AND claim = %(claim)s"""
    _of_slot = "status = 'reserved' AND worker_id = %(worker)s AND claim BETWEEN %(first)s AND %(last)s"
    _these_of_slot = "table_name = %(table)s AND key_hash IN %(hashes)s AND " + _of_slot

    release = _given_back + _these, _cancelled + _these
    #: What a slot has claimed, except the job that it was working on. Nothing is locked: a statement that locks would
    #: also wait for the claims of others, and a suspended process may keep these locked for long.
    find_claims_of_slot = (
        "SELECT table_name, key_hash FROM {jobs} WHERE table_name IN %(tables)s AND key_hash <> %(but)s AND " + _of_slot
    )
    release_slot = _given_back + _these_of_slot, _cancelled + _these_of_slot

    save_progress = "UPDATE {jobs} SET progress = %(progress)s" + _mine
