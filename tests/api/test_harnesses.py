"""What well-known harnesses send, as they send it: served, captured, and no call that was asked not to be there."""

from __future__ import annotations

import json
from typing import Any

from tests.api.conftest import Door
from tests.api.scripted_engine import text
from tests.api.speakers import SPEAKERS, ResponsesSpeaker, Speaker
from tests.api.test_dialects import ASK, MORE, SYSTEM, THINKING, TOOLS, datas, results, speaking, streaming
from tokenlake.ingest.engine import Generation
from tokenlake.ingest.first_call import until_first_call

BOTH = '<f|{"b": 2, "a": 1}><g|{}>'
FIRST = [*map(ord, '{why}so<f|{"b": 2, "a": 1}>')]
NONE: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "none"},
    "responses": {"tool_choice": "none"},
    "anthropic": {"tool_choice": {"type": "none"}},
}
ALONE: dict[str, dict[str, Any]] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@speaking
@streaming
def test_an_answer_without_tool_calls_says_what_was_sampled(door: Door, speaker: type[Speaker], stream: bool) -> None:
    """The tools stay in the prompt, so that what was sampled before stays its prefix."""
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [[4, 9], THINKING]
    first = agent.say([SYSTEM, ASK], tools=TOOLS)
    said = agent.say([SYSTEM, ASK, first, MORE], stream=stream, tools=TOOLS, **NONE[speaker.name])
    assert (said.text, said.reasoning, said.calls, said.finish) == ("so" + BOTH, "why", [], speaker.finishes["stop"])
    agent.say([SYSTEM, ASK, first, MORE, said, MORE], tools=TOOLS)
    _, two, three = door.engine.prompts
    assert three == [*two, *THINKING, 8, 101, 6, 9, 8, 102]


@speaking
@streaming
def test_an_answer_ends_with_its_only_tool_call(door: Door, speaker: type[Speaker], stream: bool) -> None:
    """The record is what the agent sees, and what the next prompt starts with; nobody sampled the end of that turn."""
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [THINKING, [4, 9]]
    said = agent.say([SYSTEM, ASK], stream=stream, tools=TOOLS, **ALONE[speaker.name])
    assert (said.text, said.reasoning, said.finish) == ("so", "why", speaker.finishes["tool_calls"])
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("f", {"b": 2, "a": 1})]
    (event,) = door.events("call_committed")
    assert door.ids(event)[0] == [*door.engine.prompts[0], *FIRST]
    assert said.usage == (len(door.engine.prompts[0]), len(FIRST))
    last = agent.say([SYSTEM, ASK, said, *results(said)], tools=TOOLS, **ALONE[speaker.name])
    one, two = door.engine.prompts
    assert two == [*one, *FIRST, 9, 8, 103, *map(ord, "result 0"), 9, 8, 102]
    assert (last.text, last.finish) == (text(4), speaker.finishes["stop"])
    assert door.client.seal("g_g0", reward=1.0)["reason"] is None
    assert door.request("GET", "/api/v1/audit").json()["healthy"]


def test_an_end_after_the_only_call_is_not_kept_either(door: Door) -> None:
    """Else the end would be trained only where no second call followed it."""
    (rollout,) = door.register()
    door.engine.answers = [[*FIRST, 9]]
    SPEAKERS[0](door, rollout).say([ASK], tools=TOOLS, **ALONE["chat"])
    (event,) = door.events("call_committed")
    assert door.ids(event)[0] == [*door.engine.prompts[0], *FIRST]


def test_versions_are_cut_with_the_ids(door: Door) -> None:
    sampled = Generation(
        token_ids=THINKING,
        logprobs=[-0.5] * len(THINKING),
        finish_reason="stop",
        text=text(*THINKING[:-1]),
        weight_version=3,
        weight_version_end=5,
        weight_version_spans=[(3, 0, 4), (4, 4, len(FIRST)), (5, len(FIRST), len(THINKING))],
    )
    cut = until_first_call(door.engine, sampled)
    assert (cut.token_ids, cut.logprobs) == (FIRST, [-0.5] * len(FIRST))
    assert (cut.weight_version, cut.weight_version_end) == (3, 4)
    assert cut.weight_version_spans == [(3, 0, 4), (4, 4, len(FIRST))]


CODEX = {
    "instructions": "You are a coding agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a shell command and returns its output.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
}


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as Codex sends it back: no ids of items, reasoning sealed."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    if item["type"] == "reasoning":
        return {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    return kept


def test_a_coding_agent_over_responses(door: Door) -> None:
    (rollout,) = door.register()
    agent = ResponsesSpeaker(door, rollout)
    shell = [*map(ord, '{plan}<shell|{"command": ["ls"]}>'), 9]
    door.engine.answers = [shell, [4, 9]]
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text(5)}]}
    events = datas(agent.post({**CODEX, "model": "m", "input": [asked]}).text)
    output = events[-1]["response"]["output"]
    (call,) = (item for item in output if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a b"}
    items = [asked, *map(without_ids, output), result]
    answer = datas(agent.post({**CODEX, "model": "m", "input": items}).text)[-1]["response"]
    assert (answer["status"], answer["store"], answer["parallel_tool_calls"]) == ("completed", False, False)
    one, two = door.engine.prompts
    assert two == [*one, *shell[:-1], 9, 8, 103, *map(ord, "a b"), 9, 8, 102]
    assert [event["mode"] for event in door.events("call_committed")] == ["text", "token_in"]


CLAUDE_CODE = {
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "cache_control": {"type": "ephemeral"},
        }
    ],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "stream": True,
}
BETAS = {
    "anthropic_version": "2023-06-01",
    "anthropic_beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
}


def blocks_of(events: list[Any]) -> list[dict[str, Any]]:
    """The content blocks of a streamed message."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append({**block, "input": ""} if "input" in block else block)
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            field = {"partial_json": "input"}.get(key, key)
            blocks[-1][field] = blocks[-1].get(field, "") + event["delta"][key]
    return [{**block, "input": json.loads(block["input"])} if "input" in block else block for block in blocks]


def test_a_coding_agent_over_messages(door: Door) -> None:
    (rollout,) = door.register()
    path, key = "/ng-rollout/g_g0/v1/messages?beta=true", rollout["data_capability"]
    bash = [*map(ord, '{plan}so<Bash|{"command": "ls"}>'), 9]
    door.engine.answers = [bash, [4, 9]]
    asked = {"role": "user", "content": [{"type": "text", "text": text(5), "cache_control": {"type": "ephemeral"}}]}
    body = {**CLAUDE_CODE, "model": "m", "messages": [asked]}
    blocks = blocks_of(datas(door.post(path, body, token=key, **BETAS).text))
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "a b", "is_error": False}
    said = {"role": "assistant", "content": blocks}
    again = {**body, "messages": [asked, said, {"role": "user", "content": [result]}]}
    counted = {name: again[name] for name in ("model", "messages", "system", "tools", "thinking")}
    count = door.post(path.replace("messages?", "messages/count_tokens?"), counted, token=key, **BETAS)
    assert datas(door.post(path, again, token=key, **BETAS).text)[-1]["type"] == "message_stop"
    one, two = door.engine.prompts
    assert count.json() == {"input_tokens": len(two)}
    assert two == [*one, *bash, 8, 103, *map(ord, "a b"), 9, 8, 102]
    assert [event["mode"] for event in door.events("call_committed")] == ["text", "token_in"]
    models = door.request("GET", "/ng-rollout/g_g0/v1/models?limit=1000", token=key, **BETAS).json()
    assert [model["id"] for model in models["data"]] == ["scripted"]
