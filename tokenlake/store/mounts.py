"""Which file systems are this machine's alone: what is written to them shows in every map of it at once.

Between nodes a file's length and its pages may be seen at different times, so that a later page is there before an
earlier one.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_local"]

_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def is_local(folder: Path) -> bool:
    """Whether a folder lies on such a file system; False where nobody says so."""
    device = folder.stat().st_dev
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    # proc(5): the third field is the device; the kind follows a field that is a hyphen, after some that may be absent.
    kinds = [
        line.partition(" - ")[2].split()[0]
        for line in mounts
        if line.split()[2] == f"{os.major(device)}:{os.minor(device)}"
    ]
    return bool(kinds) and set(kinds) <= _LOCAL
