"""From the arrays of calls to the arrays of a chain, without a step for each element.

DuckDB moves a list element by element and a BLOB at once. So `facts` carries the arrays of a delta as the bytes that
they are (`pack`), the views gather and order those, and `tl_sequence` reads them as lists again, once for each rollout.
What cannot be packed is carried as the lists that it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.store import framing
from tokenlake.store.sqlfunction import add_function
from tokenlake.store.sqltypes import sql_type

__all__ = ["PACKED", "pack", "register"]

_MAX_PACKED = 131_072
"""Elements up to which an array is packed: those of one vector have to fit into the 2 GiB of a column of BLOBs."""

_ARRAYS = {"token_ids": pa.int32(), "token_mask": pa.uint8(), "logprobs": pa.float32()}
PACKED = pa.struct({name: pa.large_binary() for name in _ARRAYS})


def register(con: duckdb.DuckDBPyConnection) -> None:
    """Register `tl_sequence` on a connection that has none yet; its cursors have it too."""
    lists = {name: pa.list_(kind) for name, kind in _ARRAYS.items()}
    given = {"packed": PACKED, **lists}
    parameters = {name: sql_type(pa.list_(kind)) for name, kind in given.items()}
    add_function(con, "tl_sequence", _sequences, parameters, sql_type(pa.struct(lists)))


def pack(arrays: list[pa.Array]) -> pa.Array:
    """A vector of `PACKED` of three list arrays; NULL where one of the lists is absent, has a NULL or is very long."""
    lengths = (pc.list_value_length(each) for each in arrays)
    fits = reduce(pc.and_, (pc.less_equal(each, _MAX_PACKED).fill_null(False) for each in lengths))
    for each in arrays:
        if each.values.null_count:
            fits = pc.and_(fits, _whole(each))
    raws = [framing.counted(each)[1] for each in arrays]
    return pa.StructArray.from_arrays(raws, fields=list(PACKED), mask=pc.invert(fits))


def _whole(lists: pa.Array) -> pa.Array:
    """Whether each list is without a NULL inside."""
    holes = lists.values.is_null().cast(pa.int64())
    before = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(holes)])
    counted = before.take(lists.offsets)
    return pc.equal(counted[1:], counted[:-1])


def _sequences(packed: pa.Array, *lists: pa.Array) -> pa.Array:
    """Arguments: records of `PACKED` for each rollout, and the lists of those that are NULL there."""
    records = packed.values
    ends = packed.offsets
    arrays: list[pa.Array] = []
    for (name, kind), unpacked in zip(_ARRAYS.items(), lists, strict=True):
        values, bounds = _bytes(records.field(name), kind)
        starts = bounds.take(ends)
        if records.null_count:
            pieces = list(_pieces(packed, values, bounds, unpacked.values))
            starts = pa.array([0, *accumulate(sum(map(len, row)) for row in pieces)], pa.int64())
            values = pa.concat_arrays([pa.array([], kind), *(piece for row in pieces for piece in row)])
        arrays.append(pa.LargeListArray.from_arrays(starts, values))
    return pa.StructArray.from_arrays(arrays, names=list(_ARRAYS), mask=packed.is_null())


def _bytes(raw: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """The elements in a column of BLOBs, and where those of each begin and the last ones end."""
    width = kind.bit_width // 8
    large = pa.types.is_large_binary(raw.type)
    _, offsets, data = raw.buffers()
    counts = pa.int64() if large else pa.int32()
    if offsets is None or len(raw) == 0:
        return pa.array([], kind), pa.array([0] * (len(raw) + 1), pa.int64())
    bounds = pa.Array.from_buffers(counts, len(raw) + 1, [None, offsets], offset=raw.offset).cast(pa.int64())
    total = bounds[-1].as_py() // width
    return pa.Array.from_buffers(kind, total, [None, data or pa.py_buffer(b"")]), pc.divide(bounds, width)


def _pieces(packed: pa.Array, values: pa.Array, bounds: pa.Array, lists: Any) -> Iterator[list[pa.Array]]:
    """The arrays of the records of each rollout, in order; a record that is neither packed nor a list has none."""
    places = bounds.to_pylist()
    there = packed.values.is_valid().to_pylist()
    for start, end in pairwise(packed.offsets.to_pylist()):
        row: list[pa.Array] = []
        for record in range(start, end):
            if there[record]:
                row.append(values[places[record] : places[record + 1]])
            elif lists[record].is_valid:
                row.append(lists[record].values)
        yield row
