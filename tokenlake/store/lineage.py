"""The lineage log: what the gate decided, one chained event after another.

`append` returns when its events are durable. Each event carries `event_hash = H(prev_hash, event)`. A log that was cut
at a batch boundary reads clean, so the head of the chain is also anchored in `head.json`: a log shorter than its
anchor is loss, and `lineage_loss` says so.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tokenlake.clock import now_us
from tokenlake.errors import DamagedLake, FormatError, InvalidInput, StorageFailed, TokenlakeError
from tokenlake.store.commit import GroupCommit, Ticket
from tokenlake.store.deltas import check_writer_name
from tokenlake.store.digest import ZERO_HASH, event_hash
from tokenlake.store.encode import EVENT_LAYOUT, encode_events, event_columns
from tokenlake.store.flatbuffer import message_lengths
from tokenlake.store.footer import blocks_of
from tokenlake.store.lock import DirectoryLock, check_process
from tokenlake.store.maps import Mapped, SegmentMaps
from tokenlake.store.records import event_rows
from tokenlake.store.recover import recover_directory
from tokenlake.store.schema import LINEAGE, SCHEMA_VERSION
from tokenlake.store.segment import (
    SegmentWriter,
    make_directory,
    segment_numbers,
    sync_directory,
    write_all,
)
from tokenlake.store.space import FreeSpace
from tokenlake.store.torn import is_torn, sound, without_torn
from tokenlake.store.walk import walk

__all__ = ["LINEAGE_MAX_BYTES", "LineageLog", "events_end", "lineage_loss", "read_events"]

LINEAGE_MAX_BYTES = 16 << 20
"""Of a segment: a kill leaves one that was not sealed, which the index takes in anew, in about a second."""

_Events = list[dict[str, Any]]
_Outcome = _Events | TokenlakeError


def read_events(root: Path, writer: str, maps: SegmentMaps | None = None) -> Iterator[dict[str, Any]]:
    """Every readable event of one writer, in order, non-NULL columns only; times are microseconds since the epoch.

    Raises `FormatError` for an event of a newer schema.
    """
    maps = maps or SegmentMaps(root)
    for segment, end in _stretches(root, writer, maps):
        name = f"lineage/{writer}/{segment:06d}.arrow"
        mapped = maps.get(name)
        if mapped is None or mapped.schema is None:
            continue
        view, schema = mapped.view, mapped.schema
        found = walk(
            view, mapped.first, len(view), EVENT_LAYOUT.prefix, lambda a, b, v=view, s=schema: event_rows(v, a, b, s)
        )
        for _, _, _, events in without_torn(mapped, found).found:
            for event in events:
                check_event_version(event["schema_version"], name)
                if end is None or event["event_seq"] < end:
                    yield event


def events_end(log: Mapped) -> int:
    """Where the last event ends in a segment: zeros that it is written ahead by may follow."""
    return walk(log.view, log.first, len(log.view), EVENT_LAYOUT.prefix, lambda _, __: True).scanned


def _stretches(root: Path, writer: str, maps: SegmentMaps) -> list[tuple[int, int | None]]:
    """Each segment, and the event with which a later one begins.

    What an earlier segment holds from there on was refused: its bytes were written, but the sync failed.
    """
    stretches: list[tuple[int, int | None]] = []
    end: int | None = None
    for segment in reversed(segment_numbers(root / "lineage" / writer)):
        stretches.append((segment, end))
        mapped = maps.get(f"lineage/{writer}/{segment:06d}.arrow")
        if mapped is None or mapped.schema is None:
            continue
        lengths = message_lengths(mapped.view, mapped.first, len(mapped.view))
        upto = mapped.first + sum(lengths or ())
        events = lengths and event_rows(mapped.view, mapped.first, upto, mapped.schema)
        if events and not is_torn(mapped, mapped.first, upto):
            first: int = events[0]["event_seq"]
            end = first if end is None else min(first, end)
    return stretches[::-1]


def _last_event(root: Path, writer: str) -> dict[str, Any] | None:
    """The last readable event, without reading those before it; every segment is sealed."""
    maps = SegmentMaps(root)
    for segment in reversed(segment_numbers(root / "lineage" / writer)):
        name = f"lineage/{writer}/{segment:06d}.arrow"
        mapped = maps.get(name)
        if mapped is None or mapped.schema is None:
            continue
        for offset, meta, body in reversed(blocks_of(mapped.view)):
            events = event_rows(mapped.view, offset, offset + meta + body, mapped.schema)
            if events:
                check_event_version(events[-1]["schema_version"], name)
                return events[-1]
    return None


def check_event_version(version: int, name: str) -> None:
    """Refuse an event of a schema that this version does not know."""
    if version > SCHEMA_VERSION:
        raise FormatError(
            f"{name} holds events of schema {version}, this Tokenlake reads up to {SCHEMA_VERSION}: upgrade Tokenlake",
            schema_version=version,
        )


def anchors(root: Path) -> dict[str, dict[str, Any]]:
    """The anchored head of each lineage writer; empty where the file is no anchor."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((root / "lineage").glob("*/head.json")):
        try:
            said = json.loads(path.read_bytes())
        except ValueError:
            said = None
        head = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        found[path.parent.name] = head if isinstance(head.get("event_seq"), int) else {}
    return found


