"""Memory maps of segments, kept between reads.

A map grows with its file, follows a file that was replaced by rename, and outlives one that was removed until `forget`:
so who opened a lake before retention removed a segment reads it on. Whoever writes for days keeps none of those: their
blocks would stay on the disk. A file that became shorter is mapped anew, so that
no read can touch a page that is gone. A map costs address space, and no file descriptor.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import StorageFailed
from tokenlake.store.walk import file_schema

__all__ = ["Mapped", "SegmentMaps", "stamp_of"]

_MAX_MAPS = 1 << 14
"""A quarter of what Linux lets a process map."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A segment as long as it was when it was mapped; what made it longer since is not in it."""

    view: memoryview
    inode: int
    stamp: int
    """What tells the file from others once it is sealed; an inode alone is given again when its file is removed."""
    schema: pa.Schema | None
    """None: the head of the file is damaged or not written yet."""
    first: int
    """Where the record batches start."""


class SegmentMaps:
    """Maps by path below a lake. Thread-safe.

    `outlive`: whether those of removed files are kept; else they go with one of the next that are made.
    """

    def __init__(self, root: Path, *, outlive: bool = True) -> None:
        self._root = root
        self._outlive = outlive
        self._made = 0
        """Maps that were made since the last look at which files are gone."""
        self._prefix = f"{root}/"
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, Mapped] = OrderedDict()

    def get(self, name: str, upto: int | None = None) -> Mapped | None:
        """The map of the file `name` (relative to the lake); None: there is no such file, or it is empty.

        It has the file's whole present length when `upto` is None or beyond what is mapped. Raises `StorageFailed` for
        a file that cannot be read.
        """
        with self._lock:
            known = self._maps.get(name)
            try:
                now = os.stat(self._prefix + name)  # noqa: PTH116  # a Path costs three times as much as the call
                if known is not None:
                    size = len(known.view)
                    if (
                        known.inode == now.st_ino
                        and now.st_size >= size
                        and (now.st_size == size or _within(upto, size))
                    ):
                        self._maps.move_to_end(name)
                        return known
                made = _map(self._root / name, known)
            except FileNotFoundError:
                return known
            except OSError as error:
                raise StorageFailed(
                    f"{self._prefix}{name} cannot be read: {error}: check the disk, who may read it, and how much this "
                    "process may map",
                    errno=error.errno,
                ) from error
            if made is None:
                self._maps.pop(name, None)
                return None
            self._maps[name] = made
            self._made += 1
            if not self._outlive and 2 * self._made > len(self._maps):
                self._leave_removed()
            if len(self._maps) > _MAX_MAPS:
                self._maps.popitem(last=False)
            return made

    def _leave_removed(self) -> None:
        self._made = 0
        for name in [name for name in self._maps if not (self._root / name).exists()]:
            del self._maps[name]

    def copy(self) -> SegmentMaps:
        """The same maps, to be kept for as long as the copy is."""
        copy = SegmentMaps(self._root)
        with self._lock:
            copy._maps = self._maps.copy()
        return copy

    def forget(self, name: str) -> None:
        """Let go of the map of a file that is gone."""
        with self._lock:
            self._maps.pop(name, None)

    def clear(self) -> None:
        """Let go of every map."""
        with self._lock:
            self._maps.clear()


def _within(upto: int | None, size: int) -> bool:
    return upto is not None and upto <= size


def _map(path: Path, known: Mapped | None) -> Mapped | None:
    """The map of a file, or None where it is empty. Raises `FileNotFoundError`."""
    inode = path.stat().st_ino
    view = _view(path)
    while inode != (now := path.stat()).st_ino:
        # Another file took its place, before it was mapped or after.
        inode, view = now.st_ino, _view(path)
    if not view:
        return None
    if known is not None and known.inode == inode and known.schema is not None and len(view) >= known.first:
        return Mapped(view, inode, stamp_of(now), known.schema, known.first)
    schema, first = file_schema(view)
    return Mapped(view, inode, stamp_of(now), schema, first)


def stamp_of(about: os.stat_result) -> int:
    """Of a sealed file, which nobody writes any more; 64 bits."""
    return about.st_ino ^ about.st_mtime_ns


def _view(path: Path) -> memoryview:
    with pa.memory_map(str(path)) as file:
        return memoryview(file.read_buffer()).cast("B")
