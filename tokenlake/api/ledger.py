"""Writing decisions down: an event is durable before the state it changes is, and a delta before its event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol

from tokenlake.api.control import Control, Event
from tokenlake.api.metrics import Metrics
from tokenlake.api.threads import Threads, tried
from tokenlake.errors import Conflict, TokenlakeError
from tokenlake.ingest.capture import refusal
from tokenlake.ingest.coords import failure
from tokenlake.store.delta import Delta, Place

__all__ = ["DeltaWriter", "Ledger", "LineageWriter", "Record"]

_Written = list[dict[str, Any]]
_Name = tuple[str, int, str]


class LineageWriter(Protocol):
    """What is needed of a lake's lineage log: durable when it returns. Thread-safe."""

    def append_each(self, batches: Sequence[Sequence[Event]]) -> list[_Written | TokenlakeError]:
        """Write batches of events durably, each all or none.

        Returns for each its events with everything that was filled in, or why they are not there.
        """
        ...


class DeltaWriter(Protocol):
    """What is needed of a lake's writer of deltas: durable when it returns. Thread-safe."""

    def stage_each(self, deltas: Sequence[Delta]) -> list[Place | TokenlakeError]:
        """Write deltas; for each, where it lies, or why it is not there."""
        ...


class Record(Protocol):
    """A call that is staged before it is committed. The ledger's thread asks for both, once."""

    @property
    def name(self) -> _Name:
        """Rollout, attempt and call."""
        ...

    def delta(self) -> Delta:
        """What is staged; raises `CaptureFailed` where nothing can be."""
        ...

    def committed(self, place: Place) -> Event | None:
        """The event of a delta that is durable there; None: it is not to be committed any more."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """What somebody waits for: events, or a record that will give one."""

    told: asyncio.Future[_Written]
    events: Sequence[Event] = ()
    record: Record | None = None


class Ledger:
    """Writes in a thread of its own, then folds on the event loop.

    What comes while the thread writes is written next, together: a sync for all deltas, one for all events, and one way
    to the thread and back.
    """

    def __init__(self, lineage: LineageWriter, deltas: DeltaWriter, control: Control, metrics: Metrics) -> None:
        self._lineage = lineage
        self._deltas = deltas
        self._control = control
        self._metrics = metrics
        self._committing: set[_Name] = set()
        self._thread = Threads(1, "tokenlake-ledger")
        self._writing = False
        self._waiting: list[_Entry] = []

    async def capture(self, record: Record) -> Event | None:
        """Stage and commit a call; its event, or None where it was not to be committed any more.

        Raises `CaptureFailed` for a delta that is not there, `Conflict` as `commit` does; else as `append`.
        """
        if self._control.call(*record.name) is not None:
            raise _recorded(record.name)
        with self._alone(record.name):
            written = await self._durable(_Entry(self._told(), record=record))
        return written[0] if written else None

    async def commit(self, event: Event) -> Event:
        """Append the one `call_committed` of a call; the same record again, from a worker that repeats itself, is none.

        Raises `Conflict` for a call that is committed with another record, or just being committed; else as `append`.
        """
        name = (event["rollout_id"], event["attempt"], event["call_id"])
        known = self._control.call(*name)
        if known is not None and known.digest == event["digest"]:
            return event
        if known is not None:
            raise _recorded(name)
        with self._alone(name):
            (written,) = await self._durable(_Entry(self._told(), [_committed(event)]))
        return written

    async def append(self, *events: Event) -> None:
        """Append events as one atomic batch; raises `StorageFailed` when they are not durable.

        Once begun it is not undone by cancellation: what is durable is also folded.
        """
        await self._durable(_Entry(self._told(), events))

    @staticmethod
    def _told() -> asyncio.Future[_Written]:
        return asyncio.get_running_loop().create_future()

    @contextmanager
    def _alone(self, name: _Name) -> Generator[None]:
        if name in self._committing:
            raise _recorded(name)
        self._committing.add(name)
        try:
            yield
        finally:
            self._committing.discard(name)

    async def _durable(self, entry: _Entry) -> _Written:
        self._waiting.append(entry)
        if not self._writing:
            self._write()
        return await entry.told

    def _write(self) -> None:
        """Hand everything that waits to the thread."""
        entries, self._waiting = self._waiting, []
        self._writing = bool(entries)
        if entries:
            self._thread.submit(partial(self._store, entries), partial(self._stored, entries))

    def _store(self, entries: Sequence[_Entry]) -> list[_Written | Exception]:
        """In the thread: what each entry came to. What goes wrong with one is no part of the others."""
        batches: list[Sequence[Event] | Exception] = [entry.events for entry in entries]
        records = [(at, entry.record) for at, entry in enumerate(entries) if entry.record is not None]
        built = [(at, record, tried(record.delta)) for at, record in records]
        deltas = [delta for *_, delta in built if isinstance(delta, Delta)]
        places = iter(self._staged(deltas))
        for at, record, delta in built:
            place = delta if isinstance(delta, Exception) else next(places)
            event = place if isinstance(place, Exception) else tried(record.committed, place)
            batches[at] = event if isinstance(event, Exception) else [] if event is None else [_committed(event)]
        sound = [batch for batch in batches if not isinstance(batch, Exception)]
        written = tried(self._lineage.append_each, sound)
        outcomes = repeat(written) if isinstance(written, Exception) else iter(written)
        return [batch if isinstance(batch, Exception) else next(outcomes) for batch in batches]

    def _staged(self, deltas: Sequence[Delta]) -> Sequence[Place | Exception]:
        """Where each delta lies, or the failed capture that it is."""
        if not deltas:
            return ()
        began = time.monotonic()
        places = tried(self._deltas.stage_each, deltas)
        seconds = time.monotonic() - began
        for _ in deltas:
            self._metrics.stage.observe(seconds)
        each = [places] * len(deltas) if isinstance(places, Exception) else places
        return [failure(refusal(place)) if isinstance(place, TokenlakeError | OSError) else place for place in each]

    def _stored(self, entries: Sequence[_Entry], outcomes: Sequence[_Written | Exception] | Exception) -> None:
        self._write()
        each = [outcomes] * len(entries) if isinstance(outcomes, Exception) else outcomes
        for entry, outcome in zip(entries, each, strict=True):
            folded = self._folded(outcome)
            if entry.told.done():
                continue
            if isinstance(folded, Exception):
                entry.told.set_exception(folded)
            else:
                entry.told.set_result(folded)

    def _folded(self, outcome: _Written | Exception) -> _Written | Exception:
        """Fold what is durable; what went wrong, for whoever waits."""
        return outcome if isinstance(outcome, Exception) else tried(self._fold, outcome)

    def _fold(self, written: _Written) -> _Written:
        for event in written:
            self._control.apply(event)
        return written


def _committed(event: Event) -> Event:
    return {**event, "event_type": "call_committed"}


def _recorded(name: _Name) -> Conflict:
    return Conflict(f"call {name[2]} of {name[0]} has a record already", call_id=name[2])
