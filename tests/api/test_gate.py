"""What the gate does when things go wrong: retries, hang-ups, failed captures, restarts."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import ScriptedEngine, text
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_lifecycle import call_id, wait_for
from tokenlake.errors import ConfigError
from tokenlake.ingest.coords import Coords
from tokenlake.store.delta import Delta


def chat(door: Door, rollout: dict[str, Any], messages: list[dict[str, Any]], **headers: str) -> httpx.Response:
    path = f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions"
    return door.post(path, {"messages": messages}, token=rollout["data_capability"], **headers)


def test_the_same_key_returns_the_same_answer_also_after_a_restart(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        door.engine.answers = [[*map(ord, "{r}a<f|{}>"), 9], [4, 9]]
        first = chat(door, rollout, [U5], Idempotency_Key="k")
        assert chat(door, rollout, [U5], Idempotency_Key="k").json() == first.json()
        assert chat(door, rollout, [U6], Idempotency_Key="k").status_code == 409
        assert chat(door, rollout, [U5], Idempotency_Key="l").json()["id"] != first.json()["id"]
    with opened() as door:
        again = chat(door, rollout, [U5], Idempotency_Key="k")
        assert {**again.json(), "created": 0} == {**first.json(), "created": 0}
        assert door.engine.prompts == []
        assert len(door.events("call_committed")) == 2


def test_an_sdks_own_retry_gets_the_answer_that_nobody_continued(door: Door) -> None:
    (rollout,) = door.register()
    first = chat(door, rollout, [U5])
    retried = chat(door, rollout, [U5], x_stainless_retry_count="1")
    assert retried.json() == first.json()
    assert chat(door, rollout, [U6], x_stainless_retry_count="1").json()["id"] != first.json()["id"]
    said = first.json()["choices"][0]["message"]
    chat(door, rollout, [U5, said, U6])
    assert chat(door, rollout, [U5], x_stainless_retry_count="1").json()["id"] != first.json()["id"]


def test_a_duplicate_in_flight_joins_it(door: Door) -> None:
    (rollout,) = door.register()
    door.engine.hold = True
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(chat(door, rollout, [U5], Idempotency_Key="k")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    flights = door.service.gate._flights
    wait_for(door, lambda: bool(door.engine._waiting) and next(iter(flights)).waiters == 2)
    door.on_loop(door.engine.release)
    for thread in threads:
        thread.join()
    assert answers[0].json() == answers[1].json()
    assert len(door.engine.prompts) == 1


def hang_up(door: Door, rollout: dict[str, Any], messages: list[dict[str, Any]], *headers: str) -> socket.socket:
    """Send a call and keep the connection, for the caller to close."""
    host, port = door.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": messages}).encode()
    head = (
        f"POST /ng-rollout/{rollout['rollout_id']}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {rollout['data_capability']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n" + "".join(f"{header}\r\n" for header in headers) + "\r\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_hangs_up_before_the_first_token_aborts_the_generation(hung: Door) -> None:
    (rollout,) = hung.register()
    hung.engine.hold = True
    connection = hang_up(hung, rollout, [U5])
    wait_for(hung, lambda: bool(hung.engine._waiting))
    connection.close()
    wait_for(hung, lambda: bool(hung.events("call_failed")))
    assert hung.engine.aborted
    (failed,) = hung.events("call_failed")
    assert (failed["reason"], failed["answered"]) == ("client_disconnected", False)
    assert not hung.events("call_committed")
    hung.engine.hold = False
    ask(hung.agent(rollout), [U5])
    receipt = hung.client.seal("g_g0", reward=1.0)
    assert (receipt["poisoned"], receipt["reason"]) == (False, None)


def test_a_client_that_hangs_up_while_staging_leaves_a_whole_undelivered_record(hung: Door) -> None:
    (rollout,) = hung.register()
    agent = hung.agent(rollout)
    first = ask(agent, [U5])
    reached, go_on = threading.Event(), threading.Event()
    build = hung.service.recorder._capture.build

    def slow(ticket: Any, **generation: Any) -> tuple[Coords, Delta | None]:
        reached.set()
        assert go_on.wait(30)
        return build(ticket, **generation)

    hung.service.recorder._capture.build = slow
    connection = hang_up(hung, rollout, [U5, echo(first), U6])
    assert reached.wait(30)
    connection.close()
    attempt = hung.service.control.groups["g"].rollouts["g_g0"].current
    wait_for(hung, lambda: next(iter(hung.service.gate._flights)).gone)
    go_on.set()
    wait_for(hung, lambda: bool(attempt.undelivered))
    hung.service.recorder._capture.build = build
    assert len(hung.events("call_committed")) == 2
    assert door_terminal(hung) == call_id(first), "an answer nobody waited for is no leaf"


def door_terminal(door: Door) -> str:
    return door.client.seal("g_g0", reward=1.0)["terminal_call_id"]


def test_an_undelivered_call_that_is_continued_counts(hung: Door) -> None:
    (rollout,) = hung.register()
    agent = hung.agent(rollout)
    first = ask(agent, [U5])
    attempt = hung.service.control.groups["g"].rollouts["g_g0"].current
    attempt.undelivered |= {call_id(first)}
    second = ask(agent, [U5, echo(first), U6])
    assert door_terminal(hung) == call_id(second)


def bad(**fields: Any) -> Any:
    return lambda generation: replace(generation, **fields)


BROKEN = {
    "logprobs_missing": bad(logprobs=None),
    "logprobs_misaligned": bad(logprobs=[-0.1]),
    "token_id_invalid": bad(token_ids=[-1, 9]),
    "logprob_not_finite": bad(logprobs=[float("nan"), -0.1]),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_failed_capture_still_answers_and_poisons(door: Door, reason: str) -> None:
    (rollout,) = door.register()
    door.engine.edit = BROKEN[reason]
    assert ask(door.agent(rollout), [U5]).choices[0].message.content == text(3)
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == (reason, True)
    assert not door.events("call_committed")
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["poisoned"], receipt["reason"]) == (
        True,
        reason if reason == "logprobs_missing" else "capture_failed",
    )


def test_abort_on_a_failed_capture_serves_nothing_and_fails_the_rollout(opened: Opener) -> None:
    with opened(policy={"on_capture_failure": "abort"}) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout, max_retries=2)
        first = ask(agent, [U5])
        door.engine.edit = BROKEN["logprobs_missing"]
        with pytest.raises(openai.InternalServerError) as refused:
            ask(agent, [U5, echo(first), U6])
        assert refused.value.status_code == 503
        assert text(3) not in refused.value.response.text
        assert len(door.engine.prompts) == 2, "the SDK is told not to try again"
        assert door.client.rollout("g_g0")["state"] == "failed"
        assert door.events("call_failed")[0]["answered"] is False


def test_an_empty_generation_is_a_call_like_any_other(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    door.engine.edit = bad(token_ids=[], logprobs=[], text="")
    first = ask(agent, [U5])
    door.engine.edit = None
    assert first.choices[0].message.content == ""
    ask(agent, [U5, echo(first), U6])
    assert door.engine.prompts[1] == [1, 101, 5, 9, 8, 102, 9, 8, 101, 6, 9, 8, 102]


def test_ids_past_a_stop_string_are_kept_and_ids_may_be_texts(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    door.engine.edit = bad(token_ids=["token_id:3", "token_id:71", "token_id:151645"], logprobs=[-0.1, -0.2, -0.3])
    first = ask(agent, [U5], stop=["x"])
    door.engine.edit = None
    ask(agent, [U5, echo(first), U6])
    assert door.ids(door.events("call_committed")[0])[0][6:] == [3, 71, 151645]
    assert door.engine.prompts[1] == [1, 101, 5, 9, 8, 102, 3, 71, 151645, 9, 8, 101, 6, 9, 8, 102]


def test_poison_on_unresolved_keeps_serving_and_spoils_the_rollout(opened: Opener) -> None:
    with opened(policy={"on_unresolved": {"no_match": "poison"}}) as door:
        first, second = door.register(n=2)
        for rollout, said in ((first, "edited"), (second, None)):
            agent = door.agent(rollout)
            answer = ask(agent, [U5])
            turn = {"role": "assistant", "content": said} if said else echo(answer)
            ask(agent, [U5, turn, U6])
        assert door.client.seal("g_g0", reward=1.0)["reason"] == "unresolved_parent"
        assert door.client.seal("g_g1", reward=1.0)["reason"] is None


def test_a_restarted_gate_goes_on_with_exact_prefixes(opened: Opener) -> None:
    with opened() as door:
        rollouts = door.register(n=3)
        said = []
        for index, rollout in enumerate(rollouts):
            door.engine.answers = [[20 + index, 30, 9]]
            said.append(ask(door.agent(rollout), [U5]))
        url = door.url
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=2)
    with opened() as door:
        for index, rollout in enumerate(rollouts):
            moved = {**rollout, "base_url": rollout["base_url"].replace(url, door.url)}
            ask(door.agent(moved), [U5, echo(said[index]), U6])
            assert door.engine.prompts[index] == [
                1, 101, 5, 9, 8, 102, 20 + index, 30, 9, 8, 101, 6, 9, 8, 102,
            ]  # fmt: skip
        assert {event["mode"] for event in door.events("call_committed")[3:]} == {"token_in"}


def test_an_evicted_prefix_is_read_back_and_never_rendered_again(opened: Opener) -> None:
    with opened(prefix_cache_bytes=70) as door:
        agents = [door.agent(rollout) for rollout in door.register(n=3)]
        histories = [[U5] for _ in agents]
        for _ in range(3):
            for agent, history in zip(agents, histories, strict=True):
                history += [echo(ask(agent, history)), U6]
        assert [event["mode"] for event in door.events("call_committed")] == ["text"] * 3 + ["token_in"] * 6
        assert door.service.prefixes.evictions > 0
        assert door.service.prefixes.reads > 0


def test_a_damaged_prefix_is_not_served(opened: Opener) -> None:
    with opened(prefix_cache_bytes=1) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        read = door.service.lake.read_deltas
        door.service.lake.read_deltas = lambda places: [replace(each, token_ids=bytes(32)) for each in read(places)]
        ask(agent, [U5, echo(first), U6])
        del door.service.lake.read_deltas
        assert door.events("call_committed")[1]["reason"] == "prefix_unavailable"


def test_a_call_that_takes_too_long_is_aborted(opened: Opener) -> None:
    with opened(call_deadline_s=0.1) as door:
        (rollout,) = door.register()
        door.engine.hold = True
        assert chat(door, rollout, [U5]).status_code == 504
        assert door.events("call_failed")[0]["reason"] == "deadline"
        door.engine.hold = False
        ask(door.agent(rollout), [U5])
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None


def test_an_unknown_policy_value_is_refused_at_start(opened: Opener) -> None:
    with pytest.raises(ConfigError), opened(policy={"on_capture_failure": "abrt"}):
        pass


def test_the_engine_that_needs_no_test_is_an_engine() -> None:
    from tokenlake.ingest.engine import Engine

    assert isinstance(ScriptedEngine(), Engine)
