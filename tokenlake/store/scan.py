"""Every delta of a lake as Arrow, without DuckDB between: its segments are Arrow files already.

DuckDB hands out a list element by element. Whoever only wants the records (an export, an audit of their own, a
statistic) gets them here as they lie on disk, a few thousand at a time: those that `SELECT * FROM deltas` would give,
in its order, with its columns. Nobody verifies them; the views do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from tokenlake.errors import InvalidInput
from tokenlake.store.fetch import Fetcher
from tokenlake.store.schema import DELTA

__all__ = ["DELTAS", "scan_deltas"]

_GROUP = DELTA.get_field_index("rollout_id")
DELTAS = DELTA.insert(_GROUP, pa.field("group_id", pa.string(), nullable=False))
"""The columns of the relation `deltas`."""

_ROWS = 2048
_BYTES = 1 << 28
"""Of the messages of a batch: lists have offsets of 32 bits."""


def scan_deltas(fetcher: Fetcher, places: pa.Table, columns: Sequence[str] | None) -> pa.RecordBatchReader:
    """The records at places (as `index/places_of_groups` gives them), read from disk batch by batch.

    `columns`: some of `DELTAS`; None: all. Raises `InvalidInput` for one that is not.
    """
    names = DELTAS.names if columns is None else list(columns)
    unknown = sorted(set(names) - set(DELTAS.names))
    if unknown:
        raise InvalidInput(f"deltas have no column {', '.join(unknown)}: see docs/format.md", columns=unknown)
    schema = pa.schema([DELTAS.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(schema, _batches(fetcher, places, schema))


def _batches(fetcher: Fetcher, places: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    stored = [name for name in schema.names if name != "group_id"]
    for batch in places.to_batches(max_chunksize=_ROWS):
        for part in _parts(batch):
            *place, groups = part.columns
            for there, found in fetcher.columns(place, stored):
                here = groups.slice(0, len(there)).filter(there)
                groups = groups.slice(len(there))
                given = iter(found)
                arrays = [here if name == "group_id" else next(given) for name in schema.names]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch of places cut so that no part has too many bytes, and at least one message."""
    start = size = 0
    for row, length in enumerate(batch.column("byte_length").to_pylist()):
        if row > start and size + length > _BYTES:
            yield batch.slice(start, row - start)
            start, size = row, 0
        size += length
    yield batch.slice(start)