def lineage_loss(root: Path) -> list[str]:
    """What is missing from the lineage logs against their anchors and chains; empty means nothing."""
    findings: list[str] = []
    held = anchors(root)
    writers = {path.name for path in (root / "lineage").glob("*") if path.is_dir()} | set(held)
    for writer in sorted(writers):
        last: dict[str, Any] = {"event_seq": -1, "event_hash": ZERO_HASH}
        at_anchor = None
        anchor = held.get(writer)
        for event in read_events(root, writer):
            if event["event_seq"] != last["event_seq"] + 1 or event["prev_hash"] != last["event_hash"]:
                findings.append(f"lineage/{writer}: event {event['event_seq']} does not follow {last['event_seq']}")
            last = event
            if anchor is not None and event["event_seq"] == anchor.get("event_seq"):
                at_anchor = event["event_hash"].hex()
        if anchor is not None and at_anchor is None:
            findings.append(
                f"lineage/{writer} ends at event {last['event_seq']}, but event {anchor.get('event_seq')} was anchored"
            )
        elif anchor is not None and at_anchor != anchor.get("event_hash"):
            findings.append(f"lineage/{writer}: event {anchor.get('event_seq')} is not the one that was anchored")
    return findings


class LineageLog:
    """Appends events under `LAKE/lineage/<writer>/`. Thread-safe; used only in the process that made it.

    `opening` is an event that goes before the first one that is written, in the same sync: who opens a lake and decides
    nothing leaves no trace. Raises `LakeLocked` while another process writes under the same name, `DamagedLake` for a
    log shorter than its anchor.
    """

    def __init__(
        self,
        root: Path,
        writer: str,
        *,
        segment_max_bytes: int = LINEAGE_MAX_BYTES,
        opening: Mapping[str, Any] | None = None,
        space: FreeSpace | None = None,
    ) -> None:
        self.writer = check_writer_name(writer)
        self._pid = os.getpid()
        self._root = root
        self._space = space or FreeSpace(root)
        self._what = f"lineage log {writer} of lake {root}"
        self._anchoring = threading.Lock()
        self._directory = root / "lineage" / writer
        make_directory(self._directory)
        self._lock = DirectoryLock(self._directory / "writer.lock", self._what)
        try:
            recover_directory(self._directory, LINEAGE, EVENT_LAYOUT.prefix, event_rows, sound)
            self._end = self._last()
        except (TokenlakeError, OSError):
            self._lock.release()
            raise
        self._segments = SegmentWriter(self._directory, LINEAGE, max_bytes=segment_max_bytes)
        self._commit: GroupCommit[list[_Outcome], list[_Outcome]] = GroupCommit(self._flush)
        self._opening = None if opening is None else event_columns(opening)
        self._turn = threading.Lock()
        self._closed = False
        self._anchor_once()

    def append(self, event_type: str, **columns: Any) -> dict[str, Any]:
        """Write one event durably and return it with everything that was filled in.

        Raises `InvalidInput` for an unknown column or a value that does not fit, `StorageFailed` when the disk refuses.
        """
        return self.append_many([{"event_type": event_type, **columns}])[0]

    def append_many(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write events durably, all or none, and return them as `append` does."""
        (outcome,) = self.append_each([events])
        if isinstance(outcome, TokenlakeError):
            raise outcome
        return outcome

    def append_each(
        self, batches: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[list[dict[str, Any]] | TokenlakeError]:
        """Write batches of events with one sync: each all or none, and for each its events, or why they are not there.

        Raises what concerns all of them.
        """
        if self._closed:
            raise TokenlakeError(f"{self._what} is closed: open it again")
        check_process(self._pid, self._what)
        self._space.for_events()
        return self._commit.submit([_known(events) for events in batches])

    def events(self) -> Iterator[dict[str, Any]]:
        """Every durable event of this log in order, for a fold; non-NULL columns only, times in microseconds."""
        return read_events(self._root, self.writer)

    @property
    def head(self) -> int:
        """Number of the last durable event; -1: there is none."""
        return self._end[0]

    def check(self) -> None:
        """Raise `StorageFailed` where another process may write this log by now."""
        lost = self._lock.lost()
        if lost is not None:
            raise lost

    def anchor(self) -> None:
        """Write down the head of the chain, so that a log cut before it is seen to be short."""
        check_process(self._pid, self._what)
        self.check()
        with self._anchoring:
            self._anchor()

    def _anchor(self) -> None:
        seq, _, last_hash = self._end
        segment, length = self._segments.position
        head = {"event_seq": seq, "event_hash": last_hash.hex(), "segment": segment, "length": length}
        temporary = self._directory / "head.tmp"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                write_all(fd, json.dumps(head).encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(self._directory / "head.json")
            sync_directory(self._directory)
        except OSError as error:
            raise StorageFailed(f"{self._directory / 'head.json'} could not be written: {error}") from error

    def close(self) -> None:
        """Seal the segment, anchor the head and let the name go. Idempotent."""
        if self._closed:
            return
        check_process(self._pid, self._what)
        with self._turn:
            self._closed = True
            try:
                self._segments.seal()
                if self._end[0] >= 0:
                    self.anchor()
            finally:
                self._lock.release()

    def _anchor_once(self) -> None:
        """Anchor a log that a crash left without: one that was opened again and has none has lost it."""
        if self._end[0] < 0 or (self._directory / "head.json").exists():
            return
        try:
            self.anchor()
        except StorageFailed:
            self._lock.release()
            raise

    def _last(self) -> tuple[int, int, bytes]:
        last = _last_event(self._root, self.writer)
        seq, at, head = (last["event_seq"], last["at"], last["event_hash"]) if last else (-1, 0, ZERO_HASH)
        anchor = anchors(self._root).get(self.writer)
        if anchor is not None and anchor.get("event_seq", 0) > seq:
            raise DamagedLake(
                f"{self._what} ends at event {seq}, but event {anchor.get('event_seq')} was acknowledged: restore the "
                f"missing segments of {self._directory} (`tokenlake audit` reads the lake as it is)",
                findings=lineage_loss(self._root),
            )
        return seq, at, head

    def _flush(self, tickets: list[Ticket[list[_Outcome], list[_Outcome]]]) -> None:
        with self._turn:
            self._flush_in_turn(tickets)

    def _flush_in_turn(self, tickets: list[Ticket[list[_Outcome], list[_Outcome]]]) -> None:
        lost = self._lock.lost()
        if lost is not None:
            for ticket in tickets:
                ticket.error = lost
            return
        batches = [batch for ticket in tickets for batch in ticket.item]
        if self._opening is None:
            outcomes = self._write(batches)
        else:
            first, *outcomes = self._write([[self._opening], *batches])
            if not isinstance(first, TokenlakeError):
                self._opening = None
        given = iter(outcomes)
        for ticket in tickets:
            ticket.result = list(islice(given, len(ticket.item)))

    def _write(self, batches: list[_Outcome]) -> list[_Outcome]:
        """What becomes of each batch; one that is refused takes no part.

        All others are one message, of which a loss of power leaves the whole or nothing that counts.
        """
        given = [event for batch in batches if isinstance(batch, list) for event in batch]
        if not given:
            return batches
        try:
            events, after = self._chain(given)
            message = encode_events(events)
        except InvalidInput as error:
            if len(batches) == 1:
                return [error]
            judged = [self._refusal(batch) or batch for batch in batches]
            return self._write(judged) if judged != batches else [self._write([batch])[0] for batch in batches]
        (done,) = self._segments.append([(message, 0)])
        if isinstance(done, StorageFailed):
            return [done if batch and isinstance(batch, list) else batch for batch in batches]
        self._end = after
        written = iter(events)
        return [list(islice(written, len(batch))) if isinstance(batch, list) else batch for batch in batches]

    def _refusal(self, batch: _Outcome) -> InvalidInput | None:
        """Why a batch cannot be written."""
        try:
            if isinstance(batch, list) and batch:
                encode_events(self._chain(batch)[0])
        except InvalidInput as error:
            return error
        return None

    def _chain(self, given: _Events) -> tuple[_Events, tuple[int, int, bytes]]:
        """Fill in what the log itself knows."""
        seq, at, head = self._end
        events: _Events = []
        for columns in given:
            seq += 1
            at = max(at + 1, now_us())
            event = {
                **columns,
                "schema_version": SCHEMA_VERSION,
                "event_seq": seq,
                "at": at,
                "event_writer": self.writer,
            }
            event["prev_hash"] = head
            head = event_hash(head, event)
            event["event_hash"] = head
            events.append(event)
        return events, (seq, at, head)


def _known(events: Sequence[Mapping[str, Any]]) -> _Outcome:
    """Events with the columns that they fill, or why they are none."""
    try:
        return [event_columns(event) for event in events]
    except InvalidInput as error:
        return error
