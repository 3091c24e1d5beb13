"""The statements about the tables themselves: what a DataJoint definition cannot say, and their migration."""

from __future__ import annotations

from typing import ClassVar


class TableStatements:
    """How tables are found, declared, and brought from one version of djjobs to the next."""

    #: Which tables of these names a schema has, and the comment of each.
    find_tables: ClassVar[str]
    #: How the server itself declares the columns of a table: name, and what `dialect.key_column` takes.
    column_types: ClassVar[str]
    #: Run once after `~jobs` was declared: what a DataJoint definition cannot say.
    after_declare: ClassVar[str]
    #: Run once after another table was declared, so that its texts can be of any language and differ by every letter.
    any_language: ClassVar[str] = ""
    #: How text columns are declared: those that hold no text of any language, and the others.
    ascii: ClassVar[str] = ""
    unicode: ClassVar[str] = ""
    #: Whether the user may write the queue, where a user who may not does not even see what DataJoint looks for.
    may_write: ClassVar[str] = ""

    add_column: ClassVar[str] = "ALTER TABLE {jobs} ADD COLUMN {column}"
    set_comment: ClassVar[str]


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
    #: Legacy rows have a hash of DataJoint's own; a table that gets the mixin takes them over.
    rehash_legacy_rows: ClassVar[str] = ""
