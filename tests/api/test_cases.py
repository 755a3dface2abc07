"""Cases from the field at the gate's own door, in every dialect: which call a request continues, and with which ids."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import ScriptedEngine, text
from tests.api.speakers import Called, Said, Speaker, Told
from tests.api.test_dialects import ASK, MORE, SYSTEM, TOOLS, speaking
from tests.api.test_gate import BROKEN
from tokenlake.errors import TokenlakeError

CONVERTED = "another"


def script(written: str) -> list[int]:
    return [*map(ord, written), 9]


def causes(door: Door) -> list[str | None]:
    return [event.get("reason") for event in door.events("call_committed")]


def converted(said: Said, **changes: Any) -> Said:
    """The answer as somebody else wrote it down: no marker."""
    return replace(said, dialect=CONVERTED, **changes)


@speaking
@pytest.mark.parametrize(
    ("echoed", "exact"),
    [
        ('{"a":1,"b":2,"c":"caf\\u00e9","d":[1,2]}', True),
        ('{"b": 2.0, "d": [1, 2], "c": "café", "a": 1}', True),
        ('{"a":true,"b":2,"c":"café","d":[1,2]}', False),
        ('{"a":"1","b":2,"c":"café","d":[1,2]}', False),
        ('{"a":1,"b":2,"c":"café","d":[2,1]}', False),
        ('{"a":1,"b":2,"c":"café"}', False),
    ],
)
def test_arguments_are_equal_as_json_and_served_as_sampled(
    door: Door, speaker: type[Speaker], echoed: str, exact: bool
) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    sampled = script('<f|{"b": 2, "a": 1, "c": "café", "d": [1, 2]}>')
    door.engine.answers = [sampled]
    first = agent.say([ASK], tools=TOOLS)
    (call,) = first.calls
    said = converted(first, calls=[Called(call.id, call.name, echoed)])
    agent.say([ASK, said, Told("tool", text(7), call.id)], tools=TOOLS)
    served = door.engine.prompts[0] + sampled
    assert (door.engine.prompts[1][: len(served)] == served) is exact
    assert causes(door)[1] == (None if exact else "no_match")


@speaking
@pytest.mark.parametrize("arguments", ['{"a":1,', '{"a": NaN}', "[1]", "", '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object_come_back_as_they_were_sampled(
    door: Door, speaker: type[Speaker], arguments: str
) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [script(f"<f|{arguments}>")]
    served = agent.raw([ASK], tools=TOOLS)
    assert served.status_code == 200
    kinds = {"chat": "message", "responses": "output", "anthropic": "content"}
    body = served.json()
    echo: Any = body["choices"][0]["message"] if speaker.name == "chat" else body[kinds[speaker.name]]
    history = agent.body([ASK], TOOLS)
    if speaker.name == "responses":
        call = next(item for item in echo if item["type"] == "function_call")["call_id"]
        history["input"] += [*echo, {"type": "function_call_output", "call_id": call, "output": "r"}]
    elif speaker.name == "chat":
        history["messages"] += [echo, {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "r"}]
    else:
        result = {"type": "tool_result", "tool_use_id": echo[-1]["id"], "content": "r", "is_error": True}
        history["messages"] += [{"role": "assistant", "content": echo}, {"role": "user", "content": [result]}]
    assert agent.post(history).status_code == 200
    assert causes(door) == ["no_history", None]


@speaking
@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"reasoning": None}, True),
        ({"reasoning": "another thought"}, False),
        ({"text": "b"}, False),
        ({"text": "<think>r</think>a", "reasoning": None}, False),
    ],
)
def test_reasoning_may_be_dropped_but_not_changed(
    door: Door, speaker: type[Speaker], changes: dict[str, Any], exact: bool
) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [script("{r}a")]
    first = agent.say([ASK])
    agent.say([ASK, converted(first, **changes), MORE])
    served = door.engine.prompts[0] + script("{r}a")
    assert (door.engine.prompts[1] == [*served, 8, 101, 6, 9, 8, 102]) is exact


@speaking
@pytest.mark.parametrize(
    ("preamble", "tools", "stripped", "cause"),
    [
        ("n=bbbb;\nBe brief", TOOLS[:1], False, "preamble_changed"),
        ("n=aaaa;\nBe brief", TOOLS, False, "preamble_changed"),
        ("n=aaaa;\nBe long", TOOLS[:1], False, "preamble_changed"),
        ("n=bbbb;\nBe brief", TOOLS[:1], True, None),
        ("n=bbbb;\nBe brief", TOOLS, True, "preamble_changed"),
    ],
)
def test_an_old_prefix_is_never_served_under_a_new_preamble(
    opened: Opener, speaker: type[Speaker], preamble: str, tools: Any, stripped: bool, cause: str | None
) -> None:
    with opened(strip_patterns=(r"n=\w+;\n",) if stripped else ()) as door:
        (rollout,) = door.register()
        agent = speaker(door, rollout)
        first = agent.say([Told("system", "n=aaaa;\nBe brief"), ASK], tools=TOOLS[:1])
        agent.say([Told("system", preamble), ASK, first, MORE], tools=tools)
        assert causes(door)[1] == cause
        assert ("n=" in text(*door.engine.prompts[0])) is not stripped


@speaking
def test_an_edited_history_is_a_new_root(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    first = agent.say([SYSTEM, ASK])
    agent.say([SYSTEM, Told("user", "edited"), first, MORE])
    agent.say([SYSTEM, ASK, converted(first, text="summary of it all"), MORE])
    assert causes(door) == ["no_history", "history_edited", "no_match"]


@speaking
def test_a_seeded_history_is_a_root_that_can_be_continued(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    calls = [Called("c1", "f", '{"a": 1}'), Called("c2", "g", "{}")]
    seed = Said(CONVERTED, None, "", "earlier", None, "", (0, 0), calls)
    history = [SYSTEM, ASK, seed, Told("tool", "r1", "c1"), Told("tool", "r2", "c2")]
    first = agent.say(history, tools=TOOLS)
    agent.say([*history, first, MORE], tools=TOOLS)
    assert causes(door) == ["seeded", None]


@speaking
def test_a_retry_continues_the_answer_that_was_used(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [[4, 5, 9], [6, 9], [10, 9]]
    agent.say([ASK])
    used = agent.say([ASK])
    last = agent.say([ASK, used, MORE])
    assert door.engine.prompts[2][:8] == [1, 101, 5, 9, 8, 102, 6, 9]
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (last.call_id, None)


@speaking
def test_equal_twins_have_one_deterministic_parent(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    first, second = agent.say([ASK]), agent.say([ASK])
    for said in (second, converted(second), first):
        agent.say([ASK, said, MORE])
    assert {event["parent_call_id"] for event in door.events("call_committed")[2:]} == {first.call_id}


@speaking
def test_siblings_that_differ_only_in_tokens_need_the_marker(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [script("{r}<f|{}>")] * 2
    door.engine.edit = lambda generation: replace(
        generation, token_ids=[len(door.engine.prompts) + 30, 9], logprobs=[-1.0, -1.0]
    )
    agent.say([ASK], tools=TOOLS)
    second = agent.say([ASK], tools=TOOLS)
    door.engine.edit = None
    agent.say([ASK, second, Told("tool", "r", second.calls[0].id)], tools=TOOLS)
    assert door.events("call_committed")[2]["parent_call_id"] == second.call_id
    unmarked = converted(second, calls=[Called("x", "f", "{}")])
    agent.say([ASK, unmarked, Told("tool", "r", "x")], tools=TOOLS)
    assert causes(door)[3] == "ambiguous"


@speaking
def test_probes_leave_no_trace_and_the_named_answer_is_the_terminal(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    before = len(door.events())
    for path in ("/v1/models", "/version") * 10:
        url = f"/ng-rollout/{rollout['rollout_id']}{path}"
        assert door.request("GET", url, token=rollout["data_capability"]).status_code == 200
    assert len(door.events()) == before
    first = agent.say([ASK])
    last = agent.say([ASK, first, MORE])
    agent.say([Told("user", "a title, please")])
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=last.response_id)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (last.call_id, None)


@speaking
@pytest.mark.parametrize(
    ("sampled", "joined"),
    [([3, 9], [8, 101, 6, 9, 8, 102]), ([3, 4], [9, 8, 101, 6, 9, 8, 102]), ([9], [8, 101, 6, 9, 8, 102])],
)
def test_the_boundary_of_a_turn(door: Door, speaker: type[Speaker], sampled: list[int], joined: list[int]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.answers = [sampled]
    first = agent.say([ASK])
    agent.say([ASK, first, MORE])
    assert door.engine.prompts[1] == [1, 101, 5, 9, 8, 102, *sampled, *joined]
    assert door.ids(door.events("call_committed")[1])[1][: len(joined)] == [0] * len(joined)


class Stripping(ScriptedEngine):
    """Its template leaves out thinking, and a turn that has nothing else."""

    def render_text(self, messages: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        kept = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        shown = [m for m in kept if m["role"] != "assistant" or m["content"] or m.get("tool_calls")]
        return super().render_text(shown, tools, add_generation_prompt=add_generation_prompt)


@speaking
@pytest.mark.parametrize("sampled", ["{why}", "{why}so"])
def test_thinking_that_the_template_would_delete_stays(opened: Opener, speaker: type[Speaker], sampled: str) -> None:
    with opened(engine=Stripping()) as door:
        (rollout,) = door.register()
        agent = speaker(door, rollout)
        door.engine.answers = [script(sampled)]
        first = agent.say([ASK])
        agent.say([ASK, first, MORE])
        assert door.engine.prompts[1] == [1, 101, 5, 9, 8, 102, *script(sampled), 8, 101, 6, 9, 8, 102]


@speaking
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", BROKEN)
def test_broken_output_of_the_engine_is_answered_and_never_trained(
    door: Door, speaker: type[Speaker], stream: bool, reason: str
) -> None:
    (rollout,) = door.register()
    door.engine.edit = BROKEN[reason]
    assert speaker(door, rollout).say([ASK], stream=stream).text == text(3)
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == (reason, True)
    assert not door.events("call_committed")
    assert door.client.seal("g_g0", reward=1.0)["poisoned"]


@speaking
def test_a_zombie_of_an_older_attempt_is_refused_and_nothing_is_shared(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    old = speaker(door, rollout)
    first = old.say([ASK])
    door.client.fail("g_g0", reason="environment_failed", retry=True)
    again = door.request("PUT", "/api/v1/rollouts/g_g0/attempts/1").json()
    new = speaker(door, again)
    assert old.raw([ASK, first, MORE]).status_code == 409
    own = new.say([ASK])
    new.say([ASK, first, MORE])
    last = new.say([ASK, own, MORE])
    events = [event for event in door.events("call_committed") if event["attempt"] == 1]
    assert events[2]["parent_call_id"] == own.call_id
    assert {event.get("parent_call_id") for event in events} <= {None, own.call_id}
    receipt = door.client.seal("g_g0", reward=1.0, attempt=1, terminal_response_id=last.response_id)
    assert (receipt["attempt"], receipt["reason"]) == (1, None)
    assert new.raw([ASK]).status_code == 409


def test_a_forked_child_cannot_write_through_the_gates_handles(door: Door) -> None:
    (rollout,) = door.register()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            door.service.lake.lineage.append_many(
                [{"event_type": "rollout_failed", "rollout_id": "g_g0", "attempt": 0}]
            )
            os.write(write, b"written")
        except TokenlakeError as error:
            os.write(write, json.dumps(error.message).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert told not in (b"", b"written")
    assert not door.events("rollout_failed")
    assert rollout["rollout_id"] == "g_g0"


@speaking
def test_a_restarted_gate_goes_on_with_exact_prefixes(opened: Opener, speaker: type[Speaker]) -> None:
    with opened() as door:
        (rollout,) = door.register()
        door.engine.answers = [script("{why}so")]
        first = speaker(door, rollout).say([ASK], stream=True)
        url = door.url
    with opened() as door:
        moved = {**rollout, "base_url": rollout["base_url"].replace(url, door.url)}
        speaker(door, moved).say([ASK, first, MORE], stream=True)
        assert door.engine.prompts[0] == [1, 101, 5, 9, 8, 102, *script("{why}so"), 8, 101, 6, 9, 8, 102]
