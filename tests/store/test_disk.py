"""A disk that refuses, forgets or answers late: what each of them comes to, one by one.

`tests/crash` finds such things by trying every call; what it found stands here by name.
"""

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.child import failure, fork
from tokenlake.errors import StorageFailed
from tokenlake.store import intake
from tokenlake.store.backup import back_up
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter, segment_name
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import LineageLog, lineage_loss
from tokenlake.store.reader import Lake

Make = Callable[..., Delta]
DELTAS = "SELECT call_id, digest FROM deltas ORDER BY call_id"
EVENTS = "SELECT event_seq, detail FROM lineage WHERE event_type = 'policy_set' ORDER BY event_seq"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """While its only entry is True, no file or folder can be created or removed."""
    refusing = [False]

    def refuse(name: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if refusing[0] and (name != "open" or rest[0] & os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return real(path, *rest, **named)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "mkdir", "rename", "unlink"):
        refuse(name)
    yield refusing
    refusing[0] = False


def doors(root: Path) -> dict[str, Callable[[], Any]]:
    return {
        "owner": lambda: OwnedLake.open(root).close(),
        "new lake": lambda: OwnedLake.open(root.with_name("other")).close(),
        "writer": lambda: DeltaWriter(root, "w9").close(),
        "known writer": lambda: DeltaWriter(root, "w0").close(),
        "log": lambda: LineageLog(root, "gate").close(),
        "backup": lambda: back_up(root, root.with_name("copy")),
    }


@pytest.mark.parametrize("door", ["owner", "new lake", "writer", "known writer", "log", "backup"])
def test_whoever_opens_for_writing_on_a_disk_that_refuses_is_told_and_leaves_no_lock(
    tmp_path: Path, make_delta: Make, read_only: list[bool], door: str
) -> None:
    root = tmp_path / "lake"
    with OwnedLake.open(root) as lake:
        lake.delta_writer("w0").stage(make_delta("c0"))
        lake.lineage.append("policy_set")
    read_only[0] = True
    with pytest.raises(StorageFailed, match="Read-only"):
        doors(root)[door]()
    with Lake(root) as reader:
        assert len(reader.sql(DELTAS).fetchall()) == 1
    read_only[0] = False
    doors(root)[door]()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user to become another one")
@pytest.mark.parametrize("hidden", ["", "lake.json", "deltas/w1", "deltas/w1/000000.arrow", "lineage/gate/head.json"])
def test_who_may_not_read_all_of_a_lake_is_told_and_backs_up_nothing(
    tmp_path: Path, make_delta: Make, hidden: str
) -> None:
    """Who may read all of it and write none backs it up."""
    root, copies = tmp_path / "lake", tmp_path / "copies"
    with OwnedLake.open(root) as lake:
        for name in ("w0", "w1"):
            lake.delta_writer(name).stage(make_delta(name))
        lake.lineage.append("policy_set")
    copies.mkdir()
    for folder, mode in ((tmp_path, 0o755), (copies, 0o777)):
        folder.chmod(mode)
    if hidden:
        (root / hidden).chmod(0o600)

    def read(_: int) -> None:
        os.chdir(tmp_path)
        os.setuid(65534)
        for attempt in (lambda: Lake(Path("lake")), lambda: back_up(Path("lake"), Path("copies/copy"))):
            if not hidden:
                attempt()
                continue
            with pytest.raises(StorageFailed, match="Permission denied"):
                attempt()

    told, status = fork(read)
    assert (failure(told, status), [*copies.iterdir()] == []) == (None, bool(hidden))


def test_every_folder_that_is_made_for_a_lake_is_synced_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a loss of power takes a lake that has acknowledged calls."""
    synced: set[str] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "runs" / "today" / "lake"
    OwnedLake.open(root).close()
    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs/today"), str(root)} <= synced


def test_a_reader_beside_a_live_owner_sees_no_loss(lake: OwnedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner appends and anchors between a reader's two looks: the anchor it read must be the older one."""
    lake.lineage.append("policy_set", detail="1")
    real = intake._Intake.lineage

    def lineage(self: Any) -> None:
        real(self)
        lake.lineage.append("policy_set")
        lake.lineage.anchor()

    monkeypatch.setattr(intake._Intake, "lineage", lineage)
    with Lake(lake.path) as reader:
        for _ in range(3):
            assert reader.sql("SELECT * FROM lake_findings").fetchall() == []
            reader.refresh()


def test_a_compaction_that_could_not_remove_is_finished_by_the_next_one(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old segments and the new one hold identical copies meanwhile: no answer shows a record twice."""
    for i in range(6):
        lake.delta_writer(f"w{i % 2}").stage(make_delta(f"c{i}"))
    before = lake.sql(DELTAS).fetchall()

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(StorageFailed, match="do no harm"):
            lake.compact()
    assert len(list(lake.path.glob("deltas/w*/*.arrow"))) == 2
    assert lake.sql(DELTAS).fetchall() == before
    assert lake.compact().records == 0
    assert [path.parent.name for path in lake.path.glob("deltas/*/*.arrow")] == ["_compacted"]
    assert lake.sql(DELTAS).fetchall() == before


@pytest.mark.parametrize("before", [1, 300])
def test_the_index_forgets_what_the_disk_never_got(tmp_path: Path, make_delta: Make, before: int) -> None:
    """It is written without syncs of ours, so after a loss of power it may know more than the files.

    With many records before, the footer of the recovered segment is longer than the record that was lost.
    """
    root, copy = tmp_path / "lake", tmp_path / "copy"
    with OwnedLake.open(root) as lake:
        writer = lake.delta_writer("w0")
        writer.stage(make_delta("kept"))
        for _ in range(before):
            lake.lineage.append("policy_set", detail="kept")
        _, size = lake.lineage._segments.position
        lost = writer.stage(make_delta("lost"))
        lake.lineage.append("policy_set", detail="lost")
        lake.refresh()
        shutil.copytree(root, copy)
    (log,) = copy.glob("lineage/*/*.arrow")
    log.write_bytes(log.read_bytes()[:size])
    with (copy / segment_name(lost)).open("r+b") as deltas:
        deltas.seek(lost.byte_offset)
        deltas.write(bytes(lost.byte_length))
    with OwnedLake.open(copy) as lake:
        assert [name for name, _ in lake.sql(DELTAS).fetchall()] == ["kept"]
        kept = [(1 + i, "kept") for i in range(before)]
        assert lake.sql(EVENTS).fetchall() == kept
        lake.delta_writer("w0").stage(make_delta("new"))
        assert lake.lineage.append("policy_set", detail="new")["event_seq"] == before + 2  # after `lake_opened`
        assert [name for name, _ in lake.sql(DELTAS).fetchall()] == ["kept", "new"]
        assert lake.sql(EVENTS).fetchall() == [*kept, (before + 2, "new")]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []


def test_an_index_that_the_disk_refuses_goes_on_in_memory(
    tmp_path: Path, make_delta: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing may grow beyond the index's log here, which is longer than any segment: a real refusal of the disk."""
    root = tmp_path / "lake"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OwnedLake.open(root, segment_max_bytes=1) as lake:
        for i in range(40):
            lake.delta_writer("w0").stage(make_delta(f"c{i:02}"))
            lake.lineage.append("policy_set", detail=f"{i}")
            lake.refresh()
        resource.setrlimit(resource.RLIMIT_FSIZE, ((root / "index.duckdb.wal").stat().st_size, before[1]))
        try:
            for i in range(40, 43):
                lake.delta_writer("w0").stage(make_delta(f"c{i:02}"))
                lake.lineage.append("policy_set", detail=f"{i}")
                assert len(lake.sql(DELTAS).fetchall()) == i + 1
                assert len(lake.sql(EVENTS).fetchall()) == i + 1
            assert len([line for line in caplog.messages if "in memory until the next start" in line]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with OwnedLake.open(root) as lake:
        assert len(lake.sql(DELTAS).fetchall()) == 43
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
        assert len(caplog.messages) == 1
    (root / "index.duckdb").unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with OwnedLake.open(root) as lake:
            assert len(lake.sql(DELTAS).fetchall()) == 43
        assert "in memory until the next start" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with OwnedLake.open(root) as lake:
        assert len(lake.sql(DELTAS).fetchall()) == 43


def test_views_are_made_in_memory_where_the_disk_refuses_them(tmp_path: Path, make_delta: Make) -> None:
    """A view that is first asked for is written into the index as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OwnedLake.open(tmp_path / "lake", segment_max_bytes=1) as lake:
        for i in range(40):
            lake.delta_writer("w0").stage(make_delta(f"c{i:02}"))
            lake.refresh()
        resource.setrlimit(resource.RLIMIT_FSIZE, ((lake.path / "index.duckdb.wal").stat().st_size, before[1]))
        try:
            con = lake.connect()
            assert con.execute("SELECT count(*) FROM call_checks").fetchall() == [(0,)]
            con.close()
            assert len(lake.sql(DELTAS).fetchall()) == 40
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("then", ["another event", "a restart"])
def test_an_event_whose_sync_failed_after_its_bytes_were_written_never_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whoever asked for it was told no. The next event takes its number, also after a restart."""
    root = tmp_path / "lake"
    lake = OwnedLake.open(root)
    lake.lineage.append("policy_set", detail="1")

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", refuse)
        with pytest.raises(StorageFailed):
            lake.lineage.append("policy_set", detail="refused")
    expected = [(1, "1"), (2, "3")]
    if then == "another event":
        lake.lineage.append("policy_set", detail="3")
        lake.lineage.anchor()
        assert lake.sql(EVENTS).fetchall() == expected
    else:
        lake._lock.release()
        lake.lineage._lock.release()
        lake._index.close()
        lake = OwnedLake.open(root)
        assert lake.lineage.append("policy_set", detail="3")["event_seq"] == 3  # 2 is `lake_opened`
        expected = [(1, "1"), (3, "3")]
    with Lake(root) as reader:
        assert reader.sql(EVENTS).fetchall() == expected
        assert reader.sql("SELECT * FROM lake_findings").fetchall() == []
    lake.close()
    assert lineage_loss(root) == []
    with OwnedLake.open(root) as lake:
        assert lake.sql(EVENTS).fetchall() == expected
