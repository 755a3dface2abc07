"""Many one-row messages of a segment decoded at once, by Arrow's own loops: no Python step for a column of a record.

Only *plain* messages are: laid out to the byte as `Layout.assemble` lays them out, without a NULL element in an array.
That is what a sound writer leaves on disk; where one message of a run is not plain, the run is left to the decoder that
takes them one by one. No value is trusted for its place: every position is checked before it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.store.columns import head_column
from tokenlake.store.layout import Layout, Tail
from tokenlake.store.shape import Kind, Leaf, Shape

__all__ = ["Plain", "read_plain"]

_MAX_OFFSET = 2**31 - 1
_MAX_SHAPES = 64
"""Each shape of a run has a fixed cost; with more of them, one message at a time is as fast."""

_LONG = pa.int64()


def read_plain(layout: Layout, view: memoryview, places: Sequence[tuple[int, int]]) -> Plain | None:
    """The messages at (offset, bytes) places, all inside `view`; None: at least one of them is not plain."""
    if any(offset % 8 or length < layout.meta_size for offset, length in places):
        return None
    found = [layout.shape_at(view, offset) for offset, _ in places]
    if None in found or len(set(map(id, found))) > _MAX_SHAPES:
        return None
    plain = Plain(layout, view, places, cast("list[Shape]", found))
    try:
        return plain if plain.sound() else None
    except (ValueError, struct.error):  # a text that is not UTF-8, a nested list that does not hold together
        return None


class Plain:
    """Plain messages, decoded a column at a time."""

    def __init__(
        self, layout: Layout, view: memoryview, places: Sequence[tuple[int, int]], shapes: Sequence[Shape]
    ) -> None:
        self._layout = layout
        self._view = view
        offsets, lengths = zip(*places, strict=True)
        self._meta = pa.array(offsets, _LONG)
        self._body = pc.add(self._meta, layout.meta_size)
        self._room = pc.subtract(pa.array(lengths, _LONG), layout.meta_size)
        kinds = {id(shape): shape for shape in shapes}
        self._kinds = list(kinds.values())
        numbers = {key: number for number, key in enumerate(kinds)}
        self._which = pa.array([numbers[id(shape)] for shape in shapes], pa.int32())
        self._columns: list[pa.Array] = []
        self._order = pc.sort_indices(pc.sort_indices(self._which))
        """Where each message is when they are sorted by shape."""
        self._tails: list[tuple[pa.Array, pa.Array, pa.Array | None]] = []
        """(position of the data in `view`, its bytes, which are there or None for all) of each tail."""

    def sound(self) -> bool:
        """Find the tails and read all but the arrays; False where one is not where `assemble` puts it.

        Raises `ValueError` for what cannot be a column.
        """
        position = self._each([shape.size for shape in self._kinds])
        checks: list[pa.Array] = []
        number = 0
        flags: list[pa.Array] = []
        for tail in self._layout.tails:
            last = 5 if tail.width == 0 else 7
            data = pc.add(position, 16)
            size = self._number(number + last)
            checks += (
                pc.equal(self._number(number), position),
                pc.equal(self._number(number + 2), pc.add(position, 8)),
                pc.equal(self._number(number + last - 1), data),
                pc.greater_equal(size, 0),
                pc.less_equal(size, self._room),
            )
            if tail.width:
                checks.append(pc.equal(self._number(number + 4), data))
                checks.append(pc.equal(self._number(number + 5), 0))
                checks.append(pc.equal(pc.bit_wise_and(size, tail.width - 1), 0))
            flags.append(pc.add(self._body, position))
            self._tails.append((pc.add(self._body, data), size, None))
            position = pc.add(data, pc.bit_wise_and(pc.add(size, 7), -8))
            number += last + 1
        length = self._words(pc.add(self._meta, self._layout.length_at))
        checks += (pc.equal(length, position), pc.less_equal(position, self._room))
        if not (_all(checks) and self._present(flags)):
            return False
        self._columns = list(self._read_heads())
        return True

    def _present(self, flags: Sequence[pa.Array]) -> bool:
        """Read the validity and the offsets that stand before the data of each tail."""
        checks: list[pa.Array] = []
        for i, (tail, at) in enumerate(zip(self._layout.tails, flags, strict=True)):
            data, size, _ = self._tails[i]
            count = pc.divide(size, tail.width or 1)
            there = pc.equal(self._words(at), 1)
            checks.append(pc.equal(self._words(pc.add(at, 8)), pc.shift_left(count, 32)))
            if tail.width or pc.all(there).as_py():
                checks.append(there)
                continue
            checks.append(pc.or_(there, pc.and_(pc.equal(self._words(at), 0), pc.equal(size, 0))))
            self._tails[i] = (data, size, there)
        return _all(checks)

    def column(self, name: str) -> pa.Array:
        """A column of the head."""
        return self._columns[self._layout.schema.get_field_index(name)]

    def batch(self) -> pa.RecordBatch:
        """All columns; only here token arrays are read."""
        columns = [*self._columns, *self._read_tails()]
        fields = [pa.field(f.name, c.type) for f, c in zip(self._layout.schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _read_heads(self) -> Iterator[pa.Array]:
        heads = self._heads()
        at = 0
        leaves = iter(self._layout.leaves)
        for leaf in leaves:
            if leaf.kind != Kind.STRUCT:
                yield self._head(leaf, at, heads)
                at += 1
                continue
            children = [next(leaves) for _ in range(leaf.type.num_fields)]
            inner = [self._head(child, at + i, heads) for i, child in enumerate(children)]
            yield pa.StructArray.from_arrays(inner, fields=list(leaf.type))
            at += len(children)

    def _read_tails(self) -> Iterator[pa.Array]:
        fields = list(self._layout.schema)[-len(self._layout.tails) :]
        for tail, field, (data, size, there) in zip(self._layout.tails, fields, self._tails, strict=True):
            yield self._text(data, size, there) if tail.width == 0 else self._list(tail, data, size, field.type)

    def _heads(self) -> list[pa.Array]:
        """The heads of the messages of each shape, which all have its size."""
        found: list[pa.Array] = []
        for number, shape in enumerate(self._kinds):
            start = self._body.filter(pc.equal(self._which, number))
            data = pa.py_buffer(b"".join(self._pieces(start, shape.size)))
            found.append(pa.Array.from_buffers(pa.binary(shape.size), len(start), [None, data]))
        return found

    def _head(self, leaf: Leaf, at: int, heads: Sequence[pa.Array]) -> pa.Array:
        if all(shape.nulls[at] for shape in self._kinds):
            return pa.nulls(len(self._which), leaf.type)
        parts: list[pa.Array] = []
        for shape, head in zip(self._kinds, heads, strict=True):
            start, size = shape.slots[at]
            parts.append(
                pa.nulls(len(head), leaf.type)
                if shape.nulls[at]
                else _values(leaf, pc.binary_slice(head, start, start + size), size)
            )
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts).take(self._order)

    def _text(self, start: pa.Array, size: pa.Array, there: pa.Array | None) -> pa.Array:
        data = b"".join(self._pieces(start, size))
        if len(data) > _MAX_OFFSET:
            raise ValueError("too much text for one column")
        valid = None if there is None else there.buffers()[1]
        made = pa.StringArray.from_buffers(len(start), _offsets(size, pa.int32()), pa.py_buffer(data), valid)
        if not data.isascii():
            made.validate(full=True)
        return made

    def _list(self, tail: Tail, start: pa.Array, size: pa.Array, kind: pa.DataType) -> pa.Array:
        data = b"".join(self._pieces(start, size))
        total = len(data) // tail.width
        # DuckDB takes 64-bit offsets as well: no chunk of any size overflows.
        large = total > _MAX_OFFSET
        elements = pa.Array.from_buffers(kind.value_type, total, [None, pa.py_buffer(data)])
        offsets = _offsets(pc.divide(size, tail.width), _LONG if large else pa.int32())
        shape = pa.large_list(kind.value_type) if large else kind
        return pa.Array.from_buffers(shape, len(start), [None, offsets], 0, children=[elements])

    def _pieces(self, start: pa.Array, size: pa.Array | int) -> Any:
        ends = pc.add(start, size).to_pylist()
        return map(self._view.__getitem__, map(slice, start.to_pylist(), ends))

    def _each(self, values: Sequence[int]) -> pa.Array:
        """A number of each message's shape."""
        return pa.array(values, _LONG).take(self._which)

    def _number(self, at: int) -> pa.Array:
        """One of the offsets and sizes of the tail's buffers."""
        return self._words(pc.add(self._meta, self._layout.tail_buffers_at + 8 * at))

    def _words(self, at: pa.Array) -> pa.Array:
        return self._elements(_LONG).take(pc.shift_right(at, 3))

    def _elements(self, kind: pa.DataType) -> pa.Array:
        """The bytes of the segment as an array of `kind`, which nothing is copied for."""
        return pa.Array.from_buffers(kind, len(self._view) * 8 // kind.bit_width, [None, pa.py_buffer(self._view)])


def _values(leaf: Leaf, raw: pa.Array, size: int) -> pa.Array:
    """A column from its values' bytes, all of one size."""
    data = raw.buffers()[1]
    if leaf.kind == Kind.TEXT:
        offsets = pa.array(range(0, size * len(raw) + 1, size) if size else [0] * (len(raw) + 1), pa.int32())
        made = pa.StringArray.from_buffers(len(raw), offsets.buffers()[1], data)
        made.validate(full=True)
        return made
    if leaf.kind == Kind.NESTED:
        return head_column(leaf, tuple(raw.to_pylist()), None)
    if pa.types.is_boolean(leaf.type):
        return pa.Array.from_buffers(pa.uint8(), len(raw), [None, data]).cast(leaf.type)
    return pa.Array.from_buffers(leaf.type, len(raw), [None, data])


def _all(checks: Sequence[pa.Array]) -> bool:
    return all(pc.all(each).as_py() for each in checks)


def _offsets(counts: pa.Array, kind: pa.DataType) -> pa.Buffer:
    ends = pa.array([0, *accumulate(counts.to_pylist())], kind)
    return ends.buffers()[1]
