"""Exclusive locks of directories: one owner of a lake, one writer of a segment folder.

A lock is the kernel's (`flock`), so it ends with its process, also after kill -9: nobody ever unlocks by hand. A forked
child lets go of what it inherited, so it cannot keep a lake locked after its parent is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any, cast

from tokenlake.errors import LakeLocked, StorageFailed, TokenlakeError

__all__ = ["SEGMENTS_LOCK", "DirectoryLock", "check_process"]

SEGMENTS_LOCK = "segments.lock"
"""Of a lake: held shared while its segments must stay, alone while some are removed."""

_RETRY_S = 0.05
_BRIEF_S = 60.0


class DirectoryLock:
    """The held lock file `path`. Raises `LakeLocked`, naming `what` and the holder's pid, while another holds it.

    A `shared` lock is held by any number at once, and by none while it is held alone. `wait_s`: how long it is waited
    for; one that is held in `brief` is waited for in any case.
    """

    def __init__(
        self, path: Path, what: str, *, shared: bool = False, wait_s: float = 0.0, brief: bool = False
    ) -> None:
        self._path = path
        self._name = str(path)
        self._what = what
        try:
            self._fd = _opened(path, shared)
        except OSError as error:
            raise StorageFailed(
                f"{path} cannot be locked ({error.strerror}): {what} needs a disk that takes writes"
            ) from error
        try:
            _acquire(self._fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)
        except OSError as error:
            note = _note(self._fd)
            holder, host = note.get("pid"), note.get("host")
            os.close(self._fd)
            self._fd = -1
            if not isinstance(error, BlockingIOError):
                raise StorageFailed(
                    f"{path} cannot be locked ({error.strerror}): {what} needs a file system with flock"
                ) from error
            who = f"process {holder}" if holder else "another process"
            who += f" on {host}" if host not in (None, socket.gethostname()) else ""
            raise LakeLocked(
                f"{what} is owned by {who}: use it through that process, or stop it first", pid=holder, path=str(path)
            ) from error
        self.pid = os.getpid()
        about = os.fstat(self._fd)
        self._inode = about.st_dev, about.st_ino
        held = {"pid": self.pid, "host": socket.gethostname(), "since": int(time.time()), "brief": brief}
        note = json.dumps(held).encode()
        # The note only helps who is refused; the lock is held without it, on a full disk too.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, note, 0)
        _held.add(self)

    @classmethod
    def acquire_if_free(cls, path: Path, what: str) -> DirectoryLock | None:
        """The lock for a moment, or None while another process holds it."""
        try:
            return cls(path, what, brief=True)
        except LakeLocked:
            return None

    def lost(self) -> StorageFailed | None:
        """Why nothing may be written any more: somebody removed the file or moved a folder that it lies in.

        Who came after locked another one. Or it was released meanwhile.
        """
        if self._fd < 0:
            return StorageFailed(f"{self._what} was closed meanwhile: nothing was acknowledged; open it again")
        if _inode(self._name) == self._inode:
            return None
        return StorageFailed(
            f"{self._path} was removed or replaced while {self._what} was open, so another process may have it by now: "
            "nothing was acknowledged; stop this process, then start it again",
            reason="lock_lost",
        )

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _held.discard(self)


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _release_inherited() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_inherited)


def _opened(path: Path, shared: bool) -> int:
    """The file, made where there is none; who only reads may be allowed no more than to open it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        if not shared or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _acquire(fd: int, mode: int, wait_s: float) -> None:
    """Take the lock, trying again until then; raises `BlockingIOError`."""
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Who took it a moment ago may not have said yet for how long.
            patience = max(wait_s, _BRIEF_S if _note(fd).get("brief") else _RETRY_S)
            if time.monotonic() >= began + patience:
                raise
        time.sleep(_RETRY_S)


def _inode(name: str) -> tuple[int, int] | None:
    """What tells a file from every other one; None: there is none."""
    try:
        about = os.stat(name)  # noqa: PTH116  # a Path costs more than the call, before every sync
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _note(fd: int) -> dict[str, Any]:
    """What the last holder left in the file."""
    try:
        note = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return cast("dict[str, Any]", note) if isinstance(note, dict) else {}


def check_process(pid: int, what: str) -> None:
    """Refuse to go on in a process that inherited a handle through fork."""
    if os.getpid() != pid:
        raise TokenlakeError(
            f"{what} was opened by process {pid} and cannot be used in its child {os.getpid()}: open it there",
            opened_by=pid,
        )
