"""Groups, attempts and their ends over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text
from tests.api.test_chat import U5, U6, ask, echo
from tokenlake.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorized


def call_id(completion: Any) -> str:
    return completion.id.removeprefix("chatcmpl-")


def test_a_group_is_created_once(door: Door) -> None:
    body = {"n": 2, "deadline_s": 60, "meta": {"task": "t"}}
    first = door.request("PUT", "/api/v1/groups/g", body, Idempotency_Key="k")
    assert first.status_code == 201
    assert [r["rollout_id"] for r in first.json()["rollouts"]] == ["g_g0", "g_g1"]
    assert set(first.json()["rollouts"][0]) == {
        "rollout_id", "attempt", "base_url", "data_capability", "control_capability",
    }  # fmt: skip
    again = door.request("PUT", "/api/v1/groups/g", body, Idempotency_Key="k")
    assert (again.status_code, again.json()) == (200, first.json())
    for other, key in ((body, None), ({**body, "n": 3}, "k"), (body, "l")):
        headers = {} if key is None else {"Idempotency_Key": key}
        assert door.request("PUT", "/api/v1/groups/g", other, **headers).status_code == 409
    assert door.client.group("g")["meta"] == {"task": "t"}


@pytest.mark.parametrize("body", [{}, {"n": 0}, {"n": True}, {"n": "2"}, {"n": 1, "x": 1}, {"n": 1, "purpose": "y"}])
def test_a_malformed_group_is_refused(door: Door, body: dict[str, Any]) -> None:
    answer = door.request("PUT", "/api/v1/groups/g", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"]["field"]
    assert not door.events("group_registered")


def test_seal_is_idempotent_with_the_same_arguments_and_a_conflict_with_others(door: Door) -> None:
    (rollout,) = door.register()
    last = ask(door.agent(rollout), [U5])
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
    assert receipt == {
        "rollout_id": "g_g0",
        "attempt": 0,
        "reward": 1.0,
        "terminal_call_id": call_id(last),
        "terminal_selection": "response_id",
        "manifest": receipt["manifest"],
        "poisoned": False,
        "reason": None,
    }
    assert set(receipt["manifest"][0]) == {
        "call_id", "parent_call_id", "prev_len", "delta_len", "cum_len", "weight_version", "weight_version_end",
        "mode", "digest",
    }  # fmt: skip
    assert receipt["manifest"][0]["weight_version"] == 7
    assert door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id, attempt=0) == receipt
    with pytest.raises(Conflict):
        door.client.seal("g_g0", reward=0.0, terminal_response_id=last.id)
    with pytest.raises(Conflict):
        door.client.fail("g_g0", reason="environment_failed")


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e999", '"1"', "null", "[1]"])
def test_a_reward_is_a_finite_number(door: Door, reward: str) -> None:
    door.register()
    answer = door.http.post(
        "/api/v1/rollouts/g_g0/seal",
        content=f'{{"reward": {reward}}}',
        headers={"Authorization": "Bearer control-token-of-the-tests", "Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert not door.events("rollout_sealed")


def test_the_terminal_is_what_the_evidence_names_and_never_the_newest(door: Door) -> None:
    agents = [door.agent(rollout) for rollout in door.register(n=6)]
    ends = []
    for index, agent in enumerate(agents):
        door.engine.answers = [[20, 9], [21, 9], [30 + index, 9]]
        first = ask(agent, [U5])
        second = ask(agent, [U5, echo(first), U6])
        other = ask(agent, [{"role": "user", "content": "title?"}])
        ends.append((second, other))
    seal = door.client.seal
    assert seal("g_g0", reward=1, terminal_response_id=ends[0][0].id)["terminal_call_id"] == call_id(ends[0][0])
    named = seal("g_g1", reward=1, terminal_response_id=ends[1][0].id, scored_text=text(31))
    assert (named["terminal_call_id"], named["reason"]) == (None, "terminal_ambiguous")
    assert seal("g_g2", reward=1)["reason"] == "terminal_ambiguous"
    content = seal("g_g3", reward=1, scored_text=text(21))
    assert (content["terminal_call_id"], content["terminal_selection"]) == (call_id(ends[3][0]), "content")
    assert seal("g_g4", reward=1, terminal_response_id="chatcmpl-nothing")["reason"] == "terminal_unknown"
    declared = seal("g_g5", reward=1, terminal_call_id=call_id(ends[5][1]))
    assert (declared["terminal_call_id"], declared["terminal_selection"]) == (call_id(ends[5][1]), "declared")


def test_a_rollout_without_a_call_says_so(door: Door) -> None:
    door.register()
    assert door.client.seal("g_g0", reward=1.0)["reason"] == "no_calls"


def test_freeze_ends_generation_and_keeps_its_terminal(opened: Opener) -> None:
    with opened(policy={"boundary": "required"}) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        ask(agent, [U5, echo(first), U6])
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=1.0)
        with pytest.raises(Conflict):
            door.client.freeze("g_g0", terminal_response_id="chatcmpl-unknown")
        frozen = door.client.freeze("g_g0", terminal_response_id=first.id)
        assert door.client.freeze("g_g0", terminal_response_id=first.id) == frozen
        assert door.client.freeze("g_g0") == frozen
        with pytest.raises(openai.ConflictError):
            ask(agent, [U5])
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=1.0, boundary_id="other")
        receipt = door.client.seal("g_g0", reward=1.0, boundary_id=frozen["boundary_id"])
        assert receipt["terminal_call_id"] == call_id(first)


def test_a_frozen_rollout_survives_a_restart(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        last = ask(door.agent(rollout), [U5])
        frozen = door.client.freeze("g_g0", terminal_response_id=last.id)
    with opened() as door:
        assert door.client.freeze("g_g0") == frozen
        assert door.client.seal("g_g0", reward=1.0)["terminal_call_id"] == call_id(last)


def test_attempts_do_not_mix(door: Door) -> None:
    (rollout,) = door.register()
    old = door.agent(rollout)
    ask(old, [U5])
    failed = door.client.fail("g_g0", reason="environment_failed", retry=True)
    assert (failed["state"], failed["retry"]) == ("failed", True)
    assert door.client.fail("g_g0", reason="environment_failed", retry=True) == failed
    for number in (0, 2):
        with pytest.raises(Conflict):
            door.client.register_attempt("g_g0", number)
    slot = door.client.register_attempt("g_g0", 1, idempotency_key="k")
    assert door.client.register_attempt("g_g0", 1, idempotency_key="k") == slot
    with pytest.raises(openai.ConflictError):
        ask(old, [U5])
    new = door.agent(slot)
    first = ask(new, [U5, {"role": "assistant", "content": text(3)}, U6])
    assert door.events("call_committed")[-1]["reason"] == "seeded"
    with pytest.raises(Conflict):
        door.client.seal("g_g0", reward=1.0)
    with pytest.raises(Conflict):
        door.client.seal("g_g0", reward=1.0, attempt=0)
    receipt = door.client.seal("g_g0", reward=1.0, attempt=1)
    assert [entry["call_id"] for entry in receipt["manifest"]] == [call_id(first)]


def test_a_capability_reaches_its_own_attempt_only(door: Door) -> None:
    first, second = door.register(n=2)
    token = first["control_capability"]
    assert door.request("GET", "/api/v1/rollouts/g_g0", token=token).status_code == 200
    assert door.request("GET", "/api/v1/rollouts/g_g1", token=token).status_code == 401
    assert door.request("GET", "/api/v1/groups/g", token=token).status_code == 401
    assert door.request("GET", "/api/v1/rollouts/g_g0", token=first["data_capability"]).status_code == 401
    assert door.post("/api/v1/rollouts/g_g0/fail", {"reason": "x", "attempt": 1}, token=token).status_code == 403
    assert door.post("/api/v1/rollouts/g_g0/fail", {"reason": "x"}, token=token).status_code == 200
    ask(door.agent(second), [U5])


def test_seal_waits_for_a_call_in_flight(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    first = ask(agent, [U5])
    door.engine.hold = True
    threads = [threading.Thread(target=ask, args=(agent, [U5, echo(first), U6]))]
    threads[0].start()
    wait_for(door, lambda: bool(door.engine._waiting))
    with pytest.raises(Conflict):
        door.client.freeze("g_g0")
    receipts: list[dict[str, Any]] = []
    threads.append(threading.Thread(target=lambda: receipts.append(door.client.seal("g_g0", reward=1.0))))
    threads[1].start()
    wait_for(door, lambda: door.service.control.groups["g"].rollouts["g_g0"].current.closing)
    with pytest.raises(openai.ConflictError):
        ask(agent, [U5])
    door.on_loop(door.engine.release)
    for thread in threads:
        thread.join()
    assert receipts[0]["reason"] is None
    assert len(receipts[0]["manifest"]) == 2
    assert receipts[0]["terminal_call_id"] == receipts[0]["manifest"][1]["call_id"]


def test_a_call_that_lands_after_the_deadline_of_a_seal_is_late(opened: Opener) -> None:
    with opened(seal_wait_s=0.1) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        door.engine.hold = True
        refused: list[Exception] = []

        def late() -> None:
            try:
                ask(agent, [U5, echo(first), U6])
            except openai.APIStatusError as error:
                refused.append(error)

        thread = threading.Thread(target=late)
        thread.start()
        wait_for(door, lambda: bool(door.engine._waiting))
        receipt = door.client.seal("g_g0", reward=1.0)
        assert receipt["reason"] == "incomplete"
        door.on_loop(door.engine.release)
        thread.join()
        assert isinstance(refused[0], openai.ConflictError)
        assert len(door.events("call_committed")) == 1
        assert (door.events("call_failed")[0]["reason"], door.events("call_failed")[0]["answered"]) == ("late", False)
        assert door.client.seal("g_g0", reward=1.0) == receipt


def wait_for(door: Door, condition: Any) -> None:
    """Ask the service's loop until it is so; the suite's own timeout bounds it."""
    for _ in range(10_000):
        if condition():
            return
        done = threading.Event()
        door.on_loop(done.set)
        done.wait(1)
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


def test_weight_versions_are_recorded_and_never_go_back(door: Door) -> None:
    assert door.client.set_weight_version(8)["workers"][0]["loaded_weight_version"] == 8
    door.client.set_weight_version(8)
    with pytest.raises(Conflict):
        door.client.set_weight_version(7)
    assert [event["weight_version"] for event in door.events("weight_version_published")] == [8]
    (rollout,) = door.register()
    ask(door.agent(rollout), [U5])
    assert door.events("call_committed")[0]["weight_version"] == 8
    assert door.events("group_registered")[0]["weight_version"] == 8


def test_unknown_things_and_wrong_tokens_are_typed_errors(door: Door) -> None:
    with pytest.raises(NotFound):
        door.client.seal("g_g0", reward=1.0)
    with pytest.raises(NotFound):
        door.client.group("g")
    with pytest.raises(InvalidInput):
        door.client.rollout("no-rollout-id")
    door.client._http.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(Unauthorized):
        door.client.group("g")
    assert issubclass(Forbidden, Exception)


def test_an_aborted_group_takes_nothing_more(door: Door) -> None:
    (rollout,) = door.register()
    assert door.client.abort("g")["state"] == "dropped"
    assert door.client.abort("g")["state"] == "dropped"
    with pytest.raises(openai.ConflictError):
        ask(door.agent(rollout), [U5])
    with pytest.raises(Conflict):
        door.client.register_attempt("g_g0", 1)
    with pytest.raises(Conflict):
        door.client.publish("g")
