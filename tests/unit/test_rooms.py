"""DataJoint's private members, and all that is changed in DataJoint, are touched in djjobs/dj/ only."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import datajoint
import pytest
from sources import trees

ROOM = "djjobs.dj"
#: What may be imported of DataJoint elsewhere. The rest comes through djjobs/dj/.
PUBLIC_MODULES = ("datajoint", "datajoint.errors")
#: The methods of named tuples begin with an underscore, but are public.
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
#: Not private: "exit without clean-up" is simply called so.
MODULES = {"os._exit"}
#: The mixin stands before DataJoint's classes, and is one of them from then on.
MIXIN = "JobsMixin"


def is_private(name: str) -> bool:
    """Whether it begins with one underscore. (`_repr_html_` is a protocol of notebooks.)"""
    return name.startswith("_") and not name.endswith("_")


def defined_in(tree: ast.AST) -> set[str]:
    """The attributes that the classes of a module define: methods, class attributes and `self.name = ...`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= names_in_body(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def names_in_body(cls: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def is_own(node: ast.expr) -> bool:
    """Whether it is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def datajoint_defines(module: str) -> set[str]:
    return defined_in(ast.parse((Path(datajoint.__file__).parent / f"{module}.py").read_text()))


#: The attributes of what djjobs has in its hands: connections, schemas, tables, queries; the private ones of headings.
DATAJOINTS = {name for name in datajoint_defines("heading") if is_private(name)}
for _module in ("autopopulate", "connection", "expression", "schemas", "table", "user_tables"):
    DATAJOINTS |= datajoint_defines(_module)


def datajoint_names(tree: ast.AST) -> set[str]:
    """The names in a module that stand for something of DataJoint."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name for a in node.names if a.name.partition(".")[0] == "datajoint"}
        elif isinstance(node, ast.ImportFrom):
            of_datajoint = (node.module or "").partition(".")[0] == "datajoint"
            # Those that djjobs/dj/ passes on begin with a capital letter: Table, QueryExpression.
            passed_on = node.level > 0 and (node.module or "").startswith("dj.")
            for alias in node.names:
                if of_datajoint or (passed_on and alias.name[0].isupper()):
                    names.add(alias.asname or alias.name)
    return names


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def heirs_of_datajoint(modules: dict[str, ast.Module]) -> set[str]:
    """The classes of djjobs that are made from one of DataJoint."""
    heirs, before = {MIXIN}, 0
    while len(heirs) != before:
        before = len(heirs)
        for tree in modules.values():
            theirs = datajoint_names(tree)
            for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                if any(root_of(base) in heirs | theirs for base in cls.bases):
                    heirs.add(cls.name)
    return heirs


class Offences(ast.NodeVisitor):
    """What a module does that only djjobs/dj/ may do."""

    def __init__(self, tree: ast.Module, ours: set[str], heirs: set[str]) -> None:
        self._here, self._ours, self._heirs = defined_in(tree), ours, heirs
        self._theirs = datajoint_names(tree)
        self._in_heir = [False]
        self.found: list[tuple[int, str]] = []
        self.visit(tree)

    def _add(self, node: ast.AST, words: str) -> None:
        self.found.append((node.lineno, words))  # type: ignore[attr-defined]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._in_heir.append(node.name in self._heirs)
        self.generic_visit(node)
        self._in_heir.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._check_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level:
            self._check_import(node, node.module or "")
            for alias in node.names:
                if (node.module or "").partition(".")[0] == "datajoint" and alias.name.startswith("_"):
                    self._add(node, f"imports DataJoint's private {alias.name}")

    def _check_import(self, node: ast.stmt, module: str) -> None:
        if module.partition(".")[0] == "datajoint" and module not in PUBLIC_MODULES:
            self._add(node, f"imports {module}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "__dict__" and not is_own(node.value):
            self._add(node, f"looks into {ast.unparse(node)}")
        elif is_private(node.attr) and not self._may_use(node):
            self._add(node, f"uses the private {ast.unparse(node)}")
        elif not isinstance(node.ctx, ast.Load):
            self._check_change(node, node.value, node.attr)
        self.generic_visit(node)

    def _may_use(self, node: ast.Attribute) -> bool:
        if node.attr in NAMED_TUPLE or ast.unparse(node) in MODULES:
            return True
        if is_own(node.value):
            return not (self._in_heir[-1] and node.attr in DATAJOINTS)
        return self._is_ours(node.attr)

    def _is_ours(self, name: str) -> bool:
        """Whether it is an attribute of ours. One that DataJoint has too must be defined in this very module."""
        return name in (self._here if name in DATAJOINTS else self._ours)

    def visit_Call(self, node: ast.Call) -> None:
        """`getattr(table, "_heading")` is `table._heading`."""
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            owner, name = node.args[0], node.args[1]
            text = name.value if isinstance(name, ast.Constant) else ""
            if text and is_private(text) and not is_own(owner) and not self._is_ours(text):
                self._add(node, f"uses the private {ast.unparse(owner)}.{text}")
            elif node.func.id in ("setattr", "delattr"):
                self._check_change(node, owner, text)
        self.generic_visit(node)

    def _check_change(self, node: ast.AST, owner: ast.expr, name: str) -> None:
        if root_of(owner) in self._theirs:
            self._add(node, f"changes {ast.unparse(owner)}, which is DataJoint's")
        elif not is_own(owner) and name in DATAJOINTS and not self._is_ours(name):
            self._add(node, f"changes {ast.unparse(owner)}.{name}, which DataJoint has, too")


MODULES_OF_DJJOBS = trees()
HEIRS = heirs_of_datajoint(MODULES_OF_DJJOBS)
OURS: set[str] = set()
for _tree in MODULES_OF_DJJOBS.values():
    OURS |= defined_in(_tree)


def offences(tree: ast.Module) -> Iterator[str]:
    for line, words in Offences(tree, OURS, HEIRS).found:
        yield f"line {line} {words}"


def is_outside(name: str) -> bool:
    return not f"{name}.".startswith(f"{ROOM}.")


@pytest.mark.parametrize("name", sorted(filter(is_outside, MODULES_OF_DJJOBS)))
def test_datajoints_inside_is_touched_in_one_room(name: str) -> None:
    found = list(offences(MODULES_OF_DJJOBS[name]))
    assert not found, f"{name} does what belongs into a function of djjobs/dj/: {'; '.join(found)}"


def test_there_is_something_to_look_at() -> None:
    assert {
        "_connection",
        "_heading",
        "_jobs_to_do",
        "_in_transaction",
        "_attributes",
        "commit_transaction",
    } <= DATAJOINTS
    assert {"QueueTable", "Jobs", "TableJobs", "RunsOfSchema", "JobsMixin", "Computed"} <= HEIRS
    assert list(offences(MODULES_OF_DJJOBS[f"{ROOM}.tables"])), "the room itself does it all the time"


@pytest.mark.parametrize(
    "code",
    [
        "import datajoint.connection",
        "from datajoint.heading import Heading",
        "from datajoint.table import Table",
        "from datajoint import _version",
        "connection._in_transaction = False",
        "def f(connection): return connection._conn",
        "class Bell:\n    def f(self): return self._queue.db.connection._config",
        "def f(table): return table._connection",
        "def f(table): return type(table)()._heading",
        "def f(table): return table._jobs_to_do(())",
        "def f(table): return getattr(table, '_support')",
        "def f(schema): schema._jobs = None",
        "def f(connection): connection.commit_transaction = f",
        "def f(connection): del connection.commit_transaction",
        "def f(queue): queue.db.connection.connection_id = 5",
        "def f(connection): setattr(connection, 'query', f)",
        "def f(connection): return connection.__dict__['queues']",
        "import datajoint as dj\ndj.Computed.populate = None",
        "import datajoint as dj\nsetattr(dj.Manual, 'anything', None)",
        "import datajoint as dj\ndj.conn.connection = None",
        "from datajoint import Computed\nComputed.anything = 5",
        "from ..dj.tables import Table\nTable.insert = None",
        "class Jobs:\n    def f(self): return self._heading",
        "class TableJobs:\n    def f(self): self._support = []",
        "class JobsMixin:\n    def f(self): return super()._populate1({})",
    ],
)
def test_the_rule_bites(code: str) -> None:
    assert list(offences(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import datajoint as dj\nfrom datajoint.errors import DataJointError\nfrom datajoint import AndList",
        "import datajoint as dj\ndef f(): return dj.conn().query('SELECT 1')",
        "class Bell:\n    def f(self): self._connection = 5; return self._connection",
        "def f(row): return row._replace(status='error')",
        "class Run:\n    def f(self, other): self._table = other._table",
        "def f(outbox): outbox.held = True",
        "import os\nos._exit(1)",
    ],
)
def test_the_rule_lets_our_own_things_alone(code: str) -> None:
    assert not list(offences(ast.parse(textwrap.dedent(code))))
