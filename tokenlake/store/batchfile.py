"""Segments that are written whole: batch by batch beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from tokenlake.store.footer import Block, Footer
from tokenlake.store.segment import sync_directory, write_all
from tokenlake.store.walk import HEAD

__all__ = ["write_batches"]


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Create a sealed segment durably: it is there whole or not at all, also after a crash.

    One batch is held in memory at a time. Raises `OSError` when the disk refuses, and leaves nothing then.
    """
    temporary = path.with_suffix(".tmp")
    head = HEAD + schema.serialize().to_pybytes()
    blocks: list[Block] = []
    offset = len(head)
    renamed = False
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, head)
            for batch in batches:
                message = memoryview(batch.serialize())
                meta = 8 + int.from_bytes(message[4:8], "little")
                blocks.append((offset, meta, len(message) - meta))
                write_all(fd, message)
                offset += len(message)
            write_all(fd, Footer(schema).closing(blocks))
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        renamed = True
    finally:
        if not renamed:
            temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
