"""Many one-row messages of a segment decoded at once, by Arrow's own loops: no Python step for a column of a record.

Only *plain* messages are: laid out to the byte as `Layout.assemble` lays them out, without a NULL element in an array.
That is what a sound writer leaves on disk; where one message of a run is not plain, the run is left to the decoder that
takes them one by one. No value is trusted for its place: every position is checked before it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
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


def read_plain(layout: Layout, view: memoryview, offsets: pa.Array, lengths: pa.Array) -> Plain | None:
    """The messages at these places (int64), all inside `view`; None: at least one of them is not plain.

    No column has been looked at yet: see `Plain.readable`.
    """
    if pc.min(lengths).as_py() < layout.meta_size:
        return None
    found = layout.shapes_at(view, offsets.to_pylist())
    if found is None or len(found[0]) > _MAX_SHAPES:
        return None
    plain = Plain(layout, view, offsets, lengths, *found)
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
        offsets: pa.Array,
        lengths: pa.Array,
        shapes: Sequence[Shape],
        which: Sequence[int],
    ) -> None:
        self._layout = layout
        self._buffer = pa.py_buffer(view)
        self._segment = pa.Array.from_buffers(_LONG, len(view) // 8, [None, self._buffer])
        """The segment, of which nothing is copied."""
        self._meta = offsets
        self._body = pc.add(self._meta, layout.meta_size)
        self._room = pc.subtract(lengths, layout.meta_size)
        self._shapes = shapes
        self._which = pa.array(which, pa.int32())
        """Which of the shapes each message has."""
        self._order = pc.sort_indices(pc.sort_indices(self._which)) if len(shapes) > 1 else None
        """Where each message is when they are sorted by shape."""
        self._columns: dict[str, pa.Array] = {}
        self._heads: list[pa.Array] = []
        self._tails: list[tuple[pa.Array, pa.Array | None]] = []
        """(the data, cut out of the segment, and which are there or None for all) of each tail."""

    def __len__(self) -> int:
        return len(self._meta)

    def sound(self) -> bool:
        """Find the tails; False where one is not where `assemble` puts it, or a message is not.

        Numbers of all tails are in one array, those of the first one first, since a step costs more than its numbers.
        """
        tails, count = self._layout.tails, len(self)
        heads, lists, datas = _places(tails)
        read = self._tail_words()
        size = read(datas, 1)
        padded = pc.add(pc.bit_wise_and(pc.add(size, 7), -8), 16)
        positions = [pa.array([shape.size for shape in self._shapes], _LONG).take(self._which)]
        for number in range(len(tails)):
            positions.append(pc.add(positions[-1], padded.slice(number * count, count)))
        *starts, end = positions
        start = pa.concat_arrays(starts)
        data = pc.add(start, 16)
        of_lists = [data.slice(number * count, count) for number, tail in enumerate(tails) if tail.width]
        widths = pa.concat_arrays([pa.repeat(pa.scalar(max(tail.width, 1), _LONG), count) for tail in tails])
        counts = pc.divide(size, widths)
        if not (
            _all(pc.equal(pc.bit_wise_and(self._meta, 7), 0))
            and pc.min(size).as_py() >= 0
            and _all(pc.less_equal(size, pa.concat_arrays([self._room] * len(tails))))
            and pc.multiply(counts, widths).equals(size)
            and read(heads, 0).equals(start)
            and read(heads, 2).equals(pc.add(start, 8))
            and read(lists, 0).equals(pa.concat_arrays(of_lists))
            and _all(pc.equal(read(lists, 1), 0))
            and read(datas, 0).equals(data)
            and self._word(pc.add(self._meta, self._layout.length_at)).equals(end)
            and _all(pc.less_equal(end, self._room))
        ):
            return False
        body = pa.concat_arrays([self._body] * len(tails))
        cut = self._cut(pc.add(body, data), size)
        self._tails = [(cut.slice(2 * number * count, 2 * count), None) for number in range(len(tails))]
        return self._present(pc.add(body, start), counts)

    def _tail_words(self) -> Callable[[tuple[int, ...], int], pa.Array]:
        """Reads numbers of the tails: those some words behind what has a place in each message.

        They are copied together first: messages are pages apart, and each way through all of them costs more than that.
        """
        each = self._layout.tail_buffers_size
        start = pc.add(self._meta, self._layout.tail_buffers_at)
        _, data = _joined(self._cut(start, pa.repeat(pa.scalar(each, _LONG), len(self))))
        words = pa.Array.from_buffers(_LONG, len(data) // 8, [None, data])
        return lambda places, behind: words.take(_numbered(tuple(at + behind for at in places), each // 8, len(self)))

    def _word(self, position: pa.Array) -> pa.Array:
        return self._segment.take(pc.shift_right(position, 3))

    def _present(self, flags: pa.Array, counts: pa.Array) -> bool:
        """Read the validity and the offsets that stand before the data of each tail."""
        if not self._word(pc.add(flags, 8)).equals(pc.shift_left(counts, 32)):
            return False
        flag = self._word(flags)
        there = pc.equal(flag, 1)
        if _all(there):
            return True
        if not _all(pc.or_(there, pc.and_(pc.equal(flag, 0), pc.equal(counts, 0)))):
            return False
        for number, tail in enumerate(self._layout.tails):
            some = pc.equal(flag.slice(number * len(self), len(self)), 1)
            if _all(some):
                continue
            if tail.width:
                return False
            self._tails[number] = (self._tails[number][0], some)
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
        for shape, head in zip(self._shapes, self._read_heads(), strict=True):
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
            found = self._read_tail(tails[0], slice(0, len(self))) if tails else self._read_head(name)
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
        cut, there = self._tails[number]
        kind = self._layout.schema.field(tail.name).type
        return _list(tail, cut[2 * rows.start : 2 * rows.stop], kind) if tail.width else _text(cut, there)

    def _head(self, leaf: Leaf, at: int) -> pa.Array:
        if all(shape.nulls[at] for shape in self._shapes):
            return pa.nulls(len(self), leaf.type)
        parts: list[pa.Array] = []
        for shape, head in zip(self._shapes, self._read_heads(), strict=True):
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
            for number, shape in enumerate(self._shapes):
                start = self._body if self._order is None else self._body.filter(pc.equal(self._which, number))
                _, data = _joined(self._cut(start, pa.repeat(pa.scalar(shape.size, _LONG), len(start))))
                self._heads.append(pa.Array.from_buffers(pa.binary(shape.size), len(start), [None, data]))
        return self._heads

    def _cut(self, start: pa.Array, size: pa.Array) -> pa.Array:
        """The bytes at these positions as every other value; of what lies behind them only the place is true."""
        ends = pa.concat_arrays([start, pc.add(start, size)]).take(_alternating(len(start)))
        last = pa.array([len(self._buffer)], _LONG)
        # What lies behind a piece may even have less than no bytes.
        bounds = pa.concat_arrays([ends, last]).buffers()[1]
        return pa.Array.from_buffers(pa.large_binary(), len(ends), [None, bounds, self._buffer])


def _joined(cut: pa.Array) -> tuple[pa.Array, pa.Buffer]:
    """Bytes that were cut, copied together, and where those of each begin and the last end."""
    taken = cut.take(_numbered((0,), 2, len(cut) // 2))
    _, offsets, data = taken.buffers()
    first = pa.Array.from_buffers(_LONG, len(taken) + 1, [None, offsets])
    return first, pa.py_buffer(b"") if data is None else data.slice(0, first[-1].as_py())


def _text(cut: pa.Array, there: pa.Array | None) -> pa.Array:
    count = len(cut) // 2
    if there is not None and there.true_count == 0:
        return pa.nulls(count, pa.string())
    offsets, data = _joined(cut)
    if len(data) > _MAX_OFFSET:
        raise ValueError("too much text for one column")
    valid = None if there is None else there.buffers()[1]
    made = pa.StringArray.from_buffers(count, offsets.cast(pa.int32()).buffers()[1], data, valid)
    if not data.to_pybytes().isascii():
        made.validate(full=True)
    return made


def _list(tail: Tail, cut: pa.Array, kind: pa.DataType) -> pa.Array:
    offsets, data = _joined(cut)
    total = len(data) // tail.width
    # DuckDB takes 64-bit offsets as well: no chunk of any size overflows.
    large = total > _MAX_OFFSET
    elements = pa.Array.from_buffers(kind.value_type, total, [None, data])
    counts = pc.divide(offsets, tail.width) if tail.width > 1 else offsets
    ends = counts.cast(_LONG if large else pa.int32())
    shape = pa.large_list(kind.value_type) if large else kind
    return pa.Array.from_buffers(shape, len(cut) // 2, [None, ends.buffers()[1]], 0, children=[elements])


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
def _alternating(count: int) -> pa.Array:
    """Where the begins and the ends of pieces are, one after the other."""
    numbers = _ladder(1, 2 * count)
    return pc.add(pc.multiply(pc.bit_wise_and(numbers, 1), count), pc.shift_right(numbers, 1))


@lru_cache(maxsize=16)
def _numbered(firsts: tuple[int, ...], step: int, count: int) -> pa.Array:
    """From each of `firsts` on so many numbers, so far from each other."""
    return pa.concat_arrays([pc.add(_ladder(step, count), first) for first in firsts])


def _ladder(step: int, count: int) -> pa.Array:
    """So many numbers from 0 on."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(step, _LONG), count), start=-step)


def _places(tails: Sequence[Tail]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Which words of a message's buffers are the first of each tail, of the validity in each list, and of the data."""
    heads: list[int] = []
    lists: list[int] = []
    datas: list[int] = []
    at = 0
    for tail in tails:
        heads.append(at)
        at += 4
        if tail.width:
            lists.append(at)
            at += 2
        datas.append(at)
        at += 2
    return tuple(heads), tuple(lists), tuple(datas)
