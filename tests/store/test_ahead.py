"""Segments that are written ahead: records take the place of zeros, and whoever looks on sees whole ones."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from tokenlake.errors import StorageFailed
from tokenlake.ingest.importer import import_file
from tokenlake.store import index, mounts, recover
from tokenlake.store import segment as segments_module
from tokenlake.store import walk as walking
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter, segment_name
from tokenlake.store.digest import extras_digest
from tokenlake.store.encode import DELTA_LAYOUT, encode_delta
from tokenlake.store.flatbuffer import message_lengths
from tokenlake.store.footer import has_footer
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake
from tokenlake.store.records import delta_keys
from tokenlake.store.schema import DELTA
from tokenlake.store.segment import SegmentWriter, make_directory
from tokenlake.store.walk import file_schema, walk

Make = Callable[..., Delta]
CALLS = "SELECT call_id FROM deltas ORDER BY call_id"
PAGE = 4096


@pytest.fixture
def segment(root: Path) -> Path:
    return root / "deltas/w0/000000.arrow"


def streamed(path: Path) -> list[Any]:
    return ipc.open_stream(pa.py_buffer(path.read_bytes()[8:])).read_all().column("call_id").to_pylist()


def names(root: Path) -> list[str]:
    with Lake(root) as lake:
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
        return [name for (name,) in lake.sql(CALLS).fetchall()]


def test_records_take_the_place_of_zeros(root: Path, segment: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    first = writer.stage(make_delta("c0"))
    data = segment.read_bytes()
    end = first.byte_offset + first.byte_length
    assert len(data) >= end + (1 << 16)
    assert not any(data[end:])
    with Lake(root) as open_before:
        assert open_before.sql(CALLS).fetchall() == [("c0",)]
        place = writer.stage(make_delta("c1"))
        assert place.byte_offset == end
        assert segment.stat().st_size == len(data)
        assert segment.read_bytes()[:end] == data[:end]
        open_before.refresh()
        assert open_before.sql(CALLS).fetchall() == [("c0",), ("c1",)]
        assert streamed(segment) == ["c0", "c1"]
        writer.close()
        open_before.refresh()
        assert open_before.sql(CALLS).fetchall() == [("c0",), ("c1",)]
    assert has_footer(memoryview(segment.read_bytes()))
    assert ipc.open_file(segment).read_all().column("call_id").to_pylist() == streamed(segment) == ["c0", "c1"]


@pytest.mark.parametrize(("tail", "torn"), [(b"", 0), (b"\0\0\0\0torn", 8)])
def test_zeros_that_a_crash_leaves_are_no_torn_bytes(
    root: Path, segment: Path, make_delta: Make, tail: bytes, torn: int, caplog: pytest.LogCaptureFixture
) -> None:
    writer = DeltaWriter(root, "w0")
    place = writer.stage(make_delta("c0"))
    crashed = root.with_name("crashed")
    shutil.copytree(root, crashed)
    writer.close()
    with (crashed / segment.relative_to(root)).open("r+b") as file:
        file.seek(place.byte_offset + place.byte_length)
        file.write(tail)
    with caplog.at_level("INFO", logger="tokenlake.store.recover"):
        OwnedLake.open(crashed).close()
    assert f"was recovered: 1 records, {torn} torn bytes left out" in caplog.text


def test_zeros_stay_within_the_bound_of_a_segment(root: Path, segment: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0", segment_max_bytes=30_001)
    places = [writer.stage(make_delta("c0", n=100))]
    while places[-1].segment == 0:
        assert segment.stat().st_size == 30_000
        places.append(writer.stage(make_delta(f"c{len(places)}", n=100)))
    writer.close()
    assert len(places) > 5


def test_a_disk_without_room_for_zeros_takes_records(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def no_room(fd: int, data: Any, offset: int) -> int:
        if len(data) > 1 << 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", no_room)
    writer = DeltaWriter(root, "w0")
    places = [writer.stage(make_delta(f"c{i}")) for i in range(2)]
    monkeypatch.undo()
    places += [writer.stage(make_delta(f"c{i}")) for i in range(2, 4)]
    assert [delta.call_id for delta in writer.read_all(places)] == ["c0", "c1", "c2", "c3"]
    writer.close()
    assert names(root) == ["c0", "c1", "c2", "c3"]


def test_a_disk_that_zeros_would_fill_takes_the_record_first(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.pwrite, set[int]()

    def eight_pages(fd: int, data: Any, offset: int) -> int:
        done = 0
        while done < len(data) and len(taken | {(offset + done) // PAGE}) <= 8:
            taken.add((offset + done) // PAGE)
            done += real(fd, data[done : done + PAGE - (offset + done) % PAGE], offset + done)
        if data and not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done

    monkeypatch.setattr(os, "pwrite", eight_pages)
    writer = DeltaWriter(root, "w0")
    places = [writer.stage(make_delta(f"c{i}", n=700)) for i in range(3)]
    assert [place.segment for place in places] == [0, 0, 0]
    assert segment.stat().st_size == 8 * PAGE
    monkeypatch.undo()
    writer.close()
    assert names(root) == ["c0", "c1", "c2"]


@pytest.mark.parametrize("seed", range(12))
def test_of_one_append_a_loss_of_power_takes_any_pages(root: Path, segment: Path, make_delta: Make, seed: int) -> None:
    """What was acknowledged is there, what was not is no damage, and all of it can be staged again."""
    deltas = [make_delta(f"c{i}", n=[3, 300, 900][i % 3]) for i in range(8)]
    messages = [(encode_delta(delta), len(delta.token_mask or b"")) for delta in deltas]
    make_directory(segment.parent)
    segments = SegmentWriter(segment.parent, DELTA)
    segments.append(messages[:2])
    durable = segment.read_bytes()
    segments.append(messages[2:])
    written = segment.read_bytes()
    pages = random.Random(seed)
    left = [pages.choice((durable, written))[at : at + PAGE] for at in range(0, len(written), PAGE)]
    segment.write_bytes(b"".join(left))

    found = names(root)
    assert found[:2] == ["c0", "c1"]
    writer = DeltaWriter(root, "w0")
    assert names(root) == found
    assert set(found[:2]) <= set(streamed(segment)) <= set(found)
    places = [writer.stage(delta) for delta in deltas]
    assert [place.segment for place in places[:2]] == [0, 0]
    assert [kept.token_ids for kept in writer.read_all(places)] == [delta.token_ids for delta in deltas]
    writer.close()
    assert names(root) == [f"c{i}" for i in range(8)]


@pytest.mark.parametrize("looked_at", [1, 4 << 20])
def test_an_index_forgets_what_was_not_safe_when_the_power_went(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch, looked_at: int
) -> None:
    """The writer, in another process, never starts again, and its file is as long as it was."""
    monkeypatch.setattr(index, "APPEND_MAX_BYTES", looked_at)
    writer = DeltaWriter(root, "w0")
    with OwnedLake.open(root) as lake:
        writer.stage(make_delta("kept"))
        lost = writer.stage(make_delta("lost"))
        assert lake.sql(CALLS).fetchall() == [("kept",), ("lost",)]
    fd = os.open(segment, os.O_WRONLY)
    os.pwrite(fd, bytes(lost.byte_length), lost.byte_offset)
    os.close(fd)
    with OwnedLake.open(root) as lake:
        assert lake.sql(CALLS).fetchall() == [("kept",)]
        assert lake.find_delta("g0_g0", 0, "lost") is None
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
    writer.close()


def test_an_append_is_no_larger_than_what_an_index_looks_at_again(
    segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = encode_delta(make_delta("c0"))
    monkeypatch.setattr(segments_module, "APPEND_MAX_BYTES", 2 * len(message) + 8)
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    make_directory(segment.parent)
    placed = SegmentWriter(segment.parent, DELTA).append([(message, 4)] * 5)
    assert len(placed) == 5
    assert len(syncs) == 3


def test_a_message_is_looked_for_again_when_a_later_one_was_written_meanwhile(
    segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_directory(segment.parent)
    segments = SegmentWriter(segment.parent, DELTA)
    segments.append([(encode_delta(make_delta(f"c{i}")), 4) for i in range(3)])
    written = segment.read_bytes()
    view = memoryview(bytearray(written))
    _, first = file_schema(view)
    view[first:] = bytes(len(view) - first)
    search = walking._search

    def search_late(*arguments: Any) -> int | None:
        view[first:] = written[first:]
        return search(*arguments)

    monkeypatch.setattr(walking, "_search", search_late)
    found = walk(view, first, len(view), DELTA_LAYOUT.prefix, lambda a, b: delta_keys(view, a, b, DELTA))
    assert [keys[0][2] for *_, keys in found.found] == ["c0", "c1", "c2"]
    assert found.damaged == []


def test_who_looks_on_sees_whole_records_in_order(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_directory(segment.parent)
    segments = SegmentWriter(segment.parent, DELTA)
    seen: list[int] = []
    real = os.pwrite
    with Lake(root) as lake:

        def looked_at(fd: int, data: Any, offset: int) -> int:
            half = real(fd, data[: len(data) // 2], offset) if len(data) > 8 else 0
            look()
            done = half + real(fd, data[half:], offset + half)
            look()
            return done

        def look() -> None:
            lake.refresh()
            found = [name for (name,) in lake.sql(CALLS).fetchall()]
            assert found == [f"c{i}" for i in range(len(found))]
            assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
            seen.append(len(found))

        monkeypatch.setattr(os, "pwrite", looked_at)
        segments.append([(encode_delta(make_delta(f"c{i}")), 4) for i in range(2)])
        segments.append([(encode_delta(make_delta(f"c{i}")), 4) for i in range(2, 5)])
        segments.seal()
    assert seen == sorted(seen)
    assert set(seen) == set(range(6))


@pytest.mark.parametrize("seed", range(3, 5))
def test_a_page_may_be_of_any_moment_of_an_append(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The system writes pages when it likes, and a backup reads them so: nothing there is damage."""
    make_directory(segment.parent)
    segments = SegmentWriter(segment.parent, DELTA)
    segments.append([(encode_delta(make_delta("c0")), 4)])
    moments = [segment.read_bytes()]
    real = os.pwrite

    def seen(fd: int, data: Any, offset: int) -> int:
        done = real(fd, data, offset)
        moments.append(segment.read_bytes())
        return done

    monkeypatch.setattr(os, "pwrite", seen)
    segments.append([(encode_delta(make_delta(f"c{i}")), 4) for i in range(1, 9)])
    monkeypatch.undo()
    pages = random.Random(seed)
    segment.write_bytes(b"".join(pages.choice(moments)[at : at + PAGE] for at in range(0, len(moments[0]), PAGE)))

    found = names(root)
    assert found[0] == "c0"
    OwnedLake.open(root).close()
    assert names(root) == found


