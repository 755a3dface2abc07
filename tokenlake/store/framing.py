"""The framed fields of format 1 for whole vectors: what `digest` packs for one record, Arrow lays out for thousands.

Every function takes and gives Arrow arrays of one length, and bytes where every record has the same. NULLs are framed
only by `optional`; elsewhere a caller has none. What the frames of a record hold is in `docs/format.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import groupby, pairwise
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["NO_NULLS", "Piece", "counted", "hashes", "joined", "optional", "text", "word"]

Piece = pa.Array | bytes
"""A part of each record, or of all."""

NO_NULLS = bytes(8)
"""How many elements of an array are NULL, where none is."""

_NONE = b"\0"
_SOME = b"\1"
_WIDE = (pa.int64(), pa.float64())


def joined(*pieces: Piece) -> pa.Array:
    """The pieces of each record, one after the other; a constant is the same in each."""
    scalars: list[Any] = []
    for constant, run in groupby(pieces, key=lambda piece: isinstance(piece, bytes)):
        if constant:
            scalars.append(pa.scalar(b"".join(cast("Iterable[bytes]", run)), pa.large_binary()))
        else:
            scalars.extend(run)
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.large_binary()))


def word(column: pa.Array) -> pa.Array:
    """A number as 8 bytes; what stands for NULL is no matter."""
    wide = column if column.type in _WIDE else column.cast(pa.int64())
    raw = pa.Array.from_buffers(pa.binary(8), len(wide), [None, wide.buffers()[1]], offset=wide.offset)
    return raw.cast(pa.large_binary())


def text(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The length of a text, and its bytes."""
    raw = column.cast(pa.large_string()).cast(pa.large_binary()).fill_null(b"")
    return word(pc.binary_length(raw)), raw


def optional(column: pa.Array, *framed: Piece) -> tuple[Piece, ...]:
    """`framed` after a 1, or a 0 where `column` is NULL."""
    if column.null_count == len(column):
        return (_NONE,)
    if column.null_count == 0:
        return _SOME, *framed
    present = joined(_SOME, *framed)
    return (pc.if_else(column.is_valid(), present, pa.scalar(_NONE, present.type)),)


def counted(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """How many elements each list has, framed, and their raw bytes."""
    width = column.type.value_type.bit_width // 8
    lists = column.cast(pa.large_list(column.type.value_type))
    offsets = lists.offsets
    elements = lists.values
    # Offsets count from the start of the elements' array, whose own offset says where that is in the buffer.
    starts = pc.multiply(pc.add(offsets, elements.offset), width)
    buffers = cast("list[Any]", [None, starts.buffers()[1], elements.buffers()[1]])
    raw = pa.Array.from_buffers(pa.large_binary(), len(lists), buffers)
    return word(pc.subtract(offsets[1:], offsets[:-1])), raw


def hashes(framed: pa.Array) -> list[bytes]:
    """The SHA-256 of each record."""
    _, offsets, data = framed.buffers()
    raw = memoryview(b"" if data is None else data)
    ends: Sequence[int] = memoryview(offsets).cast("q")[framed.offset :][: len(framed) + 1].tolist()
    return [sha256(raw[start:end]).digest() for start, end in pairwise(ends)]
