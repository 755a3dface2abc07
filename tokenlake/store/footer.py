"""The footer that turns an appended segment into a closed Arrow IPC file.

pyarrow writes a template footer once; its list of record batches is replaced by a new one at the end of the FlatBuffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.ipc as ipc

from tokenlake.errors import InvalidInput
from tokenlake.store import flatbuffer

__all__ = ["END_OF_STREAM", "MAGIC", "Block", "Footer", "blocks_of", "footer_start", "has_footer"]

MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

Block = tuple[int, int, int]
"""Offset, metadata bytes (with prefix) and body bytes of one record batch message."""

_RECORD_BATCHES = 3


class Footer:
    """Makes the closing bytes of segments of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        sink = pa.BufferOutputStream()
        with ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema))
        data = sink.getvalue().to_pybytes()
        size = struct.unpack_from("<i", data, len(data) - 10)[0]
        self._template = data[-10 - size : -10]
        at = flatbuffer.field(self._template, flatbuffer.root(self._template), _RECORD_BATCHES)
        if at is None:
            raise InvalidInput("pyarrow writes footers in a way this version of Tokenlake does not know")
        self._at = at

    def closing(self, blocks: Sequence[Block]) -> bytes:
        """What follows the last message: end of stream, footer, its length, magic."""
        footer = bytearray(self._template)
        footer += bytes((4 - len(footer)) % 8)
        struct.pack_into("<I", footer, self._at, len(footer) - self._at)
        footer += struct.pack("<I", len(blocks))
        flat = [number for block in blocks for number in block]
        footer += struct.pack("<" + "qi4xq" * len(blocks), *flat)
        return END_OF_STREAM + bytes(footer) + struct.pack("<i", len(footer)) + MAGIC


def footer_start(data: bytes | memoryview) -> int | None:
    """Where the end of stream stands that a closed Arrow IPC file's footer follows; None: there is no footer."""
    if len(data) < 32 or bytes(data[-6:]) != MAGIC:
        return None
    size = struct.unpack_from("<i", data, len(data) - 10)[0]
    start = len(data) - 18 - size
    return start if size > 0 and start >= 8 and bytes(data[start : start + 8]) == END_OF_STREAM else None


def has_footer(data: bytes | memoryview) -> bool:
    """Whether a file's bytes end like a closed Arrow IPC file."""
    return footer_start(data) is not None


def blocks_of(data: memoryview) -> list[Block]:
    """The record batches that a closed file's footer names; empty where there is no footer or it is damaged."""
    if not has_footer(data):
        return []
    size = struct.unpack_from("<i", data, len(data) - 10)[0]
    footer = bytes(data[len(data) - 10 - size : len(data) - 10])
    try:
        at = flatbuffer.field(footer, flatbuffer.root(footer), _RECORD_BATCHES)
        start, count = (0, 0) if at is None else flatbuffer.vector(footer, at)
        blocks = [struct.unpack_from("<qi4xq", footer, start + 24 * i) for i in range(min(count, size // 24))]
    except struct.error:
        return []
    return [block for block in blocks if block[0] >= 0 and sum(block) <= len(data) and min(block) >= 0]
