"""Finding the records of a segment: many at once says what one at a time says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.encode import DELTA_LAYOUT
from tokenlake.store.maps import Mapped, SegmentMaps
from tokenlake.store.placed import placed, walk_deltas
from tokenlake.store.records import delta_keys
from tokenlake.store.walk import Walk, walk

Make = Callable[..., Delta]
CALLS = 120
ODD = 50
"""A call with a NULL log-probability, which is not read with others."""


@pytest.fixture
def segment(tmp_path: Path, make_delta: Make) -> Path:
    """Calls of three shapes, one of them odd; sealed."""
    writer = DeltaWriter(tmp_path, "w0")
    for i in range(CALLS):
        child = {} if i % 3 else {"parent_call_id": "c0", "depth": 1}
        odd = {"logprob_nulls": (1,)} if i == ODD else {}
        writer.stage(make_delta(f"c{i}", rollout_id=f"g{i % 7}_g0", n=i % 5 + 2, **child, **odd))
    writer.close()
    return tmp_path / "deltas/w0/000000.arrow"


def one_by_one(mapped: Mapped, start: int, end: int) -> Walk[Any]:
    schema = mapped.schema
    assert schema is not None
    return walk(mapped.view, start, end, DELTA_LAYOUT.prefix, lambda a, b: delta_keys(mapped.view, a, b, schema))


def both(path: Path, end: int | None = None) -> tuple[Walk[Any], list[dict[str, Any]]]:
    """What is found, held equal to what is found one by one."""
    mapped = SegmentMaps(path.parent).get(path.name)
    assert mapped is not None
    end = len(mapped.view) if end is None else end
    ways = [way(mapped, mapped.first, end) for way in (walk_deltas, one_by_one)]
    fast, slow = ([row for batch in placed("w0", 3, found) for row in batch.to_pylist()] for found in ways)
    assert fast == slow
    assert [(w.scanned, w.ended, w.damaged) for w in ways[:1]] == [(w.scanned, w.ended, w.damaged) for w in ways[1:]]
    return ways[0], fast


def test_a_segment_is_read_in_runs_between_what_is_odd(segment: Path) -> None:
    found, rows = both(segment)
    assert [row["call_id"] for row in rows] == [f"c{i}" for i in range(CALLS)]
    assert rows[-1]["segment"] == 3
    assert found.ended
    assert len(found.found) < CALLS


def test_a_torn_segment_ends_where_its_last_whole_record_does(segment: Path) -> None:
    offsets = [row["byte_offset"] for row in both(segment)[1]]
    for end in [offsets[33], offsets[90] + 1, *range(offsets[-2] - 8, offsets[-1] + 9, 8 * 37), offsets[-1]]:
        assert [row["byte_offset"] for row in both(segment, end)[1]] == [each for each in offsets if each < end][
            : None if end in offsets else -1
        ]


def test_damage_costs_the_records_that_it_hits(segment: Path) -> None:
    whole = segment.read_bytes()
    rows = both(segment)[1]
    for at in damages(rows):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found = both(segment)[1]
        assert CALLS - 1 <= len(found) <= CALLS
    segment.write_bytes(whole.replace(b"c77", b"c\0 "))
    assert len(both(segment)[1]) == CALLS - 1


def damages(rows: list[dict[str, Any]]) -> Iterator[int]:
    """Some bytes of metadata, head and tail of a record, every one in another part."""
    place = rows[77]
    yield from range(place["byte_offset"], place["byte_offset"] + place["byte_length"], 97)
