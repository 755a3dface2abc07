"""Captured chat completions through the official SDK: exact prefixes, plain answers, nothing of tokens outward."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text

U5 = {"role": "user", "content": text(5)}
U6 = {"role": "user", "content": text(6)}


def ask(agent: openai.OpenAI, messages: list[dict[str, Any]], **more: Any) -> Any:
    return agent.chat.completions.create(model="m", messages=messages, **more)  # type: ignore[arg-type]


def echo(completion: Any) -> dict[str, Any]:
    return completion.choices[0].message.model_dump(exclude_none=True)


def test_a_second_turn_starts_with_the_exact_ids_of_the_first(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    first = ask(agent, [U5])
    second = ask(agent, [U5, echo(first), U6])
    assert door.engine.prompts == [[1, 101, 5, 9, 8, 102], [1, 101, 5, 9, 8, 102, 3, 9, 8, 101, 6, 9, 8, 102]]
    one, two = door.events("call_committed")
    assert (one["mode"], one["reason"], two["mode"], two["parent_call_id"]) == (
        "text", "no_history", "token_in", one["call_id"],
    )  # fmt: skip
    assert door.ids(one) == ([1, 101, 5, 9, 8, 102, 3, 9], [0, 0, 0, 0, 0, 0, 1, 1])
    assert door.ids(two) == ([8, 101, 6, 9, 8, 102, 3, 9], [0, 0, 0, 0, 0, 0, 1, 1])
    assert first.id == one["response_id"]
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (14, 2)
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=second.id)
    assert (receipt["terminal_call_id"], receipt["terminal_selection"], receipt["reason"]) == (
        two["call_id"], "response_id", None,
    )  # fmt: skip


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_no_token_id_and_no_logprob_at_any_depth_of_what_goes_out(door: Door) -> None:
    (rollout,) = door.register()
    url = f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions"
    door.engine.answers = [[123, 7, 125, 3, 60, 102, 124, 123, 125, 62, 9]]
    answer = door.post(
        url, {"messages": [U5], "logprobs": False, "top_logprobs": None}, token=rollout["data_capability"]
    )
    assert answer.status_code == 200
    bodies = [
        answer.json(),
        door.request("GET", "/api/v1/rollouts/g_g0").json(),
        door.client.seal("g_g0", reward=0.5),
        door.request("GET", "/api/v1/groups/g").json(),
    ]
    forbidden = ("token_id", "logprob", "_ids", "mask")
    for body in bodies:
        assert not [key for key in keys(body) if any(word in key for word in forbidden)]
    assert {"tool_calls", "reasoning"} <= keys(bodies[0])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, None),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": [1]}, "stop"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ],
)
def test_what_is_not_supported_is_refused_in_the_dialects_shape_and_stages_nothing(
    door: Door, body: dict[str, Any], field: str | None
) -> None:
    (rollout,) = door.register()
    url = f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions"
    answer = door.post(url, {"messages": [U5], **body}, token=rollout["data_capability"])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert field is None or error["param"] == field
    assert door.engine.prompts == []
    assert not door.events("call_committed") + door.events("call_failed")


ARGUMENTS = '{"b": 2, "a": 1}'


@pytest.mark.parametrize(
    ("echoed", "exact"),
    [
        ('{"a":1,"b":2}', True),
        ('{"a":1,"b":2.0}', True),
        ('{"a":true,"b":2}', False),
        ('{"a":"1","b":2}', False),
        ('{"a":1,', False),
    ],
)
def test_reserialized_arguments_still_continue_the_sampled_ones(door: Door, echoed: str, exact: bool) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    sampled = [ord(char) for char in f"<f|{ARGUMENTS}>"] + [9]
    door.engine.answers = [sampled]
    first = ask(agent, [U5])
    assert first.choices[0].finish_reason == "tool_calls"
    call = first.choices[0].message.tool_calls[0]
    assert call.function.arguments == ARGUMENTS
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "f", "arguments": echoed}}],
    }
    ask(agent, [U5, said, {"role": "tool", "tool_call_id": call.id, "content": text(7)}])
    served = [1, 101, 5, 9, 8, 102, *sampled]
    assert (door.engine.prompts[1][: len(served)] == served) is exact
    if exact:
        assert door.engine.prompts[1][len(served) :] == [8, 103, 7, 9, 8, 102]
    assert door.events("call_committed")[1].get("reason") == (None if exact else "no_match")


@pytest.mark.parametrize(
    ("said", "exact"),
    [
        ({"content": "a", "reasoning": "r"}, True),
        ({"content": "a", "reasoning_content": "r", "tool_calls": []}, True),
        ({"content": "a", "tool_calls": None}, True),
        ({"content": [{"type": "text", "text": "a"}], "reasoning": "r"}, True),
        ({"content": "<think>r</think>a"}, False),
        ({"content": "b", "reasoning": "r"}, False),
    ],
)
def test_reasoning_in_every_spelling(door: Door, said: dict[str, Any], exact: bool) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    door.engine.answers = [[*map(ord, "{r}a"), 9]]
    first = ask(agent, [U5])
    assert first.choices[0].message.reasoning_content == "r"
    assert first.choices[0].message.content == "a"
    ask(agent, [U5, {"role": "assistant", **said}, U6])
    served = [1, 101, 5, 9, 8, 102, *map(ord, "{r}a"), 9]
    assert (door.engine.prompts[1] == [*served, 8, 101, 6, 9, 8, 102]) is exact


def test_folded_thinking_matches_where_it_is_what_was_served(opened: Opener) -> None:
    with opened(reasoning="fold") as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        door.engine.answers = [[*map(ord, "{r}a"), 9]]
        first = ask(agent, [U5])
        assert first.choices[0].message.content == "<think>r</think>a"
        ask(agent, [U5, {"role": "assistant", "content": "<think>r</think>a"}, U6])
        ask(agent, [U5, {"role": "assistant", "content": "a"}, U6])
        assert [event["mode"] for event in door.events("call_committed")] == ["text", "token_in", "token_in"]


SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}
SUBMIT = {"type": "function", "function": {"name": "submit", "parameters": {}}}


def system(nonce: str, rule: str = "Be brief") -> dict[str, Any]:
    return {"role": "system", "content": f"H: n={nonce};\n{rule}"}


@pytest.mark.parametrize(
    ("preamble", "tools", "stripped", "cause"),
    [
        (system("bbbb"), [SEARCH], False, "preamble_changed"),
        (system("aaaa"), [SEARCH, SUBMIT], False, "preamble_changed"),
        (system("aaaa", "Be long"), [SEARCH], False, "preamble_changed"),
        (system("bbbb"), [SEARCH], True, None),
        (system("bbbb"), [SEARCH, SUBMIT], True, "preamble_changed"),
    ],
)
def test_an_old_prefix_is_never_served_under_a_new_preamble(
    opened: Opener, preamble: dict[str, Any], tools: list[dict[str, Any]], stripped: bool, cause: str | None
) -> None:
    with opened(strip_patterns=(r"n=\w+;\n",) if stripped else ()) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [system("aaaa"), U5], tools=[SEARCH])
        ask(agent, [preamble, U5, echo(first), U6], tools=tools)
        one, two = door.events("call_committed")
        assert two.get("reason") == cause
        if cause is None:
            assert two["prev_len"] == one["cum_len"]
        else:
            fresh = door.engine.render(
                [{"role": m["role"], "content": m["content"]} for m in (preamble, U5, echo(first), U6)],
                tools, add_generation_prompt=True,
            )  # fmt: skip
            assert stripped or door.engine.prompts[1] == fresh
            assert "parent_call_id" not in two
        if stripped:
            assert "n=" not in "".join(map(chr, door.engine.prompts[0]))


def test_a_retry_continues_the_answer_that_was_used(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    door.engine.answers = [[4, 5, 9], [6, 9], [10, 9]]
    ask(agent, [U5])
    used = ask(agent, [U5])
    last = ask(agent, [U5, echo(used), U6])
    assert door.engine.prompts[2][:8] == [1, 101, 5, 9, 8, 102, 6, 9]
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["terminal_selection"], receipt["reason"]) == ("only_leaf", None)
    assert last.id.endswith(receipt["terminal_call_id"])


def test_equal_twins_have_one_deterministic_parent(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    first, second = ask(agent, [U5]), ask(agent, [U5])
    for said in (echo(second), {"role": "assistant", "content": text(3)}):
        ask(agent, [U5, said, U6])
    events = door.events("call_committed")
    assert {event["parent_call_id"] for event in events[2:]} == {first.id.removeprefix("chatcmpl-")}


def test_siblings_that_differ_only_in_tokens_need_the_marker(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    door.engine.answers = [[60, 9], [60, 9]]
    door.engine.edit = lambda generation: type(generation)(
        **{
            **{name: getattr(generation, name) for name in generation.__slots__},
            "token_ids": [len(door.engine.prompts) + 30, 9],
            "text": "same",
        }
    )
    ask(agent, [U5])
    second = ask(agent, [U5])
    door.engine.edit = None
    ask(agent, [U5, echo(second), U6])
    assert door.engine.prompts[2][6:8] == [32, 9]
    ask(agent, [U5, {"role": "assistant", "content": "same"}, U6])
    assert door.events("call_committed")[3]["reason"] == "ambiguous"


def test_a_full_context_is_an_empty_length_turn_that_may_be_echoed(opened: Opener) -> None:
    from tests.api.scripted_engine import ScriptedEngine

    with opened(engine=ScriptedEngine(max_model_len=40)) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        long = {"role": "user", "content": "x" * 40}
        overflowed = ask(agent, [U5, echo(first), long])
        assert overflowed.choices[0].finish_reason == "length"
        assert overflowed.choices[0].message.content == ""
        assert len(door.events("call_overflowed")) == 1
        door.engine.max_model_len = 1000
        ask(agent, [U5, echo(first), long, echo(overflowed), U6])
        assert door.events("call_committed")[1]["parent_call_id"] == first.id.removeprefix("chatcmpl-")
        receipt = door.client.seal("g_g0", reward=0.0, terminal_response_id=overflowed.id)
        assert receipt["terminal_call_id"] == first.id.removeprefix("chatcmpl-")
        assert door.events("rollout_sealed")[0]["terminal_call_id"] == overflowed.id.removeprefix("chatcmpl-")


def test_gets_pass_through_and_record_nothing_and_other_posts_are_refused(door: Door) -> None:
    (rollout,) = door.register()
    before = len(door.events())
    prefix = f"/ng-rollout/{rollout['rollout_id']}"
    for _ in range(20):
        for path in ("/v1/models", "/version", "/training-token-capture/v1/models"):
            assert door.request("GET", prefix + path, token=rollout["data_capability"]).status_code == 200
    assert door.request("GET", prefix + "/v1/nothing", token=rollout["data_capability"]).status_code == 404
    for path in ("/v1/embeddings", "/v1/completions", "/chat/completions"):
        refused = door.post(prefix + path, {"messages": [U5]}, token=rollout["data_capability"])
        assert refused.status_code == 404
        assert refused.json()["error"]["message"]
    assert len(door.events()) == before
    assert door.client.rollout("g_g0")["calls"] == 0


def test_the_capture_variant_of_the_prefix_is_the_same_door(door: Door) -> None:
    (rollout,) = door.register()
    path = f"/ng-rollout/{rollout['rollout_id']}/training-token-capture/v1/chat/completions"
    assert door.http.post(path, json={"messages": [U5]}, headers={"x-api-key": rollout["data_capability"]}).is_success
    assert len(door.events("call_committed")) == 1


def test_unprefixed_calls_need_the_control_token_and_are_never_captured(door: Door) -> None:
    (rollout,) = door.register()
    body = {"model": "m", "messages": [U5]}
    assert door.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == text(3)
    assert door.post("/v1/chat/completions", body, token=rollout["data_capability"]).status_code == 401
    assert door.request("GET", "/v1/models").json()["data"][0]["id"] == "scripted"
    assert not door.events("call_committed")


def test_unknown_foreign_and_closed_rollouts_are_refused_before_inference(door: Door) -> None:
    first, second = door.register(n=2)
    body = {"messages": [U5]}

    def status(rollout_id: str, token: str | None) -> int:
        answer = door.post(f"/ng-rollout/{rollout_id}/v1/chat/completions", body, token=token)
        assert answer.json()["error"]["message"]
        return answer.status_code

    assert status("g_g7", first["data_capability"]) == 404
    assert status("g_g0", second["data_capability"]) == 401
    assert status("g_g0", first["control_capability"]) == 401
    assert status("g_g0", None) == 401
    assert status("g_g0", "tld-99999999999-x") == 401
    door.client.freeze("g_g0")
    assert status("g_g0", first["data_capability"]) == 409
    door.client.fail("g_g1", reason="environment_failed")
    assert status("g_g1", second["data_capability"]) == 409
    assert door.engine.prompts == []
