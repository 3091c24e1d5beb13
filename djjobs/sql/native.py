"""The statements about the queues that DataJoint 2 itself keeps, one a table: `{native}`."""

from __future__ import annotations


class NativeStatements:
    """What is read of them. Nothing is written: workers of DataJoint's own may go on."""

    #: Copy the jobs of one status whose key is not in the queue. As in a scheduling, each is due a microsecond after
    #: the one before it. DataJoint tells only of the last attempt.
    bring_native = """
        INSERT INTO {jobs} (table_name, key_hash, status, {key}, error_message, error_stack, {user}, host, pid,
                            connection_id, timestamp, run_duration, run_metadata, priority, turn, due_time,
                            created_time, attempt)
        SELECT %(table)s, job._hash, %(ours)s, {json}, job.error_message, job.error_stack, job.{user}, job.host,
               job.pid, job.connection_id, job._changed, job.duration,
               CASE WHEN job.version <> '' THEN {version_json[job.version]} END, job.priority,
               CASE WHEN job._due <= {now} THEN job.priority END, job._due + {microseconds_in[job._place]},
               job._created,
               CASE WHEN job.status = 'error' THEN 1 ELSE 0 END
        FROM (SELECT native.*, {hash} AS _hash, {utc[native.scheduled_time]} AS _due,
                     {utc[native.created_time]} AS _created,
                     {utc[COALESCE(native.completed_time, native.created_time)]} AS _changed,
                     ROW_NUMBER() OVER (ORDER BY native.scheduled_time, {order}) AS _place
              FROM {native} AS native WHERE native.status = %(status)s {also}) AS job
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE queued.table_name = %(table)s AND queued.key_hash = job._hash)
        {or_skip[table_name]}"""

    #: As `{also}`: only keys with a result, and only keys without.
    if_made = "AND {is_made}"
    unless_made = "AND NOT {is_made}"

    #: Whether what DataJoint recorded about a table has been taken over.
    was_taken_over = "SELECT EXISTS (SELECT 1 FROM {control} WHERE table_name = %(table)s AND scope = '')"
