"""SQL around queries that DataJoint has written, and conditions for such queries.

DataJoint gives a query as the text of a SELECT, or as the part of it from FROM on (`rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["among", "count", "first_row", "hashes", "hashes_of_table", "keys_among", "no_rows", "statuses_and_hashes"]


def first_row(query: str) -> str:
    """The first row of a query, to see whether there is one."""
    return f"{query} LIMIT 1"


def no_rows(query: str) -> str:
    """No row of a query: the server only sees whether it understands it."""
    return f"{query} LIMIT 0"


def count(rows: str, catalog: str) -> str:
    """How many rows there are. Takes the dialect's `catalog`."""
    return f"SELECT {catalog}COUNT(*) FROM {rows}"


def hashes(column: str, rows: str) -> str:
    """The hashes in a column. (DISTINCT keeps MySQL from merging it into a statement that changes the same table.)"""
    return f"SELECT DISTINCT {column} AS key_hash FROM {rows}"


def hashes_of_table(query: str, table_name: str) -> str:
    """The hashes of those jobs of a query that are of this table."""
    return hashes("key_hash", f"({query}) AS held WHERE held.table_name = '{table_name}'")


def statuses_and_hashes(status: str, key_hash: str, rows: str) -> str:
    """The status and the hash of each job, in columns of these names."""
    return f"SELECT {status}, {key_hash} FROM {rows}"


def among(column: str, values: str | Sequence[str]) -> str:
    """A condition: the value is among those that a query selects, or among these plain words."""
    listed = values if isinstance(values, str) else ", ".join(f"'{value}'" for value in values)
    return f"{column} IN ({listed})"


def keys_among(columns: Sequence[str], keys: Sequence[Sequence[str]]) -> str:
    """A condition: the values of these columns are among those of some keys, given as literals."""
    rows = ", ".join(f"({', '.join(key)})" for key in keys)
    return f"({', '.join(columns)}) IN ({rows})"
