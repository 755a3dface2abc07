"""Walking the messages of a segment, whether it is whole, still growing, torn or damaged.

A segment is read message by message. Where one does not parse, the next place that does is searched for: with one the
stretch between is damage, without one it is the torn (or not yet written) tail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.ipc as ipc

from tokenlake.store.flatbuffer import message_lengths
from tokenlake.store.footer import MAGIC

__all__ = ["HEAD", "UNREADABLE", "Walk", "file_schema", "has_hole", "read_batch", "walk"]

HEAD = MAGIC + b"\0\0"
"""What a segment starts with; a schema message follows, then the record batches."""

UNREADABLE = (pa.ArrowException, EOFError, OSError, ValueError)
"""What pyarrow raises for bytes that are no record batch."""

_SECTOR = 512

T = TypeVar("T")


@dataclass(slots=True)
class Walk(Generic[T]):
    """What a walk found."""

    found: list[tuple[int, int, int, T]] = field(default_factory=list["tuple[int, int, int, T]"])
    """(offset, metadata bytes, body bytes, what `read` made of it) of each message; of many together, their bytes."""
    scanned: int = 0
    """Where the next walk goes on."""
    ended: bool = False
    """The end-of-stream mark was reached: the segment is sealed."""
    damaged: list[tuple[int, int]] = field(default_factory=list["tuple[int, int]"])
    """(start, end) of stretches that hold no readable message but are followed by one."""


def file_schema(data: memoryview) -> tuple[pa.Schema | None, int]:
    """(schema, where the record batches start) of a segment; (None, 8) where the head is damaged or not there yet."""
    lengths = message_lengths(data, len(HEAD), len(data))
    if lengths is None or bytes(data[: len(HEAD)]) != HEAD:
        return None, len(HEAD)
    end = len(HEAD) + lengths[0] + lengths[1]
    try:
        return ipc.read_schema(pa.py_buffer(data[len(HEAD) : end])), end
    except UNREADABLE:
        return None, len(HEAD)


def read_batch(data: memoryview, schema: pa.Schema) -> pa.RecordBatch | None:
    """The record batch of one whole message, checked so far that no value can lie outside of it; None: unreadable."""
    try:
        batch = ipc.read_record_batch(pa.py_buffer(data), schema)
        batch.validate(full=True)
    except UNREADABLE:
        return None
    return batch


def has_hole(data: memoryview, start: int, stop: int) -> bool:
    """Whether some sector of a stretch was never written, as a loss of power leaves it: then its record is torn.

    Or the first 4 bytes of a message were not, and they alone: they are written last and may be lost without others.
    """
    if not any(data[start : start + 4]) and any(data[start + 4 : start + 8]):
        return True
    edges = [start, *range(start - start % _SECTOR + _SECTOR, stop, _SECTOR), stop]
    return any(not any(data[a:b]) for a, b in pairwise(edges))


def walk(
    view: memoryview,
    start: int,
    end: int,
    prefix: bytes,
    read: Callable[[int, int], T | None],
    leap: Callable[[int, int], tuple[int, T] | None] = lambda _, __: None,
) -> Walk[T]:
    """Read the messages from `start` on. `read(offset, end)` returns None for what is not a readable record batch.

    `leap(offset, end)` may read many messages at once: (where they end, what it made of them).
    """
    out: Walk[T] = Walk(scanned=start)
    at = start
    while at < end:
        run = leap(at, end)
        if run is not None:
            out.found.append((at, 0, run[0] - at, run[1]))
            out.scanned = at = run[0]
            continue
        lengths = message_lengths(view, at, end)
        if lengths == (8, 0):
            out.ended = True
            return out
        value = None if lengths is None else read(at, at + sum(lengths))
        if lengths is None or value is None:
            following = _search(view, at + 8, end, prefix, read)
            if following is None:
                return out
            if lengths is None and message_lengths(view, at, end) is not None:
                continue  # it was written meanwhile, before the one that was found
            out.damaged.append((at, following))
            at = following
            continue
        out.found.append((at, *lengths, value))
        at += sum(lengths)
        out.scanned = at
    return out


def _search(view: memoryview, start: int, end: int, prefix: bytes, read: Callable[[int, int], T | None]) -> int | None:
    """The next readable message that starts like ours, on an 8-byte boundary."""
    rest = bytes(view[start:end])
    # To look for one byte in zeros takes a hundredth of what a prefix does that has some.
    first = rest.find(prefix[:1])
    at = first if first < 0 else rest.find(prefix, first)
    while at >= 0:
        position = start + at
        if position % 8 == 0:
            lengths = message_lengths(view, position, end)
            if lengths is not None and read(position, position + sum(lengths)) is not None:
                return position
        at = rest.find(prefix, at + 1)
    return None
