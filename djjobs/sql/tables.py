"""The statements about the tables themselves: what a DataJoint definition cannot say, and migration."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import ClassVar


class TableStatements:
    """How tables are found, declared, and brought from one version of djjobs to the next."""

    #: Which tables of these names a schema has, and the comment of each.
    find_tables: ClassVar[str]
    #: How the server declares the columns of a table: the name, and then what `dialect.key_column` takes.
    column_types: ClassVar[str]
    #: Run once after `~jobs` was declared. It says what a DataJoint definition cannot say.
    after_declare: ClassVar[str]
    #: Run once after another table was declared. Its texts can then be in any language, and `a` differs from `A`.
    any_language: ClassVar[str] = ""
    #: The character set of columns with plain words only, and of columns with text in any language.
    ascii: ClassVar[str] = ""
    unicode: ClassVar[str] = ""
    #: Whether the user may change the queue. Empty if DataJoint itself says so clearly.
    may_write: ClassVar[str] = ""

    add_column: ClassVar[str] = "ALTER TABLE {table} ADD COLUMN {column}"
    drop_column: ClassVar[str] = "ALTER TABLE {table} DROP COLUMN {column}"
    set_comment: ClassVar[str]

    def column(self, declaration: str, plain: Container[str]) -> tuple[str, str]:
        """The name of a column, and its declaration with the character set that its text is to have.

        Parameters
        ----------
        declaration : str
            The column as DataJoint declares it.
        plain : container of str
            The names of the columns that hold plain words only.
        """
        match = re.match(r"[`\"](\w+)[`\"] ((?:var)?char\(\d+\)|enum\([^)]*\))?", declaration)
        assert match is not None
        name, text_type = match.groups()
        if not text_type:
            return name, declaration
        character_set = self.ascii if name in plain else self.unicode
        return name, f"{declaration[: match.end()]} {character_set}{declaration[match.end() :]}"

    @staticmethod
    def modify(columns: Iterable[str]) -> str:
        """Changes that make columns as they are declared here."""
        return ", ".join(f"MODIFY {column}" for column in columns)


class LegacyStatements:
    """How a `~jobs` of DataJoint 0.14 becomes one of djjobs. Only MySQL can have one."""

    lock_jobs: ClassVar[str]
    unlock_jobs: ClassVar[str]
    add_json_key: ClassVar[str]
    legacy_keys: ClassVar[str]
    store_json_key: ClassVar[str]
    replace_legacy_columns: ClassVar[str]
    #: The stored JSON of a key, as the text that is hashed.
    stored_key: ClassVar[str] = ""
    #: The rows of DataJoint 0.14 have another hash. A table that gets the mixin takes its rows over.
    rehash_legacy_rows: ClassVar[str] = ""

    @staticmethod
    def columns(columns: Mapping[str, str], present: Container[str]) -> str:
        """Changes that make each column as `~jobs` declares it, whether it is there already or not."""
        changes = {name: f"{'MODIFY' if name in present else 'ADD'} {column}" for name, column in columns.items()}
        changes["key"] = f"CHANGE key_json {columns['key']} AFTER status"
        return ", ".join(changes.values())
