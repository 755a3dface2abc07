"""Every call of `os` that changes a file, counted, and made to fail.

A store that calls nothing but `os` can be looked at between any two system calls without a debugger. `Shim` replaces
those functions in the process that installs it. It also remembers what was synced, so it can tell what a loss of power
leaves: bytes that no `fsync` covered are as they were, and names that no sync of their folder covered are undone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILLED = 137
MODES = ("process", "power", "reordered", "zeroed", "even pages", "odd pages")
"""What a kill loses: nothing; all that is not synced; bytes that are not synced, while names are kept; the same, with
zeros where a file became longer; the same, of every second page only."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class File:
    """What a file holds, and by which number an index knows it."""

    data: bytes
    inode: int


Tree = dict[str, File | None]
"""What a folder holds: paths below it, and None for folders."""

_NAMES = ("open", "write", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "mkdir")
_NEEDS = {"no room": ("open", "mkdir", "write"), "no inodes": ("open", "mkdir")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at one call, 1 the first; 0: nothing."""

    at: int = 0
    kind: str = "kill"
    """`kill` before the call; a `short` write; the name of an errno; or, for every call from here on, `read-only`,
    `no room` and `no inodes`, which refuse what the state of a file system refuses."""


Watch = Callable[[str, str, bytes | None, int | None], None]
"""Called with name and path of a call, what it writes, and where; None: at the end."""


class Shim:
    """Installed once in a process that is thrown away; `watch` is told of each call before it."""

    def __init__(self, root: Path, fault: Fault, watch: Watch = lambda *_: None) -> None:
        self.root = str(root)
        self.calls: list[str] = []
        self.watch = watch
        self._fault = fault
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _NAMES}
        self._paths: dict[int, str] = {}
        self._synced: dict[str, bytes] = {}
        self._undo: list[tuple[str, str, str, str, File | None]] = []

    def install(self) -> None:
        """Replace the functions of `os`."""
        for name in _NAMES:
            setattr(os, name, self._wrapped(name))

    def stop(self) -> None:
        """Put them back."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def left(self, mode: str, present: Tree) -> Tree:
        """What a kill before the next call leaves of a lake that holds this now."""
        if mode == "process":
            return present
        tree = dict(present)
        for path, synced in self._synced.items():
            file = tree.get(self._name(path))
            if file is not None and file.data != synced and not path.endswith(".lock"):
                tree[self._name(path)] = File(_without(file.data, synced, mode), file.inode)
        for _, name, path, target, kept in reversed(self._undo if mode == "power" else []):
            if name == "rename":
                tree[path] = tree.pop(target)
                if kept is not None:
                    tree[target] = kept
            elif name == "unlink":
                tree[path] = kept
            else:
                for below in [each for each in tree if each == path or each.startswith(f"{path}/" if path else "")]:
                    del tree[below]
        return tree

    def _name(self, path: str) -> str:
        return path[len(self.root) + 1 :]

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            path = str(self._paths.get(first, "") if isinstance(first, int) else os.fspath(first))
            ours = path.startswith(self.root) or (name == "fsync" and path == os.path.dirname(self.root))
            if not ours or (name == "open" and not rest[0] & os.O_CREAT):
                made = self._real[name](first, *rest, **named)
                if name == "open":
                    self._paths[made] = path
                return made
            return self._counted(name, path, first, rest, named)

        return call

    def _counted(self, name: str, path: str, first: Any, rest: Any, named: Any) -> Any:
        data = bytes(rest[0]) if name in ("write", "pwrite") else None
        self.watch(name, self._name(path), data, rest[1] if name == "pwrite" else None)
        self.calls.append(f"{name} /{self._name(path)}")
        fault, now = self._fault, len(self.calls)
        if fault.at and now >= fault.at:
            if fault.kind in _NEEDS or fault.kind == "read-only":
                code = "EROFS" if fault.kind == "read-only" else "ENOSPC"
                needs = _NEEDS.get(fault.kind, _NAMES)
                longer = name == "pwrite" and rest[1] + len(rest[0]) > os.path.getsize(path)
                if (name in needs or (longer and "write" in needs)) and not (
                    code == "ENOSPC" and name == "open" and os.path.exists(path)
                ):
                    raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), path)
            elif now == fault.at and fault.kind == "kill":
                os._exit(KILLED)
            elif now == fault.at and fault.kind == "short":
                if data is not None and len(data) > 1:
                    return self._real[name](first, data[: len(data) // 2], *rest[1:])
            elif now == fault.at:
                code = getattr(errno, fault.kind)
                raise OSError(code, os.strerror(code), path)
        return self._done(name, path, first, rest, named)

    def _done(self, name: str, path: str, first: Any, rest: Any, named: Any) -> Any:
        target = os.fspath(rest[0]) if name == "rename" else path
        new = name == "open" and not os.path.exists(path)
        kept = None
        if name in ("rename", "unlink") and os.path.exists(target):
            kept = read_file(Path(target))
        done = self._real[name](first, *rest, **named)
        if name == "open":
            self._paths[done] = path
            self._synced[path] = Path(path).read_bytes()
        elif name in ("fsync", "fdatasync") and os.path.isdir(path):
            self._undo = [each for each in self._undo if each[0] != path]
        elif name in ("fsync", "fdatasync"):
            self._synced[path] = Path(path).read_bytes()
        elif name == "rename":
            self._synced[target] = self._synced.pop(path, None) or Path(target).read_bytes()
        if new or name in ("rename", "unlink", "mkdir"):
            self._undo.append((os.path.dirname(target), name, self._name(path), self._name(target), kept))
        return done


def _without(data: bytes, synced: bytes, mode: str) -> bytes:
    """What a file holds when what was not synced is lost."""
    if mode in ("power", "reordered"):
        return synced
    longer = synced + bytes(max(0, len(data) - len(synced)))
    if mode == "zeroed":
        return longer
    pages = range(0, len(longer), _PAGE)
    kept = 0 if mode == "odd pages" else 1
    return b"".join((data if at // _PAGE % 2 == kept else longer)[at : at + _PAGE] for at in pages)


def read_file(path: Path) -> File:
    """One file as it is now."""
    return File(path.read_bytes(), path.stat().st_ino)


def read_tree(root: Path) -> Tree:
    """Everything below a folder; nothing where there is none."""
    if not root.is_dir():
        return {}
    found: Tree = {"": None}
    for folder, folders, files in os.walk(root):
        below = folder[len(str(root)) + 1 :]
        found |= {os.path.join(below, name): None for name in folders}
        found |= {os.path.join(below, name): read_file(Path(folder, name)) for name in files}
    return found
