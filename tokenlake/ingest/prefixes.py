"""The exact ids of a parent: from memory while they are there, from the lake whenever they are not.

The cache is bounded in bytes and only a convenience: an evicted prefix is read again from the deltas of its chain, and
every prefix that is read is checked against the chain hash that lineage holds, so a wrong one is never served. A child
takes its parent's place, so a conversation of many turns is held once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Protocol

from tokenlake.errors import DamagedLake
from tokenlake.ingest.calls import Node
from tokenlake.store.delta import Delta, Place
from tokenlake.store.digest import ArrayBytes, chain_hash

__all__ = ["DeltaReader", "Prefixes"]


class DeltaReader(Protocol):
    """What is needed of a lake: point reads. Thread-safe."""

    def read_deltas(self, places: Sequence[Place]) -> list[Delta]:
        """The records at places; raises `NotFound` for one where nothing readable is."""
        ...


class Prefixes:
    """Whole sequences by chain hash, as raw little-endian int32. Thread-safe."""

    def __init__(self, reader: DeltaReader, max_bytes: int) -> None:
        self._reader = reader
        self._max = max_bytes
        self._lock = Lock()
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self.evictions = 0
        """How many sequences were dropped for want of room."""
        self.reads = 0
        """How many deltas were read back."""

    def put(self, parent: Node | None, chain_hash: bytes, sequence: bytes) -> None:
        """Remember the whole sequence of a call that was just staged, in its parent's place."""
        with self._lock:
            if parent is not None:
                self._drop(parent.chain_hash)
            self._keep(chain_hash, sequence)

    def get(self, node: Node) -> bytes:
        """The whole sequence of a call. Reads disk: call it in a thread.

        Raises `DamagedLake` when a delta of the chain is missing or does not hash to what lineage says.
        """
        missing: list[Node] = []
        sequence = b""
        step: Node | None = node
        while step is not None:
            with self._lock:
                held = self._held.get(step.chain_hash)
                if held is not None:
                    self._held.move_to_end(step.chain_hash)
            if held is not None:
                sequence = held
                break
            missing.append(step)
            step = step.parent
        if missing:
            sequence = b"".join([sequence, *self._read(missing[::-1])])
            if len(sequence) != 4 * node.cum_len:
                raise _damaged(node)
            with self._lock:
                self._keep(node.chain_hash, sequence)
        return sequence

    def _read(self, nodes: Sequence[Node]) -> Iterator[bytes]:
        """What each call adds, read from the lake in one go."""
        places = [node.place for node in nodes if node.place is not None]
        if len(places) < len(nodes):
            raise _damaged(next(node for node in nodes if node.place is None))
        for node, delta in zip(nodes, self._reader.read_deltas(places), strict=True):
            ids = bytes(delta.token_ids or b"")
            parent = None if node.parent is None else node.parent.chain_hash
            if chain_hash(parent, ArrayBytes(len(ids) // 4, ids)) != node.chain_hash:
                raise _damaged(node)
            self.reads += 1
            yield ids

    def _keep(self, key: bytes, sequence: bytes) -> None:
        self._drop(key)
        if len(sequence) > self._max:
            self.evictions += 1
            return
        self._held[key] = sequence
        self._bytes += len(sequence)
        while self._bytes > self._max:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= len(dropped)
            self.evictions += 1

    def _drop(self, key: bytes) -> None:
        dropped = self._held.pop(key, None)
        if dropped is not None:
            self._bytes -= len(dropped)


def _damaged(node: Node) -> DamagedLake:
    return DamagedLake(
        f"the delta of call {node.call_id} is missing or is not what lineage recorded: run `tokenlake audit`",
        call_id=node.call_id,
    )
