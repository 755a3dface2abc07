"""A temporary folder of one process's own: what a process that was killed leaves there, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["Scratch"]

_PREFIX = "tokenlake-reader-"
_YOUNG_S = 60.0
"""A folder may be this new and not yet held by who makes it."""


class Scratch:
    """A folder that is held until `remove`. Raises `OSError` where none can be made."""

    def __init__(self) -> None:
        _remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._pid = os.getpid()
        self._fd = _opened(self.path)
        with contextlib.suppress(OSError):  # a file system without locks: nobody can tell who was killed
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with what is in it, unless this is a forked child of the process whose folder it is."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)


def _remove_left() -> None:
    """Remove the folders that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # One of another user, or that is removed just now, is not ours to remove.
        with contextlib.suppress(OSError):
            fd = _opened(folder)
            try:
                if time.time() - os.fstat(fd).st_mtime > _YOUNG_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
