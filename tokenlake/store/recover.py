"""What a crash leaves behind, made whole: an unsealed segment becomes a sealed one.

The valid part is copied to a new file, closed with a footer, synced and renamed over the old one, so that a reader that
still maps the old file keeps what it has. Bytes and offsets do not change. Nothing acknowledged is dropped: damage in
the middle stays where it is, and only the torn tail is left out. Where a file system made the file longer before it
wrote the bytes, a torn tail has the form of a record: `Sound` tells it from one.

Of the messages of one append a loss of power may take some and leave others, which are kept. An empty message fills the
place of what it took: that was not acknowledged, and is no damage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenlake.store.flatbuffer import BODY_LENGTH, field, message_lengths, root
from tokenlake.store.footer import Footer, footer_start
from tokenlake.store.maps import SegmentMaps
from tokenlake.store.segment import segment_numbers, sync_directory, write_all, write_at
from tokenlake.store.walk import HEAD, has_hole, walk

__all__ = ["Reader", "Sound", "recover_directory", "recover_segment"]

_log = logging.getLogger(__name__)
_CHUNK = 16 << 20

Reader = Callable[[memoryview, int, int, pa.Schema], Any]
"""Reads the message between two positions of a segment; None: unreadable."""

Sound = Callable[[Any], bool]
"""Whether what was read is what was once written, and not only has its form."""


def recover_directory(
    directory: Path, schema: pa.Schema, prefix: bytes, read: Reader, sound: Sound | None = None
) -> list[int]:
    """Seal every unsealed segment of a dead writer; returns their numbers. The caller holds the directory's lock."""
    for leftover in directory.glob("*.tmp"):
        leftover.unlink()
    numbers = segment_numbers(directory)
    return [n for n in numbers if recover_segment(directory / f"{n:06d}.arrow", schema, prefix, read, sound)]


def recover_segment(path: Path, schema: pa.Schema, prefix: bytes, read: Reader, sound: Sound | None = None) -> bool:
    """Seal one segment unless it is sealed already, or compaction removed it meanwhile; True: it was recovered."""
    maps = SegmentMaps(path.parent)
    mapped = maps.get(path.name)
    if mapped is None and not path.exists():
        return False
    data = memoryview(b"") if mapped is None else mapped.view
    footer = footer_start(data)
    if footer is not None and not has_hole(data, footer, len(data)):
        return False
    head = HEAD + schema.serialize().to_pybytes()
    if mapped is None or mapped.schema is None:
        blocks, end, body, holes = [], len(head), memoryview(head), []
        if len(data) > len(head):
            _log.error("%s has a damaged head: nothing of it can be read; it is kept as it is", path)
            return False
    else:
        known = mapped.schema
        found = walk(data, mapped.first, len(data), prefix, lambda start, stop: read(data, start, stop, known))
        end, body, schema = found.scanned, data, known
        # The end of a stream is written when all before it is safe.
        while sound is not None and found.found and not found.ended and not sound(found.found[-1][3]):
            end = found.found.pop()[0]
        unread = None if sound is None or found.ended else message_lengths(data, found.scanned, len(data))
        stop = found.scanned + sum(unread or ())
        if end < stop and not has_hole(data, end, stop):
            _keep(path, data[end:stop])
        blocks = [(offset, meta, size) for offset, meta, size, _ in found.found]
        holes = [] if sound else [(a, b) for a, b in found.damaged if has_hole(data, a, b)]
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        for start in range(0, end, _CHUNK):
            write_all(fd, body[start : min(end, start + _CHUNK)])
        for start, stop in holes:
            write_at(fd, _filler(schema, stop - start), start)
        write_all(fd, Footer(schema).closing(blocks))
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    sync_directory(path.parent)
    torn = len(bytes(data[end:]).rstrip(b"\0"))  # the zeros were written ahead, and are no loss
    _log.info("%s was recovered: %d records, %d torn bytes left out", path, len(blocks), torn)
    return True


def _filler(schema: pa.Schema, size: int) -> bytes:
    """A message of no rows that takes so many bytes; none where it takes more."""
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    message = empty.serialize().to_pybytes()
    lengths = message_lengths(message, 0, len(message))
    if lengths is None or len(message) > size:
        return b""
    at = field(message[8:], root(message[8:]), BODY_LENGTH)
    if at is None:
        return b""
    return message[: 8 + at] + struct.pack("<q", size - lengths[0]) + message[16 + at :] + bytes(size - len(message))


def _keep(path: Path, records: memoryview) -> None:
    """What is whole and not what was once written was hardly torn: it is left out as well, and not without a word."""
    kept = path.with_suffix(".left-out")
    with contextlib.suppress(OSError):
        kept.write_bytes(records)
    _log.warning(
        "the last records of %s are whole and have other content than their hash: left out, as if they had not been "
        "acknowledged, and kept in %s; check the disk",
        path,
        kept.name,
    )
