"""NeMo-Gym's `TokenSink`, `TokenSource` and lineage resolver over a lake: put where its files of token entries were.

Each may live in a process of its own: the lake's segments are what they share. Nothing is locked against writing when a
rollout is frozen; what is written later changes the version, so that a snapshot that misses it cannot be retired.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

from nemo_gym.token_id_capture.lineage import IncrementalLineageStore
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry

from tokenlake.errors import CaptureFailed, Conflict
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.nemo_gym._extra import EXTRA
from tokenlake.ingest.nemo_gym.carrier import lake_place
from tokenlake.ingest.nemo_gym.entries import entry_of, is_mark, mark, put_entry
from tokenlake.ingest.nemo_gym.writer import GymWriter
from tokenlake.store.delta import Delta
from tokenlake.store.staged import open_staged

__all__ = ["EXTRA", "LakeLineage", "LakeTokenSink", "LakeTokenSource"]


class LakeTokenSink:
    """A `TokenSink` with pre-dispatch intents. One for each process; `writer` as for a staging sink."""

    def __init__(self, lake: str | os.PathLike[str], writer: str | None = None) -> None:
        self._writer = GymWriter(lake, writer)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Say durably that a call is about to be sampled; without its entry the rollout is incomplete."""
        _staged(await asyncio.to_thread(mark, self._writer, rollout_id, "intent", model_call_id))

    async def put(self, entry: TokenEntry) -> None:
        """Store an entry durably. Raises `CaptureFailed`, and `Conflict` for a call id with other content."""
        _staged(await asyncio.to_thread(put_entry, self._writer, entry))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Say durably that a call was lost: the rollout is never trained on."""
        _staged(await asyncio.to_thread(mark, self._writer, rollout_id, "incomplete", model_call_id))

    async def close(self) -> None:
        """Seal what was written. Idempotent."""
        self._writer.close()


class LakeTokenSource:
    """A `TokenSource`: reads what any process put, in any process."""

    def __init__(self, lake: str | os.PathLike[str]) -> None:
        self._staged = open_staged(lake)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Everything of a rollout up to now; the version counts its records."""
        return await asyncio.to_thread(self._freeze, rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Whether a snapshot is all there is. Removing it is left to the lake's own retention."""
        now = await self.freeze(rollout_id)
        return (now.snapshot_id, now.version) == (snapshot_id, version)

    async def close(self) -> None:
        """Let go of the lake. Idempotent."""
        self._staged.close()

    def _freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        found = self._staged.of(*lake_place(rollout_id))
        marks = [each for _, delta in found if (each := is_mark(delta)) is not None]
        calls = {delta.call_id: delta for _, delta in found if is_mark(delta) is None}
        lost = any(what == "incomplete" or call_id not in calls for what, call_id in marks)
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(entry_of(delta, calls) for delta in calls.values()),
            incomplete=lost or len(marks) + len(calls) < len(found),
            snapshot_id=hashlib.sha256(b"".join(sorted(digest for digest, _ in found))).hexdigest(),
            version=len(found),
        )


class LakeLineage(IncrementalLineageStore):
    """A `LineageResolver` over what sinks put, in any process, with NeMo-Gym's own matching."""

    def __init__(self, lake: str | os.PathLike[str], **bounds: int) -> None:
        super().__init__(**bounds)
        self._staged = open_staged(lake)

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[list[tuple[TokenEntry, Any]], Any]:
        """The entries that a cursor, the set of digests seen, does not have."""
        seen: frozenset[bytes] = cursor or frozenset()
        found = self._staged.of(*lake_place(rollout_id))
        calls = _calls(found)
        fresh = [(entry_of(delta, calls), name) for name, delta in calls.items() if delta.digest not in seen]
        return fresh, seen | {digest for digest, _ in found}

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        calls = _calls(self._staged.of(*lake_place(rollout_id)))
        return entry_of(calls[ref], calls)


def _calls(found: list[tuple[bytes, Delta]]) -> dict[str, Delta]:
    """The entries among what was staged; none of a call id that was staged with different contents."""
    twice: set[str] = set()
    calls: dict[str, Delta] = {}
    for _, delta in found:
        if delta.call_id in calls:
            twice.add(delta.call_id)
        if is_mark(delta) is None:
            calls[delta.call_id] = delta
    return {name: delta for name, delta in calls.items() if name not in twice}


def _staged(coords: Coords) -> None:
    if coords.reason == "call_id_conflict":
        raise Conflict(f"call {coords.call_id} of {coords.rollout_id} was put with other content")
    if coords.disposition != "staged":
        raise CaptureFailed(f"call {coords.call_id} could not be stored: {coords.reason}", reason=coords.reason)
