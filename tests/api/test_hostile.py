"""What a hostile client sends is refused or served; none of it is an error of ours or outlives its own request."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.speakers import SPEAKERS, Speaker
from tests.api.test_chat import U5
from tests.api.test_dialects import ASK, speaking
from tests.api.test_gate import chat
from tests.api.test_refusals import error_of, nothing_happened
from tokenlake.ingest.tiny import TinyEngine

HALF = "\\ud800"


def sent(door: Door, method: str, path: str, body: str | bytes, token: str = TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return door.http.request(method, path, content=body, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/v1/groups/h", f'{{"n":1,"meta":{{"a":"{HALF}"}}}}'),
        ("PUT", "/api/v1/groups/h", f'{{"n":1,"meta":{{"{HALF}":1}}}}'),
        ("PUT", "/api/v1/groups/h", '{"n":1,"meta":{"a":1e999}}'),
        ("PUT", "/api/v1/groups/h", '{"n":1,"meta":{"a":NaN}}'),
        ("PUT", "/api/v1/groups/h", '{"n":1,"deadline_s":1e300}'),
        ("PUT", "/api/v1/workers/w", f'{{"url":"{HALF}"}}'),
        ("POST", "/api/v1/rollouts/g_g0/seal", f'{{"reward":1,"scored_text":"{HALF}"}}'),
        ("POST", "/api/v1/rollouts/g_g0/fail", f'{{"reason":"{HALF}"}}'),
        ("POST", "/api/v1/sql", f'{{"sql":"SELECT ?","params":["{HALF}"]}}'),
    ],
)
def test_what_no_answer_could_hold_is_refused_and_breaks_no_list(door: Door, method: str, path: str, body: str) -> None:
    door.register()
    answer = sent(door, method, path, body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_input")
    assert [group["group_id"] for group in door.request("GET", "/api/v1/groups").json()["groups"]] == ["g"]
    assert door.request("GET", "/api/v1/workers").status_code == 200


ODD: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"messages": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"seed": 10**30},
        {"seed": -(10**30)},
    ],
    "responses": [
        {"input": [{"type": {}, "content": "x"}]},
        {"input": [{"role": {}, "content": "x"}]},
        {"input": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]},
        {"seed": 10**30},
    ],
    "anthropic": [
        {"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]},
        {"messages": [{"role": {}, "content": "x"}]},
        {"system": [{"type": {}, "text": "x"}]},
    ],
}


@pytest.mark.parametrize(
    ("speaker", "more"),
    [(speaker, more) for speaker in SPEAKERS for more in ODD[speaker.name]],
    ids=lambda value: value.name if isinstance(value, type) else json.dumps(value)[:60],
)
def test_what_has_another_type_is_refused_by_name(door: Door, speaker: type[Speaker], more: dict[str, Any]) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    answer = agent.post({**agent.body([ASK], []), **more})
    assert answer.status_code == 400
    assert next(iter(more)) in error_of(speaker, answer)["message"]
    assert nothing_happened(door)


TWICE = {
    "top": ('{"model":"m",', '{"model":"m","temperature":0,"temperature":1,', "temperature"),
    "deep": ('{"model":"m",', '{"model":"m","metadata":{"a":{"k":1,"k":1}},', "k"),
    "odd": ('{"model":"m",', f'{{"model":"m","{HALF}":1,"{HALF}":2,', "\\ud800"),
    "long": ('{"model":"m",', f'{{"model":"m","{"x" * 9999}":1,"{"x" * 9999}":2,', "x" * 80 + " twice"),
}


@speaking
@pytest.mark.parametrize("where", TWICE)
def test_a_key_that_is_there_twice_is_refused_by_name(door: Door, speaker: type[Speaker], where: str) -> None:
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    before, after, named = TWICE[where]
    body = json.dumps(agent.body([ASK], []), separators=(",", ":"))
    assert before in body
    answer = sent(
        door, "POST", f"/ng-rollout/g_g0{agent.path}", body.replace(before, after), rollout["data_capability"]
    )
    assert answer.status_code == 400
    assert named in error_of(speaker, answer)["message"]
    assert nothing_happened(door)


def test_a_seal_with_two_rewards_seals_nothing(door: Door) -> None:
    door.register()
    answer = sent(door, "POST", "/api/v1/rollouts/g_g0/seal", '{"reward":1,"reward":0}')
    assert (answer.status_code, answer.json()["error"]["detail"]) == (400, {"field": "reward"})
    assert door.client.rollout("g_g0")["state"] == "open"


@speaking
def test_a_number_that_no_answer_could_repeat_is_refused(door: Door, speaker: type[Speaker]) -> None:
    """The Responses dialect echoes metadata, after the commit."""
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    body = json.dumps({**agent.body([ASK], []), "metadata": {"a": 0.5}}).replace("0.5", "1e999")
    path = f"/ng-rollout/g_g0{agent.path}"
    assert sent(door, "POST", path, body, rollout["data_capability"]).status_code == 400
    assert nothing_happened(door)


@pytest.mark.parametrize("odd", [{"temperature": 1e-320}, {"temperature": 1e-9}, {"top_p": 1e-300}, {"top_k": 10**15}])
def test_no_agent_stops_the_embedded_engine(opened: Opener, odd: dict[str, Any]) -> None:
    with opened(engine=TinyEngine()) as door:
        first, second = door.register(n=2)
        path = "/ng-rollout/g_g0/v1/chat/completions"
        body = {"messages": [U5], "max_tokens": 4, "seed": 1}
        answer = door.post(path, {**body, **odd}, token=first["data_capability"])
        assert answer.status_code == 200
        if "temperature" in odd:
            door.post(path, {**body, "temperature": 0}, token=first["data_capability"]).raise_for_status()
            one, two = (door.ids(event)[0] for event in door.events("call_committed"))
            assert one == two
        assert chat(door, second, [U5]).status_code == 200
        assert door.client.seal("g_g1", reward=1.0)["reason"] is None
        assert door.request("GET", "/api/v1/audit").json()["healthy"]


def flood(agent: socket.socket) -> None:
    for _ in range(1024):
        agent.sendall(b"x" * 65_536)


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nX-Endless: ",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Endless: ",
    ],
    ids=["head", "trailer"],
)
def test_what_never_ends_is_cut_off(door: Door, begun: bytes) -> None:
    url = urlsplit(door.running.url)
    with socket.create_connection((url.hostname, url.port), timeout=30) as agent:
        agent.sendall(begun)
        with pytest.raises(OSError):
            flood(agent)
    assert door.http.get("/healthz").status_code == 200


def test_a_head_may_be_as_long_as_many_cookies_and_a_body_is_no_head(door: Door) -> None:
    assert door.http.get("/healthz", headers={"x-long": "x" * 60_000}).status_code == 200
    (rollout,) = door.register()
    assert chat(door, rollout, [{"role": "user", "content": "<" * 200_000}]).status_code == 200
