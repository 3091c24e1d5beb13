"""The statements about DataJoint 2's native queues. There is one for each table: `{native}`."""

from __future__ import annotations


class NativeStatements:
    """How jobs are copied from there. Nothing is written there, so that DataJoint's own workers can go on.

    The copied jobs get the same order as in a scheduling: each is due a microsecond after the one before it.
    """

    #: Copy the jobs of one status whose key is not in our queue. DataJoint only knows the last attempt of a job.
    bring_native = """
        INSERT INTO {jobs} (table_name, key_hash, status, {key}, error_message, error_stack, {user}, host, pid,
                            connection_id, timestamp, run_duration, run_metadata, priority, turn, due_time,
                            created_time, attempt)
        SELECT %(table)s, job._hash, %(ours)s, {json}, job.error_message, job.error_stack, job.{user}, job.host,
               job.pid, job.connection_id, job._changed, job.duration,
               CASE WHEN job.version <> '' THEN {version_json[job.version]} END, job.priority,
               CASE WHEN job._due <= {now} THEN job.priority END, job._due + {microseconds_in[job._number]},
               job._created,
               CASE WHEN job.status = 'error' THEN 1 ELSE 0 END
        FROM (SELECT native.*, {hash} AS _hash, {utc[native.scheduled_time]} AS _due,
                     {utc[native.created_time]} AS _created,
                     {utc[COALESCE(native.completed_time, native.created_time)]} AS _changed,
                     {catalog}ROW_NUMBER() OVER (ORDER BY native.scheduled_time, {order}) AS _number
              FROM {native} AS native WHERE native.status = %(status)s {also}) AS job
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE queued.table_name = %(table)s AND queued.key_hash = job._hash)
        {or_skip[table_name]}"""

    #: As `{also}`: only jobs whose key is in the target, and only jobs whose key is not.
    if_made = "AND {is_made}"
    unless_made = "AND NOT {is_made}"

    #: Whether the native jobs of a table have been copied already.
    was_taken_over = "SELECT EXISTS (SELECT 1 FROM {control} WHERE table_name = %(table)s AND scope = '')"
