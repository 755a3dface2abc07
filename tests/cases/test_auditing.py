"""An audit that goes on where it stopped, and the digest that pins a lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import CaseLake, call, group, seal
from tests.cases.forger import event, lineage, rows
from tokenlake.errors import ConfigError
from tokenlake.store.audit import LakeAudit
from tokenlake.store.lake import OwnedLake


@pytest.fixture
def filled(case: CaseLake) -> CaseLake:
    case.take(
        *(
            record
            for name in ("a", "b", "c")
            for record in (
                group(name, 1),
                call(f"{name}_g0", "c0", [1, 2], [3, 4]),
                call(f"{name}_g0", "c1", [1, 2, 3, 4, 5], [6]),
                seal(f"{name}_g0", 1.0, terminal_call_id="c1"),
            )
        )
    )
    case.finalize()
    return case


def summary(case: CaseLake, *more: str) -> dict[str, Any]:
    status, out, err = case.run("audit", "--lake", str(case.path), "--summary", *more)
    assert status == 0, err
    return json.loads(out)


def test_the_digest_is_the_same_after_compaction_and_another_index(filled: CaseLake) -> None:
    before = summary(filled)
    assert (before["groups"], before["calls"], before["rows"], before["faults"]) == (3, 6, 3, 0)
    assert filled.run("compact", "--lake", str(filled.path))[0] == 0
    assert filled.run("rebuild", "--lake", str(filled.path))[0] == 0
    OwnedLake.open(filled.path).close()
    assert summary(filled) == before
    assert filled.run("audit", "--lake", str(filled.path), "--expect", before["digest"])[0] == 0


def test_the_digest_is_the_same_however_many_groups_are_looked_at_together(filled: CaseLake) -> None:
    for batch_bytes in (1, 1 << 30):
        with LakeAudit(filled.path, batch_bytes=batch_bytes) as audit:
            assert audit.run().digest == summary(filled)["digest"]


def test_a_forger_who_makes_every_hash_anew_is_found_by_the_digest_alone(filled: CaseLake, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret\n")
    signed = tmp_path / "summary.json"
    signed.write_text(json.dumps(summary(filled, "--key-file", str(key))))
    expect = ["audit", "--lake", str(filled.path), "--expect", str(signed), "--key-file", str(key)]
    assert filled.run(*expect)[0] == 0
    lineage(
        filled.path, lambda events: event(events, "rollout_sealed", rollout_id="a_g0").update(reward=5.0), rehash=True
    )
    rows(filled.path, lambda found: found[0].update(reward=5.0), redigest=True)
    assert filled.audit() == (0, [])
    status, _, err = filled.run(*expect)
    assert status == 1
    assert "not what was expected" in err


def test_a_summary_that_another_key_signed_is_refused(filled: CaseLake, tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("a secret")
    other.write_text("another")
    signed = tmp_path / "summary.json"
    signed.write_text(json.dumps(summary(filled, "--key-file", str(key))))
    status, _, err = filled.run("audit", "--lake", str(filled.path), "--expect", str(signed), "--key-file", str(other))
    assert status == 2
    assert "not signed with this key" in err


def test_a_new_row_is_another_digest(filled: CaseLake) -> None:
    before = summary(filled)["digest"]
    filled.take(group("d", 1), call("d_g0", "c0", [1], [2]), seal("d_g0"))
    assert summary(filled)["digest"] != before


class Stop(Exception):
    """What interrupts an audit here."""


def test_an_interrupted_audit_goes_on_where_it_stopped(filled: CaseLake, tmp_path: Path) -> None:
    state = tmp_path / "state"
    looked: list[int] = []

    def stop(done: int, due: int) -> None:
        looked.append(due)
        raise Stop

    with pytest.raises(Stop), LakeAudit(filled.path, state=state, batch_bytes=1) as audit:
        audit.run(stop)
    with LakeAudit(filled.path, state=state, batch_bytes=1) as audit:
        found = audit.run(lambda done, due: looked.append(due))
    assert looked == [3, 2, 2]
    assert (found.groups, found.digest) == (3, summary(filled)["digest"])
    assert not state.exists()


def test_a_group_that_changed_meanwhile_is_looked_at_again(filled: CaseLake, tmp_path: Path) -> None:
    state = tmp_path / "state"

    def stop(done: int, due: int) -> None:
        raise Stop

    filled.take(group("0", 1), call("0_g0", "c0", [1], [2], generation_logprobs=[0.5]))
    with pytest.raises(Stop), LakeAudit(filled.path, state=state, batch_bytes=1) as audit:
        audit.run(stop)
    filled.take(call("0_g0", "c1", [1, 2], [3], generation_logprobs=[0.5]))
    status, out, _ = filled.run("audit", "--lake", str(filled.path), "--format", "jsonl", "--resume", str(state))
    assert status == 1
    assert [json.loads(line)["call_id"] for line in out.splitlines()] == ["c0", "c1"]


def test_the_state_of_another_lake_is_refused(filled: CaseLake, tmp_path: Path) -> None:
    OwnedLake.open(tmp_path / "other").close()
    state = tmp_path / "state"
    state.mkdir()
    (state / "audit.json").write_text('{"lake_id": "another"}')
    with pytest.raises(ConfigError, match="another lake"):
        LakeAudit(filled.path, state=state)
    (state / "audit.json").rename(state / "precious")
    with pytest.raises(ConfigError, match="something else"):
        LakeAudit(filled.path, state=state)
    assert (state / "precious").exists()


def test_a_group_that_is_retired_while_an_audit_runs_is_no_fault(filled: CaseLake) -> None:
    def first(done: int, _: int) -> None:
        if done == 1:
            assert filled.run("gc", "--lake", str(filled.path), "--group", "b", "--rollout", "c_g0")[0] == 0

    with LakeAudit(filled.path, batch_bytes=1) as audit:
        done = audit.run(first)
        assert (done.faults, audit.findings().to_pylist()) == (0, [])
    assert done.digest == summary(filled)["digest"]
