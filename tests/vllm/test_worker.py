"""Capture inside a real vLLM: what is staged is what the engine sampled, and what does not ask for it sees vLLM."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served, version
from tests.vllm.conversation import streamed
from tokenlake.errors import ConfigError
from tokenlake.ingest.tiny import load_model, sequence_logprobs
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, SYSTEM_PROMPT, calculator

ASKED = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "What is 12 + 31?"}]
AGAIN = {"role": "user", "content": "Are you sure? Check once more."}
SHORT = [{"role": "user", "content": "x"}]
ENDLESS = [{"role": "user", "content": "calculator count count"}]
"""Greedily the model repeats itself after this until it is stopped, and its first words are shown at once."""
SAME = (
    "mode", "prev_len", "cum_len", "token_ids", "token_mask", "logprobs", "finish_reason", "weight_version",
    "weight_version_end", "weight_version_spans", "sampling", "extras_digest", "chain_hash",
)  # fmt: skip
"""What a delta says of a generation; the rest says whose it is."""


def say(door: Door, rollout: dict[str, Any], messages: list[Any], **more: Any) -> Any:
    """One turn; its message and what the calculator says are added to the conversation."""
    asked = {"model": "any", "messages": messages, "tools": [CALCULATOR_TOOL], "max_tokens": 64, "temperature": 0}
    answer = door.agent(rollout).chat.completions.create(**{**asked, **more})
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "content": calculator("12 + 31"), "tool_call_id": call.id} for call in message.tool_calls or ()
    ]
    if not message.tool_calls:
        messages.append(AGAIN)
    return answer


def play(door: Door, rollout: dict[str, Any], turns: int, **more: Any) -> list[dict[str, Any]]:
    """A rollout of some turns; its deltas."""
    messages: list[Any] = [*ASKED]
    for _ in range(turns):
        say(door, rollout, messages, **more)
    return deltas(door, rollout)


def deltas(door: Door, rollout: dict[str, Any]) -> list[dict[str, Any]]:
    query = f"SELECT {', '.join(SAME)} FROM deltas WHERE rollout_id = ? ORDER BY call_id"
    return door.service.lake.sql(query, [rollout["rollout_id"]]).to_arrow_table().to_pylist()


def exact(door: Door, group: str) -> None:
    """Every row of a group holds the embedded model's own log-probabilities."""
    wait_for(door, lambda: door.service.control.groups[group].state == "published")
    model = load_model(WEIGHTS_DIR)
    for row in door.request("GET", f"/api/v1/rows?group_id={group}").json()["rows"]:
        assert (row["sample_mask"], row["reason"], row["logprob_mode"]) == (1, None, "raw")
        ours = sequence_logprobs(model, row["input_ids"])
        sampled = [index for index, trained in enumerate(row["token_mask"]) if trained]
        assert sampled
        assert max(abs(row["logprobs"][index] - ours[index]) for index in sampled) < 1e-4


def test_a_rollout_is_spliced_staged_and_published(door: Door, group: str) -> None:
    (rollout,) = door.register(group)
    play(door, rollout, 6, temperature=0.7)
    receipt = door.client.seal(rollout["rollout_id"], reward=1.0)
    assert [entry["mode"] for entry in receipt["manifest"]] == ["text"] + ["token_in"] * 5
    assert {event["writer"] for event in door.events("call_committed")} == {"w0"}
    exact(door, group)
    assert door.request("GET", "/api/v1/audit").json()["healthy"]


