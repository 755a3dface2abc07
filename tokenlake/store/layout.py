"""One-row Arrow record batches, encoded and decoded by hand.

Building a record batch of one call through pyarrow costs three times its write and sync. The layout of a one-row batch
is nearly constant, so it is computed once for each *shape* (which columns are NULL, how long the texts are) and kept:
an encoding is then one `struct.pack` and a patched copy of the metadata. A schema is split in two: the *head*
(fixed-width columns, short texts, small nested lists) belongs to the shape, the *tail* (long texts, the token arrays)
is patched for every record. What is written is plain Arrow: pyarrow reads it back, and any batch that is not of a known
shape is refused by `decode`, so that the caller lets pyarrow read it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tokenlake.errors import InvalidInput
from tokenlake.store import flatbuffer
from tokenlake.store.shape import Shape, leaves_of, plan, sizes_of

__all__ = ["Layout", "Tail"]

_Buffer = bytes | bytearray | memoryview
_PAD = tuple(bytes(-n % 8) for n in range(8))
_FLAGS = struct.Struct("<B7xii")
_flags, _unpack_flags = _FLAGS.pack, _FLAGS.unpack_from
"""Validity and both offsets of a tail's only row."""

_MAX_SHAPES = 4096
_MAX_BODY = 1 << 31
_NEGATIVE = 1 << 63
"""From here on a number that was read without its sign is one below 0: beyond every end."""
_WIDTHS = {pa.int32(): 4, pa.uint8(): 1, pa.float32(): 4}


@dataclass(frozen=True, slots=True)
class Tail:
    """One variable column: a text (`width` 0) or a list of `width`-byte elements."""

    name: str
    width: int


def _tails(fields: Sequence[pa.Field]) -> list[Tail]:
    return [Tail(f.name, 0 if pa.types.is_string(f.type) else _WIDTHS[f.type.value_type]) for f in fields]


