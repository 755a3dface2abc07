"""What staging is measured against: the disk's floor, and SQLite as the database everyone has.

Both are given the bytes of a call ready made: no digest, no record to build. The floor is one append and one
`fdatasync`; SQLite runs in WAL mode with `synchronous=FULL`, which syncs at each commit as well.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.measure import Timing, one_by_one, writers
from bench.workload import BYTES_PER_TOKEN, Call, Rollout, rollouts

__all__ = ["arrays", "raw_append", "raw_append_processes", "sqlite_full", "sqlite_full_processes", "views"]

Array = npt.NDArray[Any]
_TABLE = """
CREATE TABLE IF NOT EXISTS calls (
    rollout_id TEXT, call_id TEXT, parent_call_id TEXT, prev_len INT, weight_version INT, digest BLOB,
    token_ids BLOB, token_mask BLOB, logprobs BLOB, PRIMARY KEY (rollout_id, call_id)
) WITHOUT ROWID
"""
_INSERT = "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_DIGEST = bytes(32)


def _tags(call: Call) -> tuple[str, str, str | None, int, int, bytes]:
    return call.rollout_id, call.call_id, call.parent_call_id, call.prev_len, call.weight_version, _DIGEST


def arrays(call: Call) -> bytes:
    """The bytes of a call's arrays, one after the other."""
    return b"".join((call.token_ids.tobytes(), call.token_mask.tobytes(), call.logprobs.tobytes()))


def views(raw: bytes) -> tuple[Array, Array, Array]:
    """The arrays in what `arrays` gave."""
    count = len(raw) // BYTES_PER_TOKEN
    ids, mask = np.frombuffer(raw, np.int32, count), np.frombuffer(raw, np.uint8, count, 4 * count)
    return ids, mask, np.frombuffer(raw[5 * count :], np.float32)


def _record(call: Call) -> bytes:
    return json.dumps([str(tag) for tag in _tags(call)]).encode() + arrays(call)


def _append(path: Path, records: Sequence[bytes], ready: Callable[[], object]) -> Timing:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def put(record: bytes) -> None:
        os.write(handle, record)
        os.fdatasync(handle)

    try:
        ready()
        return one_by_one(put, records)
    finally:
        os.close(handle)


def raw_append(folder: Path, work: Sequence[Rollout]) -> Timing:
    """The floor: one append and `fdatasync` a call."""
    return _append(folder / "raw.bin", [_record(call) for rollout in work for call in rollout.calls], lambda: None)


def raw_append_processes(folder: Path, spec: Sequence[tuple[int, int, int, int]]) -> Timing:
    """The floor of several processes, each with a file of its own; `spec` has a workload for each."""
    return writers(_raw_writer, [(folder / f"raw-{i}.bin", *part) for i, part in enumerate(spec)])


def _raw_writer(barrier: Barrier, path: Path, count: int, calls: int, delta: int, seed: int) -> Timing:
    made = rollouts(count, calls=calls, delta=delta, seed=seed)
    return _append(path, [_record(call) for rollout in made for call in rollout.calls], barrier.wait)


def _insert(path: Path, work: Sequence[Rollout], ready: Callable[[], object]) -> Timing:
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(_TABLE)
    rows = [
        (*_tags(call), call.token_ids.tobytes(), call.token_mask.tobytes(), call.logprobs.tobytes())
        for rollout in work
        for call in rollout.calls
    ]
    try:
        ready()
        return one_by_one(lambda row: database.execute(_INSERT, row), rows)
    finally:
        database.close()


def sqlite_full(folder: Path, work: Sequence[Rollout]) -> Timing:
    """One row and one synced commit a call."""
    return _insert(folder / "calls.db", work, lambda: None)


def sqlite_full_processes(folder: Path, spec: Sequence[tuple[int, int, int, int]]) -> Timing:
    """Several processes on one database file: SQLite lets one of them write at a time."""
    return writers(_sqlite_writer, [(folder / "calls.db", *part) for part in spec])


def _sqlite_writer(barrier: Barrier, path: Path, count: int, calls: int, delta: int, seed: int) -> Timing:
    return _insert(path, rollouts(count, calls=calls, delta=delta, seed=seed), barrier.wait)
