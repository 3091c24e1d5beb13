"""The statements about runs and the hooks of their tables."""

from __future__ import annotations


class RunStatements:
    """What can be done to the rows of `~runs`."""

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
    #: A run that all jobs have left has nothing to finish.
    end_empty_run = "UPDATE {runs} SET finish = 0, ended_time = {now} WHERE run_id = %(run)s AND total <= 0"

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

    #: As `{which}`: one run, or those of a query.
    this_run = "= %(run)s"
    these_runs = "IN (SELECT run_id FROM ({query}) AS chosen)"

    # Jobs have no index of runs: every insert, claim and end of a job would pay for it, and runs are looked at now and
    # then. The index of claims has the run as its last column, so that no row is read to find the jobs of a run.

    #: The jobs of runs that are still there, by status.
    count_in_runs = """
        SELECT run_id, status, COUNT(*) FROM {jobs} WHERE {in_tables} run_id {which} GROUP BY run_id, status"""
    #: As `{in_tables}`, where the table is known.
    in_table = "table_name = %(table)s AND"

    #: Those of some runs of which a job that waits was begun before.
    find_begun = """
        SELECT DISTINCT run_id FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'scheduled' AND attempt > 0 AND run_id IN %(runs)s"""

    #: Not locked: on the way there a change would wait for jobs of other runs, which somebody may keep locked.
    find_open_jobs = """
        SELECT key_hash FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status IN ('scheduled', 'reserved') AND run_id = %(run)s"""
    these_jobs = "SELECT DISTINCT key_hash FROM {jobs} WHERE table_name = %(table)s AND key_hash IN %(hashes)s"
    still_in_run = "AND job.run_id = %(run)s"

    #: A job of a run that is still to be done, found in the order of the line: a run that is worked on is at its head.
    _first_job = """(SELECT 1 FROM {{jobs}} AS job
                     WHERE job.table_name = %(table)s AND job.status = '{status}' AND job.run_id = run.run_id
                     ORDER BY job.turn, job.due_time LIMIT 1)"""
    _an_open_job = f"COALESCE({_first_job.format(status='scheduled')}, {_first_job.format(status='reserved')})"
    _none_open = f"{_an_open_job} IS NULL"
    #: The same for all runs of a table, by one look at its jobs.
    _not_among_open = """run.run_id NOT IN (
              SELECT open_job.run_id
              FROM (SELECT DISTINCT job.run_id FROM {jobs} AS job {use_order_index}
                    WHERE job.table_name = %(table)s AND job.status IN ('scheduled', 'reserved')
                      AND job.run_id IS NOT NULL) AS open_job)"""

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
                          WHERE job.table_name = %(table)s AND job.key_hash = run.prepare_job
                            AND job.run_id = run.run_id AND job.status = 'reserved'
                            AND job.worker_id = run.prepare_worker AND job.claim = run.prepare_claim)"""

    end_preparing = """
        UPDATE {runs} SET details = %(details)s, prepared_time = {now}
        WHERE run_id = %(run)s AND prepared_time IS NULL AND prepare_worker = %(worker)s
          AND prepare_claim = %(claim)s AND prepare_job = %(key_hash)s"""

    #: Nobody has taken note of its end; the mark to finish a run lives as long as its worker is heard of.
    _left_alone = """run.ended_time IS NULL
          AND (run.finish = 0
               OR COALESCE((SELECT worker.last_heartbeat < {now} - {own_lease} FROM {workers} AS worker
                            WHERE worker.worker_id = run.finish_worker),
                           run.finish_since < {now} - {lease}, TRUE))"""

    #: The runs that are over: some of them, and all of a table.
    _find_over = f"""
        SELECT run.run_id, run.finish, CASE WHEN run.finish_worker IS NULL THEN 0 ELSE 1 END FROM {{runs}} AS run
        WHERE {_left_alone} AND """
    find_over = _find_over + f"run.run_id IN %(runs)s AND {_none_open} ORDER BY run.created"
    find_over_in_table = _find_over + f"run.table_name = %(table)s AND {_not_among_open} ORDER BY run.created"

    end_run = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}
        WHERE run.run_id = %(run)s AND run.finish = 0 AND run.ended_time IS NULL AND {_none_open}"""

    lock_finishing = """
        SELECT finish_worker, finish_claim, finish_tries FROM {runs}
        WHERE run_id = %(run)s AND finish = 1 FOR UPDATE"""

    take_finishing = f"""
        UPDATE {{runs}} AS run SET finish_worker = %(worker)s, finish_claim = %(claim)s, finish_since = {{now}},
               finish_tries = run.finish_tries + 1
        WHERE run.run_id = %(run)s AND run.finish = 1 AND {_left_alone} AND {_none_open}"""

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
    _finished_by_slot = (
        "ended_time IS NULL AND finish_worker = %(worker)s AND finish_claim BETWEEN %(first)s AND %(last)s"
    )
    find_finishing = "SELECT run_id FROM {runs} WHERE table_name IN %(tables)s AND " + _finished_by_slot
    release_finishing = f"UPDATE {{runs}} SET {_no_mark} WHERE run_id IN %(runs)s AND {_finished_by_slot}"

    #: Runs of a table that are over, for whoever cleans up to take note of; `{finish}`: those that nobody will finish.
    end_runs = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}, finish = 0
        WHERE run.table_name = %(table)s AND run.ended_time IS NULL AND run.finish <= %(finish)s
          AND {_not_among_open}"""

    #: Runs that ended long ago and that no job needs any more.
    find_expired_runs = """
        SELECT run.run_id FROM {runs} AS run
        WHERE run.table_name = %(table)s AND run.ended_time < {now} - {retention}
          AND run.run_id NOT IN (SELECT needed.run_id
                                 FROM (SELECT DISTINCT job.run_id FROM {jobs} AS job {use_order_index}
                                       WHERE job.table_name = %(table)s AND job.run_id IS NOT NULL) AS needed)"""
    delete_runs = "DELETE FROM {runs} WHERE run_id IN %(runs)s AND ended_time IS NOT NULL"
