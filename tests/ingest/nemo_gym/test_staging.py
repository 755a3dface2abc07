"""A lake where NeMo-RL had a transfer queue: staged by workers, verified by NeMo-Gym, received as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture")

from nemo_gym.token_id_capture.staging import (
    CallRecord,
    CaptureAdmission,
    CommitCoords,
    RolloutReceipt,
    RolloutTokenCapture,
    StagedCallRecord,
    StagingSink,
    StagingSource,
    verify_and_linearize,
)
from nemo_gym.token_id_capture.staging.conformance import assert_golden_vectors, load_golden_vectors

from tokenlake.errors import Conflict, InvalidInput, NotFound
from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.ingest.nemo_gym import digests
from tokenlake.ingest.nemo_gym.receive import receive
from tokenlake.ingest.nemo_gym.staging import LakeStagingSink, LakeStagingSource
from tokenlake.store.lake import OwnedLake


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[OwnedLake]:
    with OwnedLake.open(tmp_path / "lake") as lake:
        yield lake


@pytest.fixture
def sinks(lake: OwnedLake) -> Iterator[list[LakeStagingSink]]:
    """Of two workers."""
    made = [LakeStagingSink(lake.path, f"w{i}") for i in range(2)]
    yield made
    for sink in made:
        sink.close()


def stage(
    sink: Any, rollout: str, call: str, new: list[int], sampled: list[int], before: list[Any] | None = None, **more: Any
) -> tuple[CommitCoords, list[int]]:
    """Stage as a worker of NeMo-Gym does; `before` is (coordinates, whole sequence) of the parent."""
    parent, prefix = before or (None, [])
    admission = CaptureAdmission(
        rollout_id=rollout,
        model_call_id=call,
        parent_call_id=parent and parent.model_call_id,
        prev_len=len(prefix),
        mode="token_in" if parent else "text",
        required_prefix_token_ids=prefix,
        parent_chain_hash=parent and parent.chain_hash,
    )
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 5)
    coords = capture.complete_call(
        capture.begin_call(admission),
        prompt_token_ids=[*prefix, *new],
        generated_token_ids=sampled,
        generated_logprobs=[-0.1 * (i + 1) for i in range(len(sampled))],
        **more,
    )
    return coords, [*prefix, *new, *sampled]


def receipt(rollout: str, *coords: CommitCoords, reward: float | None = 1.0, **more: Any) -> RolloutReceipt:
    names = CallRecord.model_fields.keys() & CommitCoords.model_fields.keys()
    manifest = [
        CallRecord(
            **{name: getattr(each, name) for name in names},
            mode="text" if each.parent_call_id is None else "token_in",
            response_id=f"resp-{each.model_call_id}",
        )
        for each in coords
    ]
    ended: dict[str, Any] = {"terminal_model_call_id": coords[-1].model_call_id, "terminal_selection": "response_id"}
    return RolloutReceipt(rollout_id=rollout, reward=reward, manifest=manifest, **(ended | more))


def rows(lake: OwnedLake) -> list[dict[str, Any]]:
    set_policy(lake, {"group_deadline_s": 0})
    publish_due(lake)
    return lake.sql("SELECT * FROM ready_rows ORDER BY sample_id").to_arrow_table().to_pylist()


def test_sink_and_source_are_of_the_protocols_and_the_digests_are_the_published_ones(
    lake: OwnedLake, sinks: list[LakeStagingSink]
) -> None:
    assert isinstance(sinks[0], StagingSink)
    assert isinstance(LakeStagingSource(lake.path), StagingSource)
    assert_golden_vectors()
    vectors = load_golden_vectors()
    assert digests.extras_digest(vectors["extras"]) == vectors["extras_digest"]


def test_a_rollout_staged_by_two_workers_is_linearized_by_nemo_gym_and_by_the_lake_alike(
    lake: OwnedLake, sinks: list[LakeStagingSink]
) -> None:
    first = stage(sinks[0], "p_g0", "a", [1, 2], [3], extras={"routed_experts": "nrlre1:int8:1x1x1:AA=="})
    second = stage(sinks[1], "p_g0", "b", [4], [5, 6], list(first))
    other = stage(sinks[1], "p_g1", "c", [1, 2], [9])
    made = receipt("p_g0", first[0], second[0])
    keys = [record.staging_key for record in made.manifest]
    theirs = verify_and_linearize(made, LakeStagingSource(lake.path).fetch(keys))
    receive(lake, made, n=2)
    receive(lake, receipt("p_g1", other[0], reward=0.0), n=2)
    ours, _ = rows(lake)
    assert (ours["sample_mask"], ours["reason"]) == (1, None)
    assert ours["input_ids"] == list(theirs.token_ids) == second[1] == [1, 2, 3, 4, 5, 6]
    assert ours["token_mask"] == list(map(int, theirs.token_mask)) == [0, 0, 1, 0, 1, 1]
    assert ours["logprobs"] == list(theirs.logprobs)
    assert (ours["call_ids"], ours["weight_version_min"], ours["reward"]) == (["a", "b"], 5, 1.0)
    assert lake.sql("SELECT count(*) FROM verified_calls WHERE reason IS NULL").fetchall() == [(3,)]
    assert lake.sql("SELECT * FROM audit_findings").fetchall() == []


def test_a_receipt_taken_twice_changes_nothing_and_another_one_is_a_conflict(
    lake: OwnedLake, sinks: list[LakeStagingSink]
) -> None:
    coords, _ = stage(sinks[0], "p_g0", "a", [1, 2], [3])
    receive(lake, receipt("p_g0", coords), n=1)
    before = lake.sql("SELECT count(*) FROM lineage").fetchall()
    receive(lake, receipt("p_g0", coords), n=1)
    assert lake.sql("SELECT count(*) FROM lineage").fetchall() == before
    with pytest.raises(Conflict, match="ended otherwise"):
        receive(lake, receipt("p_g0", coords, reward=0.0), n=1)
    with pytest.raises(Conflict, match="not 2"):
        receive(lake, receipt("p_g1", coords), n=2)


def test_what_a_receipt_names_and_nobody_staged_is_a_placeholder(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    first, whole = stage(sinks[0], "p_g0", "a", [1, 2], [3])
    other, _ = stage(sinks[1], "q_g0", "b", [4], [5], [first.model_copy(), whole])
    assert other.disposition == "capture_failed", "its parent is of another rollout"
    lost = first.model_copy(update={"model_call_id": "z", "staging_key": "p_g0/z"})
    changed, _ = stage(sinks[1], "p_g1", "c", [1, 2], [9])
    changed = changed.model_copy(update={"digest": "0" * 64})
    receive(lake, receipt("p_g0", first, lost), n=3)
    receive(lake, receipt("p_g1", changed), n=3)
    poisoned = {"capture_poisoned": True, "failure_reason": "worker_capture_failed"}
    last, _ = stage(sinks[0], "p_g2", "d", [1], [2])
    receive(lake, receipt("p_g2", last, **poisoned), n=3)
    found = rows(lake)
    assert [row["sample_mask"] for row in found] == [0, 0, 0]
    assert [row["reason"] for row in found] == ["delta_missing", "digest_mismatch", "rollout_failed"]


def test_a_later_attempt_is_the_one_that_counts(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    old, _ = stage(sinks[0], "p_g0", "a", [1, 2], [3])
    new, _ = stage(sinks[0], "p_g0-a1", "a", [1, 2], [8, 9])
    receive(lake, receipt("p_g0", old, capture_poisoned=True, failure_reason="timeout"), n=1)
    receive(lake, receipt("p_g0-a1", new), n=1)
    (row,) = rows(lake)
    assert (row["sample_id"], row["attempt"], row["input_ids"]) == ("p_g0", 1, [1, 2, 8, 9])


def test_the_same_call_is_staged_once_and_another_under_its_id_is_refused(sinks: list[LakeStagingSink]) -> None:
    assert stage(sinks[0], "p_g0", "a", [1, 2], [3])[0].disposition == "staged"
    assert stage(sinks[0], "p_g0", "a", [1, 2], [3])[0].disposition == "staged"
    assert stage(sinks[0], "p_g0", "a", [1, 2], [4])[0].disposition == "capture_failed"


def test_a_sink_refuses_what_it_cannot_keep(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    kept: list[StagedCallRecord] = []

    class Keeper:
        def stage(self, record: StagedCallRecord, *, attachments: Any = None) -> Any:
            kept.append(record)
            return sinks[0].stage(record)

    coords, whole = stage(Keeper(), "p_g0", "a", [1, 2], [3])
    stage(Keeper(), "p_g0", "b", [4], [5], [coords, whole])
    root, child = kept
    refused = {
        "attachments": sinks[0].stage(root, attachments={"imgs": b""}),
        "digest": sinks[0].stage(root.model_copy(update={"token_ids_delta": [1, 2, 4]})),
        "extras": sinks[0].stage(root.model_copy(update={"extras": {"a": 1}})),
        "lengths": sinks[0].stage(root.model_copy(update={"token_mask_delta": [0.0, 1.0]})),
        "parent": sinks[0].stage(child.model_copy(update={"parent_call_id": "nobody"})),
    }
    assert {name: result.ok for name, result in refused.items()} == dict.fromkeys(refused, False)
    # The words of a refusal reach logs: no token id and no log-probability is in them.
    assert not any(character.isdigit() for result in refused.values() for character in result.error or "")


def test_a_source_gives_what_was_staged_in_order_or_nothing(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    first = stage(sinks[0], "p_g0", "a", [1, 2], [3])
    stage(sinks[1], "p_g0", "b", [4], [5], list(first))
    source = LakeStagingSource(lake.path)
    found = source.fetch(["p_g0/b", "p_g0/a"])
    assert [each.model_call_id for each in found] == ["b", "a"]
    assert type(found[0]).model_validate(found[0].model_dump()) == found[0], "NeMo-Gym's own validation agrees"
    with pytest.raises(NotFound, match="p_g0/c"):
        source.fetch(["p_g0/a", "p_g0/c"])


def test_what_was_changed_on_disk_is_not_given_back(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    stage(sinks[0], "p_g0", "a", [101, 102], [103])
    (path,) = (lake.path / "deltas" / "w0").glob("*.arrow")
    old = b"".join(n.to_bytes(4, "little") for n in (101, 102, 103))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, old[:8] + (104).to_bytes(4, "little")))
    with pytest.raises(InvalidInput, match="not what was staged"):
        LakeStagingSource(lake.path).fetch(["p_g0/a"])


def test_staged_calls_are_found_after_compaction(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    source = LakeStagingSource(lake.path)
    first = stage(sinks[0], "p_g0", "a", [1, 2], [3])
    assert len(source.fetch(["p_g0/a"])) == 1
    sinks[0].close()
    receive(lake, receipt("p_g0", first[0]), n=2)
    lake.compact()
    assert not list((lake.path / "deltas" / "w0").glob("*.arrow")), "it was compacted"
    assert stage(sinks[1], "p_g0", "b", [4], [5], list(first))[0].disposition == "staged"
    assert [each.model_call_id for each in source.fetch(["p_g0/a", "p_g0/b"])] == ["a", "b"]


def test_the_delta_of_a_staged_call_carries_its_digests_and_extras(
    lake: OwnedLake, sinks: list[LakeStagingSink]
) -> None:
    coords, _ = stage(sinks[0], "p_g0", "a", [1], [2], extras={"routed_experts": [[[1, 2]]]})
    receive(lake, receipt("p_g0", coords), n=1)
    ((extras,),) = lake.sql("SELECT extras FROM deltas").fetchall()
    found = json.loads(extras)
    assert found["routed_experts"] == [[[1, 2]]]
    assert (found["nemo_gym"]["digest"], found["nemo_gym"]["chain_hash"]) == (coords.digest, coords.chain_hash)


def test_threads_of_two_workers_stage_at_once(lake: OwnedLake, sinks: list[LakeStagingSink]) -> None:
    def rollout(i: int) -> RolloutReceipt:
        done: list[Any] = []
        for turn in range(3):
            sink = sinks[(i + turn) % 2]
            done.append(stage(sink, f"p_g{i}", f"c{i}-{turn}", [i, turn], [100 + i], done and list(done[-1])))
        return receipt(f"p_g{i}", *(coords for coords, _ in done))

    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(rollout, range(16)))
    for each in receipts:
        receive(lake, each, n=16)
    found = rows(lake)
    assert len(found) == 16
    assert all(row["sample_mask"] == 1 and row["turns"] == 3 for row in found)
    for i, row in enumerate(sorted(found, key=lambda row: len(row["sample_id"]) * 1000 + row["input_ids"][0])):
        assert row["input_ids"] == [token for turn in range(3) for token in (i, turn, 100 + i)]
