"""SQL about the keys of a table: their JSON, their hashes, and which of them are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .dialect import Dialect

__all__ = ["KeyAttribute", "KeySQL"]


@dataclass(frozen=True)
class KeyAttribute:
    """An attribute of a key.

    Attributes
    ----------
    name : str
        Its name.
    column : str
        The same in quotes, as SQL takes it.
    kind : str
        What kind of value it holds: int, text, date and so on.
    type_ : str
        Its type in the heading of the target.
    differs : bool
        Whether key_source has it in another type. Such a value would have another hash. Defaults to False.
    """

    name: str
    column: str
    kind: str
    type_: str
    differs: bool = False


class KeySQL:
    """SQL about the keys of one table.

    Parameters
    ----------
    dialect : Dialect
        How the engine says it.
    attributes : sequence of KeyAttribute
        The attributes of a key.
    source : str
        SQL that selects the keys.
    target : str
        The full name of the table that the keys are made in.
    among : sequence of str
        Queries, each of which selects hashes. A key must be among all of them. Defaults to none.
    """

    def __init__(
        self, dialect: Dialect, attributes: Sequence[KeyAttribute], source: str, target: str, among: Sequence[str] = ()
    ) -> None:
        self._dialect, self._attributes, self.target = dialect, tuple(attributes), target
        #: SQL that selects the keys, one row each.
        self.source = self._restricted(source, among) if among else source

    def _restricted(self, source: str, among: Sequence[str]) -> str:
        conditions = [f"{self.hash('chosen_key')} IN ({hashes})" for hashes in among]
        return f"SELECT * FROM ({source}) AS chosen_key WHERE {' AND '.join(conditions)}"

    def _column(self, alias: str, attribute: KeyAttribute) -> str:
        """An attribute in the type that the target has."""
        column = f"{alias}.{attribute.column}"
        if attribute.differs and alias != "target":
            return self._dialect.in_type(column, attribute.kind, attribute.type_)
        return column

    def json(self, alias: str) -> str:
        """The JSON of a key in the rows of this alias, as text."""
        return self._dialect.json_text({one.name: (self._column(alias, one), one.kind) for one in self._attributes})

    def stored_json(self, alias: str) -> str:
        """The same as it is stored."""
        return self._dialect.json(self.json(alias))

    def hash(self, alias: str) -> str:
        """The hash of a key in the rows of this alias."""
        return self._dialect.hash(self.json(alias))

    def order(self, alias: str) -> str:
        """The order of keys in the rows of this alias."""
        return ", ".join(f"{alias}.{one.column}" for one in self._attributes) or "1"

    def is_made(self, alias: str = "source") -> str:
        """Whether the target has the key of a row of this alias."""
        pairs = [f"target.{one.column} = {alias}.{one.column}" for one in self._attributes]
        return f"EXISTS (SELECT 1 FROM {self.target} AS target WHERE {' AND '.join(pairs) or 'TRUE'})"

    @property
    def chosen(self) -> str:
        """The hashes of the keys, one row each."""
        return f"SELECT DISTINCT {self.hash('source')} AS key_hash FROM ({self.source}) AS source"

    @property
    def todo(self) -> str:
        """The hashes of the keys that are not in the target."""
        return f"{self.chosen} WHERE NOT {self.is_made()}"

    @property
    def made(self) -> str:
        """The hashes of all keys that are in the target."""
        return f"SELECT DISTINCT {self.hash('target')} AS key_hash FROM {self.target} AS target"

    @property
    def made_among(self) -> str:
        """A row for each of the keys that is in the target."""
        return f"SELECT 1 FROM ({self.source}) AS source WHERE {self.is_made()}"

    def made_for_job(self, jobs: str, columns: Sequence[str]) -> str:
        """A row for a job, given by the parameters `table` and `key_hash`, if its key is in the target.

        Parameters
        ----------
        jobs : str
            The full name of the queue, which is called `job` here.
        columns : sequence of str
            The attributes of the key, out of the JSON of the job.
        """
        pairs = [f"target.{one.column} = {column}" for one, column in zip(self._attributes, columns, strict=True)]
        return (
            f"SELECT 1 FROM {jobs} AS job JOIN {self.target} AS target ON {' AND '.join(pairs) or 'TRUE'} "
            "WHERE job.table_name = %(table)s AND job.key_hash = %(key_hash)s"
        )
