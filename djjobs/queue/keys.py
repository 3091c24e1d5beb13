"""The keys of a table: from key_source to JSON in the server, and back to the values that DataJoint would give."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from datajoint.errors import DataJointError

from ..dj.compat import datajoint_api
from ..dj.tables import QueryExpression, keys_of
from ..errors import DjJobsError
from ..sql import Engine
from ..sql.keys import KeyAttribute, KeySQL
from ..sql.queries import hashes_of_table
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
    """Whether a restriction is a query on `~jobs`. It chooses keys by the jobs that it holds."""
    if hasattr(restriction, "own_hashes_sql"):
        return True
    return isinstance(restriction, QueryExpression) and {"table_name", "key_hash"} <= set(restriction.heading.names)


def about_keys_of(restriction: Any, table: Any) -> Any:
    """A restriction of the keys of a table. If it is about the jobs of another table, it chooses by their keys."""
    others = hasattr(restriction, "own_hashes_sql") and restriction.target.full_table_name != table.full_table_name
    return restriction.proj().make_subquery() if others else restriction


def _in_words(restriction: Any) -> str:
    if isinstance(restriction, str):
        return " ".join(restriction.split())
    if isinstance(restriction, Mapping):
        return str(dict(restriction))
    return "a query on ~jobs" if is_about_jobs(restriction) else type(restriction).__name__


def hashes_sql(jobs: Any, table: Any) -> str:
    """SQL that selects the hashes of those jobs of a query on `~jobs` that are of this table."""
    if hasattr(jobs, "own_hashes_sql"):
        return jobs.own_hashes_sql()
    return hashes_of_table(jobs.proj("table_name", "key_hash").make_sql(), table.table_name)


class UnfitKey(dict[str, Any]):
    """A key in the queue that cannot be a key of its table, and the reason."""

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
        self.target = getattr(table, "target", table)
        self.query = self._key_source()
        self.attributes = {name: self.target.heading[name] for name in self.query.heading.primary_key}
        self._kinds = {name: kind_of(attribute, self.label) for name, attribute in self.attributes.items()}
        self._made_sql: str | None = None

    def _key_source(self) -> Any:
        if self.table.restriction:
            raise DjJobsError(
                f"{self.label} is restricted. Call the method on the table itself and pass the conditions as arguments."
            )
        with self.understood():
            return keys_of(self.table, tuple(self._on_keys))

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Name the table in an error of DataJoint about its key_source or a restriction."""
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

    @cached_property
    def sql(self) -> KeySQL:
        """The SQL about these keys."""
        among = [hashes_sql(jobs, self.table) for jobs in self._on_jobs]
        attributes = [self._attribute(name) for name in self.attributes]
        source, target = self.query.make_sql(), self.target.full_table_name
        return KeySQL(self.engine.dialect, attributes, source, target, among)

    def _attribute(self, name: str) -> KeyAttribute:
        """A key_source may compute an attribute in another type than the target has."""
        type_ = self.attributes[name].type
        quoted = datajoint_api.quote(self.table.connection, name)
        return KeyAttribute(name, quoted, self._kinds[name], type_, self.query.heading[name].type != type_)

    def made_sql(self, queue: Any) -> str:
        """SQL that has a row if the key of a job, given by the parameters `table` and `key_hash`, is in the target."""
        if self._made_sql is None:
            columns = self.columns_sql(queue, "job")
            self._made_sql = self.sql.made_for_job(queue.jobs.full_table_name, columns)
        return self._made_sql

    def columns_sql(self, queue: Any, alias: str = "") -> list[str]:
        """SQL of the attributes of a key, out of the JSON of its job. They compare as the columns of the target do.

        Parameters
        ----------
        alias : str
            The name that `~jobs` has in the query. Defaults to none.
        """
        names = {"schema": self.target.database, "table": self.target.table_name}
        rows = queue.db.execute(
            self.engine.tables.column_types, full_name=self.target.full_table_name, **names
        ).fetchall()
        declared = {name: tuple(rest) for name, *rest in rows}
        if not declared:
            raise DjJobsError(
                f"The table of {self.label} is not in the database. Declare it, or look at djjobs.jobs(schema)."
            )
        json_ = f"{alias}.{self.engine.dialect.key}" if alias else self.engine.dialect.key
        return [
            self.engine.dialect.key_column(json_, name, self._kinds[name], attribute.type, declared[name])
            for name, attribute in self.attributes.items()
        ]

    # -- back ---------------------------------------------------------------------------------------

    def decode(self, document: str | Mapping[str, Any]) -> dict[str, Any]:
        """The key of a job as DataJoint would fetch it from key_source.

        An older table of the same name may have left jobs with other keys in the queue. Their keys are unfit.
        """
        values = json.loads(document) if isinstance(document, str) else document
        try:
            return {name: self._decode(name, values[name]) for name in self.attributes}
        except Exception as error:  # each type has its own way to refuse a value
            shown = values if isinstance(values, Mapping) else {"key": values}
            return UnfitKey(shown, f"{type(error).__name__}: {error}")

    def _decode(self, name: str, value: Any) -> Any:
        kind = self._kinds[name]
        if kind == "uuid":
            # On PostgreSQL only the table that declares the attribute knows that it is a uuid.
            return uuid.UUID(value)
        value = self.engine.dialect.to_driver(kind, value)
        return datajoint_api.decode(self.attributes[name], value, self.table.connection)

    # -- checks --------------------------------------------------------------------------------------

    def insist_on_fit(self, key: dict[str, Any]) -> None:
        """Raise if a key cannot be a key of this table."""
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
