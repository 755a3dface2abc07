"""A reader that starts from the owner's snapshot answers as one that read every file."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

import tokenlake
from tokenlake.store import intake, placed, snapshot
from tokenlake.store.backup import back_up
from tokenlake.store.delta import Delta
from tokenlake.store.lake import OwnedLake
from tokenlake.store.retention import retire_named

Make = Callable[..., Delta]
RELATIONS = ("lineage", "deltas", "rows", "lake_findings")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every lake is worth a snapshot, and what readers copy lies where a test can look."""
    monkeypatch.setattr(snapshot, "_LEAST", 1)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))


def write(lake: OwnedLake, make_delta: Make, groups: range) -> None:
    writer = lake.delta_writer("w0")
    for group in groups:
        lake.lineage.append("group_registered", group_id=f"g{group}", n=1)
        for call in range(3):
            name = f"g{group}_g0"
            writer.stage(make_delta(f"{name}c{call}", rollout_id=name, first=100 * group + call))
            lake.lineage.append("call_committed", rollout_id=name, call_id=f"{name}c{call}")


@pytest.fixture
def path(tmp_path: Path, make_delta: Make) -> Path:
    """A closed lake with a snapshot."""
    with OwnedLake.open(tmp_path / "lake") as lake:
        write(lake, make_delta, range(5))
        lake.refresh()
    assert len(snapshots(tmp_path / "lake")) == 1
    return tmp_path / "lake"


def snapshots(path: Path) -> list[Path]:
    return list(path.glob("index.snapshot.*"))


def everything(path: Path) -> dict[str, list[Any]]:
    with tokenlake.open(path) as reader:
        return {name: sorted(reader.sql(f"SELECT * FROM {name}").fetchall(), key=repr) for name in RELATIONS}


def from_files(path: Path) -> dict[str, list[Any]]:
    snapshot.remove_snapshot(path)
    return everything(path)


def test_a_snapshot_saves_reading_what_it_knows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    walk = intake.walk

    def counting(view: memoryview, start: int, end: int, *rest: Any) -> Any:
        found = walk(view, start, end, *rest)
        walked.append(len(found.found))
        return found

    for module in (intake, placed):
        monkeypatch.setattr(module, "walk", counting)
    said = everything(path)
    assert sum(walked) <= 1  # the event that the owner wrote when it closed
    assert said == from_files(path)
    assert sum(walked) > 30


def test_what_was_written_since_is_taken_in(path: Path, make_delta: Make) -> None:
    with OwnedLake.open(path) as lake, tokenlake.open(path) as reader:
        write(lake, make_delta, range(5, 6))
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(15,)]
        reader.refresh()
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(18,)]
        before = everything(path)
        assert lake.compact().replaced > 0
        reader.refresh()
        assert reader.sql("SELECT count(*), count(DISTINCT call_id) FROM deltas").fetchall() == [(18, 18)]
        after = everything(path)
        assert after["deltas"] == before["deltas"]
        assert after == from_files(path)


def test_it_is_written_again_once_a_quarter_is_new(path: Path, make_delta: Make) -> None:
    with OwnedLake.open(path) as lake:
        assert not lake.snapshot()
        write(lake, make_delta, range(5, 9))
        assert lake.snapshot()
        assert not lake.snapshot()
    assert len(snapshots(path)) == 1


