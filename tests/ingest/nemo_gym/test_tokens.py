"""A lake where NeMo-Gym had its files of token entries: its own conformance kit, and the rows that come out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture")

from nemo_gym.token_id_capture.conformance import run_conformance
from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.ingest.nemo_gym.receive import receive_snapshot
from tokenlake.ingest.nemo_gym.tokens import LakeLineage, LakeTokenSink, LakeTokenSource
from tokenlake.store.lake import OwnedLake


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[OwnedLake]:
    with OwnedLake.open(tmp_path / "lake") as lake:
        yield lake


def entry(
    rollout: str, call: str, prompt: list[int], sampled: list[int], parent: TokenEntry | None = None, **more: Any
) -> TokenEntry:
    made = TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=sampled,
        generation_log_probs=[-0.1] * len(sampled),
        response_id=f"resp-{call}",
        output_items=[{"type": "message", "role": "assistant", "content": call}],
        **more,
    )
    stamp_continuation(made, [{"role": "user", "content": "go"}])
    status = ParentResolutionStatus.ROOT if parent is None else ParentResolutionStatus.RESOLVED
    return stamp_lineage(made, parent and parent.model_call_id, parent_resolution=status)


def test_nemo_gyms_conformance_kit_passes_with_every_check(lake: OwnedLake) -> None:
    passed = asyncio.run(
        run_conformance(
            lambda: LakeTokenSink(lake.path), lambda: LakeTokenSource(lake.path), lambda: LakeLineage(lake.path)
        )
    )
    assert len(passed) == 10
    assert {"begin_call_custody", "fresh_client_lineage_visibility", "conflicting_reput"} <= set(passed)


def test_a_token_is_stored_once_and_an_entry_comes_back_as_it_was(lake: OwnedLake) -> None:
    first = entry("p_g0", "a", [1, 2], [3], weight_version=4, unknown={"kept": True})
    second = entry("p_g0", "b", [1, 2, 3, 4], [5, 6], first)
    suffix = second.model_copy(
        update={"model_call_id": "c", "prompt_token_ids": [4], "prompt_is_delta": True, "routed_experts": [[[1]]]}
    )

    async def put() -> Any:
        for sink, one in zip([LakeTokenSink(lake.path) for _ in range(3)], (first, second, suffix), strict=True):
            await sink.put(one)
            await sink.close()
        return await LakeTokenSource(lake.path).freeze("p_g0")

    snapshot = asyncio.run(put())
    assert list(snapshot.entries) == [first, second, suffix]
    staged = lake.sql("SELECT list_sort(list(len(token_ids))) FROM deltas").fetchall()
    assert staged == [([3, 3, 3],)]


def test_a_prompt_that_is_not_the_parents_sequence_is_kept_whole(lake: OwnedLake) -> None:
    first = entry("p_g0", "a", [1, 2], [3])
    drifted = entry("p_g0", "b", [1, 2, 9, 4], [5], first)

    async def put() -> Any:
        sink = LakeTokenSink(lake.path)
        await sink.put(first)
        await sink.put(drifted)
        await sink.close()
        return await LakeTokenSource(lake.path).freeze("p_g0")

    snapshot = asyncio.run(put())
    assert list(snapshot.entries) == [first, drifted]
    receive_snapshot(lake, snapshot, n=1, reward=1.0, terminal_response_id="resp-b")
    assert lake.sql("SELECT verdict, reason FROM rollouts").fetchall() == [("placeholder", "lineage_mismatch")]


def test_frozen_rollouts_become_rows(lake: OwnedLake) -> None:
    first = entry("p_g0", "a", [1, 2], [3], weight_version=4)
    second = entry("p_g0", "b", [1, 2, 3, 4], [5, 6], first, weight_version=4)

    async def put() -> None:
        sink, source = LakeTokenSink(lake.path), LakeTokenSource(lake.path)
        for one in (first, second, entry("p_g1", "a", [1], [2]), entry("p_g2", "a", [1], [2])):
            await sink.begin_call(one.rollout_id, one.model_call_id)
            await sink.put(one)
        await sink.mark_incomplete("p_g1", "lost")
        await sink.close()
        for name, more in {"p_g0": {"terminal_response_id": "resp-b"}, "p_g1": {}, "p_g2": {}}.items():
            receive_snapshot(lake, await source.freeze(name), n=3, reward=1.0, **more)

    asyncio.run(put())
    set_policy(lake, {"group_deadline_s": 0})
    publish_due(lake)
    rows = lake.sql("SELECT * FROM ready_rows ORDER BY sample_id").to_arrow_table().to_pylist()
    assert [(row["sample_mask"], row["reason"]) for row in rows] == [(1, None), (0, "incomplete"), (1, None)]
    assert (rows[0]["input_ids"], rows[0]["token_mask"]) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1])
    assert (rows[0]["call_ids"], rows[0]["weight_version_max"]) == (["a", "b"], 4)
    assert lake.sql("SELECT * FROM audit_findings").fetchall() == [], "a mark is no lost record"
