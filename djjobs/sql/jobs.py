"""The statements about jobs: from scheduling to cleaning up."""

from __future__ import annotations

from typing import ClassVar


class JobStatements:
    """What can be done to the rows of `~jobs`."""

    # -- scheduling ------------------------------------------------------------------------------

    #: Insert every key of key_source that is neither in the target nor in the queue. The moment a
    #: job is due also gives its place in line, so each row is due a microsecond after the last.
    #: The last ORDER BY has all keys found before the first is inserted: PostgreSQL might else search the growing
    #: queue for each of them.
    schedule_new = """
        INSERT {hint}INTO {jobs} (table_name, key_hash, status, {key}, {user}, host, pid, connection_id,
                            timestamp, priority, turn, due_time, created_time, run_id, automatic)
        SELECT %(table)s, {hash}, {status}, {json}, %(user)s, %(host)s, %(pid)s, %(connection_id)s,
               {now}, %(priority)s, {turn}, {due} + {microseconds}, {now}, %(run)s, %(automatic)s
        FROM {new_keys}
        ORDER BY {hash}
        {or_skip_queued}"""

    #: The keys that are neither in the target nor, by their hash, in the queue. Each hash is computed once, not anew
    #: wherever it is used.
    new_by_hash = """
             (SELECT {hash} AS _hash, source.*{numbered} FROM ({source}) AS source
              WHERE NOT EXISTS (SELECT 1 FROM {target} AS target WHERE {same_key})
              {computed_once}) AS todo
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE {queued_here} AND queued.key_hash = todo._hash {one_by_one})"""

    #: Take the right to schedule this scope of a table; the row count says who got it.
    begin_scheduling = """
        UPDATE {control} SET scheduling_until = {now} + {mark}, scheduling_by = %(worker)s
        WHERE table_name = %(table)s AND scope = %(scope)s
          AND (%(interval)s = 0
               OR ((scheduling_until IS NULL OR scheduling_until <= {now})
                   AND (last_scheduled IS NULL OR last_scheduled <= {now} - {interval})))"""

    end_scheduling = """
        UPDATE {control} SET scheduling_until = NULL, scheduling_by = NULL, last_scheduled = {now}
        WHERE table_name = %(table)s AND scope = %(scope)s AND scheduling_by = %(worker)s"""

    forget_scope = """
        DELETE FROM {control}
        WHERE table_name = %(table)s AND scope = %(scope)s AND scheduling_by = %(worker)s AND last_scheduled IS NULL"""

    abandon_scheduling = """
        UPDATE {control} SET scheduling_until = NULL, scheduling_by = NULL
        WHERE table_name = %(table)s AND scope = %(scope)s AND scheduling_by = %(worker)s"""

    add_scope = """
        INSERT INTO {control} (table_name, scope) VALUES (%(table)s, %(scope)s) {or_skip[table_name]}"""

    #: Whether a scheduling of this scope runs now or is younger than the interval; no row if it is unknown.
    is_scheduled = """
        SELECT COALESCE(scheduling_until > {now}, FALSE) OR COALESCE(last_scheduled > {now} - {interval}, FALSE)
        FROM {control} WHERE table_name = %(table)s AND scope = %(scope)s"""

    is_scheduling = """
        SELECT EXISTS (SELECT 1 FROM {control} WHERE table_name = %(table)s AND scheduling_until > {now})"""

    forget_scopes = """
        DELETE FROM {control}
        WHERE table_name = %(table)s AND scope <> '' AND last_scheduled < {now} - {interval}
          AND scheduling_until IS NULL"""

    #: The next scheduling of a table, or of all tables, need not wait for the interval to pass.
    forget_scheduling = "UPDATE {control} SET last_scheduled = NULL WHERE table_name = %(table)s"
    forget_all_schedulings = "UPDATE {control} SET last_scheduled = NULL"

    #: A row of the control table says whether there may be such jobs: to look for them takes as long as they are many.
    may_be_automatic = "SELECT 1 FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"
    note_automatic = """
        INSERT INTO {control} (table_name, scope) VALUES (%(table)s, 'automatic') {or_skip[table_name]}"""
    forget_automatic = "DELETE FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"

    #: The jobs that events put there and that nobody has asked for.
    find_automatic = """
        SELECT job.key_hash FROM {jobs} AS job {use_order_index} {join_chosen}
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.automatic = 1"""
    #: Those of them that nobody has begun or is just claiming, and their runs; locked, so that both stay so.
    lock_automatic = """
        SELECT key_hash, run_id FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled' AND automatic = 1
          AND attempt = 0
        FOR UPDATE SKIP LOCKED"""
    #: They become part of a run that somebody asked for, and get what was asked for.
    take_along = "run_id = %(run)s, priority = %(priority)s, automatic = 0, turn = {turn}{due}"

    # -- claiming --------------------------------------------------------------------------------

    #: The first turn after `floor` that has jobs, and whether the first waiting job has become due.
    next_turn = """
        SELECT (SELECT MIN(turn) FROM {jobs}
                WHERE table_name = %(table)s AND status = 'scheduled' AND turn > %(floor)s {only}),
               (SELECT due_time <= {now} FROM {jobs} {use_order_index}
                WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NULL
                ORDER BY {due_first} LIMIT 1)"""

    pick_due = """
        SELECT key_hash FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NULL AND due_time <= {now}
        ORDER BY {due_first} LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Put jobs that have become due into line; a retry goes before all new work.
    line_up = """
        UPDATE {jobs} SET turn = priority - CASE WHEN attempt > 0 THEN 1000 ELSE 0 END
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled'"""

    #: Lock the first jobs of a turn in the order of the index; no sort, so only these are locked.
    pick_in_order = """
        SELECT key_hash, {key}, attempt, priority, run_id FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn = %(turn)s {asked_for}
        ORDER BY due_time {direction} LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Jobs of a turn among the next few rows from a random place on: hashes are uniform, so no job is favoured. It
    #: looks at `window` rows at most, since the rest of the table may be of other turns or long done.
    find_near = """
        SELECT near.key_hash
        FROM (SELECT key_hash, status, turn, automatic FROM {jobs} {use_primary}
              WHERE table_name = %(table)s AND key_hash >= %(start)s
              ORDER BY key_hash LIMIT %(window)s) AS near
        WHERE near.status = 'scheduled' AND near.turn = %(turn)s {asked_for} LIMIT %(count)s"""
    #: As `{asked_for}`: no job that only an event has put there.
    not_automatic = "AND {job}automatic = 0"

    pick_these = """
        SELECT key_hash, {key}, attempt, priority, run_id FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled' AND turn IS NOT NULL
        LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: A page of the scheduled jobs that a restriction chooses; not locked, so sorting does no harm.
    find_chosen = """
        SELECT job.key_hash FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NOT NULL {only}
        ORDER BY job.turn, {order} LIMIT %(count)s"""

    reserve = """
        UPDATE {jobs} SET status = 'reserved', worker_id = %(worker)s, claim = %(claim)s, {user} = %(user)s,
               host = %(host)s, pid = %(pid)s, connection_id = %(connection_id)s, timestamp = {now}{versioned}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled'"""
    #: As `{versioned}`, where the version of the code is to be seen while it runs.
    with_version = ", run_metadata = %(metadata)s"

    release_claim = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}
        WHERE table_name = %(table)s AND status = 'reserved' AND worker_id = %(worker)s AND claim = %(claim)s"""

    # -- finishing: each is guarded by the token, so a claim that was taken away changes nothing ----

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
        + """status = 'scheduled', worker_id = NULL, due_time = {now} + {wait},
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

    #: Take jobs away from workers that have had them for too long.
    release_older = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}, progress = NULL,
               priority = COALESCE(%(priority)s, priority), turn = COALESCE(%(priority)s, priority)
        WHERE table_name = %(table)s AND status = 'reserved' AND timestamp < {now} - {interval}"""

    save_progress = "UPDATE {jobs} SET progress = %(progress)s" + _mine

    # -- by hand: a job that is reserved so has no worker, and one that a worker has is left to it ---

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

    # -- changing jobs that are not running -------------------------------------------------------

    #: `{changes}` to those jobs of some statuses whose key is among `{chosen}`, if `{also}` holds.
    change_chosen: ClassVar[str]
    #: The same to jobs that are known by their hashes: no other is locked on the way there.
    change_these = """
        UPDATE {jobs} AS job SET {changes}
        WHERE job.table_name = %(table)s AND job.key_hash IN %(hashes)s AND job.status IN %(statuses)s {also}"""

    put_back = """status = 'scheduled', timestamp = {now}, due_time = {due}, turn = {turn}, attempt = 0,
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
        WHERE job.table_name = %(table)s AND job.status IN {statuses} AND living.key_hash IS NULL {also}"""
    #: As `{also}`: those that have been there for a while.
    created_before = "AND job.created_time < {now} - {age}"
    join_chosen = "JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash"

    #: The finished jobs that are older than the retention and whose result is there: no key comes back without them.
    find_expired = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN {statuses} AND job.timestamp < {now} - {retention}"""

    #: Errors that DataJoint 0.14 itself has recorded, which counts no attempts, and whose result is there.
    find_overtaken = """
        SELECT job.key_hash FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'error' AND job.attempt = 0"""

    #: Remove them, unless they have changed since.
    delete_orphans = """
        DELETE FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status IN {statuses} AND timestamp <= %(seen)s"""

    # -- looking ------------------------------------------------------------------------------------

    count_by_status = """
        SELECT table_name, status, COUNT(*) FROM {jobs} {where} GROUP BY table_name, status"""

    #: Whether jobs wait for their next try; `{join_chosen}` keeps to those of a restriction.
    has_retries = """
        SELECT EXISTS (SELECT 1 FROM {jobs} AS job {join_chosen}
                       WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NULL
                         AND job.attempt > 0)"""

    count_scheduled = """
        SELECT COUNT(*) FROM {jobs}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NOT NULL {only}"""

    count_chosen = """
        SELECT COUNT(*) FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NOT NULL {only}"""
