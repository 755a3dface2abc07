"""Writing decisions down: an event is durable before the state it changes is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from tokenlake.api.control import Control
from tokenlake.errors import Conflict, TokenlakeError

__all__ = ["Ledger", "LineageWriter"]

_Outcomes = list[list[dict[str, Any]] | TokenlakeError]
_Waiting = tuple[Sequence[Mapping[str, Any]], asyncio.Future[None]]


class LineageWriter(Protocol):
    """What is needed of a lake's lineage log: durable when it returns. Thread-safe."""

    def append_each(self, batches: Sequence[Sequence[Mapping[str, Any]]]) -> _Outcomes:
        """Write batches of events durably, each all or none.

        Returns for each its events with everything that was filled in, or why they are not there.
        """
        ...


class Ledger:
    """Appends events in a thread of its own, then folds them on the event loop.

    What comes while the thread writes is written next, together: one sync, and one way to the thread and back.
    """

    def __init__(self, lineage: LineageWriter, control: Control) -> None:
        self._lineage = lineage
        self._control = control
        self._committing: set[tuple[str, int, str]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-ledger")
        self._writing = False
        self._waiting: list[_Waiting] = []

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
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        self._waiting.append((events, told))
        if not self._writing:
            self._write(loop)
        await told

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand everything that waits to the thread."""
        batches, self._waiting = self._waiting, []
        self._writing = bool(batches)
        if not batches:
            return

        def written(done: Future[_Outcomes]) -> None:
            # A loop that is closed has nobody left who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._written, loop, batches, done)

        self._thread.submit(self._lineage.append_each, [events for events, _ in batches]).add_done_callback(written)

    def _written(self, loop: asyncio.AbstractEventLoop, batches: Sequence[_Waiting], done: Future[_Outcomes]) -> None:
        self._write(loop)
        failed = done.exception()
        outcomes = [failed] * len(batches) if failed is not None else done.result()
        for (_, told), outcome in zip(batches, outcomes, strict=True):
            wrong = self._fold(outcome)
            if told.done():
                continue
            if wrong is None:
                told.set_result(None)
            else:
                told.set_exception(wrong)

    def _fold(self, outcome: Sequence[dict[str, Any]] | BaseException) -> BaseException | None:
        """Fold what is durable; what went wrong, for whoever waits."""
        if isinstance(outcome, BaseException):
            return outcome
        try:
            for event in outcome:
                self._control.apply(event)
        except Exception as error:  # noqa: BLE001 - who appended it is told, and the others have no part in it
            return error
        return None
