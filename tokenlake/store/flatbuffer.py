"""Just enough of FlatBuffers to find the patchable numbers of an Arrow IPC message.

Arrow's metadata is a FlatBuffer. pyarrow writes it; this module only locates fields in it, so that a template can be
patched, and rejects bytes that do not hold together. Layout rules: https://flatbuffers.dev/internals/.
"""

from __future__ import annotations

import struct

__all__ = ["BODY_LENGTH", "field", "indirect", "message_lengths", "root", "vector"]

_Buffer = bytes | bytearray | memoryview
_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i64 = struct.Struct("<q").unpack_from
_prefix = struct.Struct("<II").unpack_from

CONTINUATION = 0xFFFFFFFF
BODY_LENGTH = 3
_MAX_METADATA = 1 << 26


def root(data: _Buffer) -> int:
    """Position of the root table."""
    return _u32(data, 0)[0]


def field(data: _Buffer, table: int, index: int) -> int | None:
    """Position of field `index` of a table, or None where it is absent (its default holds)."""
    vtable = table - _i32(data, table)[0]
    if vtable < 0 or 4 + 2 * index >= _u16(data, vtable)[0]:
        return None
    offset = _u16(data, vtable + 4 + 2 * index)[0]
    return None if offset == 0 else table + offset


def indirect(data: _Buffer, position: int) -> int:
    """Follow the relative offset that stands at `position`."""
    return position + _u32(data, position)[0]


def vector(data: _Buffer, position: int) -> tuple[int, int]:
    """(position of the first element, count) of the vector that the offset at `position` points to."""
    start = indirect(data, position)
    return start + 4, _u32(data, start)[0]


def message_lengths(data: _Buffer, start: int, end: int) -> tuple[int, int] | None:
    """(metadata bytes with prefix, body bytes) of the IPC message at `start`, or None where none ends by `end`.

    Metadata length 0 is the end-of-stream mark, and is returned as (8, 0).
    """
    if start + 8 > end:
        return None
    continuation, length = _prefix(data, start)
    if continuation != CONTINUATION or length > _MAX_METADATA or start + 8 + length > end:
        return None
    if length == 0:
        return 8, 0
    meta = bytes(data[start + 8 : start + 8 + length])
    try:
        at = field(meta, root(meta), BODY_LENGTH)
        body = 0 if at is None else _i64(meta, at)[0]
    except struct.error:
        return None
    if body < 0 or length % 8 or start + 8 + length + body > end:
        return None
    return 8 + length, body