def test_gate_and_worker_leave_the_same_deltas(open_gate: Opener, worker: Served, group: str) -> None:
    version(worker, 3)
    with open_gate(engine=backend(worker.url, "worker")) as door:
        (there,) = door.register(f"{group}w")
        at_worker = play(door, there, 5)
    with open_gate(engine=backend(worker.url, "gate")) as door:
        (here,) = door.register(f"{group}g")
        at_gate = play(door, here, 5)
    assert at_worker == at_gate
    assert [delta["mode"] for delta in at_worker] == ["text"] + ["token_in"] * 4
    assert {delta["weight_version"] for delta in at_worker} == {3}
    spans = at_worker[0]["weight_version_spans"]
    assert [span["version"] for span in spans] == [3]
    assert spans[0]["end"] == sum(at_worker[0]["token_mask"])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 3},
        {"tools": openai.NOT_GIVEN, "stop": ["4"]},
        {"tools": openai.NOT_GIVEN, "stop": ["ns"]},
        {"temperature": 1.5, "seed": 5, "top_p": 0.9},
        {"logprobs": False, "top_logprobs": None},
    ],
    ids=["tool-call", "one-token", "length", "stop", "stop-within-a-token", "sampled", "no-logprobs-wanted"],
)
def test_whole_streamed_and_captured_at_the_gate_are_one_record(
    open_gate: Opener, worker: Served, group: str, more: dict[str, Any]
) -> None:
    """B09, B16: ends of every kind, and a client that wants no log-probabilities."""
    with open_gate(engine=backend(worker.url, "worker")) as door:
        whole, flowing = door.register(f"{group}w", n=2)
        play(door, whole, 2, **more)
        messages: list[Any] = [*ASKED]
        for _ in range(2):
            asked = {"model": "m", "messages": messages, "tools": [CALCULATOR_TOOL], "max_tokens": 64, "temperature": 0}
            path = f"/ng-rollout/{flowing['rollout_id']}/v1/chat/completions"
            body = {name: value for name, value in {**asked, **more}.items() if value is not openai.NOT_GIVEN}
            answer = door.post(path, {**body, "stream": True}, token=flowing["data_capability"])
            messages += _echoed(answer.text)
        one, two = deltas(door, whole), deltas(door, flowing)
    with open_gate(engine=backend(worker.url, "gate")) as door:
        (here,) = door.register(f"{group}g")
        three = play(door, here, 2, **more)
    assert len(one) == 2
    assert one == two == three
    for delta in one:
        assert len(delta["logprobs"]) == len(delta["token_ids"]) == len(delta["token_mask"])
    if more.get("max_tokens") == 1:
        assert [sum(delta["token_mask"]) for delta in one] == [1, 1]
        assert one[0]["finish_reason"] == "length"


def test_an_answer_without_text_has_its_ids(door: Door, group: str) -> None:
    """B16: ids are never cut to the text."""
    first, second = door.register(group, n=2)
    asked: dict[str, Any] = {"tools": openai.NOT_GIVEN, "max_tokens": 8}
    text = say(door, first, [*ENDLESS], **asked).choices[0].message.content
    empty = say(door, second, [*ENDLESS], **asked, stop=[text[0]]).choices[0]
    assert not empty.message.content
    (whole,), (cut,) = deltas(door, first), deltas(door, second)
    assert 0 < sum(cut["token_mask"]) < sum(whole["token_mask"])
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert cut["logprobs"] == whole["logprobs"][: len(cut["logprobs"])]


def _echoed(stream: str) -> list[Any]:
    """The streamed message, and what follows it."""
    _, message, _ = streamed(stream)
    results = [
        {"role": "tool", "content": calculator("12 + 31"), "tool_call_id": call["id"]}
        for call in message.get("tool_calls", ())
    ]
    return [message, *(results or [AGAIN])]


def test_many_rollouts_at_once_are_each_exact(door: Door, group: str) -> None:
    rollouts = door.register(group, n=8)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rollout: play(door, rollout, 3, temperature=0.9), rollouts))
    assert [len(calls) for calls in found] == [3] * 8
    for rollout in rollouts:
        door.client.seal(rollout["rollout_id"], reward=1.0)
    exact(door, group)


def test_weights_that_change_in_mid_request_are_told_apart(door: Door, worker: Served, group: str) -> None:
    """B18."""
    first, second = door.register(group, n=2)
    assert version(worker, 7).json()["weights"] == "7"
    stream = door.agent(first).chat.completions.create(
        model="m", messages=ENDLESS, max_tokens=600, temperature=0, stream=True
    )
    next(iter(stream))
    assert version(worker, 8).status_code == 200
    for _ in stream:
        pass
    (delta,) = deltas(door, first)
    assert delta["finish_reason"] == "length", "it was still running when the label changed"
    assert (delta["weight_version"], delta["weight_version_end"]) == (7, 8)
    assert [span["version"] for span in delta["weight_version_spans"]] == [7, 8]
    assert delta["weight_version_spans"][1]["end"] == sum(delta["token_mask"])
    messages: list[Any] = [*ASKED]
    say(door, second, messages)
    assert version(worker, 9).is_success
    said = door.client.set_weight_version(9)["workers"]
    assert [entry["loaded_weight_version"] for entry in said] == [9]
    say(door, second, messages)
    assert [call["weight_version"] for call in deltas(door, second)] == [8, 9]
    assert version(worker, 8).status_code == 409, "never backwards"


