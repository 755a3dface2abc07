"""What a lake's files hold that its index does not know yet.

Segments are read from where the last intake ended. One that is gone, or became shorter than what was read of it, is
taken out of the index first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from tokenlake.errors import FormatError
from tokenlake.store.columns import Decoded, readable_columns
from tokenlake.store.delta import DeltaId, Place
from tokenlake.store.deltas import COMPACTED
from tokenlake.store.encode import EVENT_LAYOUT
from tokenlake.store.footer import has_footer
from tokenlake.store.maps import Mapped, SegmentMaps, stamp_of
from tokenlake.store.placed import placed, walk_deltas
from tokenlake.store.records import conform, row_keys
from tokenlake.store.schema import LINEAGE, PLACE, SCHEMA_VERSION
from tokenlake.store.segment import segment_numbers
from tokenlake.store.torn import without_torn
from tokenlake.store.walk import Walk, has_hole, read_batch, walk

__all__ = [
    "Change",
    "Scanned",
    "Segment",
    "compacted_places",
    "delta_writers",
    "new_deltas",
    "sealed_as",
    "segment_path",
    "still_there",
    "take_in",
]

Segment = tuple[str, str, int]
"""Folder, writer (empty for rows) and number."""
Scanned = dict[Segment, tuple[int, bool, int]]
"""How many bytes of each segment were read, whether it ended there, and the inode that was read, or its stamp then."""

_VERSION = LINEAGE.get_field_index("schema_version")
_CONTINUATION = b"\xff\xff\xff\xff"
_Look = Callable[[Mapped, int, int], Walk[Any]]
"""Reads what lies between two positions of a segment."""


@dataclass(slots=True)
class Change:
    """What one intake found."""

    events: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    """Lineage events with the writer and segment they were read from."""
    places: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    """`PLACED` deltas."""
    rows: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    """(writer, segment, byte_offset, byte_length, batch_row, *key) of each training row."""
    damaged: list[tuple[Segment, str]] = field(default_factory=list[tuple[Segment, str]])
    gone: set[Segment] = field(default_factory=set[Segment])
    scanned: Scanned = field(default_factory=dict[Segment, tuple[int, bool, int]])
    stamps: dict[str, int] = field(default_factory=dict[str, int])
    """When each lineage anchor was written."""
    anchors: list[tuple[str, int | None, str | None]] | None = None
    """(writer, event_seq, event_hash) of each anchor, when one of them changed."""
    partial: bool = False
    """Whether the intake stopped at its limit: there is more."""

    def placed(self) -> Iterator[tuple[Place, DeltaId, bytes]]:
        """Place, key and digest of each delta."""
        for batch in self.places:
            for *place, rollout_id, attempt, call_id, digest, _ in zip(*map(_list, batch.columns), strict=True):
                yield Place(**dict(zip(PLACE.names, place, strict=True))), (rollout_id, attempt, call_id), digest

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write down."""
        return not (self.scanned or self.gone or self.damaged or self.anchors is not None)


def segment_path(segment: Segment) -> str:
    """Path below the lake."""
    kind, writer, number = segment
    return f"{kind}/{writer}/{number:06d}.arrow" if writer else f"{kind}/{number:06d}.arrow"


def sealed_as(root: Path, segment: Segment) -> int | None:
    """The stamp of a sealed segment's file; None: it is gone."""
    try:
        return stamp_of((root / segment_path(segment)).stat())
    except FileNotFoundError:
        return None


def take_in(
    root: Path,
    maps: SegmentMaps,
    known: Scanned,
    stamps: dict[str, int],
    skip: frozenset[str] = frozenset(),
    limit: int | None = None,
) -> Change:
    """Read what is new, anchors and then lineage first: what they name is on disk before them.

    `stamps`: of the anchors that are known. `skip`: delta writers to leave out. `limit`: bytes after which to stop.
    Raises `FormatError` for an event of a newer schema.
    """
    intake = _Intake(root, maps, known, limit)
    intake.anchors(stamps)

    def wanted(writer: str) -> bool:
        return writer not in skip

    while True:
        # Retention tells lineage first and removes then: lineage that was read before a segment went may not say why.
        before = intake.staged(wanted)
        intake.lineage()
        if before <= intake.deltas(wanted):
            break
    intake.rows()
    return intake.change


