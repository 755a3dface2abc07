"""What a dialect cannot serve is refused by name in its own error shape, before anything is sampled."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.speakers import SPEAKERS, AnthropicSpeaker, ResponsesSpeaker, Speaker
from tests.api.test_dialects import ASK, SYSTEM, TOOLS, speaking


def error_of(speaker: type[Speaker], answer: httpx.Response) -> dict[str, Any]:
    """The error, checked against the shape of the dialect."""
    body = answer.json()
    if speaker.name == "anthropic":
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def nothing_happened(door: Door) -> bool:
    return not door.engine.prompts and not door.events("call_committed") + door.events("call_failed")


EVERYWHERE: list[dict[str, Any]] = [
    {"n": 2},
    {"logprobs": True},
    {"top_logprobs": 3},
    {"return_token_ids": True},
    {"prompt_token_ids": [1, 2]},
    {"include_stop_str_in_output": True},
    {"add_generation_prompt": False},
    {"temperature": 3},
    {"temperature": "1"},
    {"top_p": 0},
    {"presence_penalty": 0.5},
    {"stream": "yes"},
    {"prompt_logprobs": 1},
    {"logit_bias": {"3": 1}},
]
OWN: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"tool_choice": "required", "tools": [{"type": "function", "function": TOOLS[0]}]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"stop": [""]},
        {"max_tokens": 0},
        {"stream_options": 1},
    ],
    "responses": [
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"truncation": "auto"},
        {"prompt": {"id": "p"}},
        {"text": {"format": {"type": "json_schema"}}},
        {"include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"max_output_tokens": 0},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "web_search_call", "id": "x"}]},
        {"input": [{"role": "robot", "content": "a"}]},
        {"input": [{"type": "function_call_output", "output": "a"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": {"a": 1}}]},
    ],
    "anthropic": [
        {"max_tokens": None},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"mcp_servers": [{"name": "m"}]},
        {"container": "c"},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"stop_sequences": [1]},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "begun"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    ],
}


@pytest.mark.parametrize(
    ("speaker", "more"),
    [(speaker, more) for speaker in SPEAKERS for more in EVERYWHERE + OWN[speaker.name]],
    ids=lambda value: value.name if isinstance(value, type) else "-".join(value),
)
def test_what_is_not_supported_is_refused_by_name(door: Door, speaker: type[Speaker], more: dict[str, Any]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    answer = agent.post({**agent.body([ASK], []), **more})
    assert answer.status_code == 400
    error = error_of(speaker, answer)
    assert error["type"] == "invalid_request_error"
    assert next(reversed(more)) in error["message"] or next(iter(more)) in error["message"]
    assert answer.headers.get("x-should-retry") is None
    assert nothing_happened(door)


NEUTRAL = {"n": 1, "logprobs": False, "top_logprobs": None, "user": "u", "metadata": {"a": "b"}, "seed": 1}
OWN_NEUTRAL: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "auto", "parallel_tool_calls": True, "store": True, "reasoning_effort": "high"},
    "responses": {
        "store": True,
        "truncation": "disabled",
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    },
    "anthropic": {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    },
}


@pytest.mark.parametrize(
    ("more", "bounds"),
    [({"temperature": 3}, "temperature must be from 0 to 2"), ({"top_k": -2}, "top_k must be at least -1")],
)
def test_a_number_out_of_range_is_told_the_range(door: Door, more: dict[str, Any], bounds: str) -> None:
    (rollout,) = door.register()
    answer = SPEAKERS[0](door, rollout).post({**SPEAKERS[0](door, rollout).body([ASK], []), **more})
    assert (answer.status_code, bounds in answer.text) == (400, True)


@speaking
def test_what_changes_nothing_is_accepted(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    answer = speaker(door, rollout).raw([SYSTEM, ASK], tools=TOOLS, **NEUTRAL, **OWN_NEUTRAL[speaker.name])
    assert answer.status_code == 200


IMAGES: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url"}]}]},
    ],
    "responses": [
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
    ],
    "anthropic": [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ]
        },
    ],
}


@pytest.mark.parametrize(("speaker", "body"), [(s, body) for s in SPEAKERS for body in IMAGES[s.name]])
@pytest.mark.parametrize("stream", [False, True])
def test_images_are_refused_and_never_captured_as_text(
    door: Door, speaker: type[Speaker], body: dict[str, Any], stream: bool
) -> None:
    (rollout,) = door.register()
    answer = speaker(door, rollout).raw([ASK], **body, stream=stream)
    assert answer.status_code == 400
    assert "is not supported" in error_of(speaker, answer)["message"]
    assert nothing_happened(door)


STATUSES = {
    "unauthorized": (401, openai.AuthenticationError, anthropic.AuthenticationError, "authentication_error"),
    "unknown": (404, openai.NotFoundError, anthropic.NotFoundError, "not_found_error"),
    "closed": (409, openai.ConflictError, anthropic.ConflictError, "invalid_request_error"),
    "large": (413, openai.APIStatusError, anthropic.APIStatusError, "request_too_large"),
    "malformed": (400, openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error"),
}


@speaking
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", STATUSES)
def test_errors_come_in_the_dialects_shape(opened: Opener, speaker: type[Speaker], kind: str, stream: bool) -> None:
    with opened(max_body_bytes=2000) as door:
        (rollout,) = door.register()
        history: list[Any] = [ASK]
        if kind == "closed":
            door.client.freeze("g_g0")
        elif kind == "large":
            history = [type(ASK)("user", "x" * 3000)]
        else:
            changed = {
                "unauthorized": {"data_capability": "tld-0-x"},
                "unknown": {
                    "rollout_id": "g_g7",
                    "base_url": rollout["base_url"].replace("g_g0", "g_g7"),
                },
            }
            rollout = {**rollout, **changed.get(kind, {})}
        agent = speaker(door, rollout, max_retries=2)
        status, of_openai, of_anthropic, shape = STATUSES[kind]
        more: dict[str, Any] = {"n": 2} if kind == "malformed" else {}
        answer = agent.raw(history, stream=stream, **more)
        assert answer.status_code == status
        error = error_of(speaker, answer)
        assert speaker.name != "anthropic" or error["type"] == shape
        with pytest.raises(of_anthropic if speaker.name == "anthropic" else of_openai) as raised:
            agent.say(history, stream=stream, extra_body=more)
        assert raised.value.status_code == status
        assert nothing_happened(door)


@speaking
def test_malformed_json_and_unknown_paths_too(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    prefix = f"/ng-rollout/{rollout['rollout_id']}"
    headers = {"Authorization": f"Bearer {rollout['data_capability']}"}
    broken = door.http.post(prefix + speaker.path, content=b"{", headers=headers)
    assert broken.status_code == 400
    error_of(speaker, broken)
    lost = door.http.post(f"{prefix}{speaker.path}/x", content=b"{}", headers=headers)
    assert lost.status_code == 404
    error_of(speaker, lost)


def test_tokens_are_counted_as_the_call_would_have_them(door: Door) -> None:
    (rollout,) = door.register()
    agent = AnthropicSpeaker(door, rollout)
    first = agent.say([SYSTEM, ASK], tools=TOOLS)
    body = agent.body([SYSTEM, ASK, first, ASK], TOOLS)
    del body["max_tokens"]
    before = len(door.events())
    counted = agent.client.messages.count_tokens(**body)
    assert len(door.events()) == before
    agent.say([SYSTEM, ASK, first, ASK], tools=TOOLS)
    assert counted.input_tokens == len(door.engine.prompts[1])
    assert len(door.engine.prompts) == 2
    path = "/v1/messages/count_tokens"
    assert door.post(path, body).json() == counted.model_dump(exclude_none=True)
    assert door.post(path, body, token="other").status_code == 401
    refused = door.post(path, {"messages": []})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_a_response_says_that_nothing_is_stored(door: Door) -> None:
    (rollout,) = door.register()
    agent = ResponsesSpeaker(door, rollout)
    said = agent.say([ASK], store=True)
    assert said.native.store is False
    with pytest.raises(openai.NotFoundError):
        agent.client.responses.retrieve(said.response_id)
