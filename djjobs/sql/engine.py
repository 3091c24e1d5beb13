"""The named statements of the queue, and what an engine must say for itself.

A statement is a template: `{jobs}`, `{control}`, `{workers}` and `{runs}` are the queue's tables, `{now}` the server's
UTC time, `{key}` and `{user}` columns whose names need quotes; `%(...)s` are parameters.
"""

from __future__ import annotations

import datetime
import numbers
import re
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar

#: Texts that every server and DataJoint itself read as they are written, and dates and times to the second.
_PLAIN = re.compile(r"(?!\s)[^'\"`\\%\x00-\x1f]*(?<!\s)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DATETIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


class Engine(ABC):
    """One database engine: its statements, its JSON and hash expressions, its kinds of error."""

    now: ClassVar[str]
    key: ClassVar[str]
    user: ClassVar[str]
    #: Begins a transaction whose locking reads lock only the rows they return.
    begin: ClassVar[tuple[str, ...]]
    #: Run once after `~jobs` was declared: what a DataJoint definition cannot say.
    after_declare: ClassVar[str]
    #: Run once after another table was declared, so that its texts can be of any language and differ by every letter.
    any_language: ClassVar[str] = ""
    #: How text columns are declared: those that hold no text of any language, and the others.
    ascii: ClassVar[str] = ""
    unicode: ClassVar[str] = ""
    use_order_index: ClassVar[str] = ""
    use_primary: ClassVar[str] = ""
    #: Which jobs of the queue keys are compared with: one by one, and all at once.
    these_queued: ClassVar[str] = "queued.table_name = %(table)s"
    all_queued: ClassVar[str] = these_queued
    #: Ends a subquery that is to be asked anew for each of a few rows, whatever the engine thinks of its table.
    one_by_one: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    #: Where the keys get their places in line: all of them, inside, or only those that are new, outside.
    numbered: ClassVar[str] = ""
    place: ClassVar[str] = "ROW_NUMBER() OVER (ORDER BY {order})"
    #: The order of waiting jobs, said so that the engine finds it in the index.
    due_first: ClassVar[str] = "due_time"

    own_connection_id: ClassVar[str]
    #: Whether the user may write the queue, where a user who may not does not even see what DataJoint looks for.
    may_write: ClassVar[str] = ""
    #: Whether the driver keeps signals waiting while it waits for the server.
    defers_signals: ClassVar[bool] = False

    # -- scheduling ------------------------------------------------------------------------------

    #: Insert every key of key_source that is neither in the target nor in the queue. The moment a
    #: job is due also gives its place in line, so each row is due a microsecond after the last.
    #: The LIMIT keeps each hash from being computed anew wherever it is used. The last ORDER BY has all keys
    #: found before the first is inserted: PostgreSQL might else search the growing queue for each of them.
    schedule_new = """
        INSERT {hint}INTO {jobs} (table_name, key_hash, status, {key}, {user}, host, pid, connection_id,
                            timestamp, priority, turn, due_time, created_time, run_id)
        SELECT %(table)s, todo._hash, {status}, {json}, %(user)s, %(host)s, %(pid)s, %(connection_id)s,
               {now}, %(priority)s, {turn}, {due} + {microseconds}, {now}, %(run)s
        FROM (SELECT {hash} AS _hash, source.*{numbered} FROM ({source}) AS source
              WHERE NOT EXISTS (SELECT 1 FROM {target} AS target WHERE {same_key})
              LIMIT 9223372036854775807) AS todo
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE {queued_here} AND queued.key_hash = todo._hash {one_by_one})
        ORDER BY todo._hash
        {or_skip}"""

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
        INSERT INTO {control} (table_name, scope) VALUES (%(table)s, %(scope)s) {or_skip}"""

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
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn = %(turn)s
        ORDER BY due_time {direction} LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Jobs of a turn among the next few rows from a random place on: hashes are uniform, so no job is favoured. It
    #: looks at `window` rows at most, since the rest of the table may be of other turns or long done.
    find_near = """
        SELECT near.key_hash
        FROM (SELECT key_hash, status, turn FROM {jobs} {use_primary}
              WHERE table_name = %(table)s AND key_hash >= %(start)s
              ORDER BY key_hash LIMIT %(window)s) AS near
        WHERE near.status = 'scheduled' AND near.turn = %(turn)s LIMIT %(count)s"""

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
               host = %(host)s, pid = %(pid)s, connection_id = %(connection_id)s, timestamp = {now}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled'"""

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
    #: All claims of one slot, but for the job that it was working on.
    _of_slot = """table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s
          AND claim BETWEEN %(first)s AND %(last)s AND key_hash <> %(but)s"""

    release = _given_back + _these, _called_off + _these
    release_slot = _given_back + _of_slot, _called_off + _of_slot

    #: Take jobs away from workers that have had them for too long.
    release_older = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}, turn = priority
        WHERE table_name = %(table)s AND status = 'reserved' AND timestamp < {now} - {interval}"""

    # -- changing jobs that are not running -------------------------------------------------------

    #: `{changes}` to those jobs of some statuses whose key is among `{chosen}`, if `{also}` holds.
    change_chosen: ClassVar[str]

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

    # -- runs ------------------------------------------------------------------------------------------

    add_run = """
        INSERT INTO {runs} (run_id, table_name, name, restriction, {user}, host, pid, created, due_time, total, finish,
                            ended_time)
        VALUES (%(run)s, %(table)s, %(name)s, %(restriction)s, %(user)s, %(host)s, %(pid)s, {now}, {due}, %(total)s,
                %(finish)s, CASE WHEN %(total)s = 0 THEN {now} END)"""

    total_of_run = "SELECT total FROM {runs} WHERE run_id = %(run)s"

    #: The runs that chosen jobs of some statuses are about to leave, and how many leave each.
    count_leaving = """
        SELECT job.run_id, COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s AND job.run_id IS NOT NULL
        GROUP BY job.run_id"""
    shrink_run = "UPDATE {runs} SET total = total - %(count)s WHERE run_id = %(run)s"

    #: Chosen jobs of some statuses are put back: their runs go on.
    reopen_runs = """
        UPDATE {runs} SET retry_time = {now}, cancel_time = NULL, ended_time = NULL
        WHERE run_id IN (SELECT job.run_id
                         FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
                         WHERE job.table_name = %(table)s AND job.status IN %(statuses)s AND job.run_id IS NOT NULL)"""

    find_run = """
        SELECT run_id, table_name, name, restriction, {user}, host, pid, created, due_time, total, cancel_time,
               retry_time, ended_time, {details}, {results}, error, prepared_time, finish
        FROM {runs} WHERE run_id {which}"""

    #: The jobs of runs that are still there, by status, and whether any has used up an attempt.
    count_in_runs = """
        SELECT run_id, status, COUNT(*), MAX(attempt) FROM {jobs} WHERE run_id {which} GROUP BY run_id, status"""

    #: As `{which}`: one run, or those of a query.
    this_run = "= %(run)s"
    these_runs = "IN (SELECT run_id FROM ({query}) AS chosen)"

    jobs_of_run = "SELECT DISTINCT key_hash FROM {jobs} WHERE run_id = %(run)s"
    still_in_run = "AND job.run_id = %(run)s"

    #: One is enough: PostgreSQL would collect them all for an EXISTS, or without an order read all jobs there are.
    _an_open_job = """(SELECT 1 FROM {jobs} AS job
                       WHERE job.run_id = run.run_id AND job.status IN ('scheduled', 'reserved')
                       ORDER BY job.run_id, job.status LIMIT 1)"""

    #: Call a run off, unless it is over or called off already.
    cancel_run = f"""
        UPDATE {{runs}} AS run SET cancel_time = {{now}}
        WHERE run.run_id = %(run)s AND run.cancel_time IS NULL AND {_an_open_job} IS NOT NULL"""

    # A mark says who calls a hook. It is taken with the run's row locked by a statement of its own: the next one then
    # sees everything that whoever had the lock before has done, whatever the engine makes of a wait within one.
    lock_preparing = """
        SELECT prepared_time, prepare_worker, prepare_claim, prepare_job FROM {runs}
        WHERE run_id = %(run)s FOR UPDATE"""

    #: The mark to prepare a run lives as long as the job in whose name it was set is reserved by that claim.
    take_preparing = """
        UPDATE {runs} AS run SET prepare_worker = %(worker)s, prepare_claim = %(claim)s, prepare_job = %(key_hash)s
        WHERE run.run_id = %(run)s AND run.prepared_time IS NULL
          AND NOT EXISTS (SELECT 1 FROM {jobs} AS job
                          WHERE job.run_id = run.run_id AND job.status = 'reserved'
                            AND job.key_hash = run.prepare_job AND job.worker_id = run.prepare_worker
                            AND job.claim = run.prepare_claim)"""

    end_preparing = """
        UPDATE {runs} SET details = %(details)s, prepared_time = {now}
        WHERE run_id = %(run)s AND prepared_time IS NULL AND prepare_worker = %(worker)s
          AND prepare_claim = %(claim)s AND prepare_job = %(key_hash)s"""

    #: Over, and nobody has taken note of it; the mark to finish a run lives as long as its worker is heard of.
    _over = f"""run.ended_time IS NULL AND {_an_open_job} IS NULL
          AND (run.finish = 0
               OR COALESCE((SELECT worker.last_heartbeat < {{now}} - {{own_lease}} FROM {{workers}} AS worker
                            WHERE worker.worker_id = run.finish_worker),
                           run.finish_since < {{now}} - {{lease}}, TRUE))"""

    find_over = f"""
        SELECT run.run_id, run.finish, CASE WHEN run.finish_worker IS NULL THEN 0 ELSE 1 END FROM {{runs}} AS run
        WHERE {{which}} AND {_over} ORDER BY run.created"""
    of_runs = "run.run_id IN %(runs)s"
    of_table = "run.table_name = %(table)s"

    end_run = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}
        WHERE run.run_id = %(run)s AND run.finish = 0 AND run.ended_time IS NULL AND {_an_open_job} IS NULL"""

    lock_finishing = """
        SELECT finish_worker, finish_claim, finish_tries FROM {runs}
        WHERE run_id = %(run)s AND finish = 1 FOR UPDATE"""

    take_finishing = f"""
        UPDATE {{runs}} AS run SET finish_worker = %(worker)s, finish_claim = %(claim)s, finish_since = {{now}},
               finish_tries = run.finish_tries + 1
        WHERE run.run_id = %(run)s AND run.finish = 1 AND {_over}"""

    _no_mark = "finish_worker = NULL, finish_claim = NULL, finish_since = NULL"
    _finished_by_me = """
        WHERE run_id = %(run)s AND finish = 1 AND finish_worker = %(worker)s AND finish_claim = %(claim)s"""

    end_finishing = (
        f"UPDATE {{runs}} SET finish = 0, ended_time = {{now}}, results = %(results)s, error = '', {_no_mark}"
        + _finished_by_me
    )
    #: After too many tries the run ends with the error.
    fail_finishing = (
        f"""
        UPDATE {{runs}} SET finish = CASE WHEN finish_tries >= %(most)s THEN 0 ELSE 1 END,
               ended_time = CASE WHEN finish_tries >= %(most)s THEN {{now}} END, error = %(message)s, {_no_mark}"""
        + _finished_by_me
    )
    give_back_finishing = f"UPDATE {{runs}} SET finish_tries = finish_tries - 1, {_no_mark}" + _finished_by_me

    #: A slot has died: the runs that it was finishing are for others to finish.
    release_finishing = f"""
        UPDATE {{runs}} SET {_no_mark}
        WHERE table_name IN %(tables)s AND ended_time IS NULL AND finish_worker = %(worker)s
          AND finish_claim BETWEEN %(first)s AND %(last)s"""

    #: Runs of a table that are over, for whoever cleans up to take note of; `{finish}`: those that nobody will finish.
    end_runs = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}, finish = 0
        WHERE run.table_name = %(table)s AND run.ended_time IS NULL AND run.finish <= %(finish)s
          AND {_an_open_job} IS NULL"""

    #: Runs that ended long ago and that no job needs any more.
    find_expired_runs = """
        SELECT run.run_id FROM {runs} AS run
        WHERE run.table_name = %(table)s AND run.ended_time < {now} - {retention}
          AND NOT EXISTS (SELECT 1 FROM {jobs} AS job WHERE job.run_id = run.run_id)"""
    delete_runs = "DELETE FROM {runs} WHERE run_id IN %(runs)s AND ended_time IS NOT NULL"

    # -- workers and their leases ---------------------------------------------------------------------
    #
    # Each of these is a transaction by itself: a process that is suspended in the middle of one would keep a row
    # locked that others have to write to show that they are alive.

    enter_worker = """
        INSERT INTO {workers} (worker_id, {user}, host, pid, started, last_heartbeat, lease, state, slots, tables,
                               cluster_job)
        VALUES (%(worker)s, %(user)s, %(host)s, %(pid)s, {now}, {now}, %(lease)s, %(state)s, %(slots)s, %(tables)s,
                %(cluster_job)s) {or_skip_worker}"""

    beat = """
        UPDATE {workers} SET last_heartbeat = {now}, lease = %(lease)s, state = %(state)s
        WHERE worker_id = %(worker)s"""

    leave = "DELETE FROM {workers} WHERE worker_id = %(worker)s"

    #: What the workers that are alive work on.
    tables_of_the_living = """
        SELECT tables FROM {workers} WHERE last_heartbeat >= {now} - {own_lease}"""

    forget_workers = "DELETE FROM {workers} WHERE last_heartbeat < {now} - {interval}"
    bury_workers = """
        UPDATE {workers} SET state = 'dead' WHERE state <> 'dead' AND last_heartbeat < {now} - {own_lease}"""

    #: How often somebody has called for this worker's attention.
    calls_for = "SELECT calls FROM {workers} WHERE worker_id = %(worker)s"

    call_workers = "UPDATE {workers} SET calls = calls + 1 WHERE worker_id IN %(workers)s"

    cancel_requests = """
        SELECT key_hash, claim, cancel_request FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'reserved' AND worker_id = %(worker)s AND cancel_request <> ''"""

    save_progress = "UPDATE {jobs} SET progress = %(progress)s" + _mine

    #: Claims whose worker has not been heard of for its lease, or has left without them.
    find_dead_claims = """
        SELECT job.table_name, job.key_hash, job.{key}, job.attempt, job.priority, job.worker_id, job.claim,
               job.host, job.pid
        FROM {jobs} AS job LEFT JOIN {workers} AS worker ON worker.worker_id = job.worker_id {join_chosen}
        WHERE job.table_name IN %(tables)s AND job.status = 'reserved' AND job.worker_id IS NOT NULL
          AND CASE WHEN worker.worker_id IS NULL THEN job.timestamp < {now} - {lease}
                   ELSE worker.last_heartbeat < {now} - {own_lease} {surely} END"""

    #: The server may have been away when a worker was to be heard. This notes who was missed since it is back.
    miss_workers = """
        UPDATE {workers} SET missed = {now}
        WHERE last_heartbeat < {now} - {own_lease} AND last_heartbeat < {now} - {uptime}
          AND (missed IS NULL OR missed < {now} - {uptime})"""
    #: The server was there all the time since the last heartbeat, or as long as a lease since the worker was missed.
    was_surely_missed = """
        AND (worker.last_heartbeat > {now} - {uptime}
             OR worker.missed BETWEEN {now} - {uptime} AND {now} - {own_lease})"""

    #: Whether a worker is still as dead as it looked.
    is_dead = "SELECT last_heartbeat < {now} - {own_lease} FROM {workers} WHERE worker_id = %(worker)s"

    #: Seconds since the server was started.
    uptime: ClassVar[str]

    #: Wakes up idle workers, where the engine can.
    notify: ClassVar[str] = ""
    listen: ClassVar[str] = ""

    # -- schedules and their firings -------------------------------------------------------------------
    #
    # Each of these is a transaction by itself, too: a scheduler that is suspended keeps nothing locked that the next
    # leader needs. What a scheduler does for a schedule is guarded by its leadership, in the same statement.

    server_time = "SELECT {now}"

    _leading = """EXISTS (SELECT 1 FROM {leader}
                       WHERE role = 'scheduler' AND leader = %(leader)s AND expires > {now})"""

    add_leader = "INSERT INTO {leader} (role, expires) VALUES ('scheduler', {now}) {or_skip_leader}"

    #: Lead, or go on leading; the row count says whether. `since` first: MySQL sets one column after the other.
    lead = """
        UPDATE {leader} SET since = CASE WHEN leader = %(leader)s THEN since ELSE {now} END, leader = %(leader)s,
               {user} = %(user)s, host = %(host)s, pid = %(pid)s, expires = {now} + {expiry}
        WHERE role = 'scheduler' AND (leader = %(leader)s OR expires <= {now})"""

    resign = "UPDATE {leader} SET expires = {now} WHERE role = 'scheduler' AND leader = %(leader)s AND expires > {now}"

    #: Who leads, until when, and what time it is; no row if nobody is known to be alive.
    living_leader = "SELECT host, pid, expires, {now} FROM {leader} WHERE role = 'scheduler' AND expires > {now}"

    add_schedule = """
        INSERT INTO {schedules} (name, target, what, every, cron, timezone, created_by, created, next_time)
        VALUES (%(name)s, %(target)s, %(what)s, %(every)s, %(cron)s, %(timezone)s, %(user)s, {now}, %(next)s)
        {or_skip_schedule}"""

    remove_schedule = "DELETE FROM {schedules} WHERE name = %(name)s"
    forget_firings_of = "DELETE FROM {firings} WHERE name = %(name)s"

    pause_schedule = "UPDATE {schedules} SET enabled = 0 WHERE name = %(name)s AND enabled <> 0"
    resume_schedule = "UPDATE {schedules} SET enabled = 1, next_time = %(next)s WHERE name = %(name)s AND enabled = 0"

    _schedules = "SELECT name, target, what, every, cron, timezone, enabled, next_time FROM {schedules} "
    find_schedules = _schedules + "ORDER BY name"
    find_schedule = _schedules + "WHERE name = %(name)s"

    #: Nothing is inserted if the firing is there already, if another one of the schedule runs, or unless `{guard}`.
    fire = """
        INSERT INTO {firings} (name, fire_time, state, running, missed_since, by_hand, runner, expires, {user}, host,
                               pid, started, ended, outcome)
        SELECT due.schedule, %(fire_time)s, %(state)s, %(running)s, %(missed_since)s, %(by_hand)s, %(runner)s,
               {now} + {expiry}, %(user)s, %(host)s, %(pid)s, {now}, CASE WHEN %(running)s IS NULL THEN {now} END,
               %(outcome)s
        FROM (SELECT name AS schedule FROM {schedules} WHERE name = %(name)s {guard}) AS due
        {or_skip_firing}"""
    still_due = "AND enabled <> 0 AND next_time = %(due)s AND " + _leading

    #: What an earlier leader entered before it died, without having said when the schedule is due again.
    entered_already = (
        "SELECT MAX(fire_time) FROM {firings} WHERE name = %(name)s AND fire_time >= %(due)s AND by_hand = 0"
    )

    #: The schedule was fired, by this or by an earlier leader that died then: it is due at another time.
    advance = (
        """
        UPDATE {schedules} SET next_time = %(next)s, last_time = %(fire_time)s, last_state = (SELECT state {fired}),
               last_outcome = (SELECT outcome {fired})
        WHERE name = %(name)s AND enabled <> 0 AND next_time = %(due)s AND EXISTS (SELECT 1 {fired}) AND """
        + _leading
    )
    fired = "FROM {firings} AS fired WHERE fired.name = %(name)s AND fired.fire_time = %(fire_time)s"

    running_firing = "SELECT fire_time, host, pid FROM {firings} WHERE name = %(name)s AND running = 1"

    #: Firings whose process was not heard of for too long.
    find_lost_firings = """
        SELECT name, fire_time, runner, attempt, host, pid FROM {firings} WHERE running = 1 AND expires <= {now}"""

    _still_lost = (
        """
        WHERE name = %(name)s AND fire_time = %(fire_time)s AND running = 1 AND runner = %(lost)s AND expires <= {now}
          AND """
        + _leading
    )

    take_up_firing = (
        """
        UPDATE {firings} SET runner = %(runner)s, attempt = attempt + 1, expires = {now} + {expiry},
               {user} = %(user)s, host = %(host)s, pid = %(pid)s"""
        + _still_lost
    )

    _my_firing = "WHERE name = %(name)s AND fire_time = %(fire_time)s AND running = 1 AND runner = %(runner)s"

    keep_firings = "UPDATE {firings} SET expires = {now} + {expiry} WHERE running = 1 AND runner IN %(runners)s"

    #: Before the firing itself ends: should its process die in between, it is taken up again and this is said again.
    note_outcome = (
        """
        UPDATE {schedules} SET last_time = %(fire_time)s, last_state = %(state)s, last_outcome = %(outcome)s
        WHERE name = %(name)s AND EXISTS (SELECT 1 FROM {firings} """
        + _my_firing
        + ")"
    )

    end_firing = (
        "UPDATE {firings} SET state = %(state)s, running = NULL, ended = {now}, outcome = %(outcome)s " + _my_firing
    )

    #: Let the next leader have it at once, as if it had not been begun.
    give_back_firing = "UPDATE {firings} SET expires = {now}, attempt = attempt - 1 " + _my_firing

    forget_firings = "DELETE FROM {firings} WHERE running IS NULL AND fire_time < {now} - {retention}"

    # -- cleaning up --------------------------------------------------------------------------------

    #: The jobs of some statuses whose key is not among `{living}`, and the moment this was true. A plain SELECT
    #: sees the jobs and the tables they are about in one state; a DELETE with this subquery would, on MySQL, lock
    #: the target, wait for its workers, and take a job that succeeds meanwhile for orphaned.
    find_orphans = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job LEFT JOIN ({living}) AS living ON living.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN {statuses} AND living.key_hash IS NULL"""
    join_chosen = "JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash"

    #: The finished jobs that are older than the retention and whose result is there: no key comes back without them.
    find_expired = """
        SELECT job.key_hash, {now}
        FROM {jobs} AS job JOIN ({made}) AS made ON made.key_hash = job.key_hash {join_chosen}
        WHERE job.table_name = %(table)s AND job.status IN {statuses} AND job.timestamp < {now} - {retention}"""

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

    # -- migrating a `~jobs` of DataJoint 0.14, which only MySQL can have ---------------------------------

    lock_jobs: ClassVar[str]
    unlock_jobs: ClassVar[str]
    add_json_key: ClassVar[str]
    legacy_keys: ClassVar[str]
    store_json_key: ClassVar[str]
    replace_legacy_columns: ClassVar[str]
    #: The stored JSON of a key, as the text that is hashed.
    stored_key: ClassVar[str] = ""
    #: Legacy rows have a hash of DataJoint's own; a table that gets the mixin takes them over.
    rehash_legacy_rows: ClassVar[str] = ""

    # -- expressions -----------------------------------------------------------------------------------

    @abstractmethod
    def seconds(self, parameter: str) -> str:
        """An interval of so many seconds."""

    @abstractmethod
    def microseconds(self, count: str) -> str:
        """An interval of so many microseconds."""

    @abstractmethod
    def moment(self, parameter: str) -> str:
        """A UTC time given as a parameter."""

    @abstractmethod
    def json_text(self, columns: dict[str, tuple[str, str]]) -> str:
        """The JSON object of these columns, given as name -> (SQL, kind), as text."""

    @abstractmethod
    def json(self, text: str) -> str:
        """A JSON text, to be stored as JSON."""

    @abstractmethod
    def json_as_text(self, column: str) -> str:
        """The text of a JSON column, which the driver might else have read already."""

    @abstractmethod
    def in_type(self, column: str, kind: str, type_: str) -> str:
        """A column converted to this type of the heading, so that its JSON is that of the type."""

    @abstractmethod
    def hash(self, json: str) -> str:
        """The key_hash of a JSON expression. The only place where a hash is made."""

    @abstractmethod
    def from_json(self, json: str, name: str, kind: str) -> str:
        """The value of a key attribute inside the JSON, as SQL of the attribute's kind."""

    @abstractmethod
    def to_driver(self, kind: str, value: Any) -> Any:
        """What the driver would have returned for a key attribute with this JSON value."""

    def literal(self, kind: str, value: Any) -> str | None:
        """A key's value in SQL; None if the server may have stored it otherwise than it was given."""
        text = str(value)
        if kind == "int" and isinstance(value, numbers.Integral):
            return str(int(value))
        if kind == "bool" and isinstance(value, bool):
            return text.upper()
        plain = (
            (kind == "text" and isinstance(value, str) and _PLAIN.fullmatch(text))
            or (kind == "date" and isinstance(value, (str, datetime.date)) and _DATE.fullmatch(text))
            or (kind == "datetime" and isinstance(value, (str, datetime.datetime)) and _DATETIME.fullmatch(text))
            or (kind == "uuid" and isinstance(value, uuid.UUID))
        )
        return self.quoted(kind, text) if plain else None

    def quoted(self, kind: str, text: str) -> str:
        """A text without special characters, as a value of this kind."""
        return f"'{text}'"

    @abstractmethod
    def lock(self, name: str) -> tuple[str, str]:
        """Statements that take and give back a lock by name, for the moments a table is declared."""

    # -- errors --------------------------------------------------------------------------------------

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may well succeed when tried again."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that only a new one will do."""

    @abstractmethod
    def diagnose(self, error: BaseException) -> str | None:
        """'access', 'credentials', 'query' or 'unreachable', if the error is one of these."""

    def render(self, statement: str, **parts: str) -> str:
        """Fill a statement's template."""
        own = (
            "now",
            "key",
            "user",
            "or_skip",
            "or_skip_worker",
            "or_skip_leader",
            "or_skip_schedule",
            "or_skip_firing",
            "hint",
            "due_first",
            "use_order_index",
            "use_primary",
        )
        return statement.format(**{**{name: getattr(self, name) for name in own}, **parts})

    #: Ends an INSERT that leaves rows alone which are already there; the same for `{workers}`.
    or_skip: ClassVar[str]
    or_skip_worker: ClassVar[str]
    or_skip_leader: ClassVar[str]
    or_skip_schedule: ClassVar[str]
    or_skip_firing: ClassVar[str]
