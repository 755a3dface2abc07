"""Reads the SQL files of this package; holds no SQL itself.

A file is named by its path below `tokenlake/sql` without the suffix, e.g. `views/rollouts` or `reads/group`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from tokenlake.errors import NotFound

__all__ = ["names", "read"]


@cache
def read(name: str) -> str:
    """Text of one SQL file. Raises `NotFound` when there is no such file."""
    path = resources.files("tokenlake.sql").joinpath(*f"{name}.sql".split("/"))
    if not path.is_file():
        raise NotFound(f"no SQL file {name}.sql in tokenlake/sql", name=name)
    return path.read_text(encoding="utf-8")


@cache
def names(folder: str) -> tuple[str, ...]:
    """Names of the SQL files directly in a folder (`views`, `audits`, `reads`), sorted, each with its folder."""
    found = resources.files("tokenlake.sql").joinpath(folder)
    if not found.is_dir():
        raise NotFound(f"no folder {folder} in tokenlake/sql", name=folder)
    return tuple(sorted(f"{folder}/{entry.name[:-4]}" for entry in found.iterdir() if entry.name.endswith(".sql")))
