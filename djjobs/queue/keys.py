"""A table's keys: from key_source to JSON inside the server, and back to what DataJoint would give."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from datajoint.errors import DataJointError

from ..dj.compat import datajoint_api
from ..dj.tables import QueryExpression, keys_of
from ..errors import DjJobsError
from ..sql import Engine
from .tables import RESTRICTION_LENGTH

__all__ = ["Keys", "UnfitKey", "about_keys_of", "hashes_sql", "is_about_jobs", "table_label"]

_KINDS = (
    (r"bool", "bool"),
    (r"uuid", "uuid"),
    (r"(tiny|small|medium|big)?int|integer|serial|year", "int"),
    (r"(var)?char|character|enum|text", "text"),
    (r"decimal|numeric|dec\b|fixed", "decimal"),
    (r"float|double|real", "float"),
    (r"datetime|timestamp", "datetime"),
    (r"date", "date"),
    (r"time", "time"),
)


def table_label(table: Any) -> str:
    """How messages name a table: its class and, in the database, its schema."""
    return f"{type(table).__name__} (schema {table.database})"


def is_about_jobs(restriction: Any) -> bool:
    """Whether a restriction is a query on `~jobs`, which chooses by the jobs that it holds."""
    if hasattr(restriction, "own_hashes_sql"):
        return True
    return isinstance(restriction, QueryExpression) and {"table_name", "key_hash"} <= set(restriction.heading.names)


def about_keys_of(restriction: Any, table: Any) -> Any:
    """A restriction of a table's keys. The jobs of another table choose by their keys: none of them is this one's."""
    others = hasattr(restriction, "own_hashes_sql") and restriction.target.full_table_name != table.full_table_name
    return restriction.proj().make_subquery() if others else restriction


def _in_words(restriction: Any) -> str:
    if isinstance(restriction, str):
        return " ".join(restriction.split())
    if isinstance(restriction, Mapping):
        return str(dict(restriction))
    return "a query on ~jobs" if is_about_jobs(restriction) else type(restriction).__name__


def hashes_sql(jobs: Any, table: Any) -> str:
    """The hashes of those jobs of a query on `~jobs` that are a table's own."""
    if hasattr(jobs, "own_hashes_sql"):
        return jobs.own_hashes_sql()
    held = jobs.proj("table_name", "key_hash").make_sql()
    # DISTINCT keeps MySQL from merging the subquery into a statement that changes the same table.
    return f"SELECT DISTINCT key_hash FROM ({held}) AS held WHERE held.table_name = '{table.table_name}'"


class UnfitKey(dict[str, Any]):
    """The key of a job that is none of its table's, as it is in the queue, and the reason."""

    def __init__(self, values: Mapping[str, Any], reason: str) -> None:
        super().__init__(values)
        self.reason = reason


def kind_of(attribute: Any, label: str) -> str:
    """What kind of value a key attribute holds, by the type in its heading."""
    if attribute.uuid:
        return "uuid"
    for pattern, kind in _KINDS:
        if re.match(pattern, attribute.type, re.IGNORECASE):
            return kind
    raise DjJobsError(
        f"The key attribute {attribute.name!r} of {label} has the type {attribute.type}, which a queue cannot hold. "
        "Use a number, text, date, time, uuid, enum or bool in the primary key."
    )


