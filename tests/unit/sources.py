"""The modules of djjobs as syntax trees, for tests that read the code instead of running it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "djjobs"


def module_name(path: Path, root: Path = ROOT) -> str:
    """djjobs/queue/keys.py is djjobs.queue.keys, and a package has the name of its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trees(package: Path = PACKAGE, root: Path = ROOT) -> dict[str, ast.Module]:
    """Every module below a folder, by its full name."""
    return {module_name(path, root): ast.parse(path.read_text(), str(path)) for path in sorted(package.rglob("*.py"))}
