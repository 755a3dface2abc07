"""The writer of token deltas: a record is durable when `stage` returns.

One writer owns one folder of segments, under its own lock, in any process. Concurrent callers share a sync.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import ConfigError, Conflict, InvalidInput, NotFound, StorageFailed, TokenlakeError, TooLarge
from tokenlake.store.commit import GroupCommit, Ticket
from tokenlake.store.delta import Delta, Place, same_content
from tokenlake.store.encode import DELTA_LAYOUT, encode_delta
from tokenlake.store.lock import DirectoryLock, check_process
from tokenlake.store.maps import Mapped, SegmentMaps
from tokenlake.store.records import DeltaKey, delta_at, delta_keys
from tokenlake.store.recover import recover_directory
from tokenlake.store.schema import DELTA
from tokenlake.store.segment import (
    SEGMENT_MAX_BYTES,
    SEGMENT_MAX_ELEMENTS,
    Message,
    SegmentWriter,
    make_directory,
    segment_numbers,
)
from tokenlake.store.space import FreeSpace
from tokenlake.store.walk import walk

__all__ = ["COMPACTED", "DeltaWriter", "check_writer_name", "read_places", "segment_name"]

COMPACTED = "_compacted"
"""The folder of segments that compaction wrote; no writer can have this name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_MAX_MESSAGE = 2**31 - 1
_Known = tuple[str, int, int, int, int]
"""Folder, segment, offset, length and row of a record."""


@dataclasses.dataclass(slots=True, eq=False)
class _Wanted:
    """One delta on its way."""

    delta: Delta
    message: Message
    outcome: Place | TokenlakeError | None = None


def check_writer_name(name: str) -> str:
    """Return the name, or raise `ConfigError`: it becomes a folder."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"writer name {name!r} is not valid: 1 to 100 of A-Z a-z 0-9 _ -, a letter or digit first")
    return name


def segment_name(place: Place) -> str:
    """Path of a place's segment below the lake."""
    return f"deltas/{place.writer}/{place.segment:06d}.arrow"


def read_places(maps: SegmentMaps, places: Iterable[Place]) -> list[Delta]:
    """The records at places; each segment is looked at once. Raises `NotFound` for one where nothing readable is."""
    opened: dict[tuple[str, int], Mapped | None] = {}
    found: list[Delta] = []
    for place in places:
        segment, start = (place.writer, place.segment), place.byte_offset
        end = start + place.byte_length
        mapped = opened.get(segment)
        if mapped is None or end > len(mapped.view):
            mapped = opened[segment] = maps.get(segment_name(place), end)
        delta = None
        if mapped is not None and mapped.schema is not None and end <= len(mapped.view):
            delta = delta_at(mapped.view, start, end, place.batch_row, mapped.schema)
        if delta is None:
            raise NotFound(
                f"no readable delta at byte {start} of {segment_name(place)}: run `tokenlake audit`",
                **dataclasses.asdict(place),
            )
        found.append(delta)
    return found


