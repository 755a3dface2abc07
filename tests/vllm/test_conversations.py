"""Random multi-turn conversations: exact prompts by vLLM's own log, exact log-probabilities by the weights.

`TOKENLAKE_TEST_VLLM_CONVERSATIONS` is how many; what was played and how exact it was is printed. Turns end on stop ids,
on stop texts and on lengths (B09), and the template takes old thinking away (B11).
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
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
KINDS = {"tool call", "thinking", "only thinking", "thinking left out", "length", "stop", "stop text", "fork"}


def test_random_conversations_are_exact_and_alike_whole_and_streamed(
    open_gate: Opener, worker: Served, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: Counter[str] = Counter()
    rows_off = 0.0
    with open_gate(engine=backend(worker.url, "worker")) as door:
        for seed in range(COUNT):
            # The suite's own bound, for each: how many there are is asked for.
            faulthandler.dump_traceback_later(300, exit=True)
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
            assert played[0].seen == played[1].seen
            seen += Counter(played[0].seen)
            rows_off = max(rows_off, exact(door, name))
        calls = _calls(door, worker, group)
    assert len(calls) == 2 * sum(seen[end] for end in ("tool call", "length", "stop"))
    seen["stop text"] = sum(call["finish_reason"] == "stop" and call["sequence"][-1] != END for call in calls) // 2
    children = Counter(call["parent"] for call in calls if call["parent"] is not None)
    seen["fork"] = sum(count - 1 for count in children.values()) // 2
    assert not KINDS - set(+seen), "every kind was played"
    calls_off = _off(calls)
    assert calls_off < 1e-4
    with capsys.disabled():
        print(  # noqa: T201  # figures that are quoted
            f"\n{COUNT} conversations, each whole and streamed: {len(calls)} calls, {len(calls) - 2 * COUNT} of which "
            f"continue another by the engine's own prompt; in each half {dict(sorted(seen.items()))}; "
            f"log-probabilities off by at most {rows_off:.2g} in rows, {calls_off:.2g} in calls"
        )


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
