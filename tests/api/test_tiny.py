"""The gate over a real model: what the engine was given and sampled is what the lake holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.errors import LakeLocked
from tokenlake.store.lake import OwnedLake

TOOL = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}


def test_what_the_engine_saw_is_what_the_row_says(opened: Opener, tmp_path: Path) -> None:
    tiny = pytest.importorskip("tokenlake.ingest.tiny")
    trace = tmp_path / "trace.jsonl"
    with opened(engine=tiny.TinyEngine(trace_path=trace)) as door:
        door.client.set_weight_version(3)
        (rollout,) = door.register()
        agent = door.agent(rollout)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
        for turn in range(4):
            completion = ask(agent, messages, tools=[TOOL], max_tokens=24 if turn else 5)
            messages.append(echo(completion))
            calls = completion.choices[0].message.tool_calls or ()
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            messages.append({"role": "user", "content": f"And {turn} more?"})
        assert [event["mode"] for event in door.events("call_committed")] == ["text"] + ["token_in"] * 3
        door.client.seal("g_g0", reward=1.0, terminal_response_id=completion.id)
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        (row,) = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
        refuse_a_second_owner(door)
    seen = [json.loads(line) for line in trace.read_text().splitlines()]
    whole: list[int] = []
    mask: list[int] = []
    for call in seen:
        assert call["prompt_token_ids"][: len(whole)] == whole
        mask += [0] * (len(call["prompt_token_ids"]) - len(whole)) + [1] * len(call["token_ids"])
        whole = call["prompt_token_ids"] + call["token_ids"]
    assert (row["input_ids"], row["token_mask"]) == (whole, mask)
    sampled = [value for value, trained in zip(row["logprobs"], mask, strict=True) if trained]
    assert sampled == [value for call in seen for value in call["logprobs"]]
    assert (row["weight_version_min"], row["weight_version_max"], row["sample_mask"]) == (3, 3, 1)


def refuse_a_second_owner(door: Door) -> None:
    with pytest.raises(LakeLocked):
        OwnedLake.open(door.service.lake.path)