class DeltaWriter:
    """Appends deltas to `LAKE/deltas/<name>/`. Thread-safe; used only in the process that made it.

    `remember`: how many of the latest keys are held in memory to know a repeated `stage` by; None holds all of them,
    also those that earlier processes wrote. Whoever mints a key for every call and stages it once needs few.

    Raises `LakeLocked` while another process writes under the same name.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        remember: int | None = None,
        space: FreeSpace | None = None,
        segment_max_bytes: int = SEGMENT_MAX_BYTES,
        segment_max_elements: int = SEGMENT_MAX_ELEMENTS,
    ) -> None:
        self.name = check_writer_name(name)
        self._pid = os.getpid()
        self._root = root
        self._space = space or FreeSpace(root)
        self._what = f"writer {name} of lake {root}"
        directory = root / "deltas" / name
        self._maps = SegmentMaps(root, outlive=False)
        try:
            make_directory(directory)
            self._lock = DirectoryLock(directory / "writer.lock", self._what)
            try:
                recover_directory(directory, DELTA, DELTA_LAYOUT.prefix, delta_keys)
            except (OSError, TokenlakeError):
                self._lock.release()
                raise
        except OSError as error:
            raise StorageFailed(f"{self._what} could not start: {error}: check the disk, then try again") from error
        self._places: OrderedDict[int, _Known] = OrderedDict()
        self._remember = remember
        self._learned: set[int] = set()
        if remember is None:
            self._load(name)
            self._learn_moved()
        self._segments = SegmentWriter(directory, DELTA, max_bytes=segment_max_bytes, max_elements=segment_max_elements)
        self._commit: GroupCommit[list[_Wanted], list[_Wanted]] = GroupCommit(self._flush)
        self._turn = threading.Lock()
        self._closed = False

    @property
    def knows_all(self) -> bool:
        """Whether `find` knows every record of this writer."""
        return self._remember is None

    def stage(self, delta: Delta) -> Place:
        """Write one record durably and return where it lies.

        The same key with the same digest again returns the first place. Raises `Conflict` for the same key with another
        digest, `StorageFailed` when the disk refuses (nothing is acknowledged, later calls work again), `InvalidInput`
        for values that do not fit and `TooLarge` beyond 2 GiB.
        """
        (outcome,) = self.stage_each([delta])
        if isinstance(outcome, TokenlakeError):
            raise outcome
        return outcome

    def stage_each(self, deltas: Sequence[Delta]) -> list[Place | TokenlakeError]:
        """Write records with one sync; for each, what `stage` returns or raises. Raises what concerns all of them."""
        self._check()
        self._space.for_deltas()
        outcomes = [_wanted(delta) for delta in deltas]
        wanted = [each for each in outcomes if isinstance(each, _Wanted)]
        if wanted:
            self._commit.submit(wanted)
        return [each if isinstance(each, TokenlakeError) else _settled(each) for each in outcomes]

    def read(self, place: Place) -> Delta:
        """The record at a place of any writer of this lake. Raises `NotFound`."""
        return self.read_all([place])[0]

    def read_all(self, places: Iterable[Place]) -> list[Delta]:
        """The records at several places. Raises `NotFound`."""
        return read_places(self._maps, places)

    def find(self, rollout_id: str, attempt: int, call_id: str) -> tuple[Place, bytes] | None:
        """(place, digest) of a record of this writer, or None."""
        key = hash((rollout_id, attempt, call_id))
        known = self._places.get(key)
        if known is None:
            return None
        place = self._place(known)
        if not (self._root / segment_name(place)).exists():
            self._learn_moved()
            place = self._place(self._places.get(key, known))
        try:
            found = self.read(place)
        except NotFound:
            return None
        same = (found.rollout_id, found.attempt, found.call_id) == (rollout_id, attempt, call_id)
        return (place, found.digest) if same else None

    def roll(self) -> None:
        """Seal the segment that is written to, so that compaction may take it; the next record begins a new one."""
        self._check()
        with self._turn:
            self._segments.seal()

    def close(self) -> None:
        """Seal the segment and let the name go. Idempotent."""
        if self._closed:
            return
        check_process(self._pid, self._what)
        with self._turn:
            self._closed = True
            self._segments.seal()
            self._maps.clear()
            self._lock.release()

    def _check(self) -> None:
        if self._closed:
            raise TokenlakeError(f"{self._what} is closed: open it again")
        check_process(self._pid, self._what)

    def _place(self, known: _Known) -> Place:
        writer, segment, offset, length, row = known
        return Place(writer=writer, segment=segment, byte_offset=offset, byte_length=length, batch_row=row)

    def _load(self, folder: str, known: Container[int] = ()) -> list[int]:
        """Learn which keys are on disk in the segments that are not `known`; of copies, the last one counts."""
        numbers = [number for number in segment_numbers(self._root / "deltas" / folder) if number not in known]
        for segment in numbers:
            mapped = self._maps.get(f"deltas/{folder}/{segment:06d}.arrow")
            if mapped is None or mapped.schema is None:
                continue
            view, schema = mapped.view, mapped.schema
            read = partial(_keys, view, schema)
            found = walk(view, mapped.first, len(view), DELTA_LAYOUT.prefix, read)
            for offset, meta, body, keys in found.found:
                for row, key in enumerate(keys):
                    if self._remember is None or hash(key[:3]) in self._places:
                        self._places[hash(key[:3])] = (folder, segment, offset, meta + body, row)
        self._maps.clear()
        return numbers

    def _learn_moved(self) -> None:
        """Learn what compaction moved."""
        self._learned.update(self._load(COMPACTED, self._learned))

    def _flush(self, tickets: list[Ticket[list[_Wanted], list[_Wanted]]]) -> None:
        with self._turn:
            self._stage_all([wanted for ticket in tickets for wanted in ticket.item])
        for ticket in tickets:
            ticket.result = ticket.item

    def _stage_all(self, all_wanted: list[_Wanted]) -> None:
        fresh: dict[int, _Wanted] = {}
        twins: list[tuple[_Wanted, _Wanted]] = []
        for wanted in all_wanted:
            delta = wanted.delta
            key = hash((delta.rollout_id, delta.attempt, delta.call_id))
            if key in self._places and self._settle(wanted):
                continue
            other = fresh.setdefault(key, wanted)
            if other is not wanted:
                twins.append((wanted, other))
        self._append(fresh)
        for wanted, other in twins:
            delta, first = wanted.delta, other.delta
            if _same_key(delta, first) and delta.digest == first.digest:
                wanted.outcome = other.outcome
            elif _same_key(delta, first):
                wanted.outcome = _conflict(delta)
            else:
                self._append({hash((delta.rollout_id, delta.attempt, delta.call_id)): wanted})

    def _settle(self, wanted: _Wanted) -> bool:
        """Answer from what is on disk; False where it has to be written."""
        delta = wanted.delta
        found = self.find(delta.rollout_id, delta.attempt, delta.call_id)
        if found is None:
            return False
        place, digest = found
        if digest != delta.digest:
            wanted.outcome = _conflict(delta)
            return True
        if not same_content(self.read(place), delta):
            return False
        wanted.outcome = place
        return True

    def _append(self, fresh: dict[int, _Wanted]) -> None:
        lost = self._lock.lost()
        if lost is not None:
            for wanted in fresh.values():
                wanted.outcome = lost
            return
        done = self._segments.append([wanted.message for wanted in fresh.values()])
        for (key, wanted), outcome in zip(fresh.items(), done, strict=True):
            if isinstance(outcome, StorageFailed):
                wanted.outcome = outcome
                continue
            known = (self.name, *outcome, len(wanted.message[0]), 0)
            self._places[key] = known
            wanted.outcome = self._place(known)
        while self._remember is not None and len(self._places) > self._remember:
            self._places.popitem(last=False)


def _wanted(delta: Delta) -> _Wanted | TokenlakeError:
    """A delta with its message, or why it cannot be one."""
    if not delta.rollout_id or not delta.call_id or "\0" in delta.rollout_id or "\0" in delta.call_id:
        return InvalidInput(f"call {delta.call_id!r} of rollout {delta.rollout_id!r} has a name that is no key")
    try:
        message = encode_delta(delta)
    except InvalidInput as error:
        return error
    if len(message) > _MAX_MESSAGE:
        return TooLarge(f"the delta of call {delta.call_id} takes {len(message)} bytes; the limit is {_MAX_MESSAGE}")
    mask = delta.token_mask
    return _Wanted(delta, (message, 0 if mask is None else len(mask)))


def _settled(wanted: _Wanted) -> Place | TokenlakeError:
    return wanted.outcome or StorageFailed("the write was interrupted before it was acknowledged: try again")


def _keys(view: memoryview, schema: pa.Schema, start: int, end: int) -> list[DeltaKey] | None:
    return delta_keys(view, start, end, schema)


def _same_key(one: Delta, other: Delta) -> bool:
    return (one.rollout_id, one.attempt, one.call_id) == (other.rollout_id, other.attempt, other.call_id)


def _conflict(delta: Delta) -> Conflict:
    return Conflict(
        f"call {delta.call_id} of rollout {delta.rollout_id} attempt {delta.attempt} is staged with other content: "
        "stage a changed answer under a new call id",
        rollout_id=delta.rollout_id,
        attempt=delta.attempt,
        call_id=delta.call_id,
    )
