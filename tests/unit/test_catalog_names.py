"""On PostgreSQL, statements name functions, types and tables with their schema: a search_path may be in other hands."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Any

import pytest

from djjobs.sql import engine_for, queries
from djjobs.sql.check import PostgreSQLProbes, skip_locked
from djjobs.sql.keys import KeyAttribute, KeySQL

#: Words that stand before a bracket and are no functions. The server's grammar knows them, whatever the search_path.
GRAMMAR = set(
    "all and any as between by case cast coalesce conflict else exists extract from greatest in into is join not on or"
    " over select set skip_locked then using values when where with analyze".split()
)
#: Types that are grammar, too.
TYPES = set("bigint boolean char decimal double integer interval numeric real smallint time timestamp varchar".split())
GROUPS = (
    *("connection", "tables", "enqueue", "jobs", "workers", "control", "claims", "attempts", "by_hand", "runs"),
    *("hooks", "schedules", "native", "legacy"),
)
KINDS = {
    "int": "bigint",
    "text": "varchar(20)",
    "bool": "boolean",
    "decimal": "numeric(5,2)",
    "float": "double precision",
    "uuid": "uuid",
    "date": "date",
    "datetime": "timestamp(6)",
    "time": "time",
}


def texts_in(thing: Any) -> Iterator[str]:
    """The templates of a group of statements."""
    for cls in type(thing).__mro__:
        for value in vars(cls).values():
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and text != cls.__doc__ and text != cls.__module__:
                    yield text


def rendered(backend: str, template: str) -> str:
    """A template, filled in. What a caller would give is a name in quotes."""
    engine = engine_for(backend)
    named = {name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name}
    parts = {name: f'"lab"."{name}"' for name in named if name not in engine._words}
    return engine.render(template, **parts)


def expressions(backend: str) -> Iterator[str]:
    """What is not a template: the expressions of the dialect, and the SQL about keys and about queries."""
    engine = engine_for(backend)
    dialect, enqueue = engine.dialect, engine.enqueue
    attributes = [KeyAttribute(f"a_{kind}", f'"a_{kind}"', kind, type_, True) for kind, type_ in KINDS.items()]
    keys = KeySQL(dialect, attributes, 'SELECT 1 FROM "lab"."source"', '"lab"."target"', ['SELECT 1 FROM "lab"."x"'])
    yield from (keys.source, keys.chosen, keys.todo, keys.made, keys.made_among, keys.stored_json("source"))
    for few in (True, False):
        names = {"jobs": '"lab"."~jobs"', **dialect.due("delay"), **enqueue.new_keys(keys, few, True)}
        yield engine.render(enqueue.schedule_new_carefully, **names)
    for due in ("now", "delay", "moment"):
        yield from dialect.due(due).values()
    for kind, type_ in KINDS.items():
        declared = ("pg_catalog.int8",) if backend == "postgresql" else ("utf8mb4", "utf8mb4_bin")
        yield dialect.key_column('"key"', "a", kind, type_, declared)
    if backend == "postgresql":
        yield dialect.key_column('"key"', "a", "text", "enum('a')", ('"lab".kind',))
        yield from (
            value for name, value in vars(PostgreSQLProbes).items() if isinstance(value, str) and name[0] != "_"
        )
    yield from dialect.shown_columns().values()
    yield from (dialect.json_as_text('"key"'), dialect.version_json("version"), dialect.utc_time('"x"'))
    yield queries.count('"lab"."rows"', dialect.catalog)
    yield from (queries.hashes("key_hash", '"lab"."rows"'), queries.hashes_of_table("SELECT 1", "t"), skip_locked)


def statements(backend: str) -> list[str]:
    engine = engine_for(backend)
    templates = [text for group in GROUPS for text in texts_in(getattr(engine, group))]
    return [*(rendered(backend, text) for text in templates), *expressions(backend)]


def unqualified(sql: str) -> list[str]:
    """The functions, types and tables that a statement names without their schema."""
    plain = re.sub(r"'[^']*'", "''", sql)
    calls = [name for name in re.findall(r'(?<![\w."])([a-z_]\w*)\s*\(', plain, re.I) if name.lower() not in GRAMMAR]
    casts = re.findall(r"(?:::\s*|\bCAST\((?:[^()]|\([^()]*\))*\sAS\s+)([a-z_]\w*)(?![\w.])", plain, re.I)
    tables = re.findall(r"\b(?:FROM|JOIN|UPDATE|INTO)\s+([a-z_]\w*)(?![\w.(])", plain, re.I)
    found = [name for name in calls if name.lower() not in TYPES]
    return found + [name for name in casts if name.lower() not in TYPES] + [t for t in tables if t.upper() != "SKIP"]


def test_every_statement_for_postgresql_names_what_it_uses_with_its_schema() -> None:
    assert {name: sql for sql in statements("postgresql") for name in unqualified(sql)} == {}


def test_there_are_statements_to_look_at() -> None:
    found = statements("postgresql")
    assert len(found) > 200
    called = set(re.findall(r"pg_catalog\.(\w+)\(", " ".join(found)))
    assert {"statement_timestamp", "sha256", "encode", "to_json", "COUNT", "MAX", "ROW_NUMBER", "pg_notify"} <= called


def test_the_other_engines_do_not_know_that_schema() -> None:
    assert [sql for sql in statements("mysql") if "pg_catalog" in sql] == []


@pytest.mark.parametrize(
    "sql, name",
    [
        ("SELECT now()", "now"),
        ("SELECT 1 WHERE x > statement_timestamp() AT TIME ZONE 'UTC'", "statement_timestamp"),
        ("SELECT pg_catalog.encode(sha256(x), 'hex')", "sha256"),
        ("SELECT COUNT(*) FROM pg_catalog.pg_class", "COUNT"),
        ("SELECT pg_catalog.count(*) FROM pg_class", "pg_class"),
        ('SELECT "key"::text', "text"),
        ("SELECT CAST(a AS regclass)", "regclass"),
        ("SELECT ROW_NUMBER() OVER (ORDER BY a)", "ROW_NUMBER"),
    ],
)
def test_the_rule_bites(sql: str, name: str) -> None:
    assert unqualified(sql) == [name]
