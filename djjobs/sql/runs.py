"""The statements about runs."""

from __future__ import annotations

#: A job of a run that is still to be done, found in the order of the line: a run that is worked on is at its head.
_FIRST_JOB = """(SELECT 1 FROM {{jobs}} AS job
                 WHERE job.table_name = %(table)s AND job.status = '{status}' AND job.run_id = run.run_id
                 ORDER BY job.turn, job.due_time LIMIT 1)"""
AN_OPEN_JOB = f"COALESCE({_FIRST_JOB.format(status='scheduled')}, {_FIRST_JOB.format(status='reserved')})"
NONE_OPEN = f"{AN_OPEN_JOB} IS NULL"
#: The same for all runs of a table, by one look at its jobs.
NOT_AMONG_OPEN = """run.run_id NOT IN (
          SELECT open_job.run_id
          FROM (SELECT DISTINCT job.run_id FROM {jobs} AS job {use_order_index}
                WHERE job.table_name = %(table)s AND job.status IN ('scheduled', 'reserved')
                  AND job.run_id IS NOT NULL) AS open_job)"""


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
               retry_time, ended_time, {text_of[details]}, {text_of[results]}, error, prepared_time, finish
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

    #: Call a run off, unless it is over or called off already.
    cancel_run = f"""
        UPDATE {{runs}} AS run SET cancel_time = {{now}}
        WHERE run.run_id = %(run)s AND run.cancel_time IS NULL AND {AN_OPEN_JOB} IS NOT NULL"""

    #: Runs of a table that are over, for whoever cleans up to take note of; `{finish}`: those that nobody will finish.
    end_runs = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}, finish = 0
        WHERE run.table_name = %(table)s AND run.ended_time IS NULL AND run.finish <= %(finish)s
          AND {NOT_AMONG_OPEN}"""

    #: Runs that ended long ago and that no job needs any more.
    find_expired_runs = """
        SELECT run.run_id FROM {runs} AS run
        WHERE run.table_name = %(table)s AND run.ended_time < {now} - {seconds[retention]}
          AND run.run_id NOT IN (SELECT needed.run_id
                                 FROM (SELECT DISTINCT job.run_id FROM {jobs} AS job {use_order_index}
                                       WHERE job.table_name = %(table)s AND job.run_id IS NOT NULL) AS needed)"""
    delete_runs = "DELETE FROM {runs} WHERE run_id IN %(runs)s AND ended_time IS NOT NULL"
