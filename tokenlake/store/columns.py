"""Decoded one-row messages to Arrow columns, by joining bytes: no Python object for a token or a log-probability."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from tokenlake.store.layout import Layout, Tail
from tokenlake.store.records import segments_of, spans_of
from tokenlake.store.shape import Kind, Leaf, Shape

__all__ = ["Decoded", "columns_of", "head_column", "readable", "readable_columns"]

Decoded = tuple[Shape, tuple[Any, ...], list[Any]]
"""What `Layout.decode` gives for one message."""

_MAX_OFFSET = 2**31 - 1


def columns_of(layout: Layout, rows: Sequence[Decoded]) -> list[pa.Array]:
    """One array for each column of the layout's schema, `len(rows)` long.

    Raises `ValueError` where a text is not UTF-8 or a nested list does not hold together.
    """
    values = list(zip(*(row[1] for row in rows), strict=True))
    shapes = {id(row[0]): row[0] for row in rows}.values()
    nulls = [any(flags) for flags in zip(*(shape.nulls for shape in shapes), strict=True)]
    made: list[pa.Array] = []
    at = 0
    leaves = iter(layout.leaves)
    for leaf in leaves:
        if leaf.kind != Kind.STRUCT:
            made.append(head_column(leaf, values[at], _mask(rows, at) if nulls[at] else None))
            at += 1
            continue
        children: list[pa.Array] = []
        for _ in range(leaf.type.num_fields):
            child = next(leaves)
            children.append(head_column(child, values[at], _mask(rows, at) if nulls[at] else None))
            at += 1
        made.append(pa.StructArray.from_arrays(children, fields=list(leaf.type)))
    for i, tail in enumerate(layout.tails):
        kind = layout.schema.field(len(layout.schema) - len(layout.tails) + i).type
        made.append(_tail(tail, [row[2][i] for row in rows], kind))
    return made


def readable(layout: Layout, row: Decoded) -> bool:
    """Whether `columns_of` takes a message: each text is UTF-8, each nested list holds together."""
    shape, values, tails = row
    leaves = (leaf for leaf in layout.leaves if leaf.kind != Kind.STRUCT)
    try:
        for leaf, value, null in zip(leaves, values, shape.nulls, strict=True):
            if leaf.kind == Kind.TEXT:
                value.decode()
            elif leaf.kind == Kind.NESTED and not null:
                _nested(leaf)(value)
        for tail, value in zip(layout.tails, tails, strict=True):
            if tail.width == 0 and value is not None:
                bytes(value).decode()
    except (UnicodeDecodeError, struct.error):
        return False
    return True


def readable_columns(layout: Layout, rows: Sequence[Decoded]) -> list[tuple[list[pa.Array] | None, int]]:
    """(columns, how many) of stretches of `rows`, in order; None for one that `columns_of` refuses."""
    try:
        return [(columns_of(layout, rows), len(rows))]
    except (ValueError, struct.error):
        if len(rows) == 1:
            return [(None, 1)]
        half = len(rows) // 2
        return [*readable_columns(layout, rows[:half]), *readable_columns(layout, rows[half:])]


def _mask(rows: Sequence[Decoded], at: int) -> list[bool]:
    return [row[0].nulls[at] for row in rows]


def head_column(leaf: Leaf, values: tuple[Any, ...], mask: list[bool] | None) -> pa.Array:
    """One column of a head from its raw values, NULL where `mask` says so."""
    if leaf.kind == Kind.TEXT:
        return _text(values, mask)
    if leaf.kind == Kind.NESTED:
        read = _nested(leaf)
        names = [leaf.type.value_type.field(i).name for i in range(leaf.type.value_type.num_fields)]
        objects = [
            None if mask is not None and mask[i] else [dict(zip(names, item, strict=True)) for item in read(raw)]
            for i, raw in enumerate(values)
        ]
        return pa.array(objects, leaf.type)
    if pa.types.is_fixed_size_binary(leaf.type) and mask is None:
        return pa.FixedSizeBinaryArray.from_buffers(leaf.type, len(values), [None, pa.py_buffer(b"".join(values))])
    items: Sequence[Any] = values
    if pa.types.is_boolean(leaf.type):
        items = [bool(value) for value in values]
    if mask is not None:
        items = [None if null else value for value, null in zip(items, mask, strict=True)]
    return pa.array(items, leaf.type)


def _nested(leaf: Leaf) -> Callable[[bytes], Sequence[tuple[Any, ...]]]:
    return segments_of if leaf.name == "generation_segments" else spans_of


def _text(values: Sequence[bytes | memoryview], mask: Sequence[bool] | None) -> pa.Array:
    data = b"".join(values)
    if not data.isascii():
        for value in values:
            bytes(value).decode()
    offsets = array("i", accumulate(map(len, values), initial=0))
    valid, count = _validity(mask)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(data), valid, count)


def _validity(mask: Sequence[bool] | None) -> tuple[pa.Buffer | None, int]:
    if mask is None:
        return None, 0
    return pa.array([not null for null in mask], pa.bool_()).buffers()[1], sum(mask)


def _tail(tail: Tail, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    mask = [value is None for value in values]
    absent = mask if any(mask) else None
    if tail.width == 0:
        return _text([b"" if value is None else value for value in values], absent)
    pieces: list[memoryview | bytes] = [b"" if value is None else value[0] for value in values]
    counts = [len(piece) // tail.width for piece in pieces]
    total = sum(counts)
    valid = None
    missing = 0
    if any(value is not None and value[1] is not None for value in values):
        bits = _bits(values, counts)
        valid = pa.array(bits, pa.bool_()).buffers()[1]
        missing = total - sum(bits)
    inner = kind.value_type
    elements = pa.Array.from_buffers(inner, total, [valid, pa.py_buffer(b"".join(pieces))], missing)
    # DuckDB takes 64-bit offsets as well: no chunk of any size overflows.
    large = total > _MAX_OFFSET
    offsets = array("q" if large else "i", accumulate(counts, initial=0))
    bitmap, n = _validity(absent)
    return pa.Array.from_buffers(
        pa.large_list(inner) if large else kind, len(values), [bitmap, pa.py_buffer(offsets)], n, children=[elements]
    )


def _bits(values: Sequence[Any], counts: Sequence[int]) -> list[bool]:
    bits: list[bool] = []
    for value, count in zip(values, counts, strict=True):
        if value is None or value[1] is None:
            bits += [True] * count
        else:
            bits += [bool(value[1][i // 8] >> i % 8 & 1) for i in range(count)]
    return bits
