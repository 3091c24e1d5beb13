"""Tab completion: modules of the current folder, and schemas of a server that answers without asking."""

from __future__ import annotations

import os
import zoneinfo
from contextlib import suppress
from pathlib import Path

import click
import datajoint as dj
from click.shell_completion import CompletionItem

from ..recurring.api import listed
from ..table.targets import schemas_of

__all__ = ["modules", "modules_and_schemas", "schedules", "schemas", "timezones"]


def modules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Modules below the current folder, one level at a time."""
    *folders, start = incomplete.split(".")
    prefix = "".join(f"{folder}." for folder in folders)
    names = _modules_in(Path(*folders)) if all(folder.isidentifier() for folder in folders) else set()
    return [CompletionItem(prefix + name) for name in sorted(names) if name.startswith(start)]


def schemas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Schemas on the server, if DataJoint knows user and password: a prompt would hang the shell."""
    with suppress(Exception):
        if _can_connect():
            return [CompletionItem(name) for name in sorted(dj.list_schemas()) if name.startswith(incomplete)]
    return []


def modules_and_schemas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [*modules(ctx, param, incomplete), *schemas(ctx, param, incomplete)]


def schedules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of the schedules of the pipeline that was typed before."""
    with suppress(Exception):
        if _can_connect():
            names = {row["name"] for row in listed(schemas_of(ctx.params["pipeline"]))}
            return [
                CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and name.isprintable()
            ]
    return []


def timezones(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = sorted(zoneinfo.available_timezones())
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


def _can_connect() -> bool:
    return dj.config["database.user"] is not None and dj.config["database.password"] is not None


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
