"""What a child does until it is killed: everything a lake is there for, under a clock that jumps.

The child tells what was acknowledged, line by line, before it goes on: that is the model. It works in stations, each a
life of the process: it registers groups, captures calls, publishes through the views, hands groups out, compacts and
retires. All that is random is fixed, so that two runs leave the same bytes.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tokenlake import clock
from tokenlake.errors import StorageFailed
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import publish_due
from tokenlake.ingest.capture import CaptureCore, ParentLink
from tokenlake.ingest.coords import Coords
from tokenlake.store.delta import Delta, Place
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake
from tokenlake.store.retention import Retention, retire

Tell = Callable[..., None]
"""Called with a kind and what was acknowledged."""
LEASE_S = 1e9
_JUMPS_S = (0, 86_400, -3_600, 5)
_BEGAN_S = 1_800_000_000
Told = list[list[Any]]
"""What was acknowledged, in order: a kind and its arguments each."""

STATIONS = (
    ("group 0",),
    ("publish", "claim step-0"),
    ("compact",),
    ("group 1", "publish", "claim step-1", "compact"),
    ("gc", "last"),
)
"""The steps of each life of the process: method and arguments."""


class _Kept:
    """Takes a delta instead of a disk."""

    def stage(self, delta: Delta) -> Place:
        self.delta = delta
        return Place(writer="w0", segment=0, byte_offset=0, byte_length=0, batch_row=0)


def record(name: str) -> tuple[Delta, Coords]:
    """The call `c<group><i>`: 0 and 1 are roots of the two rollouts, 2 continues 0."""
    group, i = name[1], int(name[2])
    kept, parent, prompt = _Kept(), None, [10, 11, 12 + i % 2, *range(40)]
    if i == 2:
        before, coords = record(f"c{group}0")
        prompt += [50, 51, 60]
        parent = ParentLink(
            call_id=before.call_id,
            root_call_id=before.call_id,
            depth=0,
            cum_len=coords.cum_len,
            chain_hash=before.chain_hash,
            token_ids=array("i", [10, 11, 12, *range(40), 50, 51]).tobytes(),
        )
    core = CaptureCore(kept)
    ticket = core.begin(rollout_id=f"g{group}_g{i % 2}", attempt=0, call_id=name, parent=parent)
    coords = core.complete(
        ticket,
        prompt_token_ids=prompt,
        token_ids=[50, 51],
        logprobs=[-0.5, -0.25],
        finish_reason="stop",
        weight_version=4,
        weight_version_end=4,
    )
    assert coords.disposition == "staged", coords
    return kept.delta, coords


class Child:
    """Drives one lake through a station; goes on after an error that the store declares."""

    def __init__(self, path: Path, tell: Tell, station: int) -> None:
        self.tell = tell
        self.station = station
        _fix(station)
        self.lake = OwnedLake.open(path, segment_max_bytes=20_000)
        self.buffer = ReplayBuffer(self.lake)

    def run(self) -> None:
        """The whole station, and a clean end."""
        for name in STATIONS[self.station]:
            step, *arguments = name.split()
            self.attempt(getattr(self, step), *arguments)
        self.lake.close()
        self.tell("closed")

    def compact(self) -> None:
        self.lake.compact()

    def last(self) -> None:
        if self.attempt(self.register, "g2"):
            self.attempt(self.call, "c20")

    def group(self, turn: str) -> None:
        if self.attempt(self.register, f"g{turn}"):
            self.round(turn)

    def round(self, turn: str) -> None:
        """As a gate does it: a call that was refused is not continued."""
        done = [name for name in (f"c{turn}0", f"c{turn}1") if self.attempt(self.call, name)]
        if f"c{turn}0" in done and self.attempt(self.call, f"c{turn}2"):
            done = [f"c{turn}2", *done[1:]]
        self.attempt(self.seal, turn, {int(name[2]) % 2: name for name in done})

    def attempt(self, step: Callable[..., Any], *arguments: Any) -> bool:
        try:
            step(*arguments)
        except StorageFailed:
            self.tell("refused")
            return False
        return True

    def append(self, *events: dict[str, Any]) -> None:
        for event in self.lake.lineage.append_many(events):
            self.tell("event", event["event_seq"], event["event_hash"].hex())

    def register(self, group_id: str) -> None:
        named = {"group_id": group_id}
        slots = [{"event_type": "rollout_registered", "rollout_id": f"{group_id}_g{i}", "attempt": 0} for i in (0, 1)]
        self.append({"event_type": "group_registered", "n": 2, **named}, *({**slot, **named} for slot in slots))

    def call(self, name: str) -> None:
        """Stage and commit one call."""
        delta, coords = record(name)
        place = self.lake.delta_writer("w0").stage(delta)
        self.tell("delta", name)
        where = {key: getattr(place, key) for key in ("writer", "segment", "byte_offset", "byte_length", "batch_row")}
        self.append({**coords.columns(), **where, "event_type": "call_committed", "group_id": f"g{name[1]}"})
        self.lake.refresh()

    def seal(self, turn: str, terminals: dict[int, str]) -> None:
        self.append(
            *(
                {
                    "event_type": "rollout_sealed",
                    "group_id": f"g{turn}",
                    "rollout_id": f"g{turn}_g{i}",
                    "attempt": 0,
                    "reward": 1.0,
                    "terminal_call_id": terminals.get(i),
                    "terminal_selection": "declared",
                }
                for i in (0, 1)
            )
        )
        self.tell("sealed", f"g{turn}")

    def publish(self) -> None:
        for group in publish_due(self.lake):
            self.tell("published", group.group_id, rows_of(self.lake, group.group_id))

    def claim(self, checkpoint: str) -> None:
        claim = self.buffer.claim("t0", lease_s=LEASE_S)
        for group in claim.groups:
            self.tell("claimed", group.group_id)
        if claim.claim_id is not None:
            self.buffer.consume(claim.claim_id, checkpoint)
            for group in claim.groups:
                self.tell("consumed", group.group_id)

    def gc(self) -> None:
        for group_id in retire(self.lake, Retention(consumed=True)).groups:
            self.tell("retired", group_id)


def _fix(station: int) -> None:
    """Take away what differs between two runs."""
    ticks = count()

    def now() -> int:
        tick = next(ticks)
        return (_BEGAN_S + station * 86_400 + _JUMPS_S[tick % len(_JUMPS_S)]) * 10**9 + tick * 10**6

    numbers = count()
    clock._BEGAN_NS = 0  # the clock of the process, before anything asks it
    time.monotonic_ns = time.time_ns = now
    time.time = lambda: float(_BEGAN_S)
    os.getpid = lambda: 4242
    uuid.uuid4 = lambda: uuid.UUID(int=7)
    secrets.token_hex = lambda _=None: f"{station:08x}{next(numbers):08x}"


def rows_of(lake: OwnedLake | Lake, group_id: str) -> list[list[Any]]:
    """What a trainer gets of a group."""
    query = "SELECT sample_id, hex(row_digest), reason FROM ready_rows WHERE group_id = ? ORDER BY sample_id"
    return [list(row) for row in lake.sql(query, [group_id]).fetchall()]
