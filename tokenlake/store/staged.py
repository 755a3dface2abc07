"""Which deltas lie in a lake, committed or not: for processes that stage beside each other under names of their own.

Lineage names a call once its owner has committed it. Whoever has to find what another process staged a moment ago reads
the segments themselves, each from where the last look at it ended.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tokenlake.errors import NotFound
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import COMPACTED, read_places, segment_name
from tokenlake.store.format import read_lake
from tokenlake.store.intake import Scanned, new_deltas, segment_path
from tokenlake.store.maps import SegmentMaps

__all__ = ["StagedDeltas", "open_staged"]

_Key = tuple[int, str]
"""Attempt and call id."""
_Copy = tuple[bytes, Place]
"""The digest of a record, and where it lies."""


class StagedDeltas:
    """Records by rollout, of every writer. Thread-safe; holds a few hundred bytes for each record, and no token."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._maps = SegmentMaps(root)
        self._lock = threading.Lock()
        self._scanned: Scanned = {}
        self._rollouts: dict[str, dict[_Key, list[_Copy]]] = {}

    def of(self, rollout_id: str, attempt: int) -> list[tuple[bytes, Delta]]:
        """(digest, record) of everything staged for an attempt up to now, in the order of call ids.

        A call id that was staged with different contents comes once for each.
        """
        with self._lock:
            self._refresh()
            found = self._rollouts.get(rollout_id, {})
            keys = sorted(key for key in found if key[0] == attempt)
            copies = [copy for key in keys for copy in found[key]]
            deltas = read_places(self._maps, (place for _, place in copies))
            return [(digest, delta) for (digest, _), delta in zip(copies, deltas, strict=True)]

    def find(self, rollout_id: str, attempt: int, call_id: str) -> Delta | None:
        """The record of a call, or None. Raises `NotFound` where it was staged with different contents."""
        key = (attempt, call_id)
        with self._lock:
            copies = self._rollouts.get(rollout_id, {}).get(key)
            if copies is None or not (self._root / segment_name(copies[0][1])).exists():
                self._refresh()
                copies = self._rollouts.get(rollout_id, {}).get(key, [])
            if len(copies) > 1:
                raise NotFound(f"call {call_id} of rollout {rollout_id} was staged twice, with different contents")
            return read_places(self._maps, [copies[0][1]])[0] if copies else None

    def close(self) -> None:
        """Let go of the maps."""
        with self._lock:
            self._maps.clear()

    def _refresh(self) -> None:
        change = new_deltas(self._root, self._maps, self._scanned)
        if change.gone:
            self._forget({(writer, number) for _, writer, number in change.gone})
        for segment in change.gone:
            self._scanned.pop(segment, None)
            self._maps.forget(segment_path(segment))
        self._scanned |= change.scanned
        for place, (rollout_id, attempt, call_id), digest in change.placed():
            copies = self._rollouts.setdefault(rollout_id, {}).setdefault((attempt, call_id), [])
            if all(known != digest for known, _ in copies):
                copies.append((digest, place))
            elif place.writer == COMPACTED:
                copies[:] = [(d, place if d == digest else p) for d, p in copies]

    def _forget(self, gone: set[tuple[str, int]]) -> None:
        for rollout_id, calls in list(self._rollouts.items()):
            for key, copies in list(calls.items()):
                copies[:] = [copy for copy in copies if (copy[1].writer, copy[1].segment) not in gone]
                if not copies:
                    del calls[key]
            if not calls:
                del self._rollouts[rollout_id]


def open_staged(lake: str | os.PathLike[str]) -> StagedDeltas:
    """Of a lake that is there. Raises `NotFound` where there is none, `FormatError` for a newer one."""
    root = Path(lake)
    read_lake(root)
    return StagedDeltas(root)
