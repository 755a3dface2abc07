"""Files of training rows: written whole, synced, then renamed into place; never changed afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import InvalidInput, StorageFailed
from tokenlake.store.batchfile import write_batches
from tokenlake.store.schema import ROW
from tokenlake.store.segment import next_number

__all__ = ["RowWriter"]

_log = logging.getLogger(__name__)
_BATCH_ROWS = 256
_BATCH_ELEMENTS = 1 << 26


class RowWriter:
    """Writes `LAKE/rows/<number>.arrow`. Thread-safe; the owner's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        for leftover in directory.glob("*.tmp"):
            leftover.unlink()

    def write(self, table: pa.Table) -> int:
        """Write a table of `ROW` durably; returns the file's number.

        Raises `InvalidInput` for another schema, `StorageFailed` when the disk refuses: then nothing is there.
        """
        if not table.schema.equals(ROW):
            raise InvalidInput("rows must have exactly the columns of ROW, in their order and types")
        with self._lock:
            number = next_number(self._directory)
            path = self._directory / f"{number:06d}.arrow"
            try:
                write_batches(path, ROW, _batches(table))
            except OSError as error:
                raise StorageFailed(f"{path} could not be written: {error}; no row was published") from error
        return number


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Batches of bounded rows and elements: no list column comes near 2^31 elements."""
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        start = elements = 0
        lengths = batch.column("input_ids").value_lengths().to_pylist()
        for i, length in enumerate(lengths):
            if i > start and elements + length > _BATCH_ELEMENTS:
                yield batch.slice(start, i - start)
                start, elements = i, 0
            elements += length
        if batch.num_rows > start:
            yield batch.slice(start)
