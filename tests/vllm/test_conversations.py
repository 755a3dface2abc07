"""Random multi-turn conversations: exact prompts by vLLM's own log, exact log-probabilities by the weights.

`TOKENLAKE_TEST_VLLM_CONVERSATIONS` is how many. Turns end on stop ids, on stop texts and on lengths (B09), and the
template takes old thinking away (B11).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from tests.api.conftest import Opener
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served
from tests.vllm.conversation import Conversation
from tests.vllm.test_worker import deltas, exact
from tokenlake.api.demo.vllm_policy import read_log

COUNT = int(os.environ.get("TOKENLAKE_TEST_VLLM_CONVERSATIONS", "20"))


def test_random_conversations_are_exact_and_alike_whole_and_streamed(
    open_gate: Opener, worker: Served, group: str
) -> None:
    seen: Counter[str] = Counter()
    with open_gate(engine=backend(worker.url, "worker")) as door:
        for seed in range(COUNT):
            name = f"{group}c{seed}"
            pair = door.register(name, n=2)
            played = [
                Conversation(door, rollout, seed, stream) for rollout, stream in zip(pair, (False, True), strict=True)
            ]
            for conversation in played:
                conversation.play()
                door.client.seal(conversation.rollout["rollout_id"], reward=1.0, terminal_response_id=conversation.last)
            whole, flowing = (deltas(door, rollout) for rollout in pair)
            assert whole == flowing
            seen += Counter(played[0].seen)
            exact(door, name)
        committed = [e for e in door.events("call_committed") if e["rollout_id"].startswith(f"{group}c")]
        staged = {row["call_id"]: row for row in _staged(door, group)}
    assert len(committed) == len(staged)
    sequences: dict[str, list[int]] = {}
    traced = read_log("".join(worker.log))
    for event in committed:
        call, parent = event["call_id"], event.get("parent_call_id")
        row = staged[call]
        sampled = sum(row["token_mask"])
        before = sequences[parent] if parent else []
        sequences[call] = [*before, *row["token_ids"]]
        given = traced[call].prompt_token_ids
        assert given[: len(before)] == before, "the engine was given the parent's exact ids"
        assert given == sequences[call][: len(sequences[call]) - sampled]
        answered = traced[call].token_ids
        assert answered is None or answered == row["token_ids"][len(row["token_ids"]) - sampled :]
    assert not {"tool call", "thinking", "length", "stop", "fork"} - set(seen), "every kind was played"


def _staged(door: Any, group: str) -> list[dict[str, Any]]:
    query = "SELECT call_id, token_ids, token_mask FROM deltas WHERE starts_with(rollout_id, ?)"
    return door.service.lake.sql(query, [f"{group}c"]).to_arrow_table().to_pylist()
