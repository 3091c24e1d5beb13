"""The statements about the right to schedule, and what else is noted about a table as a whole."""

from __future__ import annotations


class ControlStatements:
    """What can be done to the rows of the control table: one for each scope of a table that is scheduled."""

    #: Take the right to schedule this scope of a table; the row count says who got it.
    begin_scheduling = """
        UPDATE {control} SET scheduling_until = {now} + {seconds[mark]}, scheduling_by = %(worker)s
        WHERE table_name = %(table)s AND scope = %(scope)s
          AND (%(interval)s = 0
               OR ((scheduling_until IS NULL OR scheduling_until <= {now})
                   AND (last_scheduled IS NULL OR last_scheduled <= {now} - {seconds[interval]})))"""

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
        SELECT COALESCE(scheduling_until > {now}, FALSE)
               OR COALESCE(last_scheduled > {now} - {seconds[interval]}, FALSE)
        FROM {control} WHERE table_name = %(table)s AND scope = %(scope)s"""

    is_scheduling = """
        SELECT EXISTS (SELECT 1 FROM {control} WHERE table_name = %(table)s AND scheduling_until > {now})"""

    forget_scopes = """
        DELETE FROM {control}
        WHERE table_name = %(table)s AND scope <> '' AND last_scheduled < {now} - {seconds[interval]}
          AND scheduling_until IS NULL"""

    #: The next scheduling of a table, or of all tables, need not wait for the interval to pass.
    forget_scheduling = "UPDATE {control} SET last_scheduled = NULL WHERE table_name = %(table)s"
    forget_all_schedulings = "UPDATE {control} SET last_scheduled = NULL"

    #: A row of the control table says whether there may be such jobs: to look for them takes as long as they are many.
    may_be_automatic = "SELECT 1 FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"
    note_automatic = """
        INSERT INTO {control} (table_name, scope) VALUES (%(table)s, 'automatic') {or_skip[table_name]}"""
    forget_automatic = "DELETE FROM {control} WHERE table_name = %(table)s AND scope = 'automatic'"
