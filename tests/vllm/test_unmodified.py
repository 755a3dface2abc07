"""A whole rollout through the gate over an unmodified vLLM that serves the embedded model."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served
from tokenlake.ingest.tiny import load_model, sequence_logprobs
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, SYSTEM_PROMPT, calculator


def play(door: Door, rollout: dict[str, Any], turns: int) -> Any:
    """An agent that answers tool calls and asks on; every turn echoes the whole conversation."""
    agent = door.agent(rollout)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "What is 12 + 31?"},
    ]
    completion: Any = None
    for _ in range(turns):
        completion = agent.chat.completions.create(
            model="any", messages=messages, tools=[CALCULATOR_TOOL], max_tokens=64, temperature=0.7
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        result = {"role": "tool", "content": calculator("12 + 31")}
        messages += [{**result, "tool_call_id": call.id} for call in message.tool_calls or ()]
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Are you sure? Check once more."})
    return completion


def test_a_rollout_over_vllm_is_exact(opened: Opener, stock: Served) -> None:
    with opened(engine=backend(stock.url)) as door:
        (rollout,) = door.register()
        last = play(door, rollout, 6)
        receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
        assert [entry["mode"] for entry in receipt["manifest"]] == ["text"] + ["token_in"] * 5
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        (row,) = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
        assert (row["sample_mask"], row["reason"], row["logprob_mode"]) == (1, None, "raw")
        assert door.request("GET", "/api/v1/audit").json()["healthy"]
    ours = sequence_logprobs(load_model(WEIGHTS_DIR), row["input_ids"])
    sampled = [index for index, trained in enumerate(row["token_mask"]) if trained]
    assert len(sampled) > 20
    assert max(abs(row["logprobs"][index] - ours[index]) for index in sampled) < 1e-4


def test_plain_calls_are_vllms_own(opened: Opener, stock: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    with opened(engine=backend(stock.url, "off")) as door:
        (rollout,) = door.register()
        path = "/ng-rollout/g_g0/v1/chat/completions"
        through = door.post(path, body, token=rollout["data_capability"]).json()
        assert through["choices"] == httpx.post(f"{stock.url}/v1/chat/completions", json=body).json()["choices"]
        streamed = door.post(path, {**body, "stream": True}, token=rollout["data_capability"])
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert not door.events("call_committed")