@pytest.mark.parametrize("damage", ["cut", "a byte", "empty", "other rows", "no database", "other tables", "no folder"])
def test_one_that_cannot_be_used_costs_only_time(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = snapshots(path)
    size = file.stat().st_size
    if damage == "cut":
        os.truncate(file, size // 2)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "a byte":
        raw = bytearray(file.read_bytes())
        raw[size // 2] ^= 1
        file.write_bytes(raw)
    elif damage == "other rows":
        con = duckdb.connect(str(file))
        con.execute("DELETE FROM tl_places")
        con.close()
    elif damage == "no database":
        file.write_bytes(b"x" * size)
        rename_to_digest(file)
    elif damage == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", str(path / "nowhere"))
    else:
        con = duckdb.connect(str(file))
        con.execute("UPDATE tl_layout SET layout = 'older'")
        con.close()
        rename_to_digest(file)
    with caplog.at_level(logging.WARNING):
        said = everything(path)
    assert len(said["deltas"]) == 15
    assert said == from_files(path)
    assert bool(caplog.records) == (damage != "other tables")


def rename_to_digest(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(file.with_name(f"index.snapshot.{digest}.duckdb"))


def test_a_segment_that_another_file_stands_for_is_read_again(path: Path) -> None:
    (segment,) = path.glob("lineage/gate/*.arrow")
    copy = segment.with_suffix(".copy")
    copy.write_bytes(segment.read_bytes())
    copy.rename(segment)
    said = everything(path)
    assert len({event[1] for event in said["lineage"]}) == len(said["lineage"])
    assert said == from_files(path)


def test_a_readers_copy_goes_with_it_and_not_with_a_forked_child(path: Path, tmp_path: Path) -> None:
    with tokenlake.open(path) as reader:
        child = os.fork()
        if child == 0:
            reader.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        reader.refresh()
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(15,)]
        assert len(reader.connect(groups=["g1"]).execute("SELECT * FROM deltas").fetchall()) == 3
    assert not list((tmp_path / "scratch").iterdir())


def test_a_disk_that_refuses_a_snapshot_is_told_and_harms_nothing(
    path: Path, make_delta: Make, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot.remove_snapshot(path)
    (path / "index.snapshot.partial").mkdir()
    with caplog.at_level(logging.WARNING), OwnedLake.open(path) as lake:
        write(lake, make_delta, range(5, 6))
        assert not lake.snapshot()
    assert "was not written" in caplog.text
    assert len(everything(path)["deltas"]) == 18


def test_no_snapshot_is_written_below_the_floor_of_the_disk(path: Path, make_delta: Make) -> None:
    with OwnedLake.open(path) as lake:
        write(lake, make_delta, range(5, 9))
        lake.space.floor = 1 << 60
        assert not lake.snapshot()
        lake.space.floor = 0
        assert lake.snapshot()


def test_a_reader_of_a_snapshot_keeps_what_retention_removes(path: Path, make_delta: Make) -> None:
    """It has not read the segment that the snapshot knows to its end."""
    with OwnedLake.open(path) as lake:
        write(lake, make_delta, range(5, 20))
        lake.refresh()
    with OwnedLake.open(path) as lake, tokenlake.open(path) as reader:
        names = [f"g{group}" for group in range(20)]
        lake.lineage.append_many([{"event_type": "group_dropped", "group_id": name, "n": 1} for name in names])
        assert retire_named(lake, groups=names).compaction.retired == 60
        assert not list(path.glob("deltas/*/*.arrow"))
        assert reader.sql("SELECT count(*), count(digest) FROM deltas").fetchall() == [(60, 60)]
        reader.refresh()
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(0,)]


def test_what_a_reader_that_was_killed_left_goes_with_the_next_one(
    path: Path, make_delta: Make, tmp_path: Path
) -> None:
    left = multiprocessing.get_context("spawn").Process(target=_killed, args=(path,))
    with OwnedLake.open(path) as lake:
        write(lake, make_delta, range(5, 9))
        left.start()
        left.join()
    assert left.exitcode == -signal.SIGKILL
    (folder,) = (tmp_path / "scratch").iterdir()
    assert [each.suffix for each in folder.iterdir()] == [".wal"]
    with tokenlake.open(path):
        assert folder.exists(), "it is so new that its owner may not hold it yet"
        held = set((tmp_path / "scratch").iterdir()) - {folder}
        for each in (folder, *held):
            os.utime(each, (0, 0))
        with tokenlake.open(path):
            assert not folder.exists()
            assert all(each.exists() for each in held)
    assert list((tmp_path / "scratch").iterdir()) == []


def _killed(path: Path) -> None:
    tempfile.tempdir = str(path.parent / "scratch")
    tokenlake.open(path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_index_that_was_left_under_another_copy_is_read_again(path: Path, make_delta: Make, tmp_path: Path) -> None:
    """As who lays an older copy over a lake leaves it: sealed segments of the same numbers, with other content."""
    back_up(path, tmp_path / "copy")
    with OwnedLake.open(path) as lake:
        write(lake, make_delta, range(5, 9))
    with OwnedLake.open(tmp_path / "copy") as lake:
        write(lake, make_delta, range(9, 10))
    OwnedLake.open(path).close()  # which sees that they are sealed
    for name in ("lineage", "deltas", "rows"):
        shutil.rmtree(path / name)
        shutil.copytree(tmp_path / "copy" / name, path / name)
    shutil.copy(tmp_path / "copy" / "lake.json", path)
    wanted = everything(tmp_path / "copy")
    assert everything(path) == wanted
    with OwnedLake.open(path) as lake:
        assert {name: sorted(lake.sql(f"SELECT * FROM {name}").fetchall(), key=repr) for name in RELATIONS} == wanted
