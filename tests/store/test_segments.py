"""Segments: what is on disk is plain Arrow, whole, torn or damaged (B24, B31)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from tokenlake.errors import NotFound
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.encode import DELTA_LAYOUT
from tokenlake.store.footer import has_footer
from tokenlake.store.format import create_lake
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake
from tokenlake.store.records import delta_keys
from tokenlake.store.schema import DELTA
from tokenlake.store.walk import file_schema, walk

Make = Callable[..., Delta]


def segment(root: Path, number: int = 0, writer: str = "w0") -> Path:
    return root / "deltas" / writer / f"{number:06d}.arrow"


def ids_of(table: pa.Table) -> list[Any]:
    return table.column("call_id").to_pylist()


def test_a_sealed_segment_is_an_arrow_file_and_from_byte_8_a_stream(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    for i in range(5):
        writer.stage(make_delta(f"c{i}", n=i))
    writer.close()
    data = segment(root).read_bytes()
    assert has_footer(memoryview(data))
    with ipc.open_file(segment(root)) as file:
        assert file.num_record_batches == 5
        assert file.schema.equals(DELTA)
        assert [file.get_batch(i).column("call_id")[0].as_py() for i in range(5)] == [f"c{i}" for i in range(5)]
    assert ids_of(ipc.open_stream(pa.py_buffer(data[8:])).read_all()) == [f"c{i}" for i in range(5)]


def test_an_unsealed_segment_from_byte_8_is_a_stream(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    assert ids_of(ipc.open_stream(pa.py_buffer(segment(root).read_bytes()[8:])).read_all()) == ["c0"]
    writer.close()


def test_a_segment_holds_at_most_so_many_elements(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0", segment_max_elements=10)
    places = [writer.stage(make_delta(f"c{i}", n=n)) for i, n in enumerate((4, 4, 4, 11))]
    writer.close()
    assert [place.segment for place in places] == [0, 0, 1, 2]
    held = [sum(len(x) for x in ipc.open_file(segment(root, s)).read_all().column("token_ids")) for s in range(3)]
    assert held == [8, 4, 11]
    with Lake(root) as lake:
        found = lake.sql("SELECT call_id, token_ids FROM deltas ORDER BY call_id").fetchall()
        assert [(call, len(ids), ids[0]) for call, ids in found] == [
            (f"c{i}", n, 10) for i, n in enumerate((4, 4, 4, 11))
        ]


def test_a_segment_holds_at_most_so_many_bytes(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0", segment_max_bytes=8000)
    places = [writer.stage(make_delta(f"c{i}", n=100)) for i in range(6)]
    writer.close()
    assert len({place.segment for place in places}) > 1
    assert all(segment(root, n).stat().st_size < 12_000 for n in {place.segment for place in places})


def test_ids_are_stored_once_however_long_the_conversation(root: Path, make_delta: Make) -> None:
    """B38: ten turns of 100 new tokens are 1,000 stored ids, whatever order they are staged in."""
    writer = DeltaWriter(root, "w0")
    for turn in (3, 0, 9, 1, 2, 8, 4, 7, 5, 6):
        writer.stage(make_delta(f"c{turn}", n=100, prev_len=100 * turn, cum_len=100 * turn + 100))
    writer.close()
    with Lake(root) as lake:
        assert lake.sql("SELECT sum(len(token_ids)), max(cum_len) FROM deltas").fetchall() == [(1000, 1000)]


@pytest.fixture
def unsealed(root: Path, make_delta: Make) -> tuple[bytes, list[int]]:
    """A live segment of four records and where each ends; c3 stands for one that was written but never acknowledged."""
    writer = DeltaWriter(root, "w0")
    ends = [(place := writer.stage(make_delta(f"c{i}", n=1))).byte_offset + place.byte_length for i in range(4)]
    data = segment(root).read_bytes()
    writer.close()
    assert not any(data[ends[-1] :])
    return data[: ends[-1]], ends


def test_a_segment_cut_at_any_byte_reads_its_whole_records(unsealed: tuple[bytes, list[int]]) -> None:
    """B24: every length, batch boundaries included."""
    data, ends = unsealed
    for cut in range(len(data) + 1):
        view = memoryview(data)[:cut]
        schema, first = file_schema(view)
        if schema is None:
            assert cut < ends[0]
            continue
        found = walk(view, first, cut, DELTA_LAYOUT.prefix, lambda a, b, v=view: delta_keys(v, a, b, DELTA))
        assert [keys[0][2] for *_, keys in found.found] == [f"c{i}" for i in range(4) if ends[i] <= cut]
        assert not found.damaged


def test_a_cut_segment_is_recovered_without_losing_a_whole_record(
    unsealed: tuple[bytes, list[int]], make_delta: Make, tmp_path: Path
) -> None:
    """B24: recovery seals what is whole, bytes and offsets as they were, and the writer goes on."""
    data, ends = unsealed
    edges = [0, 8, *ends]
    cuts = {*range(0, len(data), 499), *(edge + d for edge in edges for d in (-1, 0, 1))}
    for cut in sorted(cuts & set(range(len(data) + 1))):
        copy = tmp_path / f"cut{cut}"
        create_lake(copy)
        (copy / "deltas" / "w0").mkdir()
        segment(copy).write_bytes(data[:cut])
        whole = sum(1 for end in ends if end <= cut)
        again = DeltaWriter(copy, "w0")
        with ipc.open_file(segment(copy)) as file:
            assert ids_of(file.read_all()) == [f"c{i}" for i in range(whole)]
        if whole:
            assert segment(copy).read_bytes()[: ends[whole - 1]] == data[: ends[whole - 1]]
        assert again.stage(make_delta("c3", n=1)).segment == (0 if whole == 4 else 1)
        again.close()


@pytest.mark.parametrize("tail", [bytes(4096), os.urandom(4096), b"\xff" * 4096], ids=["zeros", "noise", "ones"])
def test_a_tail_of_zeros_or_garbage_is_torn(root: Path, make_delta: Make, tail: bytes) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    whole = segment(root).read_bytes()
    writer.close()
    segment(root).write_bytes(whole + tail)
    with Lake(root) as lake:
        assert lake.sql("SELECT call_id FROM deltas").fetchall() == [("c0",)]
        DeltaWriter(root, "w0").close()
        lake.refresh()
        assert lake.sql("SELECT call_id FROM deltas").fetchall() == [("c0",)]
    assert has_footer(memoryview(segment(root).read_bytes()))


def test_a_sealed_segment_that_was_cut_reads_what_is_left(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    ends = [(place := writer.stage(make_delta(f"c{i}", n=1))).byte_offset + place.byte_length for i in range(2)]
    writer.close()
    original = segment(root).read_bytes()
    for cut in (0, 7, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 8, ends[1], ends[1] + 9, len(original) - 1):
        segment(root).write_bytes(original[:cut])
        with Lake(root) as lake:
            found = lake.sql("SELECT call_id FROM deltas ORDER BY ALL").fetchall()
        assert found == [(f"c{i}",) for i in range(2) if ends[i] <= cut]


def test_damage_in_the_middle_keeps_what_follows(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    places = [writer.stage(make_delta(f"c{i}")) for i in range(3)]
    whole = bytearray(segment(root).read_bytes())
    writer.close()
    whole[places[1].byte_offset : places[1].byte_offset + 64] = bytes(64)
    segment(root).write_bytes(whole)
    with Lake(root) as lake:
        assert lake.sql("SELECT call_id FROM deltas ORDER BY 1").fetchall() == [("c0",), ("c2",)]
        kind, place, _ = lake.sql("SELECT * FROM lake_findings").fetchall()[0]
        assert (kind, place) == ("segment_damaged", "deltas/w0/000000.arrow")
    again = DeltaWriter(root, "w0")
    assert again.read(places[2]).call_id == "c2"
    with pytest.raises(NotFound):
        again.read(places[1])
    again.close()
    assert ipc.open_file(segment(root)).num_record_batches == 2


def test_a_reader_keeps_a_segment_that_is_replaced(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    place = writer.stage(make_delta("c0"))
    torn = segment(root).read_bytes() + b"torn"
    writer.close()
    segment(root).write_bytes(torn)
    with Lake(root) as lake:
        assert lake.sql("SELECT count(*) FROM deltas").fetchall() == [(1,)]
        before = segment(root).stat().st_ino
        again = DeltaWriter(root, "w0")
        assert segment(root).stat().st_ino != before
        assert lake.sql("SELECT call_id FROM deltas").fetchall() == [("c0",)]
        assert again.read(place).call_id == "c0"
        again.close()


def test_segments_with_many_rows_a_batch_read_the_same(root: Path, make_delta: Make) -> None:
    """What compaction writes: 1 message, many records."""
    writer = DeltaWriter(root, "w0")
    for i in range(7):
        writer.stage(make_delta(f"c{i}", n=i, logprob_nulls=(0,) if i == 5 else ()))
    writer.close()
    with Lake(root) as lake:
        before = lake.sql("SELECT * FROM deltas ORDER BY call_id").fetchall()
    table = ipc.open_file(segment(root)).read_all().combine_chunks()
    with ipc.new_file(segment(root), DELTA) as file:
        file.write_table(table, max_chunksize=4)
    with Lake(root) as lake:
        assert lake.sql("SELECT * FROM deltas ORDER BY call_id").fetchall() == before
    with OwnedLake.open(root) as owned:
        found = owned.find_delta("g0_g0", 0, "c6")
        assert found is not None
        assert (found[0].batch_row, owned.read_delta(found[0]).call_id) == (2, "c6")


def test_a_deleted_segment_is_absent_after_a_refresh(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0", segment_max_elements=4)
    for i in range(2):
        writer.stage(make_delta(f"c{i}"))
    writer.close()
    with Lake(root) as lake:
        segment(root, 0).unlink()
        lake.refresh()
        assert lake.sql("SELECT call_id FROM deltas").fetchall() == [("c1",)]


@pytest.mark.skipif(
    "TOKENLAKE_BIG_TESTS" not in os.environ, reason="takes up to 12 GB of memory: set TOKENLAKE_BIG_TESTS=1"
)
def test_more_elements_than_32_bits_can_count_come_back_exact(root: Path, make_delta: Make) -> None:
    """B31 at its true size: two lists that no one Arrow list column could hold together."""
    count = 1_100_000_000
    writer = DeltaWriter(root, "w0", segment_max_bytes=8 << 30)
    places = [
        writer.stage(make_delta(f"c{i}", token_ids=None, logprobs=None, token_mask=bytes([i]) * count)) for i in (0, 1)
    ]
    writer.close()
    assert [place.segment for place in places] == [0, 1]
    with Lake(root) as lake:
        query = "SELECT call_id, len(token_mask), list_sum(token_mask) FROM deltas WHERE call_id = ?"
        assert lake.sql(query, ["c0"]).fetchall() == [("c0", count, 0)]
        assert lake.sql(query, ["c1"]).fetchall() == [("c1", count, count)]
