"""W2: tokens back from disk: the calls of one rollout by key, and everything.

Each contender gives the three arrays of a call as they are in memory afterwards: numpy views of the bytes, or Arrow
columns. `raw` knows where each record lies and reads it with one `pread`; nobody has to be found, nothing is checked.
The files are in the page cache for all.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tokenlake
from bench import floors, tokenlake_stage
from bench.measure import Timing, one_by_one
from bench.workload import Rollout
from tokenlake.store.delta import Place

__all__ = ["Reads"]

_ONE = "SELECT token_ids, token_mask, logprobs FROM calls WHERE rollout_id = ?"
_ALL = "SELECT token_ids, token_mask, logprobs FROM calls"
_ARRAYS = ("token_ids", "token_mask", "logprobs")
_LAKE_ONE = "SELECT token_ids, token_mask, logprobs FROM deltas WHERE rollout_id = ?1"
_LAKE_ALL = "SELECT token_ids, token_mask, logprobs FROM deltas"


class Reads:
    """The same calls in a raw file, in SQLite and in a lake that was never compacted; read many times."""

    def __init__(self, folder: Path, work: Sequence[Rollout]) -> None:
        self._calls = sum(len(rollout.calls) for rollout in work)
        floors.sqlite_full(folder, work)
        self._database = sqlite3.connect(folder / "calls.db")
        self._raw: dict[str, list[tuple[int, int]]] = {}
        at = 0
        with (folder / "arrays.bin").open("wb") as file:
            for rollout in work:
                for call in rollout.calls:
                    size = file.write(floors.arrays(call))
                    self._raw.setdefault(rollout.rollout_id, []).append((at, size))
                    at += size
        self._handle = os.open(folder / "arrays.bin", os.O_RDONLY)
        coords = tokenlake_stage.fill(folder / "lake", work)
        self._places: dict[str, list[Place]] = {
            rollout.rollout_id: [each.place for each in chain if each.place is not None]
            for rollout, chain in zip(work, coords, strict=True)
        }
        self._lake = tokenlake.open(folder / "lake")
        names = list(self._raw)
        self._order = [names[int(i)] for i in np.random.default_rng(1).permutation(len(names))[:100]]
        for read in (self._raw_one, self._sqlite_one, self._places_one, self._query_one):
            if read(self._order[0]) != len(work[0].calls):
                raise AssertionError(f"{read.__name__} does not give every call of a rollout")

    def close(self) -> None:
        """Let go of all three."""
        os.close(self._handle)
        self._database.close()
        self._lake.close()

    def raw_one(self) -> Timing:
        """One `pread` a call, at a known place."""
        return one_by_one(self._raw_one, self._order)

    def sqlite_one(self) -> Timing:
        """One range of the primary key."""
        return one_by_one(self._sqlite_one, self._order)

    def places_one(self) -> Timing:
        """What the gate does for a prefix that is not in its cache: `read_deltas` at the places of lineage."""
        return one_by_one(self._places_one, self._order)

    def query_one(self) -> Timing:
        """One SQL query to Arrow: parsed, planned and run each time."""
        return one_by_one(self._query_one, self._order)

    def raw_all(self) -> Timing:
        """Every call, in order."""
        return self._timed(lambda: sum(map(self._raw_one, self._raw)))

    def sqlite_all(self) -> Timing:
        """One statement."""
        return self._timed(lambda: len([*map(_views, self._database.execute(_ALL))]))

    def query_all(self) -> Timing:
        """One SQL query to Arrow."""
        return self._timed(lambda: self._lake.sql(_LAKE_ALL).to_arrow_table().num_rows)

    def scan_all(self) -> Timing:
        """The same records past DuckDB."""
        return self._timed(lambda: self._lake.scan_deltas(columns=_ARRAYS).read_all().num_rows)

    def _timed(self, read: Callable[[], int]) -> Timing:
        start = time.monotonic()
        found = read()
        end = time.monotonic()
        if found != self._calls:
            raise AssertionError(f"{found} of {self._calls} calls were read")
        return start, end, []

    def _raw_one(self, rollout_id: str) -> int:
        return len([floors.views(os.pread(self._handle, size, at)) for at, size in self._raw[rollout_id]])

    def _sqlite_one(self, rollout_id: str) -> int:
        return len([_views(row) for row in self._database.execute(_ONE, (rollout_id,))])

    def _places_one(self, rollout_id: str) -> int:
        deltas = self._lake.read_deltas(self._places[rollout_id])
        return len([_views((delta.token_ids, delta.token_mask, delta.logprobs)) for delta in deltas])

    def _query_one(self, rollout_id: str) -> int:
        return self._lake.sql(_LAKE_ONE, [rollout_id]).to_arrow_table().num_rows


def _views(row: Sequence[Any]) -> tuple[floors.Array, floors.Array, floors.Array]:
    ids, mask, logprobs = row
    return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8), np.frombuffer(logprobs, np.float32)
