"""The index of a lake: lineage, and where deltas and rows lie; filled from the Arrow files, never the other way round.

The same code fills the owner's `index.duckdb` and a reader's in-memory database. A refresh reads what was appended since
the last one and commits it in one transaction, lineage first: whatever an event names was durable before the event, so
a query never sees a group without its rows or a call without its delta.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import FormatError
from tokenlake.store import functions, views
from tokenlake.store.columns import Decoded, readable_columns
from tokenlake.store.encode import DELTA_LAYOUT, EVENT_LAYOUT
from tokenlake.store.fetch import Fetcher
from tokenlake.store.maps import Mapped, SegmentMaps
from tokenlake.store.records import conform, delta_keys, row_keys
from tokenlake.store.schema import LINEAGE, SCHEMA_VERSION
from tokenlake.store.segment import segment_numbers
from tokenlake.store.walk import Walk, read_batch, walk

__all__ = ["Index"]

_Segment = tuple[str, str, int]
"""Folder, writer (empty for rows) and number."""
_TABLES = ("tl_events", "tl_places", "tl_rows", "tl_segments", "tl_damage", "tl_anchors")
_VIEWS = ("lineage", "deltas", "rows", "lake_findings")
_FORGET = {"lineage": "index/forget_events", "deltas": "index/forget_places", "rows": "index/forget_rows"}
_PLACES = pa.schema(
    [
        ("writer", pa.string()),
        ("segment", pa.int32()),
        ("byte_offset", pa.int64()),
        ("byte_length", pa.int32()),
        ("batch_row", pa.int32()),
    ]
)
_DELTA_PLACES = pa.schema(
    [
        *_PLACES,
        ("rollout_id", pa.string()),
        ("attempt", pa.int32()),
        ("call_id", pa.string()),
        ("digest", pa.binary(32)),
        ("staged_at", pa.int64()),
    ]
)
_ROW_PLACES = pa.schema(
    [
        *_PLACES,
        ("sample_id", pa.string()),
        ("segment_index", pa.int32()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
    ]
)
_VERSION = LINEAGE.get_field_index("schema_version")


class Index:
    """The index on an open DuckDB database, which it owns. Thread-safe: each caller takes its own cursor."""

    def __init__(self, root: Path, con: duckdb.DuckDBPyConnection) -> None:
        self.root = root
        self.maps = SegmentMaps(root)
        self.fetcher = Fetcher(self.maps)
        self._con = con
        self._lock = threading.Lock()
        self._cursors = threading.Lock()
        self.fetcher.register(con)
        functions.register(con)
        for name in _TABLES:
            con.execute(sql.read(f"tables/{name}"))
        for name in _VIEWS:
            con.execute(sql.read(f"tables/{name}"))
        views.create_views(con)
        known = con.execute(sql.read("index/known_segments")).fetchall()
        self._scanned: dict[_Segment, tuple[int, bool]] = {tuple(row[:3]): (row[3], row[4]) for row in known}
        self._anchors: dict[str, int] = {}

    def cursor(self, groups: Sequence[str] | None = None) -> duckdb.DuckDBPyConnection:
        """A connection of the caller's own. With `groups` its relations hold those groups only, and what belongs to none."""
        with self._cursors:
            con = self._con.cursor()
        if groups is not None:
            for name in ("index/group_events", "index/group_places", "index/group_rows"):
                con.execute(sql.read(name), [list(groups)])
        return con

    def refresh(self, *, skip: Iterable[str] = ()) -> None:
        """Take in what was written since the last refresh; `skip` names delta writers to leave for a later one.

        Raises `FormatError` for an event of a newer schema.
        """
        with self._lock:
            change = _Change()
            self._read_lineage(change)
            self._read_anchors(change)
            self._read_deltas(change, frozenset(skip))
            self._read_rows(change)
            if change.empty:
                return
            con = self.cursor()
            try:
                con.execute("BEGIN")
                _apply(con, change)
                con.execute("COMMIT")
            finally:
                con.close()
            for segment in change.gone:
                self._scanned.pop(segment, None)
                self.maps.forget(_name(segment))
            self._scanned |= change.scanned
            if change.anchors is not None:
                self._anchors = change.anchors[0]

    def close(self) -> None:
        """Close the database and let go of the maps."""
        with self._lock, self._cursors:
            self._con.close()
            self.maps.clear()

    # ---------------------------------------------------------------- reading the files

    def _present(self, kind: str, change: _Change, skip: frozenset[str] = frozenset()) -> Iterable[_Segment]:
        """The segments of a folder that may hold something new; those that are gone are written down."""
        folder = self.root / kind
        writers = [""] if kind == "rows" else [w for w in _folders(folder) if w not in skip]
        present: set[_Segment] = set()
        for writer in writers:
            present |= {(kind, writer, number) for number in segment_numbers(folder / writer)}
        change.gone |= {s for s in self._scanned if s[0] == kind and s[1] not in skip and s not in present}
        return sorted(s for s in present if not self._scanned.get(s, (0, False))[1])

    def _walk(self, segment: _Segment, prefix: bytes, change: _Change, read: Any) -> Walk[Any] | None:
        """The new messages of a segment. One that shrank is read again from its start."""
        mapped = self.maps.get(_name(segment))
        if mapped is None or mapped.schema is None:
            return None
        start, _ = self._scanned.get(segment, (0, False))
        if start > len(mapped.view):
            change.gone.add(segment)
            start = 0
        found = walk(
            mapped.view, max(start, mapped.first), len(mapped.view), prefix, lambda a, b, m=mapped: read(m, a, b)
        )
        if (found.scanned, found.ended) != self._scanned.get(segment):
            change.scanned[segment] = (found.scanned, found.ended)
        change.damaged += [(*segment, _name(segment), f"bytes {a} to {b} hold no readable record") for a, b in found.damaged]
        return found

    def _read_lineage(self, change: _Change) -> None:
        for segment in self._present("lineage", change):
            found = self._walk(segment, EVENT_LAYOUT.prefix, change, _event)
            if found is None:
                continue
            for batch in _event_batches([value for *_, value in found.found]):
                newest = max(batch.column(_VERSION).to_pylist(), default=0)
                if newest > SCHEMA_VERSION:
                    raise FormatError(
                        f"{self.root / _name(segment)} holds events of schema {newest}, this Tokenlake reads up to "
                        f"{SCHEMA_VERSION}: upgrade Tokenlake",
                        schema_version=newest,
                    )
                n = batch.num_rows
                named = batch.append_column("tl_writer", pa.array([segment[1]] * n, pa.string()))
                change.events.append(named.append_column("tl_segment", pa.array([segment[2]] * n, pa.int32())))

    def _read_anchors(self, change: _Change) -> None:
        stamps: dict[str, int] = {}
        for writer in _folders(self.root / "lineage"):
            path = self.root / "lineage" / writer / "head.json"
            if path.exists():
                stamps[writer] = path.stat().st_mtime_ns
        if stamps == self._anchors:
            return
        heads: list[dict[str, Any]] = []
        for writer in stamps:
            try:
                head = json.loads((self.root / "lineage" / writer / "head.json").read_bytes())
            except ValueError:
                head = {}
            heads.append(
                {"writer": writer, "event_seq": head.get("event_seq"), "event_hash": head.get("event_hash")}
            )
        change.anchors = (stamps, heads)

    def _read_deltas(self, change: _Change, skip: frozenset[str]) -> None:
        for segment in self._present("deltas", change, skip):
            found = self._walk(
                segment, DELTA_LAYOUT.prefix, change, lambda m, a, b: delta_keys(m.view, a, b, m.schema)
            )
            if found is not None:
                change.places += _placed(segment, found)

    def _read_rows(self, change: _Change) -> None:
        for segment in self._present("rows", change):
            found = self._walk(segment, b"\xff\xff\xff\xff", change, lambda m, a, b: row_keys(m.view[a:b], m.schema))
            if found is not None:
                change.rows += _placed(segment, found)


