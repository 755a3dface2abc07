"""What a child does until it is killed, and what must be true of the lake afterwards.

The child tells what was acknowledged, line by line, before it goes on: that is the model. It registers groups, captures
calls, publishes through the views, hands groups out, compacts and retires, under a clock that jumps.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from tokenlake.errors import StorageFailed
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import publish_due
from tokenlake.ingest.capture import CaptureCore, ParentLink
from tokenlake.ingest.coords import Coords
from tokenlake.store.delta import Delta, Place
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake
from tokenlake.store.retention import Retention, retire

Tell = Callable[..., None]
"""Called with a kind and what was acknowledged."""
LEASE_S = 1e9
_JUMPS_S = (0, 86_400, -3_600, 5)


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
    """Drives one lake; goes on after an error that the store declares."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.tell = tell
        jumps, real = cycle(_JUMPS_S), time.monotonic_ns
        time.monotonic_ns = lambda: real() + next(jumps) * 10**9
        self.lake = OwnedLake.open(path, segment_max_bytes=20_000)
        self.buffer = ReplayBuffer(self.lake)

    def run(self) -> None:
        """The whole scenario: two rounds of everything."""
        for turn in "01":
            if self.attempt(self.register, f"g{turn}"):
                self.round(turn)
            self.attempt(self.publish)
            self.attempt(self.claim, f"step-{turn}")
            self.attempt(self.lake.compact)
        self.attempt(self.gc)
        if self.attempt(self.register, "g2"):
            self.attempt(self.call, "c20")
        self.lake.close()
        self.tell("closed")

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


def rows_of(lake: OwnedLake | Lake, group_id: str) -> list[list[Any]]:
    """What a trainer gets of a group."""
    query = "SELECT sample_id, hex(row_digest), reason FROM ready_rows WHERE group_id = ? ORDER BY sample_id"
    return [list(row) for row in lake.sql(query, [group_id]).fetchall()]


def check(path: Path, told: list[list[Any]]) -> None:
    """Open, audit and compare with the model; then go on working. Raises `AssertionError`."""
    of: dict[str, list[list[Any]]] = {}
    for kind, *rest in told:
        of.setdefault(kind, []).append(rest)
    with OwnedLake.open(path) as lake:
        seen = _content(lake, of)
        _healthy(lake)
        assert lineage_loss(path) == []
        with Lake(path) as reader:
            assert _content(reader, of) == seen, "a reader sees something else than the owner"
        committed = "SELECT rollout_id, call_id, digest FROM lineage WHERE event_type = 'call_committed'"
        gone = _retired(lake)
        for rollout, call_id, digest in lake.sql(committed).fetchall():
            found = lake.find_delta(rollout, 0, call_id)
            assert found is not None or rollout.split("_")[0] in gone, f"{call_id} was committed and is not there"
            assert found is None or found[1] == digest
        _go_on(lake, of)
        lake.compact()
    with OwnedLake.open(path) as lake:
        assert lake.sql("SELECT count(*) FROM deltas WHERE call_id = 'c30'").fetchall() == [(1,)]
        _content(lake, of)
        _healthy(lake)
    assert [str(left) for left in path.rglob("*.tmp")] == []


def _go_on(lake: OwnedLake, of: dict[str, list[list[Any]]]) -> None:
    """A lake that was killed publishes what is due, once, and hands out what nobody has."""
    assert lake.delta_writer("w0").stage(record("c30")[0]).segment >= 0
    taken = {name for kind in ("claimed", "consumed") for (name,) in of.get(kind, [])}
    before = {name for (name,) in lake.sql("SELECT DISTINCT group_id FROM ready_rows").fetchall()}
    done = publish_due(lake)
    assert not {group.group_id for group in done} & before, "a group was published twice"
    now = {name for (name,) in lake.sql("SELECT DISTINCT group_id FROM ready_rows").fetchall()}
    assert {name for (name,) in of.get("sealed", [])} <= now, "a sealed group was not published"
    claimed = {group.group_id for group in ReplayBuffer(lake).claim("t0", groups=9, now=0).groups}
    assert not claimed & taken, "a group was handed out twice"
    assert claimed | _claimed(lake) == now


def _healthy(lake: OwnedLake) -> None:
    findings = lake.sql("SELECT * FROM lake_findings").fetchall()
    assert findings == [], findings
    faults = lake.sql("SELECT kind, rollout_id, detail FROM audit_findings WHERE severity = 'fault'").fetchall()
    assert faults == [], faults


def _claimed(lake: OwnedLake) -> set[str]:
    return {name for (name,) in lake.sql("SELECT group_id FROM lineage WHERE event_type = 'rows_claimed'").fetchall()}


def _retired(lake: OwnedLake | Lake) -> set[str]:
    return {name for (name,) in lake.sql("SELECT group_id FROM lineage WHERE event_type = 'retired'").fetchall()}


def _content(lake: OwnedLake | Lake, of: dict[str, list[list[Any]]]) -> tuple[list[Any], ...]:
    deltas = lake.sql("SELECT call_id, digest FROM deltas ORDER BY call_id").fetchall()
    names = [name for name, _ in deltas]
    gone = _retired(lake)
    acknowledged = {name for (name,) in of.get("delta", []) if f"g{name[1]}" not in gone}
    assert len(names) == len(set(names)), f"twice: {names}"
    assert acknowledged <= set(names), f"lost: {acknowledged - set(names)}"
    for (group_id,) in of.get("retired", []):
        assert group_id in gone, f"that {group_id} was retired is lost"
        assert not [name for name in names if f"g{name[1]}" == group_id], "what was retired is still there"
    assert all(record(name)[0].digest == digest for name, digest in deltas), "a record is half there"
    events = lake.sql("SELECT event_seq, hex(event_hash), lineage.at FROM lineage ORDER BY event_seq").fetchall()
    assert [seq for seq, _, _ in events] == list(range(len(events)))
    assert [at for *_, at in events] == sorted(at for *_, at in events), "time goes back"
    for seq, digest in of.get("event", []):
        assert seq < len(events), f"event {seq} is lost"
        assert events[seq][1].lower() == digest, f"event {seq} is another one"
    rows = lake.sql("SELECT group_id, count(*) FROM ready_rows GROUP BY ALL ORDER BY ALL").fetchall()
    assert all(count == 2 for _, count in rows), "half a group"
    for group_id, wanted in of.get("published", []):
        assert rows_of(lake, group_id) == wanted, f"rows of {group_id} are not what they were"
    return deltas, events, rows


def encode(*told: Any) -> bytes:
    """One line of what a child tells."""
    return json.dumps(told).encode() + b"\n"


if __name__ == "__main__":
    Child(Path(sys.argv[1]), lambda *told: sys.stdout.write(encode(*told).decode()) and sys.stdout.flush()).run()
