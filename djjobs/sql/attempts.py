"""The statements about claimed jobs: their progress, and how an attempt ends."""

from __future__ import annotations


class AttemptStatements:
    """What a worker says of the jobs it has claimed.

    Each is guarded by the token of the claim, so that a claim that was taken away changes nothing.
    """

    _mine = """
        WHERE table_name = %(table)s AND key_hash = %(key_hash)s AND status = 'reserved'
          AND worker_id = %(worker)s AND claim = %(claim)s"""

    #: A job that somebody called off is not completed.
    _mine_and_wanted = _mine + " AND cancel_request = ''"

    complete = "DELETE FROM {jobs}" + _mine_and_wanted

    complete_and_keep = (
        """
        UPDATE {jobs} SET status = 'success', timestamp = {now}, run_duration = %(duration)s,
               run_metadata = %(metadata)s, error_message = '', error_stack = NULL, progress = NULL"""
        + _mine_and_wanted
    )

    claimed_key = "SELECT {key}, attempt, priority FROM {jobs}" + _mine

    #: What there is to know of a claimed job before its attempt ends; locked until then.
    look_at_claim = "SELECT attempt, attempts, cancel_request, {now} FROM {jobs}" + _mine + " FOR UPDATE"
    #: The same of a dead worker's job. A worker that is only asleep may hold its lock, on the way to a commit.
    look_at_dead_claim = look_at_claim + " SKIP LOCKED"

    _attempt_ended = """
        UPDATE {jobs} SET timestamp = {now}, attempt = attempt + 1, attempts = %(attempts)s, progress = NULL,
               error_message = %(message)s, error_stack = %(stack)s,
               run_duration = %(duration)s, run_metadata = %(metadata)s, """

    fail = _attempt_ended + "status = 'error'" + _mine

    #: A job waits out its time with no turn; without a wait it is the next in line.
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

    #: Give claimed jobs back unharmed; they keep their place in line.
    _given_back = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}, progress = NULL
        WHERE cancel_request = '' AND """
    #: Those that were called off meanwhile do not go back.
    _called_off = """
        UPDATE {jobs} SET status = 'cancelled', timestamp = {now}, progress = NULL, cancel_request = ''
        WHERE cancel_request <> '' AND """
    _these = """table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'reserved'
          AND worker_id = %(worker)s AND claim = %(claim)s"""
    _of_slot = "status = 'reserved' AND worker_id = %(worker)s AND claim BETWEEN %(first)s AND %(last)s"
    _these_of_slot = "table_name = %(table)s AND key_hash IN %(hashes)s AND " + _of_slot

    release = _given_back + _these, _called_off + _these
    #: What a slot has claimed, but for the job that it was working on. Not locked: on the way there the statement
    #: would wait for claims of others, which somebody who is suspended may keep locked.
    find_claims_of_slot = (
        "SELECT table_name, key_hash FROM {jobs} WHERE table_name IN %(tables)s AND key_hash <> %(but)s AND " + _of_slot
    )
    release_slot = _given_back + _these_of_slot, _called_off + _these_of_slot

    save_progress = "UPDATE {jobs} SET progress = %(progress)s" + _mine
