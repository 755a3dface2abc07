"""The gate in front of capture workers: what it sends, what it checks, and that no token passes through it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text
from tests.api.stub_upstream import stub_upstream
from tests.api.stub_worker import StubWorker, stub_worker
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tokenlake.errors import ConfigError, NotFound
from tokenlake.ingest.capture_ask import CaptureAsk

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLED = [ord("{"), 4, ord("}"), 3, *map(ord, '<f|{"a":1}>'), 9]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubWorker]:
    with stub_worker(tmp_path / "lake") as made:
        yield made


@pytest.fixture
def door(opened: Opener, stub: StubWorker) -> Iterator[Door]:
    with opened(engine=backend(stub.url, "worker")) as made:
        yield made


def test_turns_are_spliced_at_the_worker_and_come_back_as_rows(door: Door, stub: StubWorker) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    stub.engine.answers = [CALLED, [5, 6], [7, 9]]
    first = ask(agent, [U5], tools=[TOOL], temperature=0.5, max_tokens=7, top_p=0.5, stop=["z"], seed=3)
    assert first.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'
    result = {"role": "tool", "content": text(6), "tool_call_id": first.choices[0].message.tool_calls[0].id}
    second = ask(agent, [U5, echo(first), result], tools=[TOOL])
    third = ask(agent, [U5, echo(first), result, echo(second), U5], tools=[TOOL])
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=third.id)
    assert [entry["mode"] for entry in receipt["manifest"]] == ["text", "token_in", "token_in"]
    one, two, three = stub.engine.prompts
    assert two == [*one, *CALLED, 8, 103, 6, 9, 8, 102]
    assert three == [*two, 5, 6, 9, 8, 101, 5, 9, 8, 102]
    wait_for(door, lambda: door.service.control.groups["g"].state == "published")
    (row,) = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
    assert row["input_ids"] == [*three, 7, 9]
    assert (row["sample_mask"], row["logprob_mode"], row["weight_version_min"]) == (1, "raw", 7)
    assert door.request("GET", "/api/v1/audit").json()["healthy"]
    asked = {name: stub.bodies[0][name] for name in ("temperature", "top_p", "top_k", "stop", "seed", "n")}
    assert asked == {"temperature": 0.5, "top_p": 0.5, "top_k": 0, "stop": ["z"], "seed": 3, "n": 1}
    assert stub.bodies[0]["max_completion_tokens"] == 7


def test_no_token_travels_between_gate_and_worker(door: Door, stub: StubWorker) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    seen: list[dict[str, Any]] = []
    stub.edit = seen.append
    first = ask(agent, [U5])
    ask(agent, [U5, echo(first), U6])
    for body in (*stub.bodies, *seen):
        assert "token_ids" not in json.dumps(body)
    assert stub.bodies[1]["ng_capture"]["prev_len"] == 8
    (link,) = stub.bodies[1]["ng_capture"]["chain"]
    assert link["place"]["writer"] == "w0"


@pytest.mark.parametrize("answer", [[3, 4, 9], CALLED, [9], [3, 4]], ids=["text", "call", "empty", "length"])
def test_a_streamed_answer_leaves_the_record_of_a_whole_one(door: Door, stub: StubWorker, answer: list[int]) -> None:
    first, second = door.register(n=2)
    stub.engine.answers = [answer, answer]
    whole = ask(door.agent(first), [U5], tools=[TOOL])
    chunks = list(ask(door.agent(second), [U5], tools=[TOOL], stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == (whole.choices[0].message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    one, two = door.events("call_committed")
    assert door.ids(one) == door.ids(two)
    assert one["chain_hash"] == two["chain_hash"]
    assert json.loads(one["detail"])["turns"] == json.loads(two["detail"])["turns"]


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda report: report.update({name: None})


def coords(**wrong: Any) -> Callable[[dict[str, Any]], None]:
    return lambda report: report["coords"].update(wrong)


def place(**wrong: Any) -> Callable[[dict[str, Any]], None]:
    return lambda report: report["coords"]["place"].update(wrong)


LIES = {
    "no-coords": (without("coords"), "coords_missing"),
    "another-parent": (lambda report: report.update(parent_chain_hash="00" * 32), "coords_contradict"),
    "root-for-no-reason": (
        lambda report: report.update(parent_call_id=None, parent_chain_hash=None),
        "coords_contradict",
    ),
    "another-call": (coords(call_id="x"), "coords_contradict"),
    "another-rollout": (coords(rollout_id="g_g1"), "coords_contradict"),
    "another-length": (coords(cum_len=9), "coords_contradict"),
    "more-sampled": (coords(sampled_tokens=9), "coords_contradict"),
    "no-prompt-digest": (coords(prompt_digest=None), "coords_contradict"),
    "short-digest": (coords(digest="00"), "coords_contradict"),
    "another-temperature": (coords(sampling=[0.25, 1.0, 0, "raw"]), "coords_contradict"),
    "another-mode": (coords(sampling=[1.0, 1.0, 0, "processed"]), "coords_contradict"),
    "another-writer": (place(writer="w1"), "coords_contradict"),
    "outside": (place(writer="../x"), "coords_contradict"),
    "failed": (coords(disposition="capture_failed", reason="stage_failed"), "stage_failed"),
}


@pytest.mark.parametrize("case", LIES)
def test_what_a_worker_contradicts_is_served_and_never_committed(door: Door, stub: StubWorker, case: str) -> None:
    first, _ = door.register(n=2)
    agent = door.agent(first)
    before = ask(agent, [U5])
    stub.edit, reason = LIES[case]
    assert ask(agent, [U5, echo(before), U6]).choices[0].message.content == text(3)
    assert len(door.events("call_committed")) == 1
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == (reason, True)
    assert door.client.seal("g_g0", reward=1.0)["poisoned"]


def test_a_parent_that_cannot_be_read_there_is_a_root_with_its_cause(door: Door, stub: StubWorker) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    before = ask(agent, [U5])
    stub.prompter._prefixes._held.clear()
    stub.prompter._prefixes._reader = type("Gone", (), {"read_deltas": staticmethod(_nothing)})()
    ask(agent, [U5, echo(before), U6])
    assert [(e["mode"], e["reason"]) for e in door.events("call_committed")] == [
        ("text", "no_history"), ("text", "prefix_unavailable"),
    ]  # fmt: skip


def _nothing(places: Any) -> Any:
    raise NotFound("nothing there")


def test_a_full_context_is_an_overflow_with_its_parent(door: Door, stub: StubWorker) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    first = ask(agent, [U5])
    full = ask(agent, [U5, echo(first), {"role": "user", "content": "x" * 2000}])
    assert (full.choices[0].finish_reason, full.choices[0].message.content) == ("length", "")
    assert full.usage.prompt_tokens > 1000
    (event,) = door.events("call_overflowed")
    assert event["parent_call_id"] == door.events("call_committed")[0]["call_id"]


@pytest.mark.parametrize(
    ("status", "seen", "reason"),
    [(404, 503, "upstream_no_route"), (503, 503, "upstream_error"), (400, 400, "refused")],
)
def test_a_worker_that_fails_answers_nothing_and_spoils_nothing(
    door: Door, stub: StubWorker, status: int, seen: int, reason: str
) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    stub.status = status
    with pytest.raises(openai.APIStatusError) as refused:
        ask(agent, [U5])
    assert refused.value.status_code == seen
    assert "123" not in refused.value.response.text
    assert stub.url not in refused.value.response.text
    stub.status = None
    ask(agent, [U5])
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == (reason, False)
    assert not door.client.seal("g_g0", reward=1.0)["poisoned"]


def test_an_agent_that_hangs_up_closes_the_workers_connection(door: Door, stub: StubWorker) -> None:
    (rollout,) = door.register()
    stub.engine.hold = True
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(
            f"{door.url}/ng-rollout/g_g0/v1/chat/completions",
            json={"messages": [U5]},
            headers={"Authorization": f"Bearer {rollout['data_capability']}"},
            timeout=1,
        )
    assert stub.gone.wait(20)
    wait_for(door, lambda: bool(door.events("call_failed")))
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == ("client_disconnected", False)
    stub.engine.hold = False
    ask(door.agent(rollout), [U5])
    assert not door.client.seal("g_g0", reward=1.0)["poisoned"]


def test_a_server_that_does_not_capture_is_refused(door: Door) -> None:
    with stub_upstream() as plain:
        plain.missing.add("*")
        with pytest.raises(ConfigError, match="does not capture"):
            backend(plain.url, "worker")
        refused = door.request("PUT", "/api/v1/workers/w1", {"url": plain.url})
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict")
    assert [worker["worker_id"] for worker in door.client.workers()] == ["w0"]


@pytest.mark.parametrize(
    "wrong", [{"lake_id": "x"}, {"template_digest": "x"}, {"stop_ids": [8]}, {"worker_id": "w2"}, {"captures": False}]
)
def test_a_worker_that_is_another_one_is_refused(door: Door, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with stub_worker(tmp_path / "lake", "w1") as other:
        other.state |= wrong
        assert door.request("PUT", "/api/v1/workers/w1", {"url": other.url}).status_code == 409
    assert len(door.client.workers()) == 1


def test_a_rollout_stays_with_one_worker_and_reads_what_another_staged(
    opened: Opener, stub: StubWorker, tmp_path: Path
) -> None:
    with stub_worker(tmp_path / "lake", "w1") as other:
        with opened(engine=backend(stub.url, "worker")) as door:
            rollouts = door.register(n=8)
            before = [ask(door.agent(rollout), [U5]) for rollout in rollouts]
            assert door.request("PUT", "/api/v1/workers/w1", {"url": other.url}).is_success
            after = [
                ask(door.agent(rollout), [U5, echo(first), U6]) for rollout, first in zip(rollouts, before, strict=True)
            ]
            assert 0 < len(other.bodies) < 8, "some rollouts have moved, and no more than had to"
            assert {event["mode"] for event in door.events("call_committed")[8:]} == {"token_in"}
            third = [U5, echo(before[0]), U6, echo(after[0]), U5]
            counts = len(stub.bodies), len(other.bodies)
            ask(door.agent(rollouts[0]), third)
            ask(door.agent(rollouts[0]), [*third, U6])
            moved = len(stub.bodies) - counts[0], len(other.bodies) - counts[1]
            assert sorted(moved) == [0, 2]
        with opened(engine=backend(stub.url, "worker")) as door:
            assert {worker["worker_id"] for worker in door.client.workers()} == {"w0", "w1"}


def test_rollouts_of_a_worker_that_is_gone_go_on_at_another_one(
    opened: Opener, stub: StubWorker, tmp_path: Path
) -> None:
    with opened(engine=backend(stub.url, "worker")) as door:
        rollouts = door.register(n=8)
        with stub_worker(tmp_path / "lake", "w1") as other:
            assert door.request("PUT", "/api/v1/workers/w1", {"url": other.url}).is_success
            before = [ask(door.agent(rollout), [U5]) for rollout in rollouts]
            assert 0 < len(other.bodies) < 8
        for rollout, first in zip(rollouts, before, strict=True):
            ask(door.agent(rollout), [U5, echo(first), U6])
        assert len(stub.bodies) + len(other.bodies) == 16
        committed = door.events("call_committed")
        assert [event["mode"] for event in committed] == ["text"] * 8 + ["token_in"] * 8
        assert door.events("call_failed") == []
        with stub_worker(tmp_path / "lake", "w1") as again:
            assert door.request("PUT", "/api/v1/workers/w1", {"url": again.url}).is_success
            for rollout in rollouts:
                ask(door.agent(rollout), [U6])
            assert len(again.bodies) == len(other.bodies)


def test_a_call_that_no_worker_can_be_reached_for_fails_by_name(opened: Opener, tmp_path: Path) -> None:
    workers = contextlib.ExitStack()
    stub, other = (workers.enter_context(stub_worker(tmp_path / "lake", name)) for name in ("w0", "w1"))
    with workers, opened(engine=backend(stub.url, "worker")) as door:
        assert door.request("PUT", "/api/v1/workers/w1", {"url": other.url}).is_success
        (rollout,) = door.register()
        workers.close()
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as refused:
                ask(door.agent(rollout), [U5])
            assert refused.value.status_code == 503
        failed = {(event["reason"], event["answered"]) for event in door.events("call_failed")}
        assert failed == {("upstream_unreachable", False)}


def test_a_published_version_is_answered_with_what_each_worker_has_loaded(
    door: Door, stub: StubWorker, tmp_path: Path
) -> None:
    with stub_worker(tmp_path / "lake", "w1") as other:
        door.request("PUT", "/api/v1/workers/w1", {"url": other.url})
        stub.state["weights"] = "8"
        said = door.client.set_weight_version(8)["workers"]
        loaded = [(worker["worker_id"], worker["healthy"], worker["loaded_weight_version"]) for worker in said]
        assert loaded == [("w0", True, 8), ("w1", True, None)]
        other.state["captures"] = False
        assert [worker["healthy"] for worker in door.client.workers()] == [True, False]


def test_what_a_worker_says_of_itself_is_not_for_agents(door: Door) -> None:
    (rollout,) = door.register()
    path = "/ng-rollout/g_g0/v1/tokenlake/capture"
    assert door.request("GET", path, token=rollout["data_capability"]).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": "0"},
        {"call_id": "../x"},
        {"rollout_id": "x"},
        {"cause": "boredom"},
        {"prev_len": 3},
        {"chain": [{}]},
        {"chain": None},
        {"more": 1},
    ],
)
def test_what_is_asked_of_a_worker_is_read_strictly(wrong: dict[str, Any]) -> None:
    whole = CaptureAsk(rollout_id="g_g0", attempt=0, call_id="c", parent=None, cause="no_history")
    assert CaptureAsk.from_json(whole.to_json()) == whole
    with pytest.raises(ValueError, match="ng_capture"):
        CaptureAsk.from_json({**whole.to_json(), **wrong})


@pytest.mark.parametrize("asked", [{"tool_choice": "none"}, {"parallel_tool_calls": False}])
def test_a_worker_cannot_limit_calls_and_says_so(door: Door, stub: StubWorker, asked: dict[str, Any]) -> None:
    agent = door.agent(door.register()[0])
    with pytest.raises(openai.BadRequestError, match="capture workers"):
        ask(agent, [U5], tools=[TOOL], **asked)
    ask(agent, [U5], **asked)
    assert len(stub.bodies) == 1
    assert door.client.seal("g_g0", reward=1.0)["reason"] is None