def running(worker: Served) -> float:
    text = httpx.get(worker.url + "/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_an_agent_that_hangs_up_ends_the_generation(door: Door, worker: Served, group: str) -> None:
    """B20."""
    (rollout,) = door.register(group)
    stream = door.agent(rollout).chat.completions.create(
        model="m", messages=ENDLESS, max_tokens=1900, temperature=0, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_for(door, lambda: any(e["rollout_id"] == rollout["rollout_id"] for e in door.events("call_failed")))
    (failed,) = [e for e in door.events("call_failed") if e["rollout_id"] == rollout["rollout_id"]]
    assert failed["reason"] == "client_disconnected"
    wait_for(door, lambda: running(worker) == 0)
    assert not deltas(door, rollout)
    say(door, rollout, [*ASKED])
    assert len(deltas(door, rollout)) == 1


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


def test_more_than_one_choice_is_refused_everywhere(door: Door, worker: Served, group: str) -> None:
    """B23."""
    (rollout,) = door.register(group)
    with pytest.raises(openai.BadRequestError):
        door.agent(rollout).chat.completions.create(model="m", messages=ASKED, n=2)
    asked = {"rollout_id": "g_g0", "attempt": 0, "call_id": "c", "cause": "no_history", "parent_call_id": None}
    asked |= {"prev_len": 0, "parent_chain_hash": None, "parent_messages": 0, "chain": []}
    body = {"model": "tiny", "messages": SHORT, "ng_capture": asked}
    path = worker.url + "/v1/tokenlake/chat/completions"
    for wrong in ({"n": 2}, {"logprobs": True}, {"use_beam_search": True}, {"ng_capture": None}, {"messages": "x"}):
        assert httpx.post(path, json={**body, **wrong}, timeout=30).status_code == 400
    assert httpx.post(path, json={**body, "max_completion_tokens": 1}, timeout=30).status_code == 200
    assert not deltas(door, rollout)


def test_what_does_not_ask_for_capture_sees_vllm_byte_for_byte(worker: Served, stock: Served) -> None:
    label = httpx.get(worker.url + "/v1/tokenlake/capture", timeout=30).json()["weights"]
    httpx.post(stock.url + "/update_weight_version", json={"new_version": label}, timeout=30).raise_for_status()
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": ASKED, "logprobs": True, "top_logprobs": 2},
        "/v1/completions": {"prompt": "What is", "logprobs": 1},
        "/v1/messages": {"messages": SHORT},
        "/tokenize": {"messages": SHORT},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0}},
    }
    for path, body in calls.items():
        for stream in (False, True) if "messages" in path or "completions" in path else (False,):
            whole = {
                "model": "tiny",
                "max_tokens": 12,
                "temperature": 0,
                **body,
                **({"stream": True} if stream else {}),
            }
            assert _said(worker, path, whole) == _said(stock, path, whole), path
    wrong = {"model": "nobody", "messages": SHORT}
    assert _said(worker, "/v1/chat/completions", wrong) == _said(stock, "/v1/chat/completions", wrong)
    ours, theirs = (httpx.get(one.url + "/openapi.json", timeout=30).json()["paths"] for one in (worker, stock))
    added = {path for path in ours if path not in theirs}
    assert added == {"/v1/tokenlake/capture", "/v1/tokenlake/chat/completions", "/v1/tokenlake/weights"}
    assert {path: ours[path] for path in theirs} == theirs