class _Change:
    """What one refresh found."""

    def __init__(self) -> None:
        self.events: list[pa.RecordBatch] = []
        self.places: list[tuple[Any, ...]] = []
        self.rows: list[tuple[Any, ...]] = []
        self.damaged: list[tuple[str, str, int, str, str]] = []
        self.gone: set[_Segment] = set()
        self.scanned: dict[_Segment, tuple[int, bool]] = {}
        self.anchors: tuple[dict[str, int], list[dict[str, Any]]] | None = None

    @property
    def empty(self) -> bool:
        return not (self.scanned or self.gone or self.damaged or self.anchors)


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def _name(segment: _Segment) -> str:
    kind, writer, number = segment
    return f"{kind}/{writer}/{number:06d}.arrow" if writer else f"{kind}/{number:06d}.arrow"


def _placed(segment: _Segment, found: Walk[Any]) -> Iterable[tuple[Any, ...]]:
    for offset, meta, body, keys in found.found:
        for row, key in enumerate(keys):
            yield (segment[1], segment[2], offset, meta + body, row, *key)


def _event(mapped: Mapped, start: int, end: int) -> Decoded | pa.RecordBatch | None:
    decoded = EVENT_LAYOUT.decode(mapped.view, start, end)
    if decoded is not None:
        return decoded if decoded[1][0] >= 1 else None
    batch = None if mapped.schema is None else read_batch(mapped.view[start:end], mapped.schema)
    if batch is None:
        return None
    batch = conform(batch, LINEAGE)
    whole = all(f.nullable or not column.null_count for f, column in zip(LINEAGE, batch.columns, strict=True))
    return batch if whole else None


