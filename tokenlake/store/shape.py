"""The shape of a one-row batch: all of it that does not depend on the values.

Which head columns are NULL and how long the others are decides every offset of the body, so nodes, buffers and the
`struct` formats of the body are computed once for each such combination.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa

__all__ = ["Kind", "Leaf", "Shape", "leaves_of", "plan", "sizes_of"]

_CODES = {
    pa.int32(): ("i4x", 4),
    pa.int64(): ("q", 8),
    pa.float64(): ("d", 8),
    pa.timestamp("us", tz="UTC"): ("q", 8),
    pa.binary(32): ("32s", 32),
    pa.bool_(): ("B7x", 1),
    pa.uint8(): ("B7x", 1),
}


class Kind(IntEnum):
    """How a head column is laid out."""

    REQUIRED = 0
    OPTIONAL = 1
    TEXT = 2
    NESTED = 3
    STRUCT = 4


@dataclass(frozen=True, slots=True)
class Leaf:
    """One column of the head, or one child of its struct column."""

    name: str
    kind: Kind
    type: pa.DataType
    code: str = ""
    width: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything about a one-row batch that does not depend on its values."""

    meta: bytes
    """Metadata with its 8-byte prefix; the numbers of the tail are still to be patched."""
    size: int
    """Body bytes of the head."""
    pack: Any
    unpack: Any
    nulls: tuple[bool, ...]
    """One for each leaf but structs."""
    fixed: tuple[bytes, ...]
    """The stretches of the metadata that are the same in every message of this shape."""
    absent: tuple[int, ...]
    """The numbers of those that are NULL."""
    slots: tuple[tuple[int, int], ...]
    """(offset in the body, bytes) of the value of each leaf but structs."""


def leaves_of(schema: pa.Schema) -> list[Leaf]:
    """The head columns, a struct's children after it."""
    found: list[Leaf] = []
    for column in schema:
        kind = column.type
        if pa.types.is_struct(kind):
            found.append(Leaf(column.name, Kind.STRUCT, kind))
            found += leaves_of(pa.schema([kind.field(i) for i in range(kind.num_fields)]))
        elif pa.types.is_string(kind):
            found.append(Leaf(column.name, Kind.TEXT, kind))
        elif pa.types.is_list(kind):
            found.append(Leaf(column.name, Kind.NESTED, kind))
        else:
            code, width = _CODES[kind]
            found.append(Leaf(column.name, Kind.OPTIONAL if column.nullable else Kind.REQUIRED, kind, code, width))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """A shape before its metadata is patched into the template."""

    nodes: list[int]
    """(length, null count) of each field node of the head, flat."""
    buffers: list[int]
    """(offset, bytes) of each buffer of the head, flat."""
    size: int
    pack: struct.Struct
    unpack: struct.Struct
    nulls: tuple[bool, ...]
    slots: tuple[tuple[int, int], ...]


def plan(leaves: Sequence[Leaf], key: Sequence[Any]) -> Plan:
    """Lay out a head; `key` holds None (NULL) or a size for each leaf that has one."""
    sizes = iter(key)
    pos, pack, unpack = 0, ["<"], ["<"]
    nodes: list[int] = []
    buffers: list[int] = []
    nulls: list[bool] = []
    slots: list[tuple[int, int]] = []
    for leaf in leaves:
        if leaf.kind == Kind.STRUCT:
            nodes += (1, 0)
            buffers += (pos, 0)
            continue
        size = 1 if leaf.kind == Kind.REQUIRED else next(sizes)
        null = size is None
        nulls.append(null)
        nodes += (1, int(null))
        if leaf.kind == Kind.REQUIRED:
            buffers += (pos, 0)
        else:
            buffers += (pos, 1)
            pack.append("8x" if null else "B7x")
            unpack.append("8x")
            pos += 8
        if leaf.kind in (Kind.REQUIRED, Kind.OPTIONAL):
            slot = max(leaf.width, 8)
            buffers += (pos, leaf.width)
            slots.append((pos, leaf.width))
            pack.append(f"{slot}x" if null else leaf.code)
            unpack.append(leaf.code)
            pos += slot
            continue
        buffers += (pos, 8)
        pos += 8
        used = _variable(leaf, size, pos, nodes, buffers)
        padded = -used % 8
        slots.append((pos - 8, 8 + used) if leaf.kind == Kind.NESTED else (pos, used))
        pack.append("8x" if null else f"4xi{used}s{padded}x")
        unpack.append(f"{8 + used}s{padded}x" if leaf.kind == Kind.NESTED else f"8x{used}s{padded}x")
        pos += used + padded
    formats = struct.Struct("".join(pack)), struct.Struct("".join(unpack))
    return Plan(nodes, buffers, pos, *formats, tuple(nulls), tuple(slots))


def sizes_of(leaves: Sequence[Leaf], nodes: Sequence[int], buffers: Sequence[int]) -> tuple[Any, ...]:
    """The key that `plan` would need for a head with these nodes and buffers."""
    key: list[Any] = []
    node = buffer = 0
    for leaf in leaves:
        null = nodes[2 * node + 1] != 0
        node += 1
        buffer += 1
        if leaf.kind == Kind.STRUCT:
            continue
        buffer += 1
        if leaf.kind == Kind.OPTIONAL:
            key.append(None if null else 1)
        elif leaf.kind == Kind.TEXT:
            key.append(None if null else buffers[2 * buffer + 1])
            buffer += 1
        elif leaf.kind == Kind.NESTED:
            inner = leaf.type.value_type
            texts = [pa.types.is_string(inner.field(i).type) for i in range(inner.num_fields)]
            last = 1 + sum(3 if text else 2 for text in texts)
            causes = buffers[2 * (buffer + last) - 1] if texts[-1] else 0
            key.append(None if null else (nodes[2 * node], causes))
            node += 1 + inner.num_fields
            buffer += last
    return tuple(key)


def _variable(leaf: Leaf, size: Any, pos: int, nodes: list[int], buffers: list[int]) -> int:
    """Lay out a text's bytes or a nested list's children from `pos` on; returns the bytes used."""
    if leaf.kind == Kind.TEXT:
        buffers += (pos, size or 0)
        return size or 0
    count, causes = size or (0, 0)
    start = pos
    nodes += (count, 0)
    buffers += (pos, 0)
    inner = leaf.type.value_type
    for i in range(inner.num_fields):
        kind = inner.field(i).type
        nodes += (count, 0)
        buffers += (pos, 0)
        if pa.types.is_string(kind):
            used = 4 * (count + 1) if count else 0
            buffers += (pos, used)
            pos += used + -used % 8
            buffers += (pos, causes)
            used = causes
        else:
            used = count * (8 if kind == pa.int64() else 4)
            buffers += (pos, used)
        pos += used + -used % 8
    return pos - start
