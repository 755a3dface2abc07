"""The index of a lake: lineage, and where deltas and rows lie; filled from the Arrow files, never the other way round.

The same code fills the owner's `index.duckdb` and a reader's in-memory database. A refresh commits what it found in one
transaction, so a query never sees a group without its rows or a call without its delta.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import Conflict, NotFound, StorageFailed
from tokenlake.store import functions, guard, views
from tokenlake.store.delta import Delta, DeltaId, Place
from tokenlake.store.deltas import read_places, segment_name
from tokenlake.store.fetch import Fetcher
from tokenlake.store.format import lake_file, read_lake
from tokenlake.store.intake import Change, Scanned, compacted_places, sealed_as, segment_path, still_there, take_in
from tokenlake.store.maps import SegmentMaps
from tokenlake.store.planned import Planned
from tokenlake.store.scan import scan_deltas
from tokenlake.store.schema import PLACE
from tokenlake.store.segment import APPEND_MAX_BYTES

__all__ = ["TABLES", "Index", "layout"]

TABLES = ("tl_events", "tl_places", "tl_rows", "tl_segments", "tl_damage", "tl_anchors")
"""What an index remembers."""
_VIEWS = ("lineage", "deltas", "rows", "lake_findings")
_GROUP = ("index/group_events", "index/group_places", "index/group_rows")
_FORGET = {"lineage": "index/forget_events", "deltas": "index/forget_places", "rows": "index/forget_rows"}
_NO_INODE = 0
"""Of no file: what was read under it is read again."""
_ROW_PLACES = pa.schema(
    [
        *PLACE,
        pa.field("sample_id", pa.string()),
        pa.field("segment_index", pa.int32()),
        pa.field("segment_count", pa.int32()),
        pa.field("rollout_id", pa.string()),
        pa.field("group_id", pa.string()),
    ]
)


def layout() -> str:
    """What stands for the tables of an index of this version: a digest of their definitions."""
    return hashlib.sha256("".join(sql.read(f"tables/{name}") for name in TABLES).encode()).hexdigest()


class Index:
    """The index on an open DuckDB database, which it owns. Thread-safe: each caller takes its own cursor."""

    def __init__(self, root: Path, con: duckdb.DuckDBPyConnection) -> None:
        self.root = root
        self.when_closed: Callable[[], object] | None = None
        """Called once the database is closed."""
        self.maps = SegmentMaps(root)
        self.fetcher = Fetcher(self.maps, self._moved)
        self._con = con
        self._refreshing = threading.Lock()
        self._cursors = threading.Lock()
        self._asking = threading.Lock()
        self._planned: Planned | None = None
        self.fetcher.register(con)
        functions.register(con)
        for name in (*TABLES, *_VIEWS):
            con.execute(sql.read(f"tables/{name}"))
        self._viewed: set[str] = set()
        self._scanned: Scanned = {}
        known = con.execute(sql.read("index/known_segments"), [APPEND_MAX_BYTES]).fetchall()
        for kind, writer, number, scanned, ended, file, checked in known:
            segment = (kind, writer, number)
            self._scanned[segment] = (scanned, ended, file)
            # A segment that is written ahead does not become shorter when the power takes what was read of it.
            if kind != "rows" and not ended and not still_there(self.maps, segment, checked, scanned):
                self._scanned[segment] = (scanned, ended, _NO_INODE)
            # Of an index that was copied with its lake, or that was left when a copy was laid over it.
            elif ended and sealed_as(root, segment) not in (file, None):
                self._scanned[segment] = (scanned, False, _NO_INODE)
        self._stamps: dict[str, int] = {}
        self._lake_id: str = read_lake(root)["lake_id"]
        self._lake_file = lake_file(root)
        self._compacted: dict[DeltaId, Place] = {}
        _open.add(self)

    def cursor(self, groups: Sequence[str] | None = None, *, query: str | None = None) -> duckdb.DuckDBPyConnection:
        """A connection of the caller's own. With `groups` its relations hold those, and what belongs to no group.

        It has every view, or at least those that `query` names, so that a first query parses no other.
        """
        wanted = views.ordered_views() if query is None else views.needed_views(query)
        with self._cursors:
            con = self._con.cursor()
            for name in wanted:
                if name not in self._viewed:
                    con.execute(sql.read(name))
                    self._viewed.add(name)
        if groups is not None:
            for name in _GROUP:
                con.execute(sql.read(name), [list(groups)])
        return con

    @contextmanager
    def planned(self, events: pa.Table, places: pa.Table) -> Generator[Planned]:
        """The statements that are planned once, over what `of_groups` gave; one caller at a time."""
        with self._asking:
            if self._planned is None:
                self._planned = Planned(self.fetcher, events, places)
            else:
                self._planned.give(events, places)
            yield self._planned

    def of_groups(self, groups: Sequence[str]) -> tuple[pa.Table, pa.Table]:
        """Events and places that judging some groups needs."""
        events, places = self._asked(groups, "planned/events", "index/places_of_groups")
        return events, places

    def _asked(self, groups: Sequence[str] | None, *names: str) -> list[pa.Table]:
        """What some statements say of some groups."""
        params = [None if groups is None else list(groups)]
        con = self.cursor(query="")
        try:
            return [con.sql(sql.read(name), params=params).to_arrow_table() for name in names]
        finally:
            con.close()

    def refresh(self, *, skip: Iterable[str] = (), limit: int | None = None) -> bool:
        """Take in what was written since the last refresh; `skip` names delta writers to leave for a later one.

        With `limit` it stops after that many bytes; true when there is more. Raises `FormatError` for an event of a
        newer schema, `NotFound` where the lake is gone, `Conflict` where another one is in its place, `StorageFailed`
        where it cannot be read.
        """
        with self._refreshing:
            try:
                change = self._take_in(frozenset(skip), limit)
            except OSError as error:
                raise StorageFailed(f"lake {self.root} cannot be read: {error}", errno=error.errno) from error
            if change.empty:
                return False
            con = self.cursor(query="")
            try:
                con.execute("BEGIN")
                _apply(con, change)
                if any(s[0] == "lineage" and (s not in self._scanned or s in change.gone) for s in change.scanned):
                    con.execute(sql.read("index/forget_refused"))
                con.execute("COMMIT")
            finally:
                con.close()
            for segment in change.gone:
                self._scanned.pop(segment, None)
                self.maps.forget(segment_path(segment))
            self._scanned |= change.scanned
            self._stamps = change.stamps
            self._compacted = {}
            return change.partial

    def _take_in(self, skip: frozenset[str], limit: int | None) -> Change:
        """What is new, of one lake: its folder may be moved away, or unmounted, or another copy come into its place."""
        while True:
            change = take_in(self.root, self.maps, self._scanned, self._stamps, skip, limit)
            file = lake_file(self.root)
            if file == self._lake_file:
                return change
            if read_lake(self.root)["lake_id"] != self._lake_id:
                raise Conflict(f"{self.root} is another lake by now than the one that was opened: open it again")
            self._lake_file = file
            self._scanned = {segment: (read[0], False, _NO_INODE) for segment, read in self._scanned.items()}

    def hold(self) -> None:
        """Map every segment of deltas that is known, so that it is read on when retention removes it."""
        for segment in self._scanned:
            if segment[0] == "deltas":
                self.maps.get(segment_path(segment))

    def read_deltas(self, places: Sequence[Place]) -> list[Delta]:
        """The records that were staged at places, also where compaction has moved them. Raises `NotFound`."""
        try:
            return read_places(self.maps, places)
        except NotFound:
            gone = {name for name in map(segment_name, places) if not self._there(name)}
            if not gone:
                raise
        self.refresh()
        return read_places(self.maps, [self._now_at(each) if segment_name(each) in gone else each for each in places])

    def _now_at(self, place: Place) -> Place:
        """Where a record lies now whose segment was compacted; the same place where nobody knows."""
        con = self.cursor(query="")
        try:
            known = (place.writer, place.segment, place.byte_offset, place.batch_row)
            moved = con.execute(sql.read("index/moved_delta"), known).fetchone()
        finally:
            con.close()
        return place if moved is None else Place(**dict(zip(PLACE.names, moved, strict=True)))

    def _there(self, name: str) -> bool:
        return (self.root / name).exists()

    def scan_deltas(self, groups: Sequence[str] | None, columns: Sequence[str] | None) -> pa.RecordBatchReader:
        """The relation `deltas`, or some groups of it, past DuckDB: see `tokenlake.store.scan`."""
        # What is mapped now is read on by who goes through it slowly, also when a refresh lets go of it.
        maps = self.maps.copy()
        (places,) = self._asked(groups, "index/places_of_groups")
        return scan_deltas(Fetcher(maps, self._moved), places, columns)

    def find_delta(self, key: DeltaId) -> tuple[Place, bytes] | None:
        """(place, digest) of the record with this key, the last copy of it; None where the index knows none."""
        con = self.cursor(query="")
        try:
            row = con.execute(sql.read("index/find_delta"), list(key)).fetchone()
        finally:
            con.close()
        if row is None:
            return None
        *place, digest = row
        return Place(**dict(zip(PLACE.names, place, strict=True))), digest

    def _moved(self, key: DeltaId, name: str) -> Place | None:
        """Where a record lies whose segment was compacted, so that a query sees one state.

        It was compacted since the last refresh; or before, and the query knows places from before that refresh.
        """
        if self._there(name):
            return None
        place = self._compacted.get(key)
        if place is None or not self._there(segment_name(place)):
            self._compacted = compacted_places(self.root, self.maps, self._scanned)
            place = self._compacted.get(key)
        if place is None:
            found = self.find_delta(key)
            if found is None:
                raise NotFound(
                    f"the delta of call {key[2]} of {key[0]} was removed by retention while a query ran that knew of "
                    "it: ask again",
                    rollout_id=key[0],
                    attempt=key[1],
                    call_id=key[2],
                )
            place = found[0]
        return place

    def lock(self) -> None:
        """From now on queries of this database reach nothing but its relations: see `tokenlake.store.guard`."""
        guard.lock(self._con)

    def keep_for_ever(self) -> None:
        """Never free its databases, not even when the interpreter ends."""
        for con in [self._con, *([] if self._planned is None else [self._planned.con])]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(con))

    def close(self) -> None:
        """Close the database and let go of the maps."""
        with self._asking, self._refreshing, self._cursors:
            self._con.close()
            if self._planned is not None:
                self._planned.con.close()
            self.maps.clear()
        if self.when_closed is not None:
            self.when_closed()


_open: weakref.WeakSet[Index] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """To free a database is to join its threads, which a forked child does not have: DuckDB crashes there."""
    for index in list(_open):
        index.keep_for_ever()


os.register_at_fork(after_in_child=_leave_to_parent)


def _apply(con: duckdb.DuckDBPyConnection, change: Change) -> None:
    for kind, writer, number in change.gone:
        con.execute(sql.read(_FORGET[kind]), [writer, number])
        for name in ("index/forget_scanned", "index/forget_damage"):
            con.execute(sql.read(name), [kind, writer, number])
    for (kind, writer, number), read in change.scanned.items():
        con.execute(sql.read("index/forget_scanned"), [kind, writer, number])
        con.execute(sql.read("index/insert_scanned"), [kind, writer, number, *read])
    for (kind, writer, number), detail in change.damaged:
        place = segment_path((kind, writer, number))
        con.execute(sql.read("index/insert_damage"), [kind, writer, number, place, detail])
    if change.events:
        _insert(con, "index/insert_events", pa.Table.from_batches(change.events))
    if change.places:
        _insert(con, "index/insert_places", pa.Table.from_batches(change.places))
    if any(kind == "deltas" for kind, _, _ in change.gone):
        con.execute(sql.read("index/shadow_places"), [None])
    elif change.places:
        named = pa.Table.from_batches(change.places).column("rollout_id").unique()
        con.execute(sql.read("index/shadow_places"), [sorted(named.to_pylist())])
    if change.rows:
        _insert(con, "index/insert_rows", _table(change.rows, _ROW_PLACES))
    if change.anchors is not None:
        con.execute(sql.read("index/forget_anchors"))
        for head in change.anchors:
            con.execute(sql.read("index/insert_anchor"), list(head))


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _insert(con: duckdb.DuckDBPyConnection, name: str, table: pa.Table) -> None:
    con.register("tl_new", table)
    con.execute(sql.read(name))
    con.unregister("tl_new")
