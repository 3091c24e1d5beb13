"""The rooms of djjobs stand in an order, and each knows only those before it.

The code is read, not run: an import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest
from sources import PACKAGE, trees

import djjobs

#: A room is a folder of djjobs or a module beside them. It may import from itself and from the rooms before it.
ORDER = [
    *(
        "errors",
        "printable",
        "dj",
        "settings",
        "interrupt",
        "telemetry",
        "log_lines",
        "sql",
        "queue",
        "run",
        "events",
        "work",
        "table",
    ),
    *("recurring", "worker", "views", "check", "demo", "cli", "__init__"),
]
RULE = f"A module may import only from its own room and from those before it: {' -> '.join(ORDER)}."
Imports = list[tuple[str, int]]


def imports_of(name: str, tree: ast.Module, known: Mapping[str, object], is_package: bool) -> Iterator[tuple[str, int]]:
    """The modules of djjobs that a module imports, with the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            source = source_of(node, name, is_package)
            for alias in node.names:
                inside = f"{source}.{alias.name}"
                if inside in known:
                    yield inside, node.lineno
                elif source in known:
                    yield source, node.lineno


def source_of(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The full name of what stands between `from` and `import`."""
    if not node.level:
        return node.module or ""
    up = node.level - 1 if is_package else node.level
    parts = name.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def room_of(name: str) -> str:
    """The second part of a module's name; the package itself is the last room."""
    return [*name.split("."), "__init__"][1]


def all_imports(modules: dict[str, ast.Module]) -> dict[str, Imports]:
    packages = {name.rpartition(".")[0] for name in modules}
    return {name: sorted(set(imports_of(name, tree, modules, name in packages))) for name, tree in modules.items()}


def against_the_direction(name: str, imports: Imports) -> list[tuple[str, int]]:
    if room_of(name) not in ORDER:
        return []  # another test says so
    place = ORDER.index(room_of(name))
    return [(target, line) for target, line in imports if room_of(target) not in ORDER[: place + 1]]


def cycle_in(imports: Mapping[str, Imports]) -> list[str]:
    """A way from a module back to itself, if there is one."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for target, _ in imports[name]:
            found = search(target, [*way, name])
            if found:
                return found
        done.add(name)
        return []

    return next(filter(None, (search(name, []) for name in imports)), [])


MODULES = trees()
IMPORTS = all_imports(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_knows_only_what_stands_before_it(name: str) -> None:
    found = against_the_direction(name, IMPORTS[name])
    offences = [f"{name}, line {line}, imports {target}" for target, line in found]
    assert not found, f"{'; '.join(offences)}. {RULE}"


def test_no_module_knows_itself_by_a_detour() -> None:
    way = cycle_in(IMPORTS)
    assert not way, f"These modules import each other in a circle: {' -> '.join(way)}"


def test_every_module_is_in_a_room() -> None:
    homeless = sorted(name for name in MODULES if room_of(name) not in ORDER)
    assert not homeless, f"{', '.join(homeless)}: put the room into ORDER, after all that it needs."


def test_no_folder_hides_a_public_name() -> None:
    """`djjobs.runs` is a function. A folder of that name would take its place when something in it is imported."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    public = {*djjobs.__all__, "runs", "schedules", "jobs", "workers", "firings", "status", "settings", "migrate"}
    # settings.py holds the object `settings`, which is imported under the same name and has taken its place.
    assert not (folders | (modules - {"settings"})) & public


# -- that the rules find something -----------------------------------------------------------------------------------


def modules(**sources: str) -> dict[str, ast.Module]:
    """A small package: `queue__keys` is djjobs/queue/keys.py."""
    found = {"djjobs": "", **{f"djjobs.{name.replace('__', '.')}": code for name, code in sources.items()}}
    for name in list(found):
        found.setdefault(name.rpartition(".")[0] or name, "")
    return {name: ast.parse(code) for name, code in found.items()}


@pytest.mark.parametrize(
    "code",
    [
        "from ..table.mixin import JobsMixin",
        "from ..table import mixin",
        "from .. import table",
        "import djjobs.table.mixin",
        "from djjobs.table.mixin import JobsMixin",
        "def f():\n    from ..table.mixin import JobsMixin",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..table.mixin import JobsMixin",
        "import djjobs",
        "from .. import jobs",
    ],
)
def test_an_import_against_the_direction_is_found(code: str) -> None:
    imports = all_imports(modules(queue__keys=code, table__mixin=""))
    assert against_the_direction("djjobs.queue.keys", imports["djjobs.queue.keys"])
    back = all_imports(modules(table__mixin="from ..queue.keys import Keys", queue__keys=""))
    assert not against_the_direction("djjobs.table.mixin", back["djjobs.table.mixin"])
    assert back["djjobs.table.mixin"] == [("djjobs.queue.keys", 1)]


def test_a_circle_is_found() -> None:
    lazy = "def f():\n    from .keys import Keys"
    circle = modules(queue__keys="from . import claim", queue__claim="from .policy import P", queue__policy=lazy)
    assert set(cycle_in(all_imports(circle))) == {"djjobs.queue.keys", "djjobs.queue.claim", "djjobs.queue.policy"}
    assert not cycle_in(all_imports(modules(queue__keys="from .claim import Job", queue__claim="")))


def test_an_import_from_the_package_itself_counts_as_one_of_it() -> None:
    imports = all_imports(modules(sql="from .engine import Engine", sql__engine="from . import jobs", sql__jobs=""))
    assert imports["djjobs.sql"] == [("djjobs.sql.engine", 1)]
    assert imports["djjobs.sql.engine"] == [("djjobs.sql.jobs", 1)]
