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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, pairwise
from typing import Any, cast

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from duckdb import sqltypes

from tokenlake.store.columns import Decoded, columns_of, readable
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
_PART = 512
"""Records that are handed on together: memory of a size that the allocator has at hand is had without the kernel."""

_MANY = 32
"""Fewer records than this are read one by one as fast."""

_FURTHEST = 1 << 62
"""Beyond the end of every segment; what is longer by a record is still a number of 64 bits."""

_ABSENT, _BY_HAND = 0, 1
_SEGMENT = re.compile(r"(?:deltas/[A-Za-z0-9_-]{1,100}|rows)/[0-9]{6,10}\.arrow")

_Place = tuple[Any, ...]
_Found = Decoded | tuple[pa.RecordBatch, int] | None
"""One record that was read by itself."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """Records that were read one by one."""

    found: list[_Found]


_Piece = Plain | pa.RecordBatch | _Alone
"""Records that follow one another in what was asked for."""


class Fetcher:
    """Reads places of one lake. `decoded` counts the records that were looked up on disk."""

    def __init__(self, maps: SegmentMaps, moved: Callable[[DeltaId, str], Place | None]) -> None:
        """`moved` finds a record whose segment (the path below the lake) is gone because compaction replaced it."""
        self._maps = maps
        self._moved = moved
        # By thread id: DuckDB's own threads get a new Python thread state, so no thread-local, with every call.
        self._kept: dict[int, tuple[float, Sequence[pa.Array], list[_Piece]]] = {}
        self.decoded = 0

    def register(self, con: duckdb.DuckDBPyConnection) -> None:
        """Make the four functions known to a database; its cursors have them too."""
        boolean = sqltypes.BOOLEAN
        add_function(con, "tl_has_delta", lambda *c: self._has(self._deltas, c), _DELTA_ARGUMENTS, boolean)
        add_function(con, "tl_has_row", lambda *c: self._has(self._rows, c), _ROW_ARGUMENTS, boolean)
        delta, row = pa.struct(list(DELTA)), pa.struct(list(ROW))
        add_function(con, "tl_delta", lambda *c: self._give(self._deltas, c, DELTA), _DELTA_ARGUMENTS, sql_type(delta))
        add_function(con, "tl_row", lambda *c: self._give(self._rows, c, ROW), _ROW_ARGUMENTS, sql_type(row))

    def deltas(self, columns: Sequence[pa.Array]) -> pa.ChunkedArray:
        """The records at places, given as the arguments of `tl_delta`; NULL where there is none."""
        return _assemble(self._deltas(columns), DELTA)

    def columns(self, columns: Sequence[pa.Array], names: Sequence[str]) -> Iterator[tuple[pa.Array, list[pa.Array]]]:
        """Some columns of the records at places, in stretches: (which of the places hold one, the columns of those)."""
        for piece in self._deltas(columns):
            if isinstance(piece, _Alone):
                made = _assemble([piece], DELTA).combine_chunks()
                found = made.filter(made.is_valid())
                yield made.is_valid(), [found.field(name) for name in names]
                continue
            whole = isinstance(piece, Plain)
            parts = piece.parts(names, _PART) if whole else [(len(piece), [piece.column(name) for name in names])]
            for count, part in parts:
                yield pa.repeat(True, count), part

    def _has(self, read: _Read, columns: Sequence[pa.Array]) -> pa.Array:
        pieces = read(columns)
        self.decoded += len(columns[0])
        flags: list[bool] = []
        for piece in pieces:
            flags += [each is not None for each in piece.found] if isinstance(piece, _Alone) else [True] * len(piece)
        # Not `pa.array`, which imports pandas where it is installed: that takes longer than many a query.
        there = pa.Array.from_buffers(pa.uint8(), len(flags), [None, pa.py_buffer(bytes(flags))]).cast(pa.bool_())
        if not all(flags):
            columns = [column.filter(there) for column in columns]
            pieces = [_Alone(list(filter(None, p.found))) if isinstance(p, _Alone) else p for p in pieces]
        if len(self._kept) > _MAX_KEPT:
            self._kept = {}
        self._kept[threading.get_ident()] = (time.monotonic(), columns, pieces)
        return there

    def _give(self, read: _Read, columns: Sequence[pa.Array], schema: pa.Schema) -> pa.ChunkedArray:
        since, known, pieces = self._kept.pop(threading.get_ident(), (0.0, (), []))
        same = len(known) == len(columns) and all(map(pa.Array.equals, known, columns))
        if not same or time.monotonic() - since > _MOMENT:
            pieces = read(columns)
            self.decoded += len(columns[0])
        return _assemble(pieces, schema)

    def _deltas(self, columns: Sequence[pa.Array]) -> list[_Piece]:
        """The records at places: those of one segment at once where that can be, else one by one."""
        opened: _Opened = {}
        if any(column.null_count for column in columns):
            return [_Alone([self._delta(place, opened) for place in _places(columns)])]
        return [piece for run in _runs(columns, columns[:2]) for piece in self._stretch(run, opened)]

    def _stretch(self, columns: Sequence[pa.Array], opened: _Opened) -> list[_Piece]:
        """Records of one segment."""
        count = len(columns[0])
        if count >= _MANY and pc.max(columns[4]).as_py() > 0:
            return [self._compacted(run, opened) for run in _runs(columns, columns[2:4])]
        plain = self._plain(columns, opened) if count >= _MANY else None
        if plain is not None:
            return [plain]
        if count < _MANY:
            return [_Alone([self._delta(place, opened) for place in _places(columns)])]
        half = count // 2
        halves = [column.slice(0, half) for column in columns], [column.slice(half) for column in columns]
        return [piece for each in halves for piece in self._stretch(each, opened)]

    def _plain(self, columns: Sequence[pa.Array], opened: _Opened) -> Plain | None:
        """The records of one segment, or None where one is not plain or not of the key that the index says."""
        offsets, lengths = columns[2], columns[3].cast(pa.int64())
        first, last = (each.as_py() for each in pc.min_max(offsets).values())
        if first < 0 or last > _FURTHEST:
            return None
        mapped = self._mapped(_name(columns), 0, pc.max(pc.add(offsets, lengths)).as_py(), opened)
        if mapped is None:
            return None
        plain = read_plain(DELTA_LAYOUT, mapped.view, offsets, lengths)
        if plain is None or not plain.readable():
            return None
        same = (plain.column(name).equals(given) for name, given in zip(_DELTA_KEY, columns[5:], strict=True))
        return plain if all(same) else None

    def _compacted(self, columns: Sequence[pa.Array], opened: _Opened) -> _Piece:
        """Records of one batch: a stretch of it where they are of the keys that the index says, else one by one."""
        *at, first = (column[0].as_py() for column in columns[:5])
        count = len(columns[0])
        mapped = self._mapped(_name(columns), at[2], at[3], opened)
        if mapped is not None and first >= 0 and columns[4].equals(pa.array(range(first, first + count), pa.int32())):
            batch = self._batch(mapped, tuple(at), DELTA, opened)
            found = None if batch is None else batch.slice(first, count)
            if found is not None and all(
                found.column(name).equals(given) for name, given in zip(_DELTA_KEY, columns[5:], strict=True)
            ):
                return found
        return _Alone([self._delta(place, opened) for place in _places(columns)])

    def _rows(self, columns: Sequence[pa.Array]) -> list[_Piece]:
        opened: _Opened = {}
        return [_Alone([self._row(place, opened) for place in _places(columns)])]

    def _delta(self, place: _Place, opened: _Opened) -> _Found:
        writer, segment, offset, length, row, rollout_id, attempt, call_id = place
        if None in place:
            return None
        name = f"deltas/{writer}/{segment:06d}.arrow"
        mapped = self._mapped(name, offset, length, opened)
        if mapped is None:
            moved = self._moved((rollout_id, attempt, call_id), name) if _SEGMENT.fullmatch(name) else None
            if moved is None:
                return None
            segment, offset, length, row = moved.segment, moved.byte_offset, moved.byte_length, moved.batch_row
            place = (moved.writer, segment, offset, length, row, rollout_id, attempt, call_id)
            mapped = self._mapped(f"deltas/{moved.writer}/{segment:06d}.arrow", offset, length, opened)
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
                return decoded if same and readable(DELTA_LAYOUT, decoded) else None
        return self._in_batch(mapped, place, DELTA, _DELTA_KEY, opened)

    def _row(self, place: _Place, opened: _Opened) -> _Found:
        segment, offset, length = place[:3]
        if None in place:
            return None
        mapped = self._mapped(f"rows/{segment:06d}.arrow", offset, length, opened)
        return None if mapped is None else self._in_batch(mapped, place, ROW, _ROW_KEY, opened)

    def _mapped(self, name: str, offset: int, length: int, opened: _Opened) -> Mapped | None:
        """The map of a segment, looked at once for each call."""
        mapped = opened.get(name)
        if mapped is None and _SEGMENT.fullmatch(name) is None:
            return None  # a query may ask for any place, and gets none outside the lake
        if mapped is None or offset + length > len(mapped.view):
            mapped = opened[name] = self._maps.get(name, offset + length)
        fits = mapped is not None and mapped.schema is not None and 0 <= offset <= offset + length <= len(mapped.view)
        return mapped if fits else None

    def _in_batch(
        self, mapped: Mapped, place: _Place, schema: pa.Schema, names: Sequence[str], opened: _Opened
    ) -> _Found:
        """A row of a batch that pyarrow reads."""
        at, row, key = place[: -len(names) - 1], place[-len(names) - 1], place[-len(names) :]
        batch = self._batch(mapped, at, schema, opened)
        if batch is None:
            return None
        keys = opened.get((at, "keys"))
        if keys is None:
            keys = opened[at, "keys"] = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
        return (batch, row) if 0 <= row < len(keys) and keys[row] == key else None

    def _batch(self, mapped: Mapped, at: _Place, schema: pa.Schema, opened: _Opened) -> pa.RecordBatch | None:
        """A batch, read once for each call; `at` ends with its offset and bytes."""
        if at not in opened:
            offset, length = at[-2:]
            read = read_batch(mapped.view[offset : offset + length], mapped.schema or schema)
            opened[at] = None if read is None else conform(read, schema)
        return opened[at]


_Opened = dict[Any, Any]
"""What one call has opened: maps by name, batches by place."""
_Read = Callable[[Sequence[pa.Array]], list[_Piece]]


def _places(columns: Sequence[pa.Array]) -> list[_Place]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _name(columns: Sequence[pa.Array]) -> str:
    """The segment of the first place."""
    return f"deltas/{columns[0][0].as_py()}/{columns[1][0].as_py():06d}.arrow"


def _runs(columns: Sequence[pa.Array], by: Sequence[pa.Array]) -> Iterator[list[pa.Array]]:
    """Stretches of `columns` in which those of `by` do not change; none is NULL."""
    count = len(columns[0])
    changes = reduce(pc.or_, (pc.not_equal(each.slice(1), each.slice(0, count - 1)) for each in by)) if count else None
    ends = [] if changes is None else [*(at + 1 for at in pc.indices_nonzero(changes).to_pylist()), count]
    for start, end in pairwise([0, *ends]):
        yield [column.slice(start, end - start) for column in columns]


def _assemble(pieces: Sequence[_Piece], schema: pa.Schema) -> pa.ChunkedArray:
    """STRUCTs of all records in their order, NULL where there is none."""
    kind = pa.struct([pa.field(f.name, f.type) for f in schema])
    made: list[pa.Array] = []
    for piece in pieces:
        if isinstance(piece, _Alone):
            made += _by_hand(piece.found, schema, kind)
        else:
            made.append(_struct(piece.batch() if isinstance(piece, Plain) else piece))
    if not made:
        return pa.chunked_array([], type=kind)
    wide = next((each.type for each in made if not each.type.equals(kind)), kind)
    return pa.chunked_array([each if each.type.equals(wide) else each.cast(wide) for each in made])


def _by_hand(found: Sequence[_Found], schema: pa.Schema, kind: pa.DataType) -> Iterator[pa.Array]:
    for which, run in groupby(found, key=_group):
        rows = cast("list[Any]", list(run))
        if which == _ABSENT:
            yield pa.nulls(len(rows), kind)
        elif which == _BY_HAND:
            columns = columns_of(DELTA_LAYOUT, rows)
            fields = [pa.field(f.name, column.type) for f, column in zip(schema, columns, strict=True)]
            yield pa.StructArray.from_arrays(columns, fields=fields)
        else:
            yield _struct(_rows_of(rows[0][0], [row for _, row in rows]))


def _struct(batch: pa.RecordBatch) -> pa.Array:
    return pa.StructArray.from_arrays(batch.columns, fields=[pa.field(f.name, f.type) for f in batch.schema])


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
