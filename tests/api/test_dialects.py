"""Three dialects through their official SDKs, whole and streamed: one conversation, one record, one row."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import anthropic
import openai
import pytest

from tests.api.conftest import TOKEN, Door
from tests.api.scripted_engine import text
from tests.api.speakers import SPEAKERS, Said, Speaker, Told
from tests.api.test_lifecycle import wait_for

TOOLS = [
    {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"name": "g", "parameters": {"type": "object"}},
]
SYSTEM, ASK, MORE = Told("system", "be brief"), Told("user", text(5)), Told("user", text(6))
THINKING = [*map(ord, '{why}so<f|{"b": 2, "a": 1}><g|{}>'), 9]

speaking = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda speaker: speaker.name)
streaming = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def results(said: Said) -> list[Told]:
    return [Told("tool", f"result {index}", call.id) for index, call in enumerate(said.calls)]


@speaking
@streaming
def test_an_answer_says_everything_in_its_dialect(door: Door, speaker: type[Speaker], stream: bool) -> None:
    (rollout,) = door.register()
    door.engine.answers = [THINKING]
    said = speaker(door, rollout).say([SYSTEM, ASK], stream=stream, tools=TOOLS)
    (event,) = door.events("call_committed")
    assert (said.text, said.reasoning, said.finish) == ("so", "why", speaker.finishes["tool_calls"])
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("f", {"b": 2, "a": 1}), ("g", {})]
    assert said.usage == (len(door.engine.prompts[0]), len(THINKING))
    assert (said.response_id, said.call_id) == (event["response_id"], event["call_id"])
    assert event["dialect"] == speaker.name
    assert door.ids(event)[0] == door.engine.prompts[0] + THINKING


@speaking
@streaming
def test_a_conversation_is_exact_to_its_end(door: Door, speaker: type[Speaker], stream: bool) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [THINKING, [4, 9], [3, 9]]
    first = agent.say([SYSTEM, ASK], stream=stream, tools=TOOLS)
    second = agent.say([SYSTEM, ASK, first, *results(first)], stream=stream, tools=TOOLS)
    last = agent.say([SYSTEM, ASK, first, *results(first), second, MORE], stream=stream, tools=TOOLS)
    one, two, three = door.engine.prompts
    assert two == [*one, *THINKING, 8, 103, *map(ord, "result 0"), 9, 8, 103, *map(ord, "result 1"), 9, 8, 102]
    assert three == [*two, 4, 9, 8, 101, 6, 9, 8, 102]
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=last.response_id)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (last.call_id, None)


@pytest.mark.parametrize("order", list(permutations(SPEAKERS)), ids=lambda order: "-".join(s.name for s in order))
@streaming
def test_a_conversation_goes_on_in_another_dialect(door: Door, order: list[type[Speaker]], stream: bool) -> None:
    (rollout,) = door.register()
    door.engine.answers = [THINKING, [*map(ord, "{r}a"), 9]]
    history: list[Any] = [SYSTEM, ASK]
    for speaker in order:
        said = speaker(door, rollout).say(history, stream=stream, tools=TOOLS)
        history += [said, *(results(said) or [MORE])]
    events = door.events("call_committed")
    assert [(event["mode"], event["dialect"]) for event in events] == [
        ("text" if index == 0 else "token_in", speaker.name) for index, speaker in enumerate(order)
    ]
    assert [event.get("parent_call_id") for event in events] == [None, *(event["call_id"] for event in events[:2])]


ORDERS = pytest.mark.parametrize(
    "order", list(permutations(SPEAKERS)), ids=lambda order: "-".join(speaker.name for speaker in order)
)


def parents(door: Door) -> dict[str, str | None]:
    return {event["call_id"]: event.get("parent_call_id") for event in door.events("call_committed")}


@ORDERS
def test_branches_of_a_conversation_go_on_in_any_dialect(door: Door, order: list[type[Speaker]]) -> None:
    """Twins that two dialects sampled alike are one sequence: its first call is the parent of what continues either."""
    (rollout,) = door.register()
    one, two, three = (speaker(door, rollout) for speaker in order)
    door.engine.answers = [THINKING]
    root = one.say([SYSTEM, ASK], tools=TOOLS)
    stem = [SYSTEM, ASK, root, *results(root)]
    left, right = two.say(stem, tools=TOOLS), three.say(stem, tools=TOOLS)
    fork = two.say([SYSTEM, ASK, root, MORE], tools=TOOLS)
    after = [one.say([*stem, left, MORE], tools=TOOLS), two.say([*stem, right, MORE], tools=TOOLS)]
    after.append(three.say([*stem, right, ASK], tools=TOOLS))
    found = parents(door)
    assert [found[said.call_id] for said in (root, left, right, fork)] == [None, *[root.call_id] * 3]
    assert [found[said.call_id] for said in after] == [left.call_id] * 3
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=after[1].response_id)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (after[1].call_id, None)
    assert door.request("GET", "/api/v1/audit").json()["healthy"]


@ORDERS
def test_siblings_of_two_dialects_that_differ_only_in_tokens_need_the_marker(
    door: Door, order: list[type[Speaker]]
) -> None:
    """Text alone cannot say which was meant: exact with the ids that its own dialect echoes, else a root."""
    (rollout,) = door.register()
    one, two, three = (speaker(door, rollout) for speaker in order)
    door.engine.answers = [[3, 9], [3]]
    siblings = [(one, one.say([ASK])), (two, two.say([ASK]))]
    converted = three.say([ASK, siblings[0][1], MORE])
    assert parents(door)[converted.call_id] is None
    for speaker, said in siblings:
        again = speaker.say([ASK, said, MORE])
        exact = speaker.name != "anthropic"  # its text blocks have no place for a marker
        assert parents(door)[again.call_id] == (said.call_id if exact else None)
    causes = {event["reason"] for event in door.events("call_committed") if event["mode"] == "text"}
    assert causes == {"no_history", "ambiguous"}


def row(door: Door, group_id: str) -> dict[str, Any]:
    wait_for(door, lambda: door.service.control.groups[group_id].state == "published")
    (only,) = door.request("GET", f"/api/v1/rows?group_id={group_id}").json()["rows"]
    return only


def test_a_transcript_gives_the_same_row_in_every_dialect_streamed_or_not(door: Door) -> None:
    rows, records = [], []
    for index, (speaker, stream) in enumerate((s, stream) for s in SPEAKERS for stream in (False, True)):
        (rollout,) = door.register(f"t{index}")
        agent = speaker(door, rollout)
        door.engine.prompts.clear()
        door.engine.answers = [
            THINKING, [*map(ord, "{only thinking}"), 9], [*map(ord, '<f|{"a":1.0}>'), 9], [7, 7], [3, 9],
        ]  # fmt: skip
        history: list[Any] = [SYSTEM, ASK]
        for _ in range(5):
            said = agent.say(history, stream=stream, tools=TOOLS, extra_body={"temperature": 0.5})
            history += [said, *(results(said) or [MORE])]
        door.client.seal(rollout["rollout_id"], reward=0.5, terminal_response_id=said.response_id)
        found = row(door, f"t{index}")
        rows.append({key: found[key] for key in ("input_ids", "token_mask", "logprobs", "turns", "sampled_tokens")})
        mine = [event for event in door.events("call_committed") if event["group_id"] == f"t{index}"]
        records.append([(e["fingerprint"], e["context_digest"], e["chain_hash"], e["finish_reason"]) for e in mine])
        assert found["sample_mask"] == 1
    assert all(other == rows[0] for other in rows)
    assert all(other == records[0] for other in records)


@speaking
def test_stream_and_whole_are_the_same_request(door: Door, speaker: type[Speaker]) -> None:
    first, second = (speaker(door, rollout) for rollout in door.register(n=2))
    for agent, stream in ((first, False), (second, True)):
        door.engine.answers = [THINKING]
        assert agent.raw([ASK], stream=stream).status_code == 200
    one, two = door.events("call_committed")
    same = ("fingerprint", "context_digest", "request_digest", "chain_hash", "served_text", "finish_reason", "cum_len")
    assert [one[key] for key in same] == [two[key] for key in same]


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def datas(written: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in written.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@speaking
@streaming
def test_no_token_id_and_no_logprob_at_any_depth(door: Door, speaker: type[Speaker], stream: bool) -> None:
    (rollout,) = door.register()
    door.engine.answers = [THINKING]
    answer = speaker(door, rollout).raw(
        [ASK], tools=TOOLS, stream=stream, logprobs=False, top_logprobs=None, return_token_ids=False
    )
    assert answer.status_code == 200
    found = keys(datas(answer.text) if stream else answer.json())
    assert found
    assert not [key for key in found if any(word in key for word in ("token_id", "logprob", "_ids", "mask"))]
    (event,) = door.events("call_committed")
    assert event["call_id"] in answer.text
    assert "-0.125" not in answer.text


@speaking
@streaming
def test_a_stop_sequence_ends_the_turn(door: Door, speaker: type[Speaker], stream: bool) -> None:
    from dataclasses import replace

    (rollout,) = door.register()
    door.engine.edit = lambda generation: replace(generation, text="a", token_ids=[97, 88], stop_sequence="X")
    door.engine.answers = [[97, 9]]
    name = "stop_sequences" if speaker.name == "anthropic" else "stop"
    more = {name: ["X", "Y"]} if speaker.name != "responses" else {"extra_body": {name: ["X", "Y"]}}
    said = speaker(door, rollout).say([ASK], stream=stream, **more)
    assert door.engine.params[0].stop == ("X", "Y")
    assert said.text == "a"
    if speaker.name == "anthropic":
        assert (said.finish, said.native.stop_sequence) == ("stop_sequence", "X")
    else:
        assert said.finish == speaker.finishes["stop"]


@speaking
@streaming
def test_a_length_stop_and_a_full_context_say_so(door: Door, speaker: type[Speaker], stream: bool) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [[3, 4]]
    first = agent.say([ASK], stream=stream)
    assert first.finish == speaker.finishes["length"]
    door.engine.max_model_len = 5
    full = agent.say([ASK, first, MORE], stream=stream)
    assert (full.text, full.calls, full.finish) == ("", [], speaker.finishes["length"])
    assert full.usage[1] == 0
    (event,) = door.events("call_overflowed")
    assert event["response_id"] == full.response_id
    door.engine.max_model_len = 1000
    agent.say([ASK, first, MORE, full, MORE], stream=stream)
    assert door.events("call_committed")[1]["parent_call_id"] == first.call_id
    receipt = door.client.seal("g_g0", reward=0.0, terminal_response_id=full.response_id)
    assert (receipt["terminal_call_id"], receipt["poisoned"]) == (first.call_id, False)


@pytest.mark.parametrize("prefixed", [True, False])
def test_models_are_listed_as_each_sdk_knows_them(door: Door, prefixed: bool) -> None:
    (rollout,) = door.register()
    base, key = (rollout["base_url"], rollout["data_capability"]) if prefixed else (f"{door.url}/v1", TOKEN)
    with openai.OpenAI(base_url=base, api_key=key) as sdk:
        assert [(m.id, m.object, m.owned_by) for m in sdk.models.list()] == [("scripted", "model", "tokenlake")]
        assert sdk.models.retrieve("scripted").id == "scripted"
    with anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=key) as other:
        page = other.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "scripted")
        assert [(m.id, m.type, m.display_name) for m in page] == [("scripted", "model", "scripted")]
        assert other.models.retrieve("scripted").created_at.tzinfo is not None
        with pytest.raises(anthropic.NotFoundError):
            other.models.retrieve("another")
    assert not door.events("call_committed")
