"""The functions behind the relations `deltas` and `rows`: from places to records, read from the bytes each time.

`tl_has_delta` and `tl_has_row` say whether a place holds a readable record of the key that the index says; `tl_delta`
and `tl_row` give it, or NULL. Nothing is remembered between queries: damage on disk changes what the views say. A query
asks for the same vector twice, first whether the records are there and then for them, so a thread keeps what it decoded
last for that moment.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import duckdb
import pyarrow as pa
from duckdb import sqltypes

from tokenlake.store.columns import Decoded, readable_columns
from tokenlake.store.delta import DeltaId, Place
from tokenlake.store.encode import DELTA_LAYOUT
from tokenlake.store.maps import Mapped, SegmentMaps
from tokenlake.store.plain import Plain, read_plain
from tokenlake.store.records import conform
from tokenlake.store.schema import DELTA, ROW
from tokenlake.store.shape import Kind
from tokenlake.store.sqlfunction import add_function
from tokenlake.store.sqltypes import sql_type
from tokenlake.store.walk import read_batch

__all__ = ["Fetcher"]

_HEAD = [leaf.name for leaf in DELTA_LAYOUT.leaves if leaf.kind != Kind.STRUCT]
_ROLLOUT, _ATTEMPT, _CALL = (_HEAD.index(name) for name in ("rollout_id", "attempt", "call_id"))
_DELTA_KEY = ("rollout_id", "attempt", "call_id")
_ROW_KEY = ("sample_id", "segment_index")
_INT, _LONG, _TEXT = sqltypes.INTEGER, sqltypes.BIGINT, sqltypes.VARCHAR
_PLACE = {"segment": _INT, "byte_offset": _LONG, "byte_length": _INT, "batch_row": _INT}
_DELTA_ARGUMENTS = {"writer": _TEXT, **_PLACE, "rollout_id": _TEXT, "attempt": _INT, "call_id": _TEXT}
_ROW_ARGUMENTS = {**_PLACE, "sample_id": _TEXT, "segment_index": _INT}
_MOMENT = 1.0
"""Seconds that a thread keeps what it decoded last."""

_MAX_KEPT = 128
_MANY = 32
"""Fewer records than this are read one by one as fast."""

_ABSENT, _BY_HAND = 0, 1
_SEGMENT = re.compile(r"(?:deltas/[A-Za-z0-9_-]{1,100}|rows)/[0-9]{6,10}\.arrow")

_Place = tuple[Any, ...]
_Found = Decoded | tuple[pa.RecordBatch | Plain, int] | None


class Fetcher:
    """Reads places of one lake. `decoded` counts the records that were looked up on disk."""

    def __init__(self, maps: SegmentMaps, moved: Callable[[DeltaId, str], Place | None]) -> None:
        """`moved` finds a record whose segment (the path below the lake) is gone because compaction replaced it."""
        self._maps = maps
        self._moved = moved
        # By thread id: DuckDB's own threads get a new Python thread state, so no thread-local, with every call.
        self._kept: dict[int, tuple[float, dict[_Place, _Found]]] = {}
        self.decoded = 0

    def register(self, con: duckdb.DuckDBPyConnection) -> None:
        """Make the four functions known to a database; its cursors have them too."""
        boolean = sqltypes.BOOLEAN
        add_function(con, "tl_has_delta", lambda *c: self._has(self._deltas, c), _DELTA_ARGUMENTS, boolean)
        add_function(con, "tl_has_row", lambda *c: self._has(self._rows, c), _ROW_ARGUMENTS, boolean)
        delta, row = pa.struct(list(DELTA)), pa.struct(list(ROW))
        add_function(con, "tl_delta", lambda *c: self._give(self._deltas, c, DELTA), _DELTA_ARGUMENTS, sql_type(delta))
        add_function(con, "tl_row", lambda *c: self._give(self._rows, c, ROW), _ROW_ARGUMENTS, sql_type(row))

    def deltas(self, places: Sequence[_Place]) -> pa.ChunkedArray:
        """The records at places, each given as the arguments of `tl_delta`; NULL where there is none."""
        return _assemble(self._deltas(places, {}), DELTA)

    def _has(self, read: _Read, columns: Sequence[pa.Array]) -> pa.Array:
        places = _places(columns)
        found = read(places, {})
        if len(self._kept) > _MAX_KEPT:
            self._kept = {}
        self._kept[threading.get_ident()] = (time.monotonic(), dict(zip(places, found, strict=True)))
        self.decoded += len(places)
        return pa.array([each is not None for each in found], pa.bool_())

    def _give(self, read: _Read, columns: Sequence[pa.Array], schema: pa.Schema) -> pa.ChunkedArray:
        places = _places(columns)
        since, kept = self._kept.pop(threading.get_ident(), (0.0, {}))
        if time.monotonic() - since > _MOMENT:
            kept = {}
        missing = [place for place in places if place not in kept]
        if missing:
            kept = kept | dict(zip(missing, read(missing, {}), strict=True))
            self.decoded += len(missing)
        return _assemble([kept[place] for place in places], schema)

    def _deltas(self, places: Sequence[_Place], batches: _Batches) -> list[_Found]:
        """The records at places: those of one segment at once if there are many and they are plain, else one by one."""
        found: list[_Found] = []
        for _, run in groupby(places, key=itemgetter(0, 1)):
            found += self._stretch(list(run), batches)
        return found

    def _stretch(self, places: list[_Place], batches: _Batches) -> list[_Found]:
        if len(places) < _MANY:
            return [self._delta(place, batches) for place in places]
        if any(place[4] for place in places):
            runs = [list(run) for _, run in groupby(places, key=itemgetter(2, 3))]
            return [found for run in runs for found in self._compacted(run, batches)]
        plain = self._plain(places, batches)
        if plain is not None:
            return [(plain, row) for row in range(len(places))]
        half = len(places) // 2
        return [*self._stretch(places[:half], batches), *self._stretch(places[half:], batches)]

    def _plain(self, places: Sequence[_Place], batches: _Batches) -> Plain | None:
        """The records of one segment, or None where one is not plain or not of the key that the index says."""
        columns = list(zip(*places, strict=True))
        if any(None in column for column in columns):
            return None
        name = f"deltas/{columns[0][0]}/{columns[1][0]:06d}.arrow"
        ends = map(sum, zip(columns[2], columns[3], strict=True))
        mapped = self._mapped(name, 0, max(ends), batches)
        if mapped is None or min(columns[2]) < 0:
            return None
        plain = read_plain(DELTA_LAYOUT, mapped.view, list(zip(columns[2], columns[3], strict=True)))
        if plain is None or any(
            plain.column(key).to_pylist() != list(given) for key, given in zip(_DELTA_KEY, columns[5:], strict=True)
        ):
            return None
        return plain

    def _compacted(self, places: Sequence[_Place], batches: _Batches) -> Sequence[_Found]:
        """The records of one batch: all at once where they are of the keys that the index says, else one by one."""
        writer, segment, offset, length = places[0][:4]
        if None not in places[0]:
            mapped = self._mapped(f"deltas/{writer}/{segment:06d}.arrow", offset, length, batches)
            if mapped is not None:
                batch, keys = self._batch(mapped, places[0][:4], DELTA, _DELTA_KEY, batches)
                rows = range(places[0][4], places[0][4] + len(places))
                if batch is not None and [
                    (row, *key) for row, key in zip(rows, keys[rows.start : rows.stop], strict=False)
                ] == [place[4:] for place in places]:
                    return [(batch, row) for row in rows]
        return [self._delta(place, batches) for place in places]

    def _rows(self, places: Sequence[_Place], batches: _Batches) -> list[_Found]:
        return [self._row(place, batches) for place in places]

    def _delta(self, place: _Place, batches: _Batches) -> _Found:
        writer, segment, offset, length, row, rollout_id, attempt, call_id = place
        if None in place:
            return None
        name = f"deltas/{writer}/{segment:06d}.arrow"
        mapped = self._mapped(name, offset, length, batches)
        if mapped is None:
            moved = self._moved((rollout_id, attempt, call_id), name) if _SEGMENT.fullmatch(name) else None
            if moved is None:
                return None
            segment, offset, length, row = moved.segment, moved.byte_offset, moved.byte_length, moved.batch_row
            place = (moved.writer, segment, offset, length, row, rollout_id, attempt, call_id)
            mapped = self._mapped(f"deltas/{moved.writer}/{segment:06d}.arrow", offset, length, batches)
            if mapped is None:
                return None
        if row == 0:
            decoded = DELTA_LAYOUT.decode(mapped.view, offset, offset + length)
            if decoded is not None:
                values = decoded[1]
                same = (
                    values[_CALL] == call_id.encode()
                    and values[_ROLLOUT] == rollout_id.encode()
                    and values[_ATTEMPT] == attempt
                )
                return decoded if same else None
        return self._in_batch(mapped, place, DELTA, _DELTA_KEY, batches)

    def _row(self, place: _Place, batches: _Batches) -> _Found:
        segment, offset, length = place[:3]
        if None in place:
            return None
        mapped = self._mapped(f"rows/{segment:06d}.arrow", offset, length, batches)
        return None if mapped is None else self._in_batch(mapped, place, ROW, _ROW_KEY, batches)

    def _mapped(self, name: str, offset: int, length: int, batches: _Batches) -> Mapped | None:
        """The map of a segment, looked at once for each call."""
        mapped = batches.get(name)
        if mapped is None and _SEGMENT.fullmatch(name) is None:
            return None  # a query may ask for any place, and gets none outside the lake
        if mapped is None or offset + length > len(mapped.view):
            mapped = batches[name] = self._maps.get(name, offset + length)
        fits = mapped is not None and mapped.schema is not None and 0 <= offset <= offset + length <= len(mapped.view)
        return mapped if fits else None

    def _in_batch(
        self, mapped: Mapped, place: _Place, schema: pa.Schema, names: Sequence[str], batches: _Batches
    ) -> _Found:
        """A row of a batch that pyarrow reads."""
        batch, keys = self._batch(mapped, place[: -len(names) - 1], schema, names, batches)
        row = place[-len(names) - 1]
        return (
            (batch, row) if batch is not None and 0 <= row < len(keys) and keys[row] == place[-len(names) :] else None
        )

    def _batch(
        self, mapped: Mapped, at: _Place, schema: pa.Schema, names: Sequence[str], batches: _Batches
    ) -> tuple[pa.RecordBatch | None, list[tuple[Any, ...]]]:
        """A batch and the keys of its rows, read once for each call; `at` ends with its offset and bytes."""
        if at not in batches:
            offset, length = at[-2:]
            read = read_batch(mapped.view[offset : offset + length], mapped.schema or schema)
            batch = None if read is None else conform(read, schema)
            columns = [] if batch is None else [batch.column(name).to_pylist() for name in names]
            batches[at] = (batch, list(zip(*columns, strict=True)))
        return batches[at]


_Batches = dict[Any, Any]
"""What one call has opened: maps by name, batches by place."""
_Read = Callable[[Sequence[_Place], _Batches], list[_Found]]


def _places(columns: Sequence[pa.Array]) -> list[_Place]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _assemble(found: Sequence[_Found], schema: pa.Schema) -> pa.ChunkedArray:
    """STRUCTs in the order of `found`, NULL where there is no record."""
    kind = pa.struct([pa.field(f.name, f.type) for f in schema])
    pieces: list[pa.Array] = []
    for which, run in groupby(found, key=_group):
        rows = cast("list[Any]", list(run))
        if which == _ABSENT:
            pieces.append(pa.nulls(len(rows), kind))
        elif which == _BY_HAND:
            for columns, n in readable_columns(DELTA_LAYOUT, rows):
                if columns is None:
                    pieces.append(pa.nulls(n, kind))
                    continue
                fields = [pa.field(f.name, column.type) for f, column in zip(schema, columns, strict=True)]
                pieces.append(pa.StructArray.from_arrays(columns, fields=fields))
        else:
            source = rows[0][0].batch() if isinstance(rows[0][0], Plain) else rows[0][0]
            taken = _rows_of(source, [row for _, row in rows])
            fields = [pa.field(f.name, f.type) for f in taken.schema]
            pieces.append(pa.StructArray.from_arrays(taken.columns, fields=fields))
    if not pieces:
        return pa.chunked_array([], type=kind)
    wide = next((piece.type for piece in pieces if not piece.type.equals(kind)), kind)
    return pa.chunked_array([piece if piece.type.equals(wide) else piece.cast(wide) for piece in pieces])


def _rows_of(batch: pa.RecordBatch, rows: list[int]) -> pa.RecordBatch:
    """Rows of a batch; a stretch of it is not copied."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return batch.slice(rows[0], len(rows))
    return batch.take(pa.array(rows, pa.int32()))


def _group(found: _Found) -> int:
    """What can be assembled together: absent records, those decoded by hand, those of one batch."""
    if found is None:
        return _ABSENT
    return _BY_HAND if len(found) == 3 else id(found[0])
