"""Random multi-turn conversations: exact prompts by vLLM's own log, exact log-probabilities by the weights.

`TOKENLAKE_TEST_VLLM_CONVERSATIONS` is how many; what was played and how exact it was is printed. Turns end on stop ids,
on stop texts and on lengths (B09), and the template takes old thinking away (B11).
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served
from tests.vllm.conversation import Conversation
from tests.vllm.test_worker import deltas, exact
from tokenlake.api.demo.vllm_policy import read_log
from tokenlake.ingest.tiny import load_model, sequence_logprobs
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer

COUNT = int(os.environ.get("TOKENLAKE_TEST_VLLM_CONVERSATIONS", "20"))
END = TinyTokenizer(WEIGHTS_DIR / "tokenizer.json").id_of("<|im_end|>")
AT_ONCE = 20
"""Conversations of one test, which the suite gives five minutes."""
KINDS = {"tool call", "thinking", "only thinking", "thinking left out", "length", "stop", "stop text", "fork"}


@dataclass
class Played:
    """What was played so far, and how exact it was."""

    seen: Counter[str] = field(default_factory=Counter[str])
    """How often what happened, of the half that was asked whole."""
    conversations: int = 0
    calls: int = 0
    rows_off: float = 0.0
    calls_off: float = 0.0
    """How far a log-probability lies from the one that the weights give, at most: of rows, of all calls."""

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations, each whole and streamed: {self.calls} calls, "
            f"{self.calls - 2 * self.conversations} of which continue another by the engine's own prompt; in each half "
            f"{dict(sorted(self.seen.items()))}; log-probabilities off by at most {self.rows_off:.2g} in rows, "
            f"{self.calls_off:.2g} in calls"
        )


@pytest.fixture(scope="module")
def played() -> Played:
    return Played()


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_conversations_are_exact_and_alike_whole_and_streamed(
    open_gate: Opener, worker: Served, group: str, played: Played, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    with open_gate(engine=backend(worker.url, "worker")) as door:
        for seed in range(first, min(first + AT_ONCE, COUNT)):
            name = f"{group}c{seed}"
            pair = door.register(name, n=2)
            twins = [
                Conversation(door, rollout, seed, stream) for rollout, stream in zip(pair, (False, True), strict=True)
            ]
            for twin in twins:
                twin.play()
                door.client.seal(twin.rollout["rollout_id"], reward=1.0, terminal_response_id=twin.last)
            whole, flowing = (deltas(door, rollout) for rollout in pair)
            assert whole == flowing
            assert twins[0].seen == twins[1].seen
            played.conversations += 1
            played.seen += Counter(twins[0].seen)
            played.rows_off = max(played.rows_off, exact(door, name))
        calls = _calls(door, worker, group)
    cut = [call for call in calls if call["finish_reason"] == "stop" and call["sequence"][-1] != END]
    children = Counter(call["parent"] for call in calls if call["parent"] is not None)
    played.seen += Counter({"stop text": len(cut) // 2, "fork": sum(count - 1 for count in children.values()) // 2})
    played.calls += len(calls)
    played.calls_off = max(played.calls_off, _off(calls))
    assert played.calls_off < 1e-4
    assert played.calls == 2 * sum(played.seen[end] for end in ("tool call", "length", "stop"))
    assert first + AT_ONCE < COUNT or not KINDS - set(played.seen), "every kind was played"
    with capsys.disabled():
        print(f"\n{played}")  # noqa: T201  # figures that are quoted


def _calls(door: Door, worker: Served, group: str) -> list[dict[str, Any]]:
    """Every committed call; its prompt by vLLM's log is its parent's exact ids and what was carried after them."""
    committed = [e for e in door.events("call_committed") if e["rollout_id"].startswith(f"{group}c")]
    wait_for(door, lambda: {e["call_id"] for e in committed} <= set(read_log("".join(worker.log))))
    traced = read_log("".join(worker.log))
    query = (
        "SELECT call_id, finish_reason, token_ids, token_mask, logprobs FROM deltas WHERE starts_with(rollout_id, ?)"
    )
    staged = {row["call_id"]: row for row in door.service.lake.sql(query, [f"{group}c"]).to_arrow_table().to_pylist()}
    assert len(committed) == len(staged)
    sequences: dict[str, list[int]] = {}
    roots = Counter(event["rollout_id"] for event in committed if event.get("parent_call_id") is None)
    assert set(roots.values()) == {1}, "each call but the first of a rollout continues another"
    for event in committed:
        call, row = event["call_id"], staged[event["call_id"]]
        sampled = sum(row["token_mask"])
        row["parent"] = event.get("parent_call_id")
        before = sequences[row["parent"]] if row["parent"] else []
        sequences[call] = row["sequence"] = [*before, *row["token_ids"]]
        given = traced[call].prompt_token_ids
        assert given[: len(before)] == before, "the engine was given the parent's exact ids"
        assert given == row["sequence"][: len(row["sequence"]) - sampled]
        answered = traced[call].token_ids
        assert answered is None or answered == row["token_ids"][len(row["token_ids"]) - sampled :]
    return list(staged.values())


def _off(calls: list[dict[str, Any]]) -> float:
    """How far a staged log-probability lies from the one that the weights give it, at most."""
    model = load_model(WEIGHTS_DIR)
    farthest = 0.0
    for call in calls:
        ours = sequence_logprobs(model, call["sequence"])[-len(call["token_ids"]) :]
        kept = zip(call["logprobs"], ours, call["token_mask"], strict=True)
        farthest = max(farthest, *(abs(said - own) for said, own, sampled in kept if sampled))
    return farthest
