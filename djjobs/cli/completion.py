"""Tab completion: modules of the current folder, and schemas of a server that answers without asking."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click
import datajoint as dj
from click.shell_completion import CompletionItem

__all__ = ["modules", "modules_and_schemas", "schemas"]


def modules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Modules below the current folder, one level at a time."""
    *folders, start = incomplete.split(".")
    prefix = "".join(f"{folder}." for folder in folders)
    names = _modules_in(Path(*folders)) if all(folder.isidentifier() for folder in folders) else set()
    return [CompletionItem(prefix + name) for name in sorted(names) if name.startswith(start)]


def schemas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Schemas on the server, if DataJoint knows user and password: a prompt would hang the shell."""
    with suppress(Exception):
        if dj.config["database.user"] is not None and dj.config["database.password"] is not None:
            return [CompletionItem(name) for name in sorted(dj.list_schemas()) if name.startswith(incomplete)]
    return []


def modules_and_schemas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [*modules(ctx, param, incomplete), *schemas(ctx, param, incomplete)]


def _modules_in(folder: Path) -> set[str]:
    found = set()
    with suppress(OSError):
        for entry in os.scandir(folder):
            name = entry.name.removesuffix(".py") if entry.is_file() and entry.name.endswith(".py") else ""
            if entry.is_dir() and (Path(entry) / "__init__.py").exists():
                name = entry.name
            if name.isidentifier() and not name.startswith("__"):
                found.add(name)
    return found