def delta_writers(root: Path) -> list[str]:
    """Names of the writers of deltas, that of compaction included."""
    return _folders(root / "deltas")


def new_deltas(root: Path, maps: SegmentMaps, known: Scanned) -> Change:
    """What was staged since what is `known`, by every writer; committed or not."""
    intake = _Intake(root, maps, known)
    intake.deltas(lambda _: True)
    return intake.change


def compacted_places(root: Path, maps: SegmentMaps, known: Scanned) -> dict[DeltaId, Place]:
    """Where the deltas lie that compaction moved since what is `known`."""
    intake = _Intake(root, maps, known)
    intake.deltas(lambda writer: writer == COMPACTED)
    return {key: place for place, key, _ in intake.change.placed()}


def still_there(maps: SegmentMaps, segment: Segment, start: int, scanned: int) -> bool:
    """Whether what was read of a segment of deltas or events from `start` on is in it.

    A loss of power takes the last append of an unsealed one.
    """
    mapped = maps.get(segment_path(segment))
    if mapped is None or mapped.schema is None:
        return False
    if has_footer(mapped.view):
        return True
    stretch = max(start, mapped.first), min(scanned, len(mapped.view))
    if segment[0] == "deltas":
        found = walk_deltas(mapped, *stretch)
    else:
        found = without_torn(mapped, walk(mapped.view, *stretch, EVENT_LAYOUT.prefix, lambda _, __: True))
    return found.scanned == scanned and not found.damaged


class _Intake:
    def __init__(self, root: Path, maps: SegmentMaps, known: Scanned, limit: int | None = None) -> None:
        self._root = root
        self._maps = maps
        self._known = known
        self._left = limit
        self.change = Change()

    def lineage(self) -> None:
        for segment in self._growing("lineage", self._present("lineage", _folders(self._root / "lineage"))):
            found = self._walk(segment, _events)
            for batch in _event_batches([value for *_, value in found.found]):
                newest = max(batch.column(_VERSION).to_pylist(), default=0)
                if newest > SCHEMA_VERSION:
                    raise FormatError(
                        f"{self._root / segment_path(segment)} holds events of schema {newest}, this Tokenlake reads "
                        f"up to {SCHEMA_VERSION}: upgrade Tokenlake",
                        schema_version=newest,
                    )
                n = batch.num_rows
                named = batch.append_column("tl_writer", pa.array([segment[1]] * n, pa.string()))
                self.change.events.append(named.append_column("tl_segment", pa.array([segment[2]] * n, pa.int32())))

    def anchors(self, known: dict[str, int]) -> None:
        paths = {writer: self._root / "lineage" / writer / "head.json" for writer in _folders(self._root / "lineage")}
        stamps = {writer: path.stat().st_mtime_ns for writer, path in paths.items() if path.exists()}
        self.change.stamps = stamps
        if stamps != known:
            self.change.anchors = [(writer, *_head(paths[writer])) for writer in stamps]

    def staged(self, wanted: Callable[[str], bool]) -> set[Segment]:
        """The segments of deltas that are there, of the writers that are wanted."""
        return self._present("deltas", filter(wanted, delta_writers(self._root)))

    def deltas(self, wanted: Callable[[str], bool]) -> set[Segment]:
        """What is new of the writers that are wanted; returns the segments that stand for all of theirs.

        Compaction adds before it removes and no number is given twice, so two equal looks at the folders saw one state;
        when a segment went while it was read, what stands for it is read as well.
        """
        while True:
            present = self.staged(wanted)
            while present != (again := self.staged(wanted)):
                present = again
            growing = self._growing("deltas", present, wanted)
            for segment in growing:
                self.change.places += placed(segment[1], segment[2], self._walk(segment, walk_deltas))
            if all((self._root / segment_path(segment)).exists() for segment in growing):
                return present

    def rows(self) -> None:
        for segment in self._growing("rows", self._present("rows", [""])):
            self.change.rows += _placed(segment, self._walk(segment, _rows))

    def _present(self, kind: str, writers: Iterable[str]) -> set[Segment]:
        folder = self._root / kind
        return {(kind, writer, number) for writer in writers for number in segment_numbers(folder / writer)}

    def _growing(
        self, kind: str, present: set[Segment], wanted: Callable[[str], bool] = lambda _: True
    ) -> list[Segment]:
        """The segments that may hold something new; those that are gone are written down."""
        self.change.gone |= {s for s in self._known if s[0] == kind and wanted(s[1]) and s not in present}
        return sorted(s for s in present if not self._read_so_far(s)[1])

    def _read_so_far(self, segment: Segment) -> tuple[int, bool, int]:
        return self.change.scanned.get(segment) or self._known.get(segment, (0, False, 0))

    def _walk(self, segment: Segment, look: _Look) -> Walk[Any]:
        """The new messages of a segment. One that shrank or was recovered is read again from its start.

        A loss of power takes what was read but not yet synced; recovery then puts another file in its place.
        """
        mapped = self._maps.get(segment_path(segment))
        if mapped is None or mapped.schema is None:
            return Walk()
        before = self._read_so_far(segment)
        start, size = before[0], len(mapped.view)
        if start > size or (start and before[2] != mapped.inode):
            self.change.gone.add(segment)
            start = 0
        if self._left is not None and self._left <= 0:
            self.change.partial |= start < size
            return Walk()
        found = self._stretch(mapped, max(start, mapped.first), look)
        after = (found.scanned, found.ended, mapped.stamp if found.ended else mapped.inode)
        # One with no more than its head is still new: the first event of a log bounds the segments before it.
        if after != before and (found.ended or found.scanned > mapped.first):
            self.change.scanned[segment] = after
        self.change.damaged += [
            (segment, f"bytes {a} to {b} hold no readable record")
            for a, b in found.damaged
            if not _lost_with_power(segment, mapped.view, a, b)
        ]
        return found

    def _stretch(self, mapped: Mapped, start: int, look: _Look) -> Walk[Any]:
        """As much from `start` on as the limit leaves, and at least one message."""
        size = len(mapped.view)
        if self._left is None:
            return look(mapped, start, size)
        end = min(size, start + self._left)
        found = look(mapped, start, end)
        while end < size and not (found.found or found.ended):
            end = min(size, 2 * end - start)
            found = look(mapped, start, end)
        self.change.partial |= end < size and not found.ended
        self._left -= found.scanned - start
        return found


