"""A floor of free disk: what is written stops before the disk is full, so that reading and clean-up go on.

A file system that is out of inodes is as full as one that is out of bytes: some of those stay free as well.

The half below the floor is kept for what ends things and makes room: events, rows, upkeep. Space that returns is seen
with the next write.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenlake.errors import StorageFailed

__all__ = ["FreeSpace"]

_INODES = 256
"""Files that can still be made where a floor is set; half of it for events, as of the bytes."""


class FreeSpace:
    """The free bytes of a lake's disk. Thread-safe; asking costs one system call."""

    def __init__(self, root: Path, floor: int = 0) -> None:
        self._root = root
        self.floor = floor
        """Bytes that stay free; 0: the disk may fill up."""

    def for_deltas(self) -> None:
        """Raise `StorageFailed`, reason `disk_full`, where a delta would go below the floor."""
        self._check(1)

    def for_events(self) -> None:
        """The same for events and rows, which may use half of it."""
        self._check(2)

    def has_room_for(self, size: int) -> bool:
        """Whether so many bytes more would leave the floor."""
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize >= size + self.floor

    def _check(self, share: int) -> None:
        floor = self.floor // share
        if not floor:
            return
        try:
            disk = os.statvfs(self._root)
        except OSError as error:
            raise StorageFailed(f"the disk of {self._root} does not answer: {error}", errno=error.errno) from error
        free = disk.f_bavail * disk.f_frsize
        if free < floor:
            raise self._full(free, floor, "bytes")
        if disk.f_files and disk.f_favail < _INODES // share:
            raise self._full(disk.f_favail, _INODES // share, "inodes")

    def _full(self, free: int, floor: int, what: str) -> StorageFailed:
        return StorageFailed(
            f"the disk of {self._root} has {free} {what} free, below the {floor} that stay free: remove something, and "
            "calls are taken again",
            reason="disk_full",
            **{f"free_{what}": free, f"min_free_{what}": floor},
        )
