"""The statements about the right to schedule, and what else is noted about a table as a whole."""

from __future__ import annotations


class ControlStatements:
    """What can be done to the rows of `~jobs_control`.

    Each scheduled table has one row for each scope: all of its keys, or the keys under some restrictions.
    """

    # A time that lies too far ahead was written before somebody set the server's clock back. It counts as over:
    # otherwise nobody would schedule until the clock has come there again.
    _running = "COALESCE(scheduling_until > {now} AND scheduling_until <= {now} + {seconds[ahead]}, FALSE)"
    _recent = """COALESCE(last_scheduled > {now} - {seconds[interval]}
                          AND last_scheduled <= {now} + {seconds[ahead]}, FALSE)"""

    #: Take the right to schedule this scope of a table. Who changed the row has the right.
    begin_scheduling = f"""
        UPDATE {{control}} SET scheduling_until = {{now}} + {{seconds[mark]}}, scheduling_by = %(worker)s
        WHERE table_name = %(table)s AND scope = %(scope)s
          AND (%(interval)s = 0 OR NOT ({_running} OR {_recent}))"""

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

    #: Whether a scheduling of this scope runs now, or ended less than an interval ago. No row if there never was one.
    is_scheduled = f"""
        SELECT {_running} OR {_recent} FROM {{control}} WHERE table_name = %(table)s AND scope = %(scope)s"""

    is_scheduling = f"SELECT EXISTS (SELECT 1 FROM {{control}} WHERE table_name = %(table)s AND {_running})"

    forget_scopes = """
        DELETE FROM {control}
        WHERE table_name = %(table)s AND scope <> '' AND last_scheduled < {now} - {seconds[interval]}
          AND scheduling_until IS NULL"""

    #: Let the next scheduling of a table, or of all tables, begin at once, without waiting for the interval.
    forget_scheduling = "UPDATE {control} SET last_scheduled = NULL WHERE table_name = %(table)s"
    forget_all_schedulings = "UPDATE {control} SET last_scheduled = NULL"

    #: A row with this scope says that there may be jobs that only an event has put there. To search the queue for such
    #: jobs would take longer, the more jobs there are.
    may_be_automatic = "SELECT 1 FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"
    note_automatic = """
        INSERT INTO {control} (table_name, scope) VALUES (%(table)s, 'automatic') {or_skip[table_name]}"""
    forget_automatic = "DELETE FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"
