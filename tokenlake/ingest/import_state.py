"""What an import knows while it judges a file: the groups, attempts and calls of the lake and of the file so far.

Sequences are kept as deltas with parent links, never as whole prefixes, and only for rollouts that the file names.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from tokenlake import sql
from tokenlake.ids import split_rollout_id
from tokenlake.store.delta import Place
from tokenlake.store.digest import ArrayBytes, chain_hash
from tokenlake.store.lake import OwnedLake
from tokenlake.store.query import fetch

__all__ = ["Attempt", "Group", "ImportState", "KnownCall", "seal_end"]


@dataclass(slots=True, kw_only=True)
class Group:
    """A registered group."""

    n: int
    purpose: str
    meta: str | None
    published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCall:
    """A committed call of the lake, or an earlier one of the file."""

    call_id: str
    parent_call_id: str | None
    root_call_id: str | None
    depth: int | None
    cum_len: int
    chain_hash: bytes
    digest: bytes
    response_id: str | None


@dataclass(slots=True)
class Attempt:
    """One attempt at a rollout: its calls in commit order."""

    published: bool = False
    ended: tuple[str, str] | None = None
    """`("fail", reason)` or `("seal", canonical arguments)`."""
    calls: dict[str, KnownCall] = field(default_factory=dict[str, KnownCall])
    retired: bool = False
    """Retention removed its deltas: the sequence of a call is known once the file repeats it."""
    _tails: dict[str, tuple[str | None, bytes]] = field(default_factory=dict[str, tuple[str | None, bytes]])
    _by_length: dict[int, dict[bytes, str]] = field(default_factory=dict[int, dict[bytes, str]])

    def add_call(self, call: KnownCall, whole: bytes) -> None:
        """Remember a call whose whole sequence (prompt and answer) is `whole`, raw int32."""
        parent = self.calls.get(call.parent_call_id or "")
        if parent is not None and not self.knows_sequence(parent):
            parent = None
        prefix = b"" if parent is None else self.raw_sequence(parent)
        self.calls[call.call_id] = call
        if parent is not None and whole.startswith(prefix):
            self._tails[call.call_id] = (parent.call_id, whole[len(prefix) :])
        else:
            self._tails[call.call_id] = (None, whole)
        digest = hashlib.sha256(whole).digest()
        self._by_length.setdefault(len(whole) // 4, {}).setdefault(digest, call.call_id)

    def knows_sequence(self, call: KnownCall) -> bool:
        """Whether the sequence of a call is known, as always where nothing was retired."""
        return call.call_id in self._tails

    def longest_prefix(self, prompt: list[int], *, before: str) -> KnownCall | None:
        """The call whose whole sequence is the longest prefix of the prompt, the first committed of equal ones.

        A call that is itself being repeated (`before`) never continues itself or what came after it.
        """
        raw = array("i", prompt).tobytes()
        order = {call_id: position for position, call_id in enumerate(self.calls)}
        limit = order.get(before, len(order))
        found: KnownCall | None = None
        running = hashlib.sha256()
        hashed = 0
        for length in sorted(length for length in self._by_length if 0 < length <= len(prompt)):
            running.update(raw[4 * hashed : 4 * length])
            hashed = length
            call_id = self._by_length[length].get(running.digest())
            if call_id is not None and order[call_id] < limit:
                found = self.calls[call_id]
        return found

    def raw_sequence(self, call: KnownCall) -> bytes:
        """The whole sequence of a call as raw little-endian int32."""
        tails: list[bytes] = []
        step: str | None = call.call_id
        while step is not None:
            step, tail = self._tails[step]
            tails.append(tail)
        return b"".join(reversed(tails))

    def sequence(self, call: KnownCall) -> list[int]:
        """The whole sequence of a call."""
        return array("i", self.raw_sequence(call)).tolist()

    @staticmethod
    def hash_of(sequence: list[int]) -> bytes:
        """The chain hash of a sequence taken as one root delta."""
        return chain_hash(None, ArrayBytes(len(sequence), array("i", sequence).tobytes()))


def seal_end(reward: float | None, terminal: str | None, reason: str | None) -> tuple[str, str]:
    """How a seal ended an attempt, in a form that is equal for equal seals (a NaN reward equals itself)."""
    canonical = None if reward is None else ("nan" if math.isnan(reward) else repr(reward))
    return "seal", json.dumps([canonical, terminal, reason])


class ImportState:
    """Groups and attempts, loaded from the lake when the file first names them."""

    def __init__(self, lake: OwnedLake) -> None:
        self._lake = lake
        self._groups: dict[str, Group | None] = {}
        self._attempts: dict[str, dict[int, Attempt]] = {}
        self._closings: dict[str, list[dict[str, Any]]] = {}

    def group(self, group_id: str) -> Group | None:
        """A known group, or None."""
        if group_id not in self._groups:
            found = self._lake.sql(sql.read("reads/group"), [group_id]).fetchall()
            groups = [
                Group(n=n, purpose=purpose or "train", meta=meta, published=closed)
                for n, purpose, meta, closed in found
            ]
            self._groups[group_id] = groups[0] if groups else None
        return self._groups[group_id]

    def add_group(self, group_id: str, *, n: int, purpose: str, meta: str | None) -> None:
        """Remember a group that the file registers."""
        self._groups[group_id] = Group(n=n, purpose=purpose, meta=meta)

    def attempt(self, rollout_id: str, attempt: int) -> Attempt | None:
        """A registered attempt, or None."""
        if rollout_id not in self._attempts:
            self._attempts[rollout_id] = self._load(rollout_id)
        return self._attempts[rollout_id].get(attempt)

    def add_attempt(self, rollout_id: str, attempt: int) -> Attempt:
        """Remember an attempt that the file registers."""
        made = Attempt()
        self._attempts.setdefault(rollout_id, {})[attempt] = made
        return made

    def _load(self, rollout_id: str) -> dict[int, Attempt]:
        group_id, _ = split_rollout_id(rollout_id)
        group = self.group(group_id)
        found = self._lake.sql(sql.read("reads/rollout_events"), [rollout_id]).to_arrow_table()
        published = group is not None and group.published
        retired = published and self._retired(group_id, rollout_id)
        attempts: dict[int, Attempt] = {}
        for event in found.to_pylist():
            attempt = attempts.setdefault(event["attempt"] or 0, Attempt(published=published, retired=retired))
            if event["event_type"] == "call_committed":
                self._load_call(attempt, event)
            elif event["event_type"] == "rollout_failed":
                attempt.ended = ("fail", event["reason"])
            elif event["event_type"] == "rollout_sealed":
                attempt.ended = seal_end(event["reward"], event["terminal_call_id"], event["reason"])
        return attempts

    def _retired(self, group_id: str, rollout_id: str) -> bool:
        if group_id not in self._closings:
            found = fetch(self._lake, sql.read("reads/group_closings"), [[group_id]], groups=[group_id])
            self._closings[group_id] = found.to_pylist()
        return any(row["whole"] or rollout_id in row["rollouts"] for row in self._closings[group_id])

    def _load_call(self, attempt: Attempt, event: dict[str, Any]) -> None:
        place = Place(
            writer=event["writer"],
            segment=event["segment"],
            byte_offset=event["byte_offset"],
            byte_length=event["byte_length"],
            batch_row=event["batch_row"],
        )
        call = KnownCall(**{name: event[name] for name in KnownCall.__slots__})  # pyright: ignore[reportArgumentType]
        if attempt.retired:
            attempt.calls[call.call_id] = call
            return
        delta = self._lake.read_delta(place)
        parent = attempt.calls.get(event["parent_call_id"])
        prefix = b"" if parent is None else attempt.raw_sequence(parent)
        attempt.add_call(call, prefix[: 4 * event["prev_len"]] + bytes(delta.token_ids or b""))
