"""Which tests come by which statement and which function, and how long each takes.

A copy of the tree is changed so that it writes this down itself, in child processes and commands too. A mutant then
has to be shown only to the tests that can notice it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mutation.mutants import PYTHON, Mutant, contains

#: Goes into the copy as a module of its own, which is also a plugin of pytest.
RECORDER = """
import json
import os
import re

_seen = set()
_file = os.environ.get("DJJOBS_TOUCHED", "")


def note(kind, text):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if not _file or not test or (test, text) in _seen:
        return
    _seen.add((test, text))
    _write({"test": test, kind: text})


def _write(line):
    file = os.open(_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, (json.dumps(line) + "\\n").encode())
    finally:
        os.close(file)


def watch(connection_class):
    query = connection_class.query

    def noted(self, sql, *arguments, **options):
        note("sql", re.sub(r"djjobs_test_\\w+", "S", " ".join(str(sql).split())))
        return query(self, sql, *arguments, **options)

    connection_class.query = noted


def pytest_runtest_logreport(report):
    _write({"test": report.nodeid, "seconds": report.duration, "outcome": report.outcome})
"""


@dataclass
class Touched:
    """What the tests have come by."""

    sql: dict[str, set[str]] = field(default_factory=dict)
    functions: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Touched:
        touched = cls()
        for line in path.read_text().splitlines():
            note = json.loads(line)
            test = note["test"]
            if "sql" in note:
                touched.sql.setdefault(note["sql"], set()).add(test)
            elif "function" in note:
                touched.functions.setdefault(note["function"], set()).add(test)
            else:
                touched.seconds[test] = touched.seconds.get(test, 0.0) + note["seconds"]
                if note["outcome"] != "passed":
                    touched.failed.add(test)
        return touched

    def by(self, mutant: Mutant) -> set[str]:
        """The tests that can notice a mutant."""
        if mutant.pieces:
            found = [tests for sql, tests in self.sql.items() if contains(sql, mutant.pieces)]
        else:
            found = [self.functions.get(f"{mutant.file}:{mutant.where}", set())]
        return set().union(*found) - self.failed

    def quickest(self, tests: Iterable[str], budget: float, first: str) -> tuple[list[str], int]:
        """As many of these tests as fit into so many seconds, and how many are left out.

        Those of the files whose names have the pattern `first` go first, then the quickest.
        """
        chosen, left, spent = [], 0, 0.0

        def rank(test: str) -> tuple[bool, float, str]:
            return not re.search(first, test.partition("::")[0]), self.seconds.get(test, 1.0), test

        for test in sorted(tests, key=rank):
            seconds = self.seconds.get(test, 1.0)
            if spent + seconds <= budget or not chosen:
                chosen.append(test)
                spent += seconds
            else:
                left += 1
        # File by file: the tests of a file share what takes long to set up.
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        return sorted(chosen, key=lambda test: files.index(test.partition("::")[0])), left


def instrument(root: Path) -> None:
    """Change a copy of the tree so that it notes what is come by."""
    (root / "djjobs_touched.py").write_text(RECORDER)
    start = root / "djjobs" / "__init__.py"
    hook = "import datajoint as _dj\nimport djjobs_touched as _touched\n_touched.watch(_dj.Connection)\n"
    start.write_text(start.read_text() + "\n" + hook)
    for pattern in PYTHON:
        for path in root.glob(pattern):
            tree = ast.parse(path.read_text())
            _note_functions(tree, str(path.relative_to(root)), "")
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _note_functions(node: ast.AST, file: str, prefix: str) -> None:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}" if prefix else child.name
        if isinstance(child, ast.FunctionDef):
            (call,) = ast.parse(f"__import__('djjobs_touched').note('function', {f'{file}:{name}'!r})").body
            child.body.insert(1 if ast.get_docstring(child) is not None else 0, call)
        _note_functions(child, file, name)
