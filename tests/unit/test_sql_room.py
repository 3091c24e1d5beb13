"""SQL is in djjobs/sql/ only: nobody else writes it or puts it together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sources import trees

ROOM = "djjobs.sql"

#: Words that SQL is written with. In a text for people they are in small letters.
WORDS = """
    SELECT INSERT UPDATE DELETE FROM WHERE JOIN LIMIT OFFSET EXISTS UNION HAVING VALUES DISTINCT SET INTO
    CASE WHEN THEN ELSE END AND OR NOT IN IS NULL AS BETWEEN LIKE ASC DESC COALESCE COUNT MIN MAX SUM CAST INTERVAL
    ALTER CREATE DROP TRUNCATE GRANT MODIFY ADD CHANGE RENAME INDEX TABLE CONVERT COMMENT CHARACTER COLLATE
    BEGIN COMMIT ROLLBACK START SAVEPOINT LOCK UNLOCK SHOW EXPLAIN ANALYZE LISTEN NOTIFY
"""
UPPER_CASE = re.compile(rf"\b({'|'.join(WORDS.split())}|(ORDER|GROUP|PARTITION)\s+BY)\b")
#: Whole statements, however they are written.
ANY_CASE = re.compile(
    r"\bselect\b.+\bfrom\b|\bselect\s+(distinct|count|\*|1)\b|\binsert\s+into\b|\bdelete\s+from\b|\bupdate\b.+\bset\b"
    r"|\b(order|group)\s+by\b|\bnot\s+exists\s*\(|\b(alter|create|drop)\s+table\b",
    re.IGNORECASE | re.DOTALL,
)

#: What looks like SQL and is none, by module and a part of the text.
NOT_SQL = {
    ("djjobs.queue.database", "It takes SELECT, INSERT, UPDATE and DELETE"): "names rights, for people",
    ("djjobs.cli.jobs", "timestamp DESC"): "is how DataJoint wants an order",
}


def is_sql(text: str) -> bool:
    """Whether a text is SQL, or a part of it."""
    return bool(UPPER_CASE.search(text) or ANY_CASE.search(text))


def texts_in(tree: ast.AST) -> Iterator[ast.Constant]:
    """The texts of a module, those of f-strings too. Without docstrings and what people read."""
    skipped = {id(text) for node in ast.walk(tree) for text in for_people(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node


def for_people(node: ast.AST) -> Iterator[ast.AST]:
    """What is read by people: docstrings, and the messages of errors and of the log."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Call) and is_told(node.func):
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            yield from ast.walk(argument)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and is_plain_condition(node.right):
        yield from ast.walk(node.right)


def is_told(function: ast.expr) -> bool:
    """Whether a function is an exception's class, or a method of the logger."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "logger":
        return True
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name.endswith(("Error", "Exception", "Warning"))


def is_plain_condition(node: ast.expr) -> bool:
    """Whether it is a condition as DataJoint takes it after `&`. A query is none."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return not re.search(r"\bselect\b", " ".join(texts), re.IGNORECASE)


def sql_in(tree: ast.AST, module: str) -> list[str]:
    """The places where a module writes SQL."""
    excused = [part for where, part in NOT_SQL if where == module]
    return [
        f"{module}, line {node.lineno}: {node.value!r}"
        for node in texts_in(tree)
        if is_sql(node.value) and not any(part in node.value for part in excused)
    ]


def test_sql_is_written_in_its_own_folder_only() -> None:
    others = {name: tree for name, tree in trees().items() if not f"{name}.".startswith(f"{ROOM}.")}
    assert len(others) > 50
    assert [place for name, tree in others.items() for place in sql_in(tree, name)] == []


def test_the_rule_finds_the_sql_in_its_own_folder() -> None:
    """So that the test above could fail."""
    for name in ("attempts", "claims", "enqueue", "jobs", "keys", "queries", "check", "runs", "schedules"):
        assert sql_in(trees()[f"{ROOM}.{name}"], name), name


@pytest.mark.parametrize("module, part", NOT_SQL)
def test_each_exception_is_still_needed(module: str, part: str) -> None:
    assert any(part in node.value and is_sql(node.value) for node in texts_in(trees()[module]))


@pytest.mark.parametrize(
    "code",
    [
        'db.execute("SELECT 1")',
        'db.execute(f"{query} LIMIT 1")',
        'sql = f"select key_hash from {jobs}"',
        'parts = " AND ".join(conditions)',
        'direction = "DESC" if reverse else "ASC"',
        'turn = f"CASE WHEN {due} THEN {priority} END"',
        'self.execute("COMMIT")',
        'change = f"MODIFY {column}"',
        'jobs & f"key_hash IN (SELECT key_hash FROM {other})"',
        'where = {"also": "ORDER BY due_time"}',
        'def find(sql="update jobs set turn = 1"): ...',
    ],
)
def test_the_rule_bites(code: str) -> None:
    assert sql_in(ast.parse(code), "djjobs.queue.somewhere")


@pytest.mark.parametrize(
    "code",
    [
        '"""SELECT is explained here."""',
        'raise DjJobsError(f"no INSERT on {label}")',
        'logger.warning("%s: the statement SELECT failed", name)',
        "jobs & \"status IN ('error', 'ignore')\"",
        'help = "Take keys from key_source and update the jobs"',
        'name = "SKIP LOCKED"',
        "engine.jobs.put_back",
    ],
)
def test_the_rule_leaves_alone_what_is_no_sql(code: str) -> None:
    assert not sql_in(ast.parse(code), "djjobs.queue.somewhere")