class Keys:
    """The keys of one table under some restrictions.

    Parameters
    ----------
    table
        An instance of an auto-populated table.
    restrictions
        Conditions on key_source as in `populate`. Queries on `~jobs` (``Table.jobs & ...``) are
        allowed too and choose by the jobs they hold.
    """

    def __init__(self, table: Any, restrictions: tuple[Any, ...], engine: Engine) -> None:
        self.table = table
        self.label = table_label(table)
        self.engine = engine
        restrictions = tuple(about_keys_of(restriction, table) for restriction in restrictions)
        self._on_keys = [r for r in restrictions if not is_about_jobs(r)]
        self._on_jobs = [r for r in restrictions if is_about_jobs(r)]
        self._quote = lambda name: datajoint_api.quote(table.connection, name)
        self.target = getattr(table, "target", table)
        self.query = self._key_source()
        self.attributes = {name: self.target.heading[name] for name in self.query.heading.primary_key}
        self._kinds = {name: kind_of(attribute, self.label) for name, attribute in self.attributes.items()}

    def _key_source(self) -> Any:
        if self.table.restriction:
            raise DjJobsError(
                f"{self.label} is restricted. Call the method on the table itself and pass the conditions as arguments."
            )
        with self.understood():
            return keys_of(self.table, tuple(self._on_keys))

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Name the table in what DataJoint says of its key_source or of a restriction."""
        try:
            yield
        except DjJobsError:
            raise
        except (DataJointError, TypeError) as error:
            raise DjJobsError(
                f"The keys of {self.label} cannot be had: {str(error).rstrip('.')}. "
                "Check its key_source and the restriction."
            ) from error

    # -- towards the server ------------------------------------------------------------------------

    @property
    def restricted(self) -> bool:
        return bool(self._on_keys or self._on_jobs)

    @property
    def restriction_text(self) -> str:
        """The restrictions in words, for people to read."""
        return "; ".join(_in_words(one) for one in (*self._on_keys, *self._on_jobs))[:RESTRICTION_LENGTH]

    @property
    def source_sql(self) -> str:
        """The keys, one row each."""
        sql = self.query.make_sql()
        if self._on_jobs:
            among = [f"{self.hash_sql('chosen_key')} IN ({hashes_sql(jobs, self.table)})" for jobs in self._on_jobs]
            sql = f"SELECT * FROM ({sql}) AS chosen_key WHERE {' AND '.join(among)}"
        return sql

    def json_sql(self, alias: str) -> str:
        return self.engine.dialect.json_text(
            {name: (self._column(alias, name), self._kinds[name]) for name in self.attributes}
        )

    def _column(self, alias: str, name: str) -> str:
        """A key attribute, in the target's type: a key_source may compute it in another, and hash differently."""
        column, kind, wanted = f"{alias}.{self._quote(name)}", self._kinds[name], self.attributes[name].type
        if self.query.heading[name].type == wanted or alias == "target":
            return column
        return self.engine.dialect.in_type(column, kind, wanted)

    def hash_sql(self, alias: str) -> str:
        return self.engine.dialect.hash(self.json_sql(alias))

    @property
    def chosen_sql(self) -> str:
        """The hashes of the keys, one row each."""
        return f"SELECT DISTINCT {self.hash_sql('source')} AS key_hash FROM ({self.source_sql}) AS source"

    @property
    def todo_sql(self) -> str:
        """The hashes of the keys that are not in the target."""
        made = f"SELECT 1 FROM {self.target.full_table_name} AS target WHERE {self.same_key_sql}"
        return f"{self.chosen_sql} WHERE NOT EXISTS ({made})"

    @property
    def made_sql(self) -> str:
        """The hashes of the keys that are in the target."""
        target = self.target.full_table_name
        return f"SELECT DISTINCT {self.hash_sql('target')} AS key_hash FROM {target} AS target"

    @property
    def made_among_sql(self) -> str:
        """A row for every key that is in the target."""
        made = f"SELECT 1 FROM {self.target.full_table_name} AS target WHERE {self.same_key_sql}"
        return f"SELECT 1 FROM ({self.source_sql}) AS source WHERE EXISTS ({made})"

    @property
    def same_key_sql(self) -> str:
        """Whether a row of the target belongs to a key."""
        pairs = [f"target.{self._quote(name)} = source.{self._quote(name)}" for name in self.attributes]
        return " AND ".join(pairs) or "TRUE"

    def order_sql(self, alias: str) -> str:
        return ", ".join(f"{alias}.{self._quote(name)}" for name in self.attributes) or "1"

    def read_back_sql(self, alias: str) -> str:
        """The attributes of a key from the JSON of its job, in the target's types.

        Empty if that cannot be said, or if jobs of other keys would be in the way.
        """
        if self.restricted:
            return ""
        json = f"{alias}.{self.engine.dialect.key}"
        columns = [
            self.engine.dialect.read_back(json, name, attribute.type) for name, attribute in self.attributes.items()
        ]
        return ", ".join(columns) if all(columns) else ""

    def columns_sql(self, queue: Any) -> list[str]:
        """The attributes of the key of a job, out of its JSON, as the columns of the target would be."""
        place = {"schema": self.target.database, "table": self.target.table_name}
        rows = queue.db.execute(
            self.engine.tables.column_types, full_name=self.target.full_table_name, **place
        ).fetchall()
        declared = {name: tuple(rest) for name, *rest in rows}
        if not declared:
            raise DjJobsError(
                f"The table of {self.label} is not in the database. Declare it, or look at djjobs.jobs(schema)."
            )
        return [
            self.engine.dialect.key_column(
                self.engine.dialect.key, name, self._kinds[name], attribute.type, declared[name]
            )
            for name, attribute in self.attributes.items()
        ]

    # -- back ---------------------------------------------------------------------------------------

    def decode(self, document: str | Mapping[str, Any]) -> dict[str, Any]:
        """A job's key as DataJoint would have fetched it from key_source.

        A table of the same name that had other keys may have left jobs in the queue; theirs are unfit.
        """
        values = json.loads(document) if isinstance(document, str) else document
        try:
            return {name: self._decode(name, values[name]) for name in self.attributes}
        except Exception as error:  # each type has its own way to refuse a value
            return UnfitKey(values, f"{type(error).__name__}: {error}")

    def _decode(self, name: str, value: Any) -> Any:
        kind = self._kinds[name]
        if kind == "uuid":
            # On PostgreSQL only the table that declares the attribute knows it to be one.
            return uuid.UUID(value)
        value = self.engine.dialect.to_driver(kind, value)
        return datajoint_api.decode(self.attributes[name], value, self.table.connection)

    # -- checks --------------------------------------------------------------------------------------

    def insist_on_fit(self, key: dict[str, Any]) -> None:
        """Raise if a job's key is none of this table's."""
        if isinstance(key, UnfitKey):
            raise DjJobsError(
                f"The key {dict(key)} does not fit {self.label}, whose keys have {', '.join(self.attributes)} "
                f"({key.reason}): the job is of a table of that name that was there before. "
                f"{type(self.table).__name__}.cleanup_jobs() removes such jobs."
            )

    def insist_on_known_keys(self) -> None:
        """Raise if a restriction names a whole key that key_source does not have."""
        for restriction in self._on_keys:
            for key in restriction if isinstance(restriction, (list, tuple)) else [restriction]:
                if isinstance(key, Mapping) and set(self.attributes) <= set(key) and not self.query & key:
                    raise DjJobsError(
                        f"The key {dict(key)} is not in the key_source of {self.label}. Check its values; if its "
                        f"upstream rows were deleted, {type(self.table).__name__}.cleanup_jobs() removes what is left."
                    )