def _event_batches(values: Sequence[Any]) -> Iterable[pa.RecordBatch]:
    """The events in order, those decoded by hand joined into large batches."""
    for by_hand, run in groupby(values, key=lambda value: isinstance(value, tuple)):
        if by_hand:
            for columns, _ in readable_columns(EVENT_LAYOUT, list(run)):
                if columns is not None:
                    yield pa.RecordBatch.from_arrays(columns, schema=LINEAGE)
        else:
            yield from run


def _apply(con: duckdb.DuckDBPyConnection, change: _Change) -> None:
    for kind, writer, number in change.gone:
        con.execute(sql.read(_FORGET[kind]), {"writer": writer, "segment": number})
        for name in ("index/forget_scanned", "index/forget_damage"):
            con.execute(sql.read(name), {"kind": kind, "writer": writer, "segment": number})
    for (kind, writer, number), (scanned, ended) in change.scanned.items():
        key = {"kind": kind, "writer": writer, "segment": number}
        con.execute(sql.read("index/forget_scanned"), key)
        con.execute(sql.read("index/insert_scanned"), {**key, "scanned": scanned, "ended": ended})
    for kind, writer, number, place, detail in change.damaged:
        values = {"kind": kind, "writer": writer, "segment": number, "place": place, "detail": detail}
        con.execute(sql.read("index/insert_damage"), values)
    if change.events:
        _insert(con, "index/insert_events", pa.Table.from_batches(change.events))
    if change.places:
        _insert(con, "index/insert_places", _table(change.places, _DELTA_PLACES))
    if any(kind == "deltas" for kind, _, _ in change.gone):
        con.execute(sql.read("index/shadow_places"), {"rollouts": None})
    elif change.places:
        con.execute(sql.read("index/shadow_places"), {"rollouts": sorted({place[5] for place in change.places})})
    if change.rows:
        _insert(con, "index/insert_rows", _table(change.rows, _ROW_PLACES))
    if change.anchors is not None:
        con.execute(sql.read("index/forget_anchors"))
        for head in change.anchors[1]:
            con.execute(sql.read("index/insert_anchor"), head)


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _insert(con: duckdb.DuckDBPyConnection, name: str, table: pa.Table) -> None:
    con.register("tl_new", table)
    con.execute(sql.read(name))
    con.unregister("tl_new")