def test_a_segment_is_sealed_where_zeros_found_room_for_some_bytes(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(encode_delta(make_delta("c0")))
    real = os.pwrite

    def no_room(fd: int, data: Any, offset: int) -> int:
        if len(data) > size + 3:
            real(fd, data[: size + 3], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    writer = DeltaWriter(root, "w0")
    monkeypatch.setattr(os, "pwrite", no_room)
    writer.stage(make_delta("c0"))
    monkeypatch.undo()
    writer.close()
    assert has_footer(memoryview(segment.read_bytes()))
    assert ipc.open_file(segment).read_all().column("call_id").to_pylist() == streamed(segment) == ["c0"]
    with Lake(root) as lake:
        assert lake.connect().sql("SELECT ended FROM tl_segments WHERE kind = 'deltas'").fetchall() == [(True,)]


def test_a_message_of_no_rows_fills_a_place_of_any_size() -> None:
    for size in (3_000, (64 << 20) + 4_000):
        message = memoryview(recover._filler(DELTA, size))
        assert sum(message_lengths(message, 0, size) or ()) == len(message) == size
        assert delta_keys(message, 0, size, DELTA) == []


def lose_page(segment: Path, place: Place) -> None:
    """The last whole page of a record, as it was before."""
    with segment.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(PAGE), (place.byte_offset + place.byte_length) // PAGE * PAGE - PAGE)


def test_a_record_of_which_the_power_took_a_part_is_staged_again(root: Path, segment: Path, make_delta: Make) -> None:
    """Its digest is there, and so are its arrays."""
    extras = json.dumps({"text": "x" * 20_000})
    delta = make_delta("c0", extras=extras, extras_digest=extras_digest(extras))
    writer = DeltaWriter(root, "w0")
    lost = writer.stage(delta)
    writer.close()
    lose_page(segment, lost)
    writer = DeltaWriter(root, "w0")
    assert writer.read(writer.stage(delta)).extras == extras
    writer.close()


def test_a_file_is_imported_again_after_a_loss_of_power(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"type": "call", "rollout_id": "g0_g0", "call_id": "c0", "prompt_token_ids": [*range(5000)]}
    answer = {"generation_token_ids": [7], "generation_logprobs": [-0.5], "weight_version": 7}
    group = {"type": "group", "group_id": "g0", "n": 1, "purpose": "train"}
    seal = {"type": "seal", "rollout_id": "g0_g0", "reward": 1}
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in (group, call | answer, seal)))

    def gone(*_: object) -> None:
        raise StorageFailed("the power went")

    with OwnedLake.open(root) as lake, monkeypatch.context() as patched:
        patched.setattr(lake.lineage, "append_many", gone)
        with pytest.raises(StorageFailed):
            import_file(lake, file)
        found = lake.find_delta("g0_g0", 0, "c0")
    assert found is not None
    with (root / segment_name(found[0])).open("r+b") as segment:
        os.pwrite(segment.fileno(), bytes(PAGE), found[0].byte_offset + PAGE)
    with OwnedLake.open(root) as lake:
        import_file(lake, file)
        assert lake.sql("SELECT kind FROM audit_findings WHERE severity = 'fault'").fetchall() == []


