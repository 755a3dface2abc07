"""Real file systems that are small, have few inodes or become read-only, in a mount namespace of the child's own.

Where the kernel permits it: user namespaces are enough, no right of root is needed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.child import failure, fork, live, tell
from tests.crash.known import Known
from tests.crash.laid import Laid
from tests.crash.scenario import STATIONS, Told
from tests.crash.shim import Fault
from tests.crash.trials import Outcome, Trial, Where, checked, folder
from tokenlake.errors import StorageFailed
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _REMOUNT, _REC, _PRIVATE = 1, 32, 16384, 1 << 18
_ROOM = "size=256m,nr_inodes=10000"


def own_namespace() -> None:
    """Leave the parent's mounts. Raises `OSError` where that is not permitted."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWUSER | _NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("none", "/", None, _REC | _PRIVATE, None)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    """As mount(2). Raises `OSError`."""
    raw = [None if each is None else each.encode() for each in (source, target, kind, options)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]):
        raise OSError(ctypes.get_errno(), f"mount {target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A whole run on a file system that cannot hold it, which is then given room."""

    kind: str
    options: str
    known: Known

    @property
    def where(self) -> Where:
        return None

    def __call__(self) -> Outcome:
        def work(fd: int) -> None:
            own_namespace()
            mount("none", str(base), "tmpfs", 0, self.options)
            told: Told = []
            for station in range(len(STATIONS)):
                mine, status = fork(lambda out, at=station: live(base / "lake", at, Fault(), out))
                assert failure(mine, status) is None, mine[-1][-1]
                told += mine
            mount("none", str(base), None, _REMOUNT, _ROOM)
            tell(fd, "told", len(told))
            wrong, _ = checked(Laid({}, base / "lake"), told, self.known, Outcome())
            assert wrong is None, wrong

        with folder() as base:
            done = Outcome()
            done.add(self.kind, self.options, failure(*fork(work)))
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnly:
    """A file system that is mounted read-only between two lives, and then not any more."""

    station: int
    known: Known

    @property
    def kind(self) -> str:
        return "really read-only"

    @property
    def where(self) -> Where:
        return None

    def __call__(self) -> Outcome:
        def work(fd: int) -> None:
            own_namespace()
            mount("none", str(base), "tmpfs", 0, _ROOM)
            told: Told = []
            for station in range(self.station + 1):
                told += fork(lambda out, at=station: live(base / "lake", at, Fault(), out))[0]
            mount("none", str(base), None, _REMOUNT | _RDONLY, None)
            refused, status = fork(lambda _: _refused(base / "lake"))
            assert status == 0, refused[-1][-1]
            mount("none", str(base), None, _REMOUNT, None)
            wrong, _ = checked(Laid({}, base / "lake"), told, self.known, Outcome())
            assert wrong is None, wrong

        with folder() as base:
            done = Outcome()
            done.add(self.kind, f"after {self.station}", failure(*fork(work)))
        return done


def _refused(lake: Path) -> None:
    """Owning is refused in one line, reading goes on."""
    with pytest.raises(StorageFailed) as refused:
        OwnedLake.open(lake)
    assert "\n" not in str(refused.value)
    with Lake(lake) as reader:
        assert reader.sql("SELECT count(*) FROM lineage").fetchall() != [(0,)]


def disk_trials(known: Known) -> list[Trial]:
    """Disks of many sizes; none where mounting is not permitted."""
    if fork(lambda _: own_namespace())[1]:
        return []
    trials: list[Trial] = [ReadOnly(station=station, known=known) for station in range(len(STATIONS))]
    for k in range(12):
        trials.append(Small(kind="really no room", options=f"size={16 * (k + 1) * (k + 2)}k", known=known))
        trials.append(Small(kind="really no inodes", options=f"size=64m,nr_inodes={4 + 2 * k}", known=known))
    return trials
