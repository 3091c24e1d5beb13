"""Where tests run: the table names every file and no other, and tests/README.md shows the same."""

from __future__ import annotations

import ast
from pathlib import Path

import cell_table
import pytest

TESTS = Path(cell_table.__file__).resolve().parent
FILES = {path.name for path in TESTS.glob("test_*.py")}


def test_every_file_is_in_the_table() -> None:
    rows = {name for name in cell_table.TABLE if "::" not in name}
    assert FILES - rows == set(), "say in tests/cell_table.py where these run, and why"
    assert rows - FILES == set(), "these are gone"


@pytest.mark.parametrize("name", [name for name in cell_table.TABLE if "::" in name])
def test_a_test_with_a_row_of_its_own_is_there_and_runs_where_its_file_does(name: str) -> None:
    file, test = name.split("::")
    functions = [node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert test in functions
    assert set(cell_table.TABLE[name].cells) < set(cell_table.TABLE[file].cells)


def test_every_test_runs_somewhere_and_every_cell_has_tests() -> None:
    for name, row in cell_table.TABLE.items():
        assert row.cells and set(row.cells) <= set(cell_table.CELLS), name
    for cell in cell_table.CELLS:
        assert cell_table.files_of(cell)
        assert set(cell_table.files_of(cell, everything=True)) == FILES


def test_the_readme_shows_the_table() -> None:
    assert cell_table.markdown() in (TESTS / "README.md").read_text(), "python3 tests/cell_table.py prints it"