def test_who_looks_on_takes_no_half_written_bytes_for_the_end(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    real = os.pwrite
    with Lake(root) as lake:

        def by_bytes(fd: int, data: Any, offset: int) -> int:
            done = real(fd, data[: len(data) if len(data) > 8 else max(1, len(data) // 2)], offset)
            lake.refresh()
            return done

        monkeypatch.setattr(os, "pwrite", by_bytes)
        writer.stage(make_delta("c1"))
        monkeypatch.undo()
        writer.stage(make_delta("c2"))
        lake.refresh()
        assert lake.sql(CALLS).fetchall() == [("c0",), ("c1",), ("c2",)]
        writer.close()


def test_no_number_is_given_twice_when_an_early_segment_is_compacted_last(root: Path, make_delta: Make) -> None:
    """One that took no record, or that could not be sealed: those behind it are gone by then."""
    writer = DeltaWriter(root, "w0")
    for name in ("c0", "c1"):
        writer.stage(make_delta(name))
        writer.roll()
    writer.close()
    early, late = (root / f"deltas/w0/{number:06d}.arrow" for number in range(2))
    early.rename(root / "aside")
    with OwnedLake.open(root) as lake:
        assert lake.compact().records == 1
        assert not late.exists()
        (root / "aside").rename(early)
        assert lake.compact().replaced > 0
        assert not early.exists()
    writer = DeltaWriter(root, "w0")
    assert writer.stage(make_delta("c2")).segment == 2
    writer.close()
    with OwnedLake.open(root):
        assert names(root) == ["c0", "c1", "c2"]


@pytest.mark.parametrize(("kind", "local"), [("ext4", True), ("nfs4", False), ("fuse.sshfs", False)])
def test_only_a_file_system_of_this_machine_alone_is_written_ahead(
    root: Path, segment: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch, kind: str, local: bool
) -> None:
    device = root.stat().st_dev
    listed = root / "mountinfo"
    lines = [
        "22 1 0:999 / /mnt/\xe9 rw - ext4 /dev/vda rw",
        f"36 22 {os.major(device)}:{os.minor(device)} / /lake rw,noatime master:1 shared:7 - {kind} host:/lake rw",
    ]
    listed.write_bytes("\n".join(lines).encode("latin-1"))
    monkeypatch.setattr(mounts, "_MOUNTS", listed)
    writer = DeltaWriter(root, "w0")
    place = writer.stage(make_delta("c0"))
    assert (segment.stat().st_size > place.byte_offset + place.byte_length) is local
    writer.close()
    listed.unlink()
    assert not mounts.is_local(root)
    assert names(root) == ["c0"]
