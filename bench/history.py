"""What lineage is measured against: SQLite by the hash of a history, and a dict of such hashes.

The least that finds a parent: the SHA-256 of the canonical JSON of the messages up to the last answer. No dialect is
made equal to another, nothing ambiguous is seen. A call is one row and one synced commit; nothing stays in memory.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sqlite3
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.conversations import Conversation, Seconds

__all__ = ["held", "play"]

_TABLE = """
CREATE TABLE ledger (
    rollout_id TEXT, history BLOB, call_id TEXT, parent_call_id TEXT, PRIMARY KEY (rollout_id, history)
) WITHOUT ROWID
"""
_INSERT = "INSERT INTO ledger VALUES (?, ?, ?, ?)"
_SELECT = "SELECT call_id FROM ledger WHERE rollout_id = ? AND history = ?"


def play(folder: Path, work: Sequence[Conversation], turns: int) -> Seconds:
    """Record every call, and resolve the request after it."""
    database = sqlite3.connect(folder / "ledger.db", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(_TABLE)
    seconds = Seconds()
    for turn in range(turns):
        for said in work:
            whole, following = _answered(said, turn), said.request(turn + 1)
            began = time.perf_counter()
            database.execute(_INSERT, (said.rollout_id, _digest(whole), _call_id(turn), _call_id(turn - 1)))
            between = time.perf_counter()
            last = max(at for at, message in enumerate(following) if message["role"] == "assistant")
            digest = _digest(following[: last + 1])
            hashed = time.perf_counter()
            found = database.execute(_SELECT, (said.rollout_id, digest)).fetchone()
            ended = time.perf_counter()
            seconds.record.append(between - began)
            seconds.resolve.append(ended - between)
            seconds.look_up.append(ended - hashed)
            if found != (_call_id(turn),):
                raise AssertionError(f"{said.rollout_id}: the request after turn {turn} is resolved to {found}")
    database.close()
    return seconds


def held(work: Sequence[Conversation], turns: int) -> float:
    """Bytes for each call of a dict from the digest of its history to its id."""
    known: dict[bytes, str] = {}
    gc.collect()
    tracemalloc.start()
    for said in work:
        for turn in range(turns):
            known[_digest(_answered(said, turn))] = f"{said.rollout_id}/{_call_id(turn)}"
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(known)


def _answered(said: Conversation, turn: int) -> list[dict[str, Any]]:
    return said.request(turn + 1)[:-1]


def _digest(messages: Sequence[dict[str, Any]]) -> bytes:
    return hashlib.sha256(json.dumps(messages, sort_keys=True, separators=(",", ":")).encode()).digest()


def _call_id(turn: int) -> str:
    return f"c{turn:03d}"
