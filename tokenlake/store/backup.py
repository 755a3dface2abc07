"""A consistent copy of a live lake, made without stopping or owning it.

The order of copying makes it consistent: anchors before lineage (so no anchor is beyond its log), lineage before deltas
and rows (what an event names is on disk before the event). A shared lock keeps compaction and retention away
meanwhile. A log is copied as far as it has events before: one that takes the place of zeros while it is read might be
in the copy without the one before it. What is staged during the copy may be in it as a torn tail or an uncommitted
record, as after a crash; the first start of the copy recovers it. The index is not copied: it is built anew.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenlake.errors import Conflict, StorageFailed
from tokenlake.store.footer import has_footer
from tokenlake.store.format import read_lake
from tokenlake.store.lineage import events_end
from tokenlake.store.lock import SEGMENTS_LOCK, DirectoryLock
from tokenlake.store.maps import SegmentMaps
from tokenlake.store.segment import FLOOR, sync_directory, write_all

__all__ = ["Backup", "back_up"]

_CHUNK = 16 << 20
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What was copied."""

    files: int
    bytes: int


def back_up(root: Path, target: Path) -> Backup:
    """Copy the lake at `root` to `target`, which must not exist yet; it is there whole or not at all.

    Raises `NotFound` where there is no lake, `Conflict` for a target that exists or is inside the lake, `LakeLocked`
    while segments have been rewritten for a minute, `StorageFailed` when the disk refuses.
    """
    read_lake(root)
    if target.exists():
        raise Conflict(f"{target} exists: name a folder that does not", path=str(target))
    if target.resolve().is_relative_to(root.resolve()):
        raise Conflict(f"{target} is inside the lake: name a folder outside it", path=str(target))
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}-{time.time_ns()}")
    lock = DirectoryLock(root / SEGMENTS_LOCK, f"the set of segments of {root}", shared=True, wait_s=_WAIT_S)
    try:
        for folder in ("", "deltas", "lineage", "rows"):
            (partial / folder).mkdir()
        files = size = 0
        for path in _files(root):
            copy = partial / path.relative_to(root)
            copy.parent.mkdir(exist_ok=True)
            size += _copy(path, copy, _upto(path) if path.match("lineage/*/*.arrow") else None)
            files += 1
        for folder in (*partial.glob("*/*/"), *partial.glob("*/"), partial):
            sync_directory(folder)
        partial.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise StorageFailed(
            f"{root} could not be copied to {target} ({error}): nothing of it was kept", errno=error.errno
        ) from error
    finally:
        lock.release()
        shutil.rmtree(partial, ignore_errors=True)
    return Backup(files=files, bytes=size)


def _files(root: Path) -> Iterator[Path]:
    """Every file of a lake that is no lock and no index, in an order that keeps the copy consistent."""
    yield root / "lake.json"
    logs = _in(root / "lineage")
    yield from (head for log in logs if (head := log / "head.json").exists())
    for folders in (logs, _in(root / "deltas"), [root / "rows"]):
        for folder in folders:
            yield from (path for path in _in(folder) if path.suffix == ".arrow" or path.name == FLOOR)


def _in(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is none. Not `glob`, which passes over what it may not read."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _upto(path: Path) -> int | None:
    """Where the last event ends in a log that is written; None: all of it is to be copied."""
    mapped = SegmentMaps(path.parent).get(path.name)
    if mapped is None or mapped.schema is None or has_footer(mapped.view):
        return None
    return events_end(mapped)


def _copy(path: Path, copy: Path, upto: int | None) -> int:
    """Copy a file, or so many bytes of it, as long as it is now; returns its bytes."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = left = os.fstat(source).st_size if upto is None else upto
        target = os.open(copy, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            while left and (data := os.read(source, min(left, _CHUNK))):
                write_all(target, data)
                left -= len(data)
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        os.close(source)
    return size - left
