"""Many one-row messages of a segment decoded at once, by Arrow's own loops: no Python step for a column of a record.

Only *plain* messages are: laid out to the byte as `Layout.assemble` lays them out, without a NULL element in an array.
That is what a sound writer leaves on disk; where one message of a run is not plain, the run is left to the decoder that
takes them one by one. No value is trusted for its place: every position is checked before it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

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


def read_plain(
    layout: Layout,
    view: memoryview,
    offsets: Sequence[int],
    lengths: Sequence[int],
    shapes: Sequence[Shape] | None = None,
) -> Plain | None:
    """The messages at these places, all inside `view`; None: at least one of them is not plain.

    `shapes`: where they are known. No column has been looked at yet: see `Plain.readable`.
    """
    if min(lengths) < layout.meta_size:
        return None
    found = layout.shapes_at(view, offsets) if shapes is None else shapes
    if found is None or len(set(map(id, found))) > _MAX_SHAPES:
        return None
    plain = Plain(layout, view, offsets, lengths, found)
    try:
        return plain if plain.sound() else None
    except struct.error:
        return None


class Plain:
    """Plain messages, decoded a column at a time."""

    def __init__(
        self,
        layout: Layout,
        view: memoryview,
        offsets: Sequence[int],
        lengths: Sequence[int],
        shapes: Sequence[Shape],
    ) -> None:
        self._layout = layout
        self._view = view
        self._buffer = pa.py_buffer(view)
        self._words = pa.Array.from_buffers(_LONG, len(view) // 8, [None, self._buffer])
        """The segment, of which nothing is copied."""
        self._meta = pa.array(offsets, _LONG)
        self._body = pc.add(self._meta, layout.meta_size)
        self._room = pc.subtract(pa.array(lengths, _LONG), layout.meta_size)
        keys = list(map(id, shapes))
        kinds = dict(zip(keys, shapes, strict=True))
        self._kinds = list(kinds.values())
        numbers = {key: number for number, key in enumerate(kinds)}
        self._which = pa.array([numbers[key] for key in keys], pa.int32())
        self._columns: dict[str, pa.Array] = {}
        self._heads: list[pa.Array] = []
        self._order = pc.sort_indices(pc.sort_indices(self._which)) if len(kinds) > 1 else None
        """Where each message is when they are sorted by shape."""
        self._tails: list[tuple[pa.Array, pa.Array, pa.Array | None]] = []
        """(position of the data in `view`, its bytes, which are there or None for all) of each tail."""

    def __len__(self) -> int:
        return len(self._meta)

    def sound(self) -> bool:
        """Find the tails; False where one is not where `assemble` puts it, or a message is not."""
        if not _all(pc.equal(pc.bit_wise_and(self._meta, 7), 0)):
            return False
        position = pa.array([shape.size for shape in self._kinds], _LONG).take(self._which)
        numbers = iter(self._numbers())
        flags: list[pa.Array] = []
        for tail in self._layout.tails:
            valid_at, offsets_at = next(numbers), next(numbers)
            bits_at, bits = (next(numbers), next(numbers)) if tail.width else (None, None)
            data_at, size = next(numbers), next(numbers)
            data = pc.add(position, 16)
            there = valid_at.equals(position) and offsets_at.equals(pc.add(position, 8)) and data_at.equals(data)
            if bits_at is not None:
                there = there and bits_at.equals(data) and _all(pc.equal(bits, 0))
                there = there and _all(pc.equal(pc.bit_wise_and(size, tail.width - 1), 0))
            if not there or pc.min(size).as_py() < 0 or not _all(pc.less_equal(size, self._room)):
                return False
            flags.append(pc.shift_right(pc.add(self._body, position), 3))
            self._tails.append((pc.add(self._body, data), size, None))
            position = pc.add(data, pc.bit_wise_and(pc.add(size, 7), -8))
        length = self._words.take(pc.shift_right(pc.add(self._meta, self._layout.length_at), 3))
        return length.equals(position) and _all(pc.less_equal(position, self._room)) and self._present(flags)

    def _numbers(self) -> list[pa.Array]:
        """Of each tail where validity and offsets are, of a list where the validity of its elements is and its bytes,
        where the data are and their bytes. All in one step, since a step costs more than its numbers.
        """
        first = pc.shift_right(pc.add(self._meta, self._layout.tail_buffers_at), 3)
        wanted: list[int] = []
        for tail in self._layout.tails:
            at = wanted[-1] + 1 if wanted else 0
            wanted += [at, at + 2, *range(at + 4, at + (8 if tail.width else 6))]
        steps = pa.concat_arrays([pa.repeat(pa.scalar(each, _LONG), len(self)) for each in wanted])
        found = self._words.take(pc.add(pa.concat_arrays([first] * len(wanted)), steps))
        return [found[start : start + len(self)] for start in range(0, len(found), len(self))]

    def _present(self, flags: Sequence[pa.Array]) -> bool:
        """Read the validity and the offsets that stand before the data of each tail."""
        for i, (tail, at) in enumerate(zip(self._layout.tails, flags, strict=True)):
            data, size, _ = self._tails[i]
            if not self._words.take(pc.add(at, 1)).equals(pc.shift_left(pc.divide(size, tail.width or 1), 32)):
                return False
            flag = self._words.take(at)
            there = pc.equal(flag, 1)
            if _all(there):
                continue
            if tail.width or not _all(pc.or_(there, pc.and_(pc.equal(flag, 0), pc.equal(size, 0)))):
                return False
            self._tails[i] = (data, size, there)
        return True

    def readable(self) -> bool:
        """Whether every column can be read: each text is UTF-8, each nested list holds together."""
        doubtful = () if self._ascii() else (Kind.TEXT, Kind.STRUCT)
        try:
            for leaf in self._layout.leaves:
                if leaf.kind in (*doubtful, Kind.NESTED) and leaf.name in self._layout.schema.names:
                    self.column(leaf.name)
            for tail in self._layout.tails:
                if tail.width == 0:
                    self.column(tail.name)
        except (ValueError, struct.error):
            return False
        return True

    def _ascii(self) -> bool:
        """Whether the texts of all heads, and what lies between them, are ASCII: then they are UTF-8."""
        leaves = [leaf for leaf in self._layout.leaves if leaf.kind != Kind.STRUCT]
        for shape, head in zip(self._kinds, self._read_heads(), strict=True):
            texts = [shape.slots[at] for at, leaf in enumerate(leaves) if leaf.kind == Kind.TEXT]
            between = pc.binary_slice(head, min(texts)[0], max(at + size for at, size in texts))
            if not between.buffers()[1].to_pybytes().isascii():
                return False
        return True

    def column(self, name: str) -> pa.Array:
        """A column. Raises `ValueError` or `struct.error` where a value cannot be one; a token array can."""
        found = self._columns.get(name)
        if found is None:
            tails = [number for number, tail in enumerate(self._layout.tails) if tail.name == name]
            found = self._read_tail(tails[0], slice(None)) if tails else self._read_head(name)
            self._columns[name] = found
        return found

    def parts(self, names: Sequence[str], rows: int) -> Iterator[tuple[int, list[pa.Array]]]:
        """(how many, some columns of them), so many rows at a time: no more token arrays are read at once."""
        numbers = {tail.name: number for number, tail in enumerate(self._layout.tails) if tail.width}
        for start in range(0, len(self), rows):
            some = slice(start, start + rows)
            yield (
                min(rows, len(self) - start),
                [
                    self._read_tail(numbers[name], some) if name in numbers else self.column(name)[some]
                    for name in names
                ],
            )

    def batch(self) -> pa.RecordBatch:
        """All columns. Raises as `column` does."""
        columns = [self.column(name) for name in self._layout.schema.names]
        fields = [pa.field(f.name, c.type) for f, c in zip(self._layout.schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _read_head(self, name: str) -> pa.Array:
        at = 0
        leaves = iter(self._layout.leaves)
        for leaf in leaves:
            inside = [next(leaves) for _ in range(leaf.type.num_fields)] if leaf.kind == Kind.STRUCT else [leaf]
            if leaf.name == name:
                values = [self._head(each, at + i) for i, each in enumerate(inside)]
                return values[0] if inside == [leaf] else pa.StructArray.from_arrays(values, fields=list(leaf.type))
            at += len(inside)
        raise KeyError(name)

    def _read_tail(self, number: int, rows: slice) -> pa.Array:
        tail = self._layout.tails[number]
        data, size, there = (each if each is None else each[rows] for each in self._tails[number])
        kind = self._layout.schema.field(tail.name).type
        return self._text(data, size, there) if tail.width == 0 else self._list(tail, data, size, kind)

    def _head(self, leaf: Leaf, at: int) -> pa.Array:
        if all(shape.nulls[at] for shape in self._kinds):
            return pa.nulls(len(self), leaf.type)
        parts: list[pa.Array] = []
        for shape, head in zip(self._kinds, self._read_heads(), strict=True):
            start, size = shape.slots[at]
            parts.append(
                pa.nulls(len(head), leaf.type)
                if shape.nulls[at]
                else _values(leaf, pc.binary_slice(head, start, start + size), size)
            )
        return parts[0] if self._order is None else pa.concat_arrays(parts).take(self._order)

    def _read_heads(self) -> list[pa.Array]:
        """The heads of the messages of each shape, which all have its size."""
        if not self._heads:
            for number, shape in enumerate(self._kinds):
                start = self._body if self._order is None else self._body.filter(pc.equal(self._which, number))
                _, data = self._gathered(start, pa.repeat(pa.scalar(shape.size, _LONG), len(start)))
                self._heads.append(pa.Array.from_buffers(pa.binary(shape.size), len(start), [None, data]))
        return self._heads

    def _text(self, start: pa.Array, size: pa.Array, there: pa.Array | None) -> pa.Array:
        if there is not None and there.true_count == 0:
            return pa.nulls(len(start), pa.string())
        offsets, data = self._gathered(start, size)
        if len(data) > _MAX_OFFSET:
            raise ValueError("too much text for one column")
        valid = None if there is None else there.buffers()[1]
        made = pa.StringArray.from_buffers(len(start), offsets.cast(pa.int32()).buffers()[1], data, valid)
        if not data.to_pybytes().isascii():
            made.validate(full=True)
        return made

    def _list(self, tail: Tail, start: pa.Array, size: pa.Array, kind: pa.DataType) -> pa.Array:
        offsets, data = self._gathered(start, size)
        total = len(data) // tail.width
        # DuckDB takes 64-bit offsets as well: no chunk of any size overflows.
        large = total > _MAX_OFFSET
        elements = pa.Array.from_buffers(kind.value_type, total, [None, data])
        ends = pc.divide(offsets, tail.width).cast(_LONG if large else pa.int32())
        shape = pa.large_list(kind.value_type) if large else kind
        return pa.Array.from_buffers(shape, len(start), [None, ends.buffers()[1]], 0, children=[elements])

    def _gathered(self, start: pa.Array, size: pa.Array) -> tuple[pa.Array, pa.Buffer]:
        """The bytes at these positions, copied together, and where there the bytes of each begin and the last end."""
        count = len(start)
        order, pieces = _alternating(count)
        last = pa.array([len(self._view)], _LONG)
        ends = pa.concat_arrays([start, pc.add(start, size), last]).take(order)
        # Every other value is what lies behind a piece, which nobody looks at: it may even have less than no bytes.
        both = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, ends.buffers()[1], self._buffer])
        taken = both.take(pieces)
        _, offsets, data = taken.buffers()
        first = pa.Array.from_buffers(_LONG, count + 1, [None, offsets])
        return first, pa.py_buffer(b"") if data is None else data.slice(0, first[-1].as_py())


def _values(leaf: Leaf, raw: pa.Array, size: int) -> pa.Array:
    """A column from its values' bytes, all of one size."""
    data = raw.buffers()[1]
    if leaf.kind == Kind.TEXT:
        return raw.cast(pa.string()) if size else pa.repeat("", len(raw))
    if leaf.kind == Kind.NESTED:
        return head_column(leaf, tuple(raw.to_pylist()), None)
    if pa.types.is_boolean(leaf.type):
        return pa.Array.from_buffers(pa.uint8(), len(raw), [None, data]).cast(leaf.type)
    return pa.Array.from_buffers(leaf.type, len(raw), [None, data])


def _all(flags: pa.Array) -> bool:
    return pc.all(flags).as_py()


@lru_cache(maxsize=4)
def _alternating(count: int) -> tuple[pa.Array, pa.Array]:
    """Where the begins and the ends of pieces are, one after the other, and which of what they cut are the pieces."""
    order = pa.array([*(at for number in range(count) for at in (number, count + number)), 2 * count], _LONG)
    return order, pa.array(range(0, 2 * count, 2), _LONG)
