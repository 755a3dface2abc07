"""A generation under way: its weights change, the engine is held, the trainer aborts it, the agent goes."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served, load, version
from tests.vllm.test_worker import ASKED, ENDLESS, deltas, say

ANSWERED_FOR_LONG = {"worker": ENDLESS, "other": [{"role": "user", "content": "66666666"}]}
"""By template: greedily the model repeats itself after this."""


@pytest.fixture(params=["worker", "other"], ids=["bare", "behind-function-middleware"])
def either(request: pytest.FixtureRequest) -> tuple[Served, list[Any]]:
    return request.getfixturevalue(request.param), ANSWERED_FOR_LONG[request.param]


@contextlib.contextmanager
def held(worker: Served) -> Iterator[None]:
    """The engine samples nothing until the block ends; what runs goes on then."""
    httpx.post(worker.url + "/pause", params={"mode": "keep", "clear_cache": False}, timeout=30).raise_for_status()
    try:
        yield
    finally:
        httpx.post(worker.url + "/resume", timeout=30).raise_for_status()


def running(worker: Served) -> float:
    text = httpx.get(worker.url + "/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def endless(door: Door, rollout: dict[str, Any], tokens: int, **more: Any) -> Any:
    """A stream that has begun."""
    asked = {"model": "m", "messages": ENDLESS, "max_tokens": tokens, "temperature": 0, **more}
    stream = door.agent(rollout).chat.completions.create(**asked, stream=True)
    next(iter(stream))
    return stream


def test_weights_that_change_in_mid_request_are_told_apart(door: Door, worker: Served, group: str) -> None:
    """B18: by token where one answer has both, and by call where a rollout has."""
    first, second = door.register(group, n=2)
    older = load(worker)
    stream = endless(door, first, 1900)
    newer = load(worker)
    for _ in stream:
        pass
    (delta,) = deltas(door, first)
    assert delta["finish_reason"] == "length", "it was still running when the label changed"
    assert (delta["weight_version"], delta["weight_version_end"]) == (older, newer)
    one, two = delta["weight_version_spans"]
    assert (one["version"], one["start"]) == (older, 0)
    assert (two["version"], two["start"], two["end"]) == (newer, one["end"], sum(delta["token_mask"]))
    messages: list[Any] = [*ASKED]
    say(door, second, messages)
    newest = load(worker)
    said = door.client.set_weight_version(newest)["workers"]
    assert [entry["loaded_weight_version"] for entry in said] == [newest]
    say(door, second, messages)
    assert [call["weight_version"] for call in deltas(door, second)] == [newer, newest]
    assert version(worker, newer).status_code == 409, "never backwards"


def test_a_call_that_waited_for_a_load_is_of_the_new_weights_alone(door: Door, worker: Served, group: str) -> None:
    """B18: it came under one version, and its first token is of the next."""
    (rollout,) = door.register(group)
    load(worker)
    with ThreadPoolExecutor(1) as pool:
        with held(worker):
            before = len(worker.log)
            waiting = pool.submit(say, door, rollout, [*ASKED])
            wait_for(door, lambda: any("prompt_token_ids" in line for line in worker.log[before:]))
            newer = load(worker)
        waiting.result()
    (delta,) = deltas(door, rollout)
    assert (delta["weight_version"], delta["weight_version_end"]) == (newer, newer)
    assert [span["version"] for span in delta["weight_version_spans"]] == [newer]


def test_a_generation_that_is_held_and_goes_on_is_one_turn(door: Door, worker: Served, group: str) -> None:
    """B19: nothing of it is lost, twice there, or a prompt; each token is of the weights that sampled it."""
    plain, cut = door.register(group, n=2)
    for _ in endless(door, plain, 1900):
        pass
    older = load(worker)
    stream = endless(door, cut, 1900)
    with held(worker):
        newer = load(worker)
    for _ in stream:
        pass
    (whole,), (resumed,) = deltas(door, plain), deltas(door, cut)
    same = ("token_ids", "token_mask", "logprobs", "finish_reason", "cum_len")
    assert {name: resumed[name] for name in same} == {name: whole[name] for name in same}
    assert [span["version"] for span in resumed["weight_version_spans"]] == [older, newer]


def test_a_generation_that_the_trainer_aborts_is_asked_for_again(door: Door, worker: Served, group: str) -> None:
    """B19: what was sampled before an abort is no turn."""
    (rollout,) = door.register(group)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(say, door, rollout, [*ENDLESS], tools=openai.NOT_GIVEN, max_tokens=1900)
        wait_for(door, lambda: running(worker) == 1)
        httpx.post(worker.url + "/pause", params={"mode": "abort"}, timeout=30).raise_for_status()
        httpx.post(worker.url + "/resume", timeout=30).raise_for_status()
        with pytest.raises(openai.APIStatusError) as refused:
            waiting.result()
    assert refused.value.status_code == 503
    assert not deltas(door, rollout), "what it had sampled is no turn"
    say(door, rollout, [*ASKED])
    assert len(deltas(door, rollout)) == 1
    assert not door.client.seal(rollout["rollout_id"], reward=1.0)["poisoned"]


@pytest.mark.parametrize("when", ["before-the-first-token", "in-mid-stream"])
def test_an_agent_that_hangs_up_ends_the_generation(
    open_gate: Opener, either: tuple[Served, list[Any]], group: str, when: str
) -> None:
    """B20: also behind a function middleware. An answer that was staged and not delivered is the gate's to tell."""
    served, messages = either
    with open_gate(engine=backend(served.url, "worker")) as door:
        (rollout,) = door.register(group)
        before = len(served.log)

        def logged(words: str) -> bool:
            return any(words in line for line in served.log[before:])

        if when == "in-mid-stream":
            endless(door, rollout, 1900, messages=messages).close()
            wait_for(door, lambda: logged("aborted."))
        else:
            with held(served):
                call = _asked(door, rollout)
                wait_for(door, lambda: logged("Added request"))
                call.close()
                wait_for(door, lambda: logged("aborted."))
        wait_for(door, lambda: running(served) == 0)
        wait_for(door, lambda: any(e["rollout_id"] == rollout["rollout_id"] for e in door.events("call_failed")))
        (failed,) = [e for e in door.events("call_failed") if e["rollout_id"] == rollout["rollout_id"]]
        assert failed["reason"] == "client_disconnected"
        assert not deltas(door, rollout)
        say(door, rollout, [*ASKED])
        assert len(deltas(door, rollout)) == 1


def _asked(door: Door, rollout: dict[str, Any]) -> http.client.HTTPConnection:
    """A call that is asked whole, and not yet answered."""
    made = http.client.HTTPConnection(str(urlsplit(door.url).netloc))
    headers = {"Authorization": f"Bearer {rollout['data_capability']}", "Content-Type": "application/json"}
    body = {"model": "m", "messages": ENDLESS, "max_tokens": 1900, "temperature": 0}
    made.request("POST", f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions", json.dumps(body), headers)
    return made
