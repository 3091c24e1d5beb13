"""The statements about runs."""

from __future__ import annotations

#: A job of a run that is still to be done. It is looked for in the order of claims, since workers are at the first
#: jobs.
_FIRST_JOB = """(SELECT 1 FROM {{jobs}} AS job
                 WHERE job.table_name = %(table)s AND job.status = '{status}' AND job.run_id = run.run_id
                 ORDER BY job.turn, job.due_time LIMIT 1)"""
AN_OPEN_JOB = f"COALESCE({_FIRST_JOB.format(status='scheduled')}, {_FIRST_JOB.format(status='reserved')})"
NONE_OPEN = f"{AN_OPEN_JOB} IS NULL"
#: The same for all runs of a table, with one look at its jobs.
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

    #: The runs that the chosen jobs of some statuses are about to leave, and how many jobs leave each run.
    count_leaving = """
        SELECT job.run_id, {catalog}COUNT(*)
        FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status IN %(statuses)s AND job.run_id IS NOT NULL
        GROUP BY job.run_id"""
    shrink_run = "UPDATE {runs} SET total = total - %(count)s WHERE run_id = %(run)s"
    #: A run without jobs has nothing to finish.
    end_empty_run = "UPDATE {runs} SET finish = 0, ended_time = {now} WHERE run_id = %(run)s AND total <= 0"

    #: The chosen jobs of some statuses are put back, so their runs go on.
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

    # There is no index of jobs by run. It would make every insert, claim and end of a job slower, and people look at
    # runs only now and then. The index of claims has the run as its last column, so the jobs of a run are found without
    # reading rows.

    #: How many jobs of runs there are in the queue, by status.
    count_in_runs = """
        SELECT run_id, status, {catalog}COUNT(*) FROM {jobs} WHERE {in_tables} run_id {which} GROUP BY run_id, status"""
    #: As `{in_tables}`, if the table is known.
    in_table = "table_name = %(table)s AND"

    #: Which of some runs have a waiting job that was begun before.
    find_begun = """
        SELECT DISTINCT run_id FROM {jobs}
        WHERE table_name IN %(tables)s AND status = 'scheduled' AND attempt > 0 AND run_id IN %(runs)s"""

    #: Nothing is locked. A statement that locks would also wait for jobs of other runs, which somebody may keep locked.
    find_open_jobs = """
        SELECT key_hash FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status IN ('scheduled', 'reserved') AND run_id = %(run)s"""
    these_jobs = "SELECT DISTINCT key_hash FROM {jobs} WHERE table_name = %(table)s AND key_hash IN %(hashes)s"
    still_in_run = "AND job.run_id = %(run)s"

    #: Cancel a run, unless it is over or cancelled already.
    cancel_run = f"""
        UPDATE {{runs}} AS run SET cancel_time = {{now}}
        WHERE run.run_id = %(run)s AND run.cancel_time IS NULL AND {AN_OPEN_JOB} IS NOT NULL"""

    #: End the runs of a table that are over. With `finish` = 1 also those whose `finish_run` nobody will call.
    end_runs = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}, finish = 0
        WHERE run.table_name = %(table)s AND run.ended_time IS NULL AND run.finish <= %(finish)s
          AND {NOT_AMONG_OPEN}"""

    #: Runs that ended long ago, and that have no jobs any more.
    find_expired_runs = """
        SELECT run.run_id FROM {runs} AS run
        WHERE run.table_name = %(table)s AND run.ended_time < {now} - {seconds[retention]}
          AND run.run_id NOT IN (SELECT needed.run_id
                                 FROM (SELECT DISTINCT job.run_id FROM {jobs} AS job {use_order_index}
                                       WHERE job.table_name = %(table)s AND job.run_id IS NOT NULL) AS needed)"""
    delete_runs = "DELETE FROM {runs} WHERE run_id IN %(runs)s AND ended_time IS NOT NULL"
