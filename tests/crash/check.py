"""What must be true of a lake, whatever happened to the process that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.crash.known import Known
from tests.crash.scenario import Told, record, rows_of
from tests.crash.shim import Shim
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import publish_due
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake


def check(path: Path, told: Told, known: Known, starting: Shim | None = None) -> bool:
    """Open, audit and compare with the model; then go on working, and audit again. Raises `AssertionError`.

    False: a lake that is the same once it is open was checked before. `starting` sees it start, and stop then.
    """
    of = _by_kind(told)
    if starting is not None:
        starting.install()
    with OwnedLake.open(path) as lake:
        if not known.first(lake, told):
            return False
        if starting is not None:
            starting.stop()
        seen = _content(lake, of)
        _whole(lake)
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
        _whole(lake)
        # What was wrong before is wrong now: nothing heals by itself.
        faults = lake.sql("SELECT kind, rollout_id, detail FROM audit_findings WHERE severity = 'fault'").fetchall()
        assert faults == [], faults
    assert [str(left) for left in path.rglob("*.tmp")] == []
    return True


def _by_kind(told: Told) -> dict[str, Told]:
    of: dict[str, Told] = {}
    for kind, *rest in told:
        of.setdefault(kind, []).append(rest)
    return of


def _go_on(lake: OwnedLake, of: dict[str, Told]) -> None:
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


def _whole(lake: OwnedLake) -> None:
    findings = lake.sql("SELECT * FROM lake_findings").fetchall()
    assert findings == [], findings
    assert lineage_loss(lake.path) == []


def _claimed(lake: OwnedLake) -> set[str]:
    return {name for (name,) in lake.sql("SELECT group_id FROM lineage WHERE event_type = 'rows_claimed'").fetchall()}


def _retired(lake: OwnedLake | Lake) -> set[str]:
    return {name for (name,) in lake.sql("SELECT group_id FROM lineage WHERE event_type = 'retired'").fetchall()}


def _content(lake: OwnedLake | Lake, of: dict[str, Told]) -> tuple[list[Any], ...]:
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
