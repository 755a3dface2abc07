"""Where the delta records of a segment lie, and under which keys: what the index remembers of each.

Nearly all messages of a segment are plain, and thousands of those are read at once; the others one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import groupby
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.store.encode import DELTA_LAYOUT
from tokenlake.store.maps import Mapped
from tokenlake.store.plain import Plain, read_plain
from tokenlake.store.records import DeltaKey, delta_keys
from tokenlake.store.schema import PLACE
from tokenlake.store.walk import Walk, walk

__all__ = ["PLACED", "placed", "walk_deltas"]

_KEY = pa.schema(
    [
        pa.field("rollout_id", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("call_id", pa.string()),
        pa.field("digest", pa.binary(32)),
        pa.field("staged_at", pa.int64()),
    ]
)
PLACED = pa.schema([*PLACE, *_KEY])
"""A record: its place and its key."""

_RUN = 1 << 13
"""Messages that are read at once."""

_FEW = 32
"""Fewer than this are read one by one as fast."""

_Found = pa.RecordBatch | list[DeltaKey]


def walk_deltas(mapped: Mapped, start: int, end: int) -> Walk[_Found]:
    """The records between two positions of a segment, for `placed`."""
    schema = mapped.schema
    if schema is None:
        return Walk()
    view = mapped.view

    def read(offset: int, message_end: int) -> _Found | None:
        return delta_keys(view, offset, message_end, schema)

    return walk(view, start, end, DELTA_LAYOUT.prefix, read, _Leap(view))


def placed(writer: str, segment: int, found: Walk[_Found]) -> Iterator[pa.RecordBatch]:
    """Batches of `PLACED` of what was found in a segment."""
    for many, run in groupby(found.found, key=lambda each: isinstance(each[3], pa.RecordBatch)):
        if many:
            for *_, keys in run:
                batch = cast("pa.RecordBatch", keys)
                where = [
                    pa.repeat(pa.scalar(value, field.type), len(batch))
                    for value, field in zip((writer, segment), PLACE, strict=False)
                ]
                yield pa.RecordBatch.from_arrays([*where, *batch.columns], schema=PLACED)
            continue
        rows = [
            (writer, segment, offset, meta + body, row, *key)
            for offset, meta, body, keys in run
            for row, key in enumerate(cast("list[DeltaKey]", keys))
        ]
        columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [()] * len(PLACED)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, PLACED, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=PLACED)


class _Leap:
    """From the start of a run of plain messages to its end."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._after = 0
        """Up to here messages have to be read one by one."""

    def __call__(self, start: int, end: int) -> tuple[int, pa.RecordBatch] | None:
        if start < self._after:
            return None
        run = DELTA_LAYOUT.run(self._view, start, end, _RUN)
        while len(run[0]) >= _FEW:
            batch = self._at_once(*run)
            if batch is not None:
                return run[0][-1] + run[1][-1], batch
            half = len(run[0]) // 2
            run = run[0][:half], run[1][:half]
        self._after = run[0][-1] + run[1][-1] if run[0] else start + 1
        return None

    def _at_once(self, offsets: list[int], lengths: list[int]) -> pa.RecordBatch | None:
        """The place within the segment and the key of each; None: one of them is not plain, or has no key."""
        starts, sizes = pa.array(offsets, pa.int64()), pa.array(lengths, pa.int64())
        plain = read_plain(DELTA_LAYOUT, self._view, starts, sizes)
        keys = None if plain is None else _keys(plain)
        if keys is None:
            return None
        first_row = pa.repeat(pa.scalar(0, pa.int32()), len(offsets))
        place = [starts, sizes.cast(pa.int32()), first_row]
        return pa.RecordBatch.from_arrays([*place, *keys], names=PLACED.names[2:])


def _keys(plain: Plain) -> list[pa.Array] | None:
    """The columns of the keys; None: one of them is not a key."""
    try:
        columns = [plain.column(name) for name in _KEY.names]
        oldest = pc.min(plain.column("schema_version")).as_py()
    except (ValueError, struct.error):
        return None
    for name in (columns[0], columns[2]):
        data = name.buffers()[2]
        if pc.min(pc.binary_length(name)).as_py() < 1 or (data is not None and b"\0" in data.to_pybytes()):
            return None
    return [*columns[:-1], columns[-1].cast(pa.int64())] if oldest >= 1 else None
