"""Writing decisions down: an event is durable before the state it changes is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenlake.api.control import Control
from tokenlake.errors import Conflict

__all__ = ["Ledger", "LineageWriter"]


class LineageWriter(Protocol):
    """What is needed of a lake's lineage log: durable when it returns. Thread-safe."""

    def append_many(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write events durably, all or none, and return them with everything that was filled in."""
        ...


class Ledger:
    """Appends events in a thread, then folds them on the event loop."""

    def __init__(self, lineage: LineageWriter, control: Control) -> None:
        self._lineage = lineage
        self._control = control
        self._committing: set[tuple[str, int, str]] = set()

    async def commit(self, event: dict[str, Any]) -> None:
        """Append the one `call_committed` of a call; the same record again, from a worker that repeats itself, is none.

        Raises `Conflict` for a call that is committed with another record, or just being committed; else as `append`.
        """
        name = (event["rollout_id"], event["attempt"], event["call_id"])
        known = self._control.call(*name)
        if known is not None and known.digest == event["digest"]:
            return
        if known is not None or name in self._committing:
            raise Conflict(f"call {name[2]} of {name[0]} has a record already", call_id=name[2])
        self._committing.add(name)
        try:
            await self.append({**event, "event_type": "call_committed"})
        finally:
            self._committing.discard(name)

    async def append(self, *events: dict[str, Any]) -> None:
        """Append events as one atomic batch; raises `StorageFailed` when they are not durable.

        Once begun it is not undone by cancellation: what is durable is also folded.
        """
        await asyncio.shield(asyncio.ensure_future(self._append(events)))

    async def _append(self, events: Sequence[dict[str, Any]]) -> None:
        for event in await asyncio.to_thread(self._lineage.append_many, events):
            self._control.apply(event)
