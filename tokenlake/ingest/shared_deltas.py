"""Reading parents from a lake that another process owns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tokenlake.errors import NotFound
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.reader import Lake

__all__ = ["SharedDeltas"]


class SharedDeltas:
    """Point reads of the records of every writer. Thread-safe.

    A record lies where lineage says until compaction moves it; only then is an index of the lake built.
    """

    def __init__(self, root: Path, writer: DeltaWriter) -> None:
        self._root = root
        self._writer = writer
        self._lake: Lake | None = None
        self._lock = threading.Lock()

    def read_deltas(self, places: Sequence[Place]) -> list[Delta]:
        """The records that were staged at places; raises `NotFound` where nothing readable is."""
        try:
            return self._writer.read_all(places)
        except NotFound:
            with self._lock:
                if self._lake is None:
                    self._lake = Lake(self._root)
                return self._lake.read_deltas(places)

    def close(self) -> None:
        """Let go of the index, where there is one."""
        if self._lake is not None:
            self._lake.close()
