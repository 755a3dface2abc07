"""What a child does until it is killed, and what must be true of the lake afterwards.

The child tells what was acknowledged, line by line, before it goes on: that is the model. Claims belong beside
`retire`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.store.conftest import build_delta
from tests.store.test_lake import row_table
from tokenlake.errors import StorageFailed
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake

Tell = Callable[..., None]
"""Called with a kind and what was acknowledged."""


class Child:
    """Drives one lake; goes on after an error that the store declares."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.tell = tell
        self.lake = OwnedLake.open(path, segment_max_bytes=20_000)

    def run(self) -> None:
        """The whole scenario: two rounds of everything."""
        for turn in range(2):
            for i in range(3):
                self.call(f"c{turn}{i}", f"g{i % 2}_g0")
            self.attempt(self.publish, f"p{turn}")
            self.attempt(self.lake.compact)
        self.attempt(self.retire, "g1")
        self.attempt(self.call, "last", "g0_g0")
        self.lake.close()
        self.tell("closed")

    def attempt(self, step: Callable[..., Any], *arguments: Any) -> None:
        try:
            step(*arguments)
        except StorageFailed:
            self.tell("refused")

    def call(self, call_id: str, rollout_id: str) -> None:
        """Stage and commit one call."""
        delta = build_delta(call_id, rollout_id=rollout_id, n=50)
        try:
            place = self.lake.delta_writer("w0").stage(delta)
            self.tell("delta", call_id)
            event = self.lake.lineage.append(
                "call_committed",
                rollout_id=rollout_id,
                call_id=call_id,
                digest=delta.digest,
                writer=place.writer,
                segment=place.segment,
                byte_offset=place.byte_offset,
                byte_length=place.byte_length,
                batch_row=place.batch_row,
            )
            self.tell("event", event["event_seq"], event["event_hash"].hex())
        except StorageFailed:
            self.tell("refused")
        self.lake.refresh()

    def publish(self, group_id: str) -> None:
        """Rows, then the event that names them, then the anchor."""
        segment = self.lake.write_rows(row_table(group_id))
        event = self.lake.lineage.append("group_published", group_id=group_id, segment=segment, n=2)
        self.tell("event", event["event_seq"], event["event_hash"].hex())
        self.tell("rows", group_id, segment)
        self.lake.lineage.anchor()

    def retire(self, group_id: str) -> None:
        """What retention does of a group, without the views that choose it."""
        self.tell("retiring", group_id)
        event = self.lake.lineage.append("retired", group_id=group_id)
        self.tell("event", event["event_seq"], event["event_hash"].hex())
        self.lake.compact()
        self.tell("retired", group_id)


def check(path: Path, told: list[list[Any]]) -> None:
    """Open, audit and compare with the model; then go on working. Raises `AssertionError`."""
    of: dict[str, list[list[Any]]] = {}
    for kind, *rest in told:
        of.setdefault(kind, []).append(rest)
    with OwnedLake.open(path) as lake:
        seen = _content(lake, of)
        findings = lake.sql("SELECT * FROM lake_findings").fetchall()
        assert findings == [], findings
        assert lineage_loss(path) == []
        with Lake(path) as reader:
            assert _content(reader, of) == seen, "a reader sees something else than the owner"
        calls = lake.sql("SELECT rollout_id, call_id, digest FROM lineage WHERE event_type = 'call_committed'")
        for rollout, call_id, digest in calls.fetchall():
            found = lake.find_delta(rollout, 0, call_id)
            assert found is not None or rollout.startswith("g1_"), f"{call_id} was committed and is not there"
            assert found is None or found[1] == digest
        assert lake.delta_writer("w0").stage(build_delta("after")).segment >= 0
        lake.lineage.append("policy_set")
        lake.compact()
        assert {name for name, _ in seen[0]} - {"after"} <= {
            name for (name,) in lake.sql("SELECT call_id FROM deltas").fetchall()
        } | _retired(of)
    with OwnedLake.open(path) as lake:
        assert lake.sql("SELECT count(*) FROM deltas WHERE call_id = 'after'").fetchall() == [(1,)]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
    assert [str(left) for left in path.rglob("*.tmp")] == []


def _retired(of: dict[str, list[list[Any]]]) -> set[str]:
    return {f"c{turn}1" for turn in range(2)} if "retiring" in of else set()


def _content(lake: OwnedLake | Lake, of: dict[str, list[list[Any]]]) -> tuple[list[Any], list[Any], list[Any]]:
    deltas = lake.sql("SELECT call_id, digest FROM deltas ORDER BY call_id").fetchall()
    names = [name for name, _ in deltas]
    acknowledged = {name for (name,) in of.get("delta", [])}
    assert len(names) == len(set(names)), f"twice: {names}"
    assert acknowledged - _retired(of) <= set(names), f"lost: {acknowledged - set(names)}"
    if "retired" in of:
        assert not _retired(of) & set(names), "what was retired is still there"
    whole = {
        name: build_delta(name, rollout_id=f"g{int(name[2]) % 2 if name[0] == 'c' else 0}_g0", n=50).digest
        for name in names
        if name != "after"
    }
    assert all(whole[name] == digest for name, digest in deltas if name in whole), "a record is half there"
    events = lake.sql("SELECT event_seq, hex(event_hash) FROM lineage ORDER BY event_seq").fetchall()
    assert [seq for seq, _ in events] == list(range(len(events)))
    for seq, digest in of.get("event", []):
        assert seq < len(events), f"event {seq} is lost"
        assert events[seq][1].lower() == digest, f"event {seq} is another one"
    rows = lake.sql("SELECT group_id, segment, count(*) FROM rows GROUP BY ALL ORDER BY ALL").fetchall()
    assert all(count == 2 for *_, count in rows), "half a group"
    for group_id, segment in of.get("rows", []):
        assert (group_id, segment, 2) in rows, f"rows of {group_id} are lost"
    return deltas, events, rows


def encode(*told: Any) -> bytes:
    """One line of what a child tells."""
    return json.dumps(told).encode() + b"\n"
