"""Every call of `os` that changes a file, counted, and made to fail or to be the last one.

A store that calls nothing but `os` can be killed between any two system calls without a debugger. `Shim` replaces those
functions in the process that installs it. It also remembers what was not yet synced, so that a kill can be a loss of
power: bytes that no `fsync` covered are cut off, and names that no sync of their folder covered are undone.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILLED = 137
MODES = ("process", "power", "reordered", "zeroed")
"""What a kill loses: nothing; all that is not synced; bytes that are not synced, while names are kept; the same, with
zeros in their place."""

_NAMES = ("open", "write", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "mkdir")
_CREATES = os.O_CREAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at one call, 1 the first; 0: nothing."""

    at: int = 0
    kind: str = "kill"
    """`kill` before the call, `torn` within a write, `short` write, or the name of an errno."""
    mode: str = "process"
    lasting: bool = False
    """The error stays for every later call (a file system that became read-only)."""


class Shim:
    """Installed once in a process that is thrown away."""

    def __init__(self, root: Path, fault: Fault) -> None:
        self.root = str(root)
        self.fault = fault
        self.calls: list[str] = []
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _NAMES}
        self._spare = tempfile.mkdtemp(dir=root.parent)
        self._paths: dict[int, str] = {}
        self._synced: dict[str, int] = {}
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._saved = 0

    def install(self) -> None:
        """Replace the functions of `os`."""
        for name in _NAMES:
            setattr(os, name, self._wrapped(name))

    def stop(self) -> None:
        """Put them back."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            path = self._paths.get(first) if isinstance(first, int) else os.fspath(first)
            ours = path is not None and str(path).startswith(self.root)
            if name == "fsync" and path == os.path.dirname(self.root):
                ours = True
            if not ours or (name == "open" and not rest[0] & _CREATES):
                made = self._real[name](first, *rest, **named)
                if name == "open":
                    self._paths[made] = str(path)
                return made
            return self._counted(name, str(path), first, rest, named)

        return call

    def _counted(self, name: str, path: str, first: Any, rest: Any, named: Any) -> Any:
        self.calls.append(f"{name} {path[len(self.root) :]}")
        fault, now = self.fault, len(self.calls)
        if fault.at and (now == fault.at or (fault.lasting and now > fault.at)):
            if fault.kind == "kill":
                self._die()
            elif fault.kind == "torn":
                if name == "write":
                    self._real["write"](first, rest[0][: 1 + now * 7919 % len(rest[0])])
                self._die()
            elif fault.kind == "short":
                if name == "write" and len(rest[0]) > 1:
                    return self._real["write"](first, rest[0][: len(rest[0]) // 2])
            else:
                code = getattr(errno, fault.kind)
                raise OSError(code, os.strerror(code), path)
        return self._done(name, path, first, rest, named)

    def _done(self, name: str, path: str, first: Any, rest: Any, named: Any) -> Any:
        real, folder = self._real, os.path.dirname(path)
        if name == "open":
            new = not os.path.exists(path)
            made = real["open"](first, *rest, **named)
            self._paths[made] = path
            if new:
                self._undo.append((folder, lambda: real["unlink"](path)))
            self._synced[path] = 0 if new or rest[0] & os.O_TRUNC else os.path.getsize(path)
            return made
        if name in ("fsync", "fdatasync"):
            done = real[name](first)
            if os.path.isdir(path):
                self._undo = [each for each in self._undo if each[0] != path]
            else:
                self._synced[path] = os.fstat(first).st_size
            return done
        if name in ("rename", "unlink"):
            target = os.fspath(rest[0]) if name == "rename" else path
            kept = self._keep(target)
            done = real[name](first, *rest, **named)
            if name == "rename":
                self._synced[target] = self._synced.pop(path, os.path.getsize(target))

                def back() -> None:
                    real["rename"](target, path)
                    if kept:
                        real["rename"](kept, target)

                self._undo.append((os.path.dirname(target), back))
            else:
                self._undo.append((folder, lambda: real["rename"](kept, path)))
            return done
        done = real[name](first, *rest, **named)
        if name == "mkdir":
            self._undo.append((folder, lambda: shutil.rmtree(path)))
        return done

    def _keep(self, path: str) -> str:
        """A second name of a file that is about to lose its own."""
        if not os.path.exists(path):
            return ""
        self._saved += 1
        kept = f"{self._spare}/{self._saved}"
        os.link(path, kept)
        return kept

    def _die(self) -> None:
        self.stop()
        if self.fault.mode != "process":
            for path, size in self._synced.items():
                if os.path.exists(path) and os.path.getsize(path) > size and not path.endswith(".lock"):
                    length = os.path.getsize(path)
                    os.truncate(path, size)
                    if self.fault.mode == "zeroed":
                        os.truncate(path, length)
        if self.fault.mode == "power":
            for _, undo in reversed(self._undo):
                undo()
        os._exit(KILLED)