class Layout:
    """Encoder and decoder of one-row batches of `schema`, whose columns from `first_tail` on are the tail."""

    def __init__(self, schema: pa.Schema, first_tail: str) -> None:
        split = schema.get_field_index(first_tail)
        self.schema = schema
        self.leaves = leaves_of(pa.schema([schema.field(i) for i in range(split)]))
        self.tails = _tails([schema.field(i) for i in range(split, len(schema))])
        self._tail_widths = [tail.width for tail in self.tails]
        template = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema).serialize()
        data = template.to_pybytes()
        meta = data[8:]
        message = flatbuffer.root(meta)
        self.length_at = 8 + _present(flatbuffer.field(meta, message, 3))
        batch = flatbuffer.indirect(meta, _present(flatbuffer.field(meta, message, 2)))
        nodes, n_nodes = flatbuffer.vector(meta, _present(flatbuffer.field(meta, batch, 1)))
        buffers, n_buffers = flatbuffer.vector(meta, _present(flatbuffer.field(meta, batch, 2)))
        self.meta_size = 8 + struct.unpack_from("<I", data, 4)[0]
        self._template = data[: self.meta_size]
        self._nodes_at, self._buffers_at = 8 + nodes, 8 + buffers
        tail_nodes = sum(1 if tail.width == 0 else 2 for tail in self.tails)
        tail_buffers = sum(3 if tail.width == 0 else 4 for tail in self.tails)
        self._tail_nodes_at = self._nodes_at + 16 * (n_nodes - tail_nodes)
        self.tail_buffers_at = self._buffers_at + 16 * (n_buffers - tail_buffers)
        self._tail_nodes = struct.Struct(f"<{2 * tail_nodes}q")
        self._tail_buffers = struct.Struct(f"<{2 * tail_buffers}Q")
        self.tail_buffers_size = self._tail_buffers.size
        self._head_nodes = struct.Struct(f"<{2 * (n_nodes - tail_nodes)}q")
        self._head_buffers = struct.Struct(f"<{2 * (n_buffers - tail_buffers)}q")
        self._body_length = struct.Struct("<q")
        cuts = [
            (self.length_at, 8),
            (self.tail_buffers_at, self._tail_buffers.size),
            (self._tail_nodes_at, self._tail_nodes.size),
        ]
        self._fixed: Callable[..., tuple[bytes, ...]] = _between(sorted(cuts), self.meta_size).unpack_from
        """What of the metadata of the message at a position is the same in every message of its shape."""
        self.prefix = self._template[: self.length_at]
        """What every one-row batch of this schema starts with: where to look for the next one after damage."""
        self._start = struct.Struct(f"<{self.length_at}sq")
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._by_meta: dict[tuple[bytes, ...], Shape] = {}
        self._latest: Shape | None = None
        """Of the message that was read last: the next one is often like it."""

    # ---------------------------------------------------------------- writing

    def shape(self, key: tuple[Any, ...]) -> Shape:
        """The shape of a head; `key` holds None (NULL) or a size for each leaf but required ones and structs.

        The size of a number is 1, of a text its bytes, of a nested list (count, bytes of texts).
        """
        return self._shapes.get(key) or self._build(key)

    def assemble(self, shape: Shape, args: Sequence[Any], tails: Sequence[Any]) -> bytes:
        """One whole IPC message.

        `args`: a required value itself, an optional one after a 1, a text or nested list as 1, count, raw bytes;
        nothing for NULL. `tails`: raw bytes or None for texts, (raw, NULL positions) or None for lists.
        """
        position = shape.size
        parts: list[_Buffer] = [b"", shape.pack(*args)]
        nodes: list[int] = []
        buffers: list[int] = []
        for width, value in zip(self._tail_widths, tails, strict=True):
            position = _put_tail(width, value, position, parts, nodes, buffers)
        meta = bytearray(shape.meta)
        self._body_length.pack_into(meta, self.length_at, position)
        self._tail_nodes.pack_into(meta, self._tail_nodes_at, *nodes)
        self._tail_buffers.pack_into(meta, self.tail_buffers_at, *buffers)
        parts[0] = meta
        return b"".join(parts)

    def _build(self, key: tuple[Any, ...]) -> Shape:
        """Compute the shape of `key` and remember it."""
        made = plan(self.leaves, key)
        meta = bytearray(self._template)
        self._head_nodes.pack_into(meta, self._nodes_at, *made.nodes)
        self._head_buffers.pack_into(meta, self._buffers_at, *made.buffers)
        absent = tuple(number for number, null in enumerate(made.nulls) if null)
        pack, unpack = made.pack.pack, made.unpack.unpack_from
        whole = bytes(meta)
        fixed = self._fixed(whole)
        shape = Shape(whole, made.size, pack, unpack, made.nulls, fixed, absent, made.slots)
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
            self._by_meta.clear()
        self._shapes[key] = shape
        self._by_meta[fixed] = shape
        return shape

    # ---------------------------------------------------------------- reading

    def decode(self, data: _Buffer, start: int, end: int) -> tuple[Shape, tuple[Any, ...], list[Any]] | None:
        """(shape, one raw value for each leaf but structs, tails) of the message at `start`, or None.

        None means: not a whole one-row batch that `assemble` could have written. NULL leaves come as zero or `b""`
        (`Shape.nulls` tells), texts as bytes. A tail is None, or a `memoryview`, or for lists (view, validity or None).
        """
        found = self._head(data, start, end)
        if found is None:
            return None
        shape, meta, length = found
        body = start + self.meta_size
        tails = self._read_tails(meta, memoryview(data), body, length)
        return None if tails is None else (shape, shape.unpack(data, body), tails)

    def decode_head(self, data: _Buffer, start: int, end: int) -> tuple[Any, ...] | None:
        """The values alone, as `decode` gives them, at half the cost."""
        found = self._head(data, start, end)
        return None if found is None else found[0].unpack(data, start + self.meta_size)

    def run(self, view: memoryview, start: int, end: int, most: int) -> tuple[list[int], list[int]]:
        """(offsets, bytes) of up to `most` messages that follow one another from `start` on.

        It ends before the first one that does not start as `assemble` starts them, or that is not whole.
        """
        offsets: list[int] = []
        lengths: list[int] = []
        size, read, wanted = self.meta_size, self._start.unpack_from, self.prefix
        while len(offsets) < most and start + size <= end:
            prefix, length = read(view, start)
            if prefix != wanted or length < 0 or start + size + length > end:
                break
            offsets.append(start)
            lengths.append(size + length)
            start += size + length
        return offsets, lengths

    def shapes_at(self, view: memoryview, offsets: Sequence[int]) -> tuple[list[Shape], list[int]] | None:
        """The shapes of messages whose metadata is there whole, and the number of that of each.

        None: one of them is not one that `assemble` wrote.
        """
        numbers: dict[int, int] = {}
        shapes: list[Shape] = []
        which: list[int] = []
        fixed, latest, number = self._fixed, None, 0
        for start in offsets:
            # What `_shape_of` looks at first, without a call for each message.
            if latest is None or latest.fixed != fixed(view, start):
                latest = self._shape_of(view[start : start + self.meta_size].tobytes())
                if latest is None:
                    return None
                number = numbers.setdefault(id(latest), len(shapes))
                if number == len(shapes):
                    shapes.append(latest)
            which.append(number)
        return shapes, which

    def _head(self, data: _Buffer, start: int, end: int) -> tuple[Shape, bytes, int] | None:
        """(shape, metadata, bytes of the body) of a message of a known shape."""
        body = start + self.meta_size
        if body > end:
            return None
        meta = bytes(data[start:body])
        shape = self._shape_of(meta)
        if shape is None:
            return None
        length = self._body_length.unpack_from(meta, self.length_at)[0]
        if length < shape.size or body + length > end:
            return None
        return shape, meta, length

    def _shape_of(self, meta: bytes) -> Shape | None:
        """The shape of a message of this metadata."""
        latest, fixed = self._latest, self._fixed(meta)
        if latest is not None and latest.fixed == fixed:
            return latest
        found = self._by_meta.get(fixed) or self._recognize(meta, fixed)
        if found is not None:
            self._latest = found
        return found

    def _read_tails(self, meta: bytes, view: memoryview, body: int, length: int) -> list[Any] | None:
        """The tails of a message whose body has `length` bytes from `body` on; None: a position does not hold."""
        numbers = self._tail_buffers.unpack_from(meta, self.tail_buffers_at)
        tails: list[Any] = []
        at = 0
        for width in self._tail_widths:
            if width:
                valid_at, flag, offsets_at, two, bits_at, bits, data_at, size = numbers[at : at + 8]
                at += 8
            else:
                valid_at, flag, offsets_at, two, data_at, size = numbers[at : at + 6]
                bits_at = bits = 0
                at += 6
            end = data_at + size
            if flag | two >= _NEGATIVE or offsets_at != valid_at + 8 or offsets_at + 8 > length or end > length:
                return None
            present, first, last = _unpack_flags(view, body + valid_at)
            if present > 1 or first or last * (width or 1) != size:
                return None
            if bits_at + bits > length or (bits and bits * 8 < last):
                return None
            if not present:
                tails.append(None)
            elif width:
                valid = view[body + bits_at : body + bits_at + bits] if bits else None
                tails.append((view[body + data_at : body + end], valid))
            else:
                tails.append(view[body + data_at : body + end])
        return tails

    def _recognize(self, meta: bytes, fixed: tuple[bytes, ...]) -> Shape | None:
        """The shape that would write this metadata, if there is one."""
        nodes = self._head_nodes.unpack_from(meta, self._nodes_at)
        buffers = self._head_buffers.unpack_from(meta, self._buffers_at)
        if not meta.startswith(self.prefix) or min(nodes) < 0 or min(buffers) < 0 or max(*nodes, *buffers) > _MAX_BODY:
            return None
        shape = self._build(sizes_of(self.leaves, nodes, buffers))
        return shape if shape.fixed == fixed else None


