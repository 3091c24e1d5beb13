"""What `djjobs check` asks a server about itself."""

from __future__ import annotations

__all__ = ["DECLARING", "USING", "WRITING", "MySQLProbes", "PostgreSQLProbes", "skip_locked"]

#: The rights that a worker needs on the queue.
WRITING = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: The rights that it needs on the table that it fills.
USING = ("SELECT", "INSERT")
#: The further rights that it takes to make a queue.
DECLARING = ("CREATE", "ALTER", "INDEX")

skip_locked = "SELECT 1 FROM (SELECT 1 AS one) AS nothing FOR UPDATE SKIP LOCKED"


class MySQLProbes:
    """MySQL and MariaDB."""

    version = "SELECT VERSION()"
    variables = "SHOW VARIABLES"
    used_connections = "SHOW GLOBAL STATUS LIKE 'Threads_connected'"
    current_user = "SELECT CURRENT_USER()"

    #: A statement for each right. None of them does anything: EXPLAIN only looks, and the others are for a table that
    #: is not there or cannot be. A server checks the rights first.
    trials = {
        "SELECT": "EXPLAIN SELECT 1 FROM {table}",
        "INSERT": "EXPLAIN INSERT INTO {table} VALUES ()",
        "UPDATE": "EXPLAIN UPDATE {table} SET table_name = table_name",
        "DELETE": "EXPLAIN DELETE FROM {table}",
        "CREATE": "CREATE TABLE {table} (twice int, twice int)",
        "ALTER": "ALTER TABLE {table} COMMENT = ''",
        "INDEX": "CREATE INDEX nothing ON {table} (nothing)",
    }

    @staticmethod
    def grant(database: str, user: str) -> str:
        """What gives a user all the rights in a schema."""
        name = user.replace("@", "'@'")
        return f"GRANT {', '.join((*WRITING, *DECLARING))} ON `{database}`.* TO '{name}'"


class PostgreSQLProbes:
    """PostgreSQL."""

    setting = "SELECT pg_catalog.current_setting(%(name)s)"
    used_connections = "SELECT pg_catalog.SUM(numbackends) FROM pg_catalog.pg_stat_database"
    current_user = "SELECT current_user"

    has_table_right = "SELECT pg_catalog.has_table_privilege(%(table)s, %(right)s)"
    has_schema_right = "SELECT pg_catalog.has_schema_privilege(%(schema)s, %(right)s)"
    #: Whoever makes a table owns it, and may do all else with it.
    schema_rights = ("USAGE", "CREATE")

    @staticmethod
    def grant(database: str, user: str) -> str:
        """What gives a user all the rights in a schema."""
        return (
            f'GRANT USAGE, CREATE ON SCHEMA "{database}" TO "{user}"; '
            f'GRANT {", ".join(WRITING)} ON ALL TABLES IN SCHEMA "{database}" TO "{user}"'
        )
