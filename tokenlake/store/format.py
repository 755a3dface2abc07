"""`lake.json`: what says that a folder is a lake, and of which format."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, cast

from tokenlake.errors import FormatError, NotFound, StorageFailed
from tokenlake.store.schema import FORMAT_VERSION
from tokenlake.store.segment import make_directory, sync_directory, write_all

__all__ = ["create_lake", "lake_file", "read_lake", "write_durable"]

_FILE = "lake.json"


def read_lake(path: Path) -> dict[str, Any]:
    """The contents of `lake.json`.

    Raises `NotFound` where there is no lake, `FormatError` for a newer one, `StorageFailed` where it cannot be read.
    """
    try:
        if not path.is_dir():
            raise NotFound(f"no lake at {path}: there is no such folder", path=str(path))
        raw = (path / _FILE).read_bytes()
    except FileNotFoundError as error:
        _check_not_lost(path)
        raise NotFound(
            f"no lake at {path}: the folder has no {_FILE} (`tokenlake serve` and `import` create one)", path=str(path)
        ) from error
    except OSError as error:
        raise StorageFailed(f"lake {path} cannot be read: {error}", path=str(path)) from error
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path / _FILE} is not JSON: restore it, or name another folder", path=str(path)) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path / _FILE} is not a JSON object: restore it, or name another folder", path=str(path))
    lake = cast("dict[str, Any]", found)
    version = lake.get("format_version")
    if not isinstance(version, int) or not isinstance(lake.get("lake_id"), str):
        raise FormatError(f"{path / _FILE} names no format_version and lake_id: restore it", path=str(path))
    if version > FORMAT_VERSION:
        raise FormatError(
            f"lake {path} has format {version}, this Tokenlake reads up to {FORMAT_VERSION}: upgrade Tokenlake",
            format_version=version,
        )
    return lake


def lake_file(path: Path) -> tuple[int, int]:
    """Which file says that a folder is a lake: that of a copy in its place is another. Raises as `read_lake`."""
    try:
        about = os.stat(f"{path}/{_FILE}")  # noqa: PTH116  # a Path costs three times as much, at every refresh
    except OSError:
        read_lake(path)
        raise
    return about.st_dev, about.st_ino


def create_lake(path: Path) -> None:
    """Make a folder a lake, unless it is one. The file that says so is written last.

    Raises `FormatError` where that file is gone from a lake: another id would make another lake of it, for which
    none of its credentials is worth anything.
    """
    make_directory(path)
    for folder in ("deltas", "lineage", "rows"):
        (path / folder).mkdir(exist_ok=True)
    if (path / _FILE).exists():
        # Whoever made it may have died before this.
        sync_directory(path.parent)
        return
    _check_not_lost(path)
    lake = {"format_version": FORMAT_VERSION, "lake_id": uuid.uuid4().hex, "created_at": time.time_ns() // 1000}
    write_durable(path / _FILE, json.dumps(lake, indent=2).encode() + b"\n")
    sync_directory(path.parent)


def _check_not_lost(path: Path) -> None:
    if next(path.glob("lineage/*/*.arrow"), None) is not None:
        raise FormatError(
            f"{path} holds a lake's lineage and no {_FILE}: restore that file from a backup, or name another folder",
            path=str(path),
        )


def write_durable(path: Path, data: bytes) -> None:
    """Create or replace a file so that it is there whole or not at all, also after a crash."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    sync_directory(path.parent)