def _present(position: int | None) -> int:
    if position is None:
        raise InvalidInput("pyarrow writes record batches in a way this version of Tokenlake does not know")
    return position


def _between(cuts: list[tuple[int, int]], end: int) -> struct.Struct:
    """The stretches of 0..end that no cut covers."""
    kept = "<"
    at = 0
    for start, size in cuts:
        kept += f"{start - at}s{size}x"
        at = start + size
    return struct.Struct(f"{kept}{end - at}s")


def _put_tail(width: int, value: Any, position: int, parts: list[_Buffer], nodes: list[int], buffers: list[int]) -> int:
    """Append one tail's buffers; returns the position after them."""
    if value is None:
        parts.append(_flags(0, 0, 0))
        nodes += (1, 1) if width == 0 else (1, 1, 0, 0)
        data = position + 16
        if width == 0:
            buffers += (position, 1, position + 8, 8, data, 0)
        else:
            buffers += (position, 1, position + 8, 8, data, 0, data, 0)
        return data
    if width == 0:
        size = len(value)
        parts += (_flags(1, 0, size), value, _PAD[size % 8])
        nodes += (1, 0)
        buffers += (position, 1, position + 8, 8, position + 16, size)
        return position + 16 + size + -size % 8
    raw, null_at = value
    size = len(raw)
    count = size // width
    data = position + 16
    parts.append(_flags(1, 0, count))
    bits = b""
    if null_at:
        bits = _validity(count, null_at)
        parts += (bits, _PAD[len(bits) % 8])
    nodes += (1, 0, count, len(null_at))
    buffers += (position, 1, position + 8, 8, data, len(bits))
    data += len(bits) + -len(bits) % 8
    buffers += (data, size)
    parts += (raw, _PAD[size % 8])
    return data + size + -size % 8


def _validity(count: int, null_at: Sequence[int]) -> bytes:
    bits = bytearray(b"\xff") * ((count + 7) // 8)
    for position in null_at:
        bits[position // 8] &= ~(1 << position % 8)
    if count % 8:
        bits[-1] &= (1 << count % 8) - 1
    return bytes(bits)
