"""`--capture off`: bytes in and out unchanged, streams as they come, nothing recorded."""

from __future__ import annotations

import httpx
import pytest

from tests.api.conftest import TOKEN, Opener
from tests.api.stub_upstream import StubUpstream
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import served, stub

__all__ = ["stub"]

CALLS = ["v1/chat/completions", "v1/responses", "v1/messages", "v1/messages/count_tokens"]
BODY = b'{"model" : "any",\n "messages":[], "n":1.0, "\xc3\xa9": "\\u00e9"}'


@pytest.mark.parametrize("prefix", ["/ng-rollout/g_g0", "/ng-rollout/g_g0/training-token-capture"])
@pytest.mark.parametrize("path", CALLS)
def test_bodies_and_headers_pass_unchanged(opened: Opener, stub: StubUpstream, prefix: str, path: str) -> None:
    stub.key = "upstream-key"
    with served(opened, stub, "off") as door:
        (rollout,) = door.register()
        headers = {
            "Authorization": f"Bearer {rollout['data_capability']}",
            "x-api-key": "another",
            "x-session-id": "s",
            "connection": "x-private",
            "x-private": "mine",
            "accept-encoding": "identity",
        }
        answer = door.http.post(f"{prefix}/{path}?a=%20b&c", content=BODY, headers=headers)
        ((target, body, sent),) = stub.raw
        assert (target, body) == (f"/{path}?a=%20b&c", BODY)
        assert answer.status_code == 203
        assert answer.content == b'{"spaces" :  "kept",\n"\xc3\xa9": 1}' + BODY
        assert (answer.headers["x-kept"], "x-hop" in answer.headers) == ("yes", False)
        assert len(answer.headers.get_list("date")) == 1
        assert sent["authorization"] == "Bearer upstream-key"
        assert (sent["x-session-id"], sent["accept-encoding"]) == ("s", "identity")
        assert not {"x-api-key", "x-private"} & set(sent)
        assert not [e for e in door.events() if e["event_type"].startswith(("call_", "model_"))]
        assert door.client.seal("g_g0", reward=1.0)["manifest"] == []


def test_a_credential_of_ours_never_reaches_an_upstream_without_a_key(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off") as door:
        (rollout,) = door.register()
        door.post("/ng-rollout/g_g0/v1/messages", {}, token=rollout["data_capability"])
        door.post("/v1/anything/at%2Fall", {})
        assert ["authorization" in sent for _, _, sent in stub.raw] == [False, False]
        assert stub.raw[1][0] == "/v1/anything/at%2Fall"


def test_a_stream_passes_as_it_comes(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off") as door:
        (rollout,) = door.register()
        headers = {"x-api-key": rollout["data_capability"]}
        path = "/ng-rollout/g_g0/v1/chat/completions"
        with door.http.stream("POST", path, json={"stream": True}, headers=headers) as answer:
            chunks = answer.iter_raw()
            for event in stub.events:
                stub.release()
                assert next(chunks) == event, "the next event waits until this one has arrived"
            assert list(chunks) == []


def test_a_client_that_hangs_up_ends_the_stream_upstream(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off") as door:
        (rollout,) = door.register()
        headers = {"x-api-key": rollout["data_capability"]}
        path = "/ng-rollout/g_g0/v1/chat/completions"
        with door.http.stream("POST", path, json={"stream": True}, headers=headers) as answer:
            stub.release()
            chunks = answer.iter_raw()  # held: a collected iterator would hang up here already
            assert next(chunks)
            assert door.service.control.groups["g"].rollouts["g_g0"].current.inflight
        assert stub.gone.wait(20)
        wait_for(door, lambda: not door.service.control.groups["g"].rollouts["g_g0"].current.inflight)


def test_a_stream_that_breaks_upstream_never_looks_whole(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off") as door:
        stub.events = [b"data: 1\n\n", b"cut"]
        stub.release(2)
        with (
            pytest.raises(httpx.RemoteProtocolError),
            door.http.stream("POST", "/v1/x", json={"stream": 1}, headers={"x-api-key": TOKEN}) as a,
        ):
            a.read()


def test_an_upstream_that_is_late_or_gone_is_named_in_time(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off", call_deadline_s=3.0) as door:
        stub.hang.add("*")
        answer = door.post("/v1/chat/completions", {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        assert stub.gone.wait(20)
        stub.hang.clear()
        stub.cut.add("*")
        with pytest.raises(httpx.RemoteProtocolError):
            door.post("/v1/chat/completions", {})


def test_who_may_call_is_decided_as_ever(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off") as door:
        (rollout,) = door.register()
        key = rollout["data_capability"]
        path = "/ng-rollout/g_g0/v1/chat/completions"
        assert door.post(path, {}, token="wrong").status_code == 401
        assert door.post("/ng-rollout/h_g0/v1/chat/completions", {}, token=key).status_code == 404
        assert door.post("/ng-rollout/g_g0/v1/embeddings", {}, token=key).status_code == 404
        assert door.request("DELETE", path, token=key).status_code == 404
        assert door.post("/v1/chat/completions", {}, token=key).status_code == 401
        for climbing in (b"/ng-rollout/g_g0/v1/%2e%2e/%2E./x", b"/ng-rollout/g_g0%2Fv1/x"):
            raw = door.http.build_request("GET", "/ng-rollout/g_g0/v1/x", headers={"x-api-key": key})
            raw.url = raw.url.copy_with(raw_path=climbing)
            assert door.http.send(raw).status_code == 404
        door.client.freeze("g_g0")
        assert door.post(path, {}, token=key).status_code == 409
        assert not stub.raw
        elsewhere = "training-token-capture@127.0.0.1:1/x"
        assert door.request("GET", f"/ng-rollout/g_g0/{elsewhere}", token=key).status_code == 203
        assert stub.raw[0][0] == f"/{elsewhere}", "what follows the prefix never becomes the upstream's address"


def test_a_body_beyond_the_limit_is_not_passed_on(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub, "off", max_body_bytes=100) as door:
        (rollout,) = door.register()
        path = "/ng-rollout/g_g0/v1/messages"
        assert door.post(path, {"x": "y" * 100}, token=rollout["data_capability"]).status_code == 413
        assert not stub.raw
        assert door.client.freeze("g_g0"), "nothing is left in flight"