def _lost_with_power(segment: Segment, view: memoryview, start: int, end: int) -> bool:
    """Whether a record was not there yet when the power went, and one of the same append was: recovery fills its place.

    What was acknowledged of a delta's bytes is known from lineage, which names the call that misses them.
    """
    return segment[0] == "deltas" and not has_footer(view) and has_hole(view, start, end)


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def _head(path: Path) -> tuple[int | None, str | None]:
    """An anchor's event; NULLs where the file is not an anchor."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    head = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    seq, digest = head.get("event_seq"), head.get("event_hash")
    return (seq if isinstance(seq, int) else None, digest if isinstance(digest, str) else None)


def _placed(segment: Segment, found: Walk[Any]) -> Iterable[tuple[Any, ...]]:
    for offset, meta, body, keys in found.found:
        for row, key in enumerate(keys):
            yield (segment[1], segment[2], offset, meta + body, row, *key)


def _list(column: pa.Array) -> list[Any]:
    return column.to_pylist()


def _events(mapped: Mapped, start: int, end: int) -> Walk[Any]:
    return without_torn(mapped, walk(mapped.view, start, end, EVENT_LAYOUT.prefix, partial(_event, mapped)))


def _rows(mapped: Mapped, start: int, end: int) -> Walk[Any]:
    return walk(mapped.view, start, end, _CONTINUATION, partial(_row, mapped))


def _row(mapped: Mapped, start: int, end: int) -> Any:
    return None if mapped.schema is None else row_keys(mapped.view[start:end], mapped.schema)


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
        if not by_hand:
            yield from run
            continue
        for columns, _ in readable_columns(EVENT_LAYOUT, list(run)):
            if columns is not None:
                yield pa.RecordBatch.from_arrays(columns, schema=LINEAGE)
