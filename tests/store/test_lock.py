"""One owner, whatever name the lake is called by and whatever happens to a lock file (B26, B29)."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.store.test_lake import row_table
from tokenlake.errors import LakeLocked, StorageFailed
from tokenlake.store import snapshot
from tokenlake.store.backup import back_up
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lock import DirectoryLock

Make = Callable[..., Delta]


def _try(path: Path, end: Connection) -> None:
    try:
        OwnedLake.open(path).close()
        end.send(None)
    except LakeLocked as error:
        end.send(error.detail["pid"])
    end.close()


@pytest.mark.parametrize("name", ["link", "relative", "child of a fork"])
def test_another_name_is_no_way_in(lake: OwnedLake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lake.path
    if name == "link":
        path = lake.path.with_name("link")
        path.symlink_to(lake.path)
    elif name == "relative":
        monkeypatch.chdir(lake.path / "rows")
        path = Path("..")
    with pytest.raises(LakeLocked):
        OwnedLake.open(path)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_try, args=(path, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == os.getpid()
    process.join()
    ours.close()
    theirs.close()
    lake.lineage.append("policy_set")


def test_who_lost_its_lock_files_writes_nothing_any_more(lake: OwnedLake, make_delta: Make) -> None:
    """Somebody removes the locks of a lake that is in use: whoever opens it then is its one owner."""
    lake.delta_writer("w0").stage(make_delta("c0"))
    lake.lineage.append("policy_set")
    lake.write_rows(row_table("g0"))
    for path in lake.path.rglob("*.lock"):
        path.unlink()
    with OwnedLake.open(lake.path) as other:
        other.delta_writer("w0").stage(make_delta("c1"))
        other.write_rows(row_table("g1"))
        last = other.lineage.append("policy_set")
        before = {path: path.read_bytes() for path in lake.path.rglob("*.arrow")}
        for attempt in (
            lambda: lake.delta_writer("w0").stage(make_delta("c2")),
            lambda: lake.lineage.append("policy_set"),
            lake.lineage.anchor,
            lambda: lake.write_rows(row_table("g2")),
            lake.compact,
            lake.close,
        ):
            with pytest.raises(StorageFailed, match=r"was removed or replaced while"):
                attempt()
        assert {path: path.read_bytes() for path in lake.path.rglob("*.arrow")} == before
    with OwnedLake.open(lake.path) as again:
        assert again.lineage.head == last["event_seq"]
        assert again.sql("SELECT call_id FROM deltas ORDER BY ALL").fetchall() == [("c0",), ("c1",)]
        assert again.sql("SELECT * FROM lake_findings").fetchall() == []


def test_who_lost_its_folder_writes_into_neither_any_more(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody moves a lake away that is in use and puts a copy in its place."""
    monkeypatch.setattr(snapshot, "_LEAST", 0)
    lake.delta_writer("w0").stage(make_delta("c0"))
    lake.lineage.append("policy_set")
    aside = lake.path.rename(lake.path.with_name("aside"))
    back_up(aside, lake.path)
    before = {path: path.read_bytes() for path in lake.path.parent.rglob("*.arrow")}
    for attempt in (
        lambda: lake.delta_writer("w0").stage(make_delta("c1")),
        lambda: lake.delta_writer("w1"),
        lambda: lake.lineage.append("policy_set"),
        lambda: lake.write_rows(row_table("g0")),
        lake.compact,
    ):
        with pytest.raises(StorageFailed, match=r"was removed or replaced while"):
            attempt()
    assert {path: path.read_bytes() for path in lake.path.parent.rglob("*.arrow")} == before
    with pytest.raises(LakeLocked):
        OwnedLake.open(aside)
    assert not lake.snapshot()
    with pytest.raises(StorageFailed):
        lake.close()
    assert not [*lake.path.glob("index.*")]
    for path in (aside, lake.path):
        with OwnedLake.open(path) as again:
            assert again.sql("SELECT call_id FROM deltas").fetchall() == [("c0",)]


def test_a_writer_that_starts_while_an_owner_recovers_its_folder_waits(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of everything: the owner that starts looks into the folder of the worker that starts."""
    DeltaWriter(lake.path, "w0").close()
    recovering = [DirectoryLock.acquire_if_free(lake.path / "deltas/w0/writer.lock", "writer w0")]

    def later(_: float) -> None:
        for lock in recovering:
            assert lock is not None
            lock.release()

    monkeypatch.setattr(time, "sleep", later)
    writer = DeltaWriter(lake.path, "w0")
    writer.stage(make_delta("c0"))
    writer.close()


def test_an_owner_on_another_machine_is_told_with_its_name(lake: OwnedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid says nothing here, or names another process."""
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(LakeLocked, match=rf"is owned by process {os.getpid()} on {os.uname().nodename}: use it"):
        OwnedLake.open(lake.path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_told(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    lake.delta_writer("w0").stage(make_delta("c0"))

    def flock(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len([*Path("/proc/self/fd").iterdir()])
    for attempt in (
        lambda: OwnedLake.open(lake.path.with_name("other")),
        lambda: lake.delta_writer("w1"),
        lake.compact,
        lambda: back_up(lake.path, lake.path.with_name("copy")),
    ):
        with pytest.raises(StorageFailed, match="needs a file system with flock"):
            attempt()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_lake_that_cannot_be_closed_well_is_let_go_all_the_same(tmp_path: Path) -> None:
    lake = OwnedLake.open(tmp_path / "lake")
    lake.lineage.append("policy_set")
    shutil.rmtree(tmp_path / "lake/lineage")
    with pytest.raises(StorageFailed):
        lake.close()
    shutil.rmtree(tmp_path / "lake/deltas")
    (tmp_path / "lake/deltas").mkdir()
    OwnedLake.open(tmp_path / "lake").close()
