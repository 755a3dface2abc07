"""Streamed answers: text flows before the commit, what an agent can act upon after it, and every way it can break."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.speakers import ChatSpeaker, Speaker
from tests.api.test_dialects import ASK, MORE, THINKING, TOOLS, datas, keys, speaking
from tests.api.test_lifecycle import wait_for

ACTIONABLE = ('"tool_calls"', "tool_use", "function_call", 'reason":"', "response.completed", "DONE")


@contextlib.contextmanager
def opened_stream(agent: Speaker, history: list[Any], **more: Any) -> Any:
    """A streamed call without the SDK, its lines as they come."""
    url = f"/ng-rollout/{agent.rollout['rollout_id']}{agent.path}"
    headers = {"Authorization": f"Bearer {agent.rollout['data_capability']}"}
    body = {**agent.body(history, TOOLS), "stream": True, **more}
    with agent.door.http.stream("POST", url, json=body, headers=headers) as response:
        yield response, response.iter_lines()


def until(lines: Any, *wanted: str) -> str:
    """What came, up to the first line that holds one of these."""
    seen = ""
    for line in lines:
        seen += line + "\n"
        if any(word in line for word in wanted):
            return seen
    raise AssertionError(f"none of {wanted} in {seen}")


@speaking
def test_text_flows_before_the_commit_and_nothing_to_act_upon(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    door.engine.hold, door.engine.shown_first = True, 8
    door.engine.answers = [THINKING]
    with opened_stream(speaker(door, rollout), [ASK]) as (response, lines):
        assert response.headers["content-type"].startswith("text/event-stream")
        early = until(lines, '"o"')
        assert '"w"' in early
        assert not [word for word in ACTIONABLE if word in early]
        assert not door.events("call_committed")
        door.on_loop(door.engine.release)
        late = "\n".join(lines)
    assert "f" in json.dumps(datas(late))
    assert [name for name in ("tool_calls", "tool_use", "function_call") if name in late]
    assert len(door.events("call_committed")) == 1


@speaking
def test_the_sdk_sees_text_while_the_engine_works(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.hold, door.engine.shown_first = True, 2
    door.engine.answers = [[*map(ord, "abc"), 9]]
    stream = agent.events([ASK])
    said = ""
    for event in stream:
        said += agent.first_text(event) or ""
        if said == "ab":
            door.on_loop(door.engine.release)
    assert said == "abc"


def failed(door: Door) -> tuple[str, bool]:
    wait_for(door, lambda: bool(door.events("call_failed")))
    (event,) = door.events("call_failed")
    return event["reason"], event["answered"]


def unreadable(generation: Any) -> Any:
    return replace(generation, logprobs=None)


@speaking
def test_a_capture_failure_under_abort_ends_the_stream_in_the_dialects_error(
    opened: Opener, speaker: type[Speaker]
) -> None:
    with opened(policy={"on_capture_failure": "abort"}) as door:
        (rollout,) = door.register()
        door.engine.hold, door.engine.shown_first = True, 8
        door.engine.answers, door.engine.edit = [THINKING], unreadable
        with opened_stream(speaker(door, rollout), [ASK]) as (response, lines):
            until(lines, '"o"')
            door.on_loop(door.engine.release)
            rest = "\n".join(lines)
        assert response.status_code == 200
        (error,) = [data["error"] for data in datas(rest) if data.get("error")]
        assert "captured" in error["message"]
        assert not [word for word in ("tool_calls", "tool_use", "function_call", "[DONE]") if word in rest]
        assert failed(door) == ("logprobs_missing", True)
        assert not door.events("call_committed")
        assert door.client.rollout("g_g0")["state"] == "failed"


@speaking
def test_what_fails_before_the_first_byte_of_a_stream_has_a_status(opened: Opener, speaker: type[Speaker]) -> None:
    with opened(policy={"on_capture_failure": "abort"}) as door:
        (rollout,) = door.register()
        door.engine.answers, door.engine.edit = [[9]], unreadable
        answer = speaker(door, rollout).raw([ASK], stream=True)
        assert answer.status_code == 503
        assert "captured" in answer.json()["error"]["message"]
        assert failed(door) == ("logprobs_missing", False)


@speaking
def test_the_sdk_raises_what_ends_a_stream(opened: Opener, speaker: type[Speaker]) -> None:
    with opened(policy={"on_capture_failure": "abort"}) as door:
        (rollout,) = door.register()
        agent = speaker(door, rollout)
        door.engine.edit = unreadable
        errors = anthropic.APIError if speaker.name == "anthropic" else openai.APIError
        with pytest.raises(errors, match="captured"):
            agent.say([ASK], stream=True)


@speaking
def test_a_failed_capture_that_continues_still_ends_the_stream_well_and_poisons(
    door: Door, speaker: type[Speaker]
) -> None:
    (rollout,) = door.register()
    door.engine.edit = unreadable
    door.engine.answers = [THINKING]
    assert speaker(door, rollout).say([ASK], stream=True, tools=TOOLS).finish == speaker.finishes["tool_calls"]
    assert failed(door) == ("logprobs_missing", True)
    assert door.client.seal("g_g0", reward=1.0)["poisoned"]


@speaking
@pytest.mark.parametrize("shown", [0, 2], ids=["before-the-first-byte", "after-it"])
def test_a_client_that_leaves_a_stream_aborts_the_engine(hung: Door, speaker: type[Speaker], shown: int) -> None:
    (rollout,) = hung.register()
    agent = speaker(hung, rollout)
    hung.engine.hold, hung.engine.shown_first = True, shown
    hung.engine.answers = [[*map(ord, "abc"), 9]]
    body = json.dumps({**agent.body([ASK], []), "stream": True})
    headers = {"Authorization": f"Bearer {rollout['data_capability']}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(hung.url.removeprefix("http://"), timeout=30)
    connection.request("POST", f"/ng-rollout/{rollout['rollout_id']}{agent.path}", body, headers)
    wait_for(hung, lambda: bool(hung.engine._waiting))
    if shown:
        response = connection.getresponse()
        until((line.decode() for line in response), '"b"')
        response.close()
    connection.close()
    assert failed(hung) == ("client_disconnected", bool(shown))
    assert hung.engine.aborted
    assert not hung.events("call_committed")
    hung.engine.hold = False
    agent.say([ASK], stream=True)
    receipt = hung.client.seal("g_g0", reward=1.0)
    assert (receipt["poisoned"], receipt["reason"]) == (bool(shown), "capture_failed" if shown else None)


@speaking
def test_a_stream_says_something_while_nothing_happens(opened: Opener, speaker: type[Speaker]) -> None:
    with opened(stream_keep_alive_s=0.01) as door:
        (rollout,) = door.register()
        door.engine.hold = True
        with opened_stream(speaker(door, rollout), [ASK]) as (_, lines):
            until(lines, "event: ping" if speaker.name == "anthropic" else ": keep-alive")
            door.on_loop(door.engine.release)
            assert "\x03" in json.dumps(datas("\n".join(lines)), ensure_ascii=False).encode().decode("unicode_escape")
        assert len(door.events("call_committed")) == 1


@speaking
def test_a_keep_alive_is_no_answer(opened: Opener, speaker: type[Speaker]) -> None:
    with opened(stream_keep_alive_s=0.01) as door:
        (rollout,) = door.register()
        door.engine.hold = True
        with opened_stream(speaker(door, rollout), [ASK]) as (_, lines):
            until(lines, "event: ping" if speaker.name == "anthropic" else ": keep-alive")
        assert failed(door) == ("client_disconnected", False)


@speaking
def test_a_repeated_stream_gets_the_whole_answer_as_a_stream(opened: Opener, speaker: type[Speaker]) -> None:
    def said(answer: httpx.Response) -> list[Any]:
        return [{key: value for key, value in data.items() if key != "sequence_number"} for data in datas(answer.text)]

    key = {"Idempotency_Key": "k"}
    with opened() as door:
        (rollout,) = door.register()
        agent = speaker(door, rollout)
        door.engine.answers = [THINKING]
        first = agent.raw([ASK], tools=TOOLS, stream=True, headers=key)
        again = agent.raw([ASK], tools=TOOLS, stream=True, headers=key)
        retried = agent.raw([ASK], tools=TOOLS, stream=True, headers={"x_stainless_retry_count": "1"})
        assert again.text == retried.text
        assert said(again)[0] == said(first)[0]
        assert said(again)[-1] == said(first)[-1]
        whole = agent.raw([ASK], tools=TOOLS, headers=key)
        assert whole.status_code == 200
        assert agent.raw([MORE], tools=TOOLS, stream=True, headers=key).status_code == 409
        assert len(door.engine.prompts) == 1
    with opened() as door:
        agent = speaker(door, rollout)
        after = said(agent.raw([ASK], tools=TOOLS, stream=True, headers=key))
        assert keys(after) == keys(said(again))
        assert len(after) == len(said(again))
        assert door.engine.prompts == []


@speaking
def test_a_duplicate_joins_a_stream_in_flight(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    door.engine.hold, door.engine.shown_first = True, 1
    answers: list[httpx.Response] = []
    call = lambda: answers.append(agent.raw([ASK], stream=True, headers={"Idempotency_Key": "k"}))  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    flights = door.service.gate._flights
    wait_for(door, lambda: bool(door.engine._waiting) and next(iter(flights)).waiters == 2)
    door.on_loop(door.engine.release)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert datas(answers[0].text)[-1] == datas(answers[1].text)[-1]
    assert len(door.engine.prompts) == 1


def test_usage_comes_with_a_chat_stream_only_when_asked_for(door: Door) -> None:
    (rollout,) = door.register()
    agent = ChatSpeaker(door, rollout)
    plain = datas(agent.raw([ASK], stream=True).text)
    asked = datas(agent.raw([ASK], stream=True, stream_options={"include_usage": True}).text)
    assert not [chunk for chunk in plain if "usage" in chunk]
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
    assert all(chunk["usage"] is None for chunk in asked[:-1])


def test_folded_thinking_is_streamed_as_it_is_served_whole(opened: Opener) -> None:
    with opened(reasoning="fold") as door:
        for index, script in enumerate(("{r}a", "{r}", "a")):
            first, second = door.register(f"f{index}", n=2)
            door.engine.answers = [[*map(ord, script), 9]] * 2
            whole = ChatSpeaker(door, first).say([ASK])
            streamed = ChatSpeaker(door, second).say([ASK], stream=True)
            assert streamed.text == whole.text
            ChatSpeaker(door, second).say([ASK, streamed, MORE])
        assert {event["mode"] for event in door.events("call_committed") if event.get("parent_call_id")} == {"token_in"}


def test_an_engine_that_contradicts_what_it_streamed_is_not_captured(door: Door) -> None:
    (rollout,) = door.register()
    door.engine.answers = [[*map(ord, "abc"), 9]]
    door.engine.edit = lambda generation: replace(generation, text="xyz")
    answer = ChatSpeaker(door, rollout).raw([ASK], stream=True)
    assert answer.status_code == 503 or "error" in keys(datas(answer.text))
    assert failed(door)[0] == "stream_contradicted"
    assert not door.events("call_committed")


@speaking
@pytest.mark.parametrize("stream", [False, True])
def test_the_plain_proxy_speaks_every_dialect_and_keeps_nothing(
    door: Door, speaker: type[Speaker], stream: bool
) -> None:
    body = {**speaker(door, {}).body([ASK], []), "stream": stream}
    answer = door.post(speaker.path, body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert door.post(speaker.path, body, token="other").status_code == 401
    assert not door.events("call_committed")


def test_a_seal_waits_for_a_stream_and_its_row_has_it(door: Door) -> None:
    (rollout,) = door.register()
    agent = ChatSpeaker(door, rollout)
    door.engine.hold, door.engine.shown_first = True, 1
    sealed: list[Any] = []
    with opened_stream(agent, [ASK]) as (_, lines):
        until(lines, "\\u0003")
        thread = threading.Thread(target=lambda: sealed.append(door.client.seal("g_g0", reward=1.0)))
        thread.start()
        attempt = door.service.control.groups["g"].rollouts["g_g0"].current
        wait_for(door, lambda: attempt.closing)
        door.on_loop(door.engine.release)
        "".join(lines)
        thread.join()
    assert (sealed[0]["reason"], len(sealed[0]["manifest"])) == (None, 1)
