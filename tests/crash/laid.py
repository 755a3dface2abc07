"""A lake that is laid out again from what was read of it, and known by the same numbers as before.

An index on disk trusts a file by its inode. A copy has other inodes, and an index that reads everything anew would hide
what one that trusts too much gets wrong: so the process that opens the copy is told the old numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.shim import Tree

_NEW = 1 << 40
"""Added to the inode of a file that was not copied, so that it is never taken for one that was."""
_MORE = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns", "st_blksize", "st_blocks", "st_rdev")


class Laid:
    """A lake at `path`, which is copied there from `tree`; an empty one is left as it is."""

    def __init__(self, tree: Tree, path: Path) -> None:
        self.path = path
        self._inodes: dict[int, int] = {}
        for name in sorted(tree):
            file = tree[name]
            if file is None:
                (path / name).mkdir(parents=True, exist_ok=True)
            else:
                (path / name).write_bytes(file.data)
                self._inodes[(path / name).stat().st_ino] = file.inode

    def pretend(self) -> None:
        """From now on this process, which is thrown away, is told the numbers that the files had."""
        if self._inodes:
            os.stat, os.fstat = self._told(os.stat), self._told(os.fstat)

    def _told(self, real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def told(*arguments: Any, **named: Any) -> os.stat_result:
            found = real(*arguments, **named)
            values = list(found)
            values[1] = self._inodes.get(found.st_ino, found.st_ino + _NEW)
            return os.stat_result(values, {name: getattr(found, name) for name in _MORE})

        return told
