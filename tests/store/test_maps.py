"""Maps of segments: who opened a lake before segments were removed reads them on, however many there were."""

from collections.abc import Callable
from pathlib import Path

from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.maps import SegmentMaps
from tokenlake.store.schema import DELTA
from tokenlake.store.staged import open_staged
from tokenlake.store.walk import HEAD

Make = Callable[..., Delta]
_HEAD = HEAD + DELTA.serialize().to_pybytes()


def test_a_thousand_segments_that_are_gone_are_read_on_and_take_no_descriptor(tmp_path: Path) -> None:
    names = [f"{i:06d}.arrow" for i in range(1000)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(_HEAD + bytes([i % 256]))
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    maps = SegmentMaps(tmp_path)
    assert all(maps.get(name) is not None for name in names)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
    for name in names:
        (tmp_path / name).unlink()
    for i, name in enumerate(names):
        mapped = maps.get(name)
        assert mapped is not None
        assert (mapped.view[-1], mapped.first, len(mapped.view)) == (i % 256, len(_HEAD), len(_HEAD) + 1)
    maps.forget(names[0])
    assert maps.get(names[0]) is None


def test_a_map_grows_with_its_file_and_follows_another_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "000000.arrow"
    path.touch()
    maps = SegmentMaps(tmp_path)
    assert maps.get(path.name) is None
    path.write_bytes(_HEAD)
    first = maps.get(path.name)
    assert first is not None
    with path.open("ab") as file:
        file.write(b"more")
    assert maps.get(path.name, len(_HEAD)) is first
    grown = maps.get(path.name)
    assert grown is not None
    assert (bytes(grown.view[-4:]), grown.inode) == (b"more", first.inode)
    path.with_name("new").write_bytes(_HEAD + b"other")
    path.with_name("new").rename(path)
    other = maps.get(path.name, len(_HEAD))
    assert other is not None
    assert other.inode == path.stat().st_ino != first.inode
    assert (bytes(grown.view[-4:]), bytes(other.view[-5:])) == (b"more", b"other")


def deleted(root: Path) -> list[str]:
    """Segments whose blocks stay on the disk because this process maps them."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(root) in line and line.endswith(".arrow (deleted)")]


def test_who_stages_for_days_keeps_no_segment_that_compaction_removed(lake: OwnedLake, make_delta: Make) -> None:
    """A worker reads the parents of its calls where they lie, and so does who ends NeMo-Gym's rollouts."""
    writer = DeltaWriter(lake.path, "worker")
    staged = open_staged(lake.path)
    for i in range(20):
        delta = make_delta(f"c{i}", rollout_id=f"g{i}_g0")
        writer.read(writer.stage(delta))
        assert [found.call_id for _, found in staged.of(delta.rollout_id, 0)] == [delta.call_id]
        writer.roll()
        assert lake.compact().replaced >= 1
        assert len(deleted(lake.path)) < 9
    writer.close()
    staged.close()
    lake.refresh()
    assert deleted(lake.path) == []