def _said(server: Served, path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
    """Status and lines of an answer, without what differs from call to call."""
    answer = httpx.post(server.url + path, json=body, headers={"X-Request-Id": "same"}, timeout=60)
    kept = []
    for line in answer.content.split(b"\n"):
        mark, _, data = line.partition(b"data: ") if line.startswith(b"data: {") else (b"", b"", line)
        if data.startswith(b"{"):
            value = json.loads(data)
            for name in ("id", "created", "request_id"):
                value.pop(name, None)
            (value.get("message") or {}).pop("id", None) if isinstance(value.get("message"), dict) else None
            data = json.dumps(value).encode()
        kept.append(mark + data)
    return answer.status_code, kept


def test_a_server_without_capture_is_refused(door: Door, stock: Served) -> None:
    with pytest.raises(ConfigError, match="does not capture"):
        backend(stock.url, "worker")
    assert door.request("PUT", "/api/v1/workers/w1", {"url": stock.url}).status_code == 409


def test_a_disk_that_refuses_is_a_failed_capture_and_nothing_else(door: Door, worker: Served, group: str) -> None:
    first, second = door.register(group, n=2)
    messages: list[Any] = [*ASKED]
    say(door, first, messages)
    pid = worker.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    try:
        answer = say(door, first, messages)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert answer.choices[0].message.content
    (failed,) = [e for e in door.events("call_failed") if e["rollout_id"] == first["rollout_id"]]
    assert (failed["reason"], failed["answered"]) == ("stage_failed", True)
    play(door, second, 2)
    assert door.client.seal(first["rollout_id"], reward=1.0)["poisoned"]
    assert not door.client.seal(second["rollout_id"], reward=1.0)["poisoned"]
    wait_for(door, lambda: door.service.control.groups[group].state == "published")
    rows = door.request("GET", f"/api/v1/rows?group_id={group}").json()["rows"]
    assert [(row["sample_mask"], row["reason"]) for row in rows] == [(0, "capture_failed"), (1, None)]


def test_with_a_prefix_cache_chunked_prefill_and_vllms_parsers_the_record_is_the_same(
    worker: Served,
    open_gate: Opener,
    run_worker: Callable[..., contextlib.AbstractContextManager[Served]],
    group: str,
) -> None:
    """B15: vLLM's parser holds a tool call's ids back from a stream, and nothing from the record."""
    with open_gate(engine=backend(worker.url, "worker")) as door:
        (plain,) = door.register(f"{group}p")
        expected = play(door, plain, 4)
    flags = ("--enable-prefix-caching", "--block-size", "32", "--max-num-batched-tokens", "48", "--max-num-seqs", "8")
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with run_worker("w2", *flags, *parsers) as made, open_gate(engine=backend(made.url, "worker")) as there:
        whole, flowing = there.register(group, n=2)
        messages: list[Any] = [*ASKED]
        found = play(there, whole, 4)
        for _ in range(4):
            stream = there.agent(flowing).chat.completions.create(
                model="m", messages=messages, tools=[CALCULATOR_TOOL], max_tokens=64, temperature=0, stream=True
            )
            text = "".join(f"data: {chunk.model_dump_json()}\n" for chunk in stream)
            messages += _echoed(text)
        again = deltas(there, flowing)
        for rollout in (whole, flowing):
            there.client.seal(rollout["rollout_id"], reward=1.0)
        exact(there, group)
    assert [d["token_ids"] for d in expected] == [d["token_ids"] for d in found] == [d["token_ids"] for d in again]
    assert any(sum(not sampled for sampled in delta["token_mask"]) > 48 for delta in found), "a prefill of two chunks"


def test_a_worker_that_died_comes_back_and_reads_its_prefixes_from_the_lake(
    open_gate: Opener, run_worker: Callable[..., contextlib.AbstractContextManager[Served]], group: str
) -> None:
    """B22: and what it says is processed is, at the temperature that the record names."""
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--logprobs-mode", "processed_logprobs")
    messages: list[Any] = [*ASKED]
    with run_worker("w1", *flags) as made, open_gate(engine=backend(made.url, "worker")) as door:
        (rollout,) = door.register(group)
        first = say(door, rollout, messages, temperature=0.5)
        assert first.choices[0].message.tool_calls, "read by vLLM's own parser"
        made.kill()
        with pytest.raises(openai.APIStatusError) as refused:
            say(door, rollout, [*messages])
        assert refused.value.status_code == 503
    with run_worker("w1", *flags) as made, open_gate(engine=backend(made.url, "worker")) as door:
        moved = {**rollout, "base_url": f"{door.url}/ng-rollout/{rollout['rollout_id']}/v1"}
        say(door, moved, messages, temperature=0.5)
        receipt = door.client.seal(rollout["rollout_id"], reward=1.0)
        assert [entry["mode"] for entry in receipt["manifest"]] == ["text", "token_in"]
        assert (receipt["poisoned"], receipt["reason"]) == (False, None)
        calls = deltas(door, rollout)
    assert {delta["sampling"]["logprob_mode"] for delta in calls} == {"processed"}
    ids = [token for delta in calls for token in delta["token_ids"]]
    sampled = [sampled for delta in calls for sampled in delta["token_mask"]]
    said = [logprob for delta in calls for logprob in delta["logprobs"]]
    ours = sequence_logprobs(load_model(WEIGHTS_DIR), ids, temperature=0.5)
    assert max(abs(one - two) for one, two, mask in zip(said, ours, sampled, strict=True) if mask) < 1e-4
