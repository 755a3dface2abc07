"""Capture inside a real vLLM: what is staged is what the engine sampled, and what does not ask for it sees vLLM."""

from __future__ import annotations

import contextlib
import re
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
from tests.vllm.conftest import Served, load
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


def exact(door: Door, group: str) -> float:
    """Every row of a group holds the embedded model's own log-probabilities; how far the farthest lies off."""
    wait_for(door, lambda: door.service.control.groups[group].state == "published")
    model = load_model(WEIGHTS_DIR)
    farthest = 0.0
    for row in door.request("GET", f"/api/v1/rows?group_id={group}").json()["rows"]:
        assert (row["sample_mask"], row["reason"], row["logprob_mode"]) == (1, None, "raw")
        ours = sequence_logprobs(model, row["input_ids"])
        sampled = [index for index, trained in enumerate(row["token_mask"]) if trained]
        assert sampled
        farthest = max(farthest, *(abs(row["logprobs"][index] - ours[index]) for index in sampled))
    assert farthest < 1e-4
    return farthest


def test_a_rollout_is_spliced_staged_and_published(door: Door, group: str) -> None:
    (rollout,) = door.register(group)
    play(door, rollout, 6, temperature=0.7)
    receipt = door.client.seal(rollout["rollout_id"], reward=1.0)
    assert [entry["mode"] for entry in receipt["manifest"]] == ["text"] + ["token_in"] * 5
    mine = [e for e in door.events("call_committed") if e["rollout_id"] == rollout["rollout_id"]]
    assert [event["writer"] for event in mine] == ["w0"] * 6
    exact(door, group)
    assert door.request("GET", "/api/v1/audit").json()["healthy"]


def test_gate_and_worker_leave_the_same_deltas(open_gate: Opener, worker: Served, group: str) -> None:
    loaded = load(worker)
    with open_gate(engine=backend(worker.url, "worker")) as door:
        (there,) = door.register(f"{group}w")
        at_worker = play(door, there, 5)
    with open_gate(engine=backend(worker.url, "gate")) as door:
        (here,) = door.register(f"{group}g")
        at_gate = play(door, here, 5)
    assert at_worker == at_gate
    assert [delta["mode"] for delta in at_worker] == ["text"] + ["token_in"] * 4
    assert {delta["weight_version"] for delta in at_worker} == {loaded}
    spans = at_worker[0]["weight_version_spans"]
    assert [span["version"] for span in spans] == [loaded]
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


def test_a_parent_is_used_only_where_it_hashes_to_what_was_named(door: Door, worker: Served, group: str) -> None:
    """What a worker says of the parent that it used is its own finding; the gate refuses another one by name."""
    (rollout,) = door.register(group)
    play(door, rollout, 1)
    (event,) = [e for e in door.events("call_committed") if e["rollout_id"] == rollout["rollout_id"]]
    place = {name: event[name] for name in ("writer", "segment", "byte_offset", "byte_length", "batch_row")}
    true = event["chain_hash"].hex()
    for hashed, used, cause in ((true, event["call_id"], None), ("00" * 32, None, "prefix_unavailable")):
        link = {"call_id": event["call_id"], "cum_len": event["cum_len"], "chain_hash": hashed, "place": place}
        asked = {"rollout_id": rollout["rollout_id"], "attempt": 0, "call_id": f"x{hashed}", "cause": None}
        asked |= {"parent_call_id": link["call_id"], "parent_chain_hash": hashed, "chain": [link]}
        asked |= {"prev_len": link["cum_len"], "parent_messages": 3}
        messages = [*ASKED, {"role": "assistant", "content": "43"}, AGAIN]
        body = {"model": "tiny", "messages": messages, "max_completion_tokens": 1, "ng_capture": asked}
        answer = httpx.post(worker.url + "/v1/tokenlake/chat/completions", json=body, timeout=30)
        said = answer.raise_for_status().json()["ng_capture"]
        assert (said["parent_call_id"], said["parent_chain_hash"]) == (used, used and true)
        assert (said["cause"], said["coords"]["mode"]) == (cause, "token_in" if used else "text")


def test_what_does_not_ask_for_capture_sees_vllm_byte_for_byte(worker: Served, stock: Served) -> None:
    label = httpx.get(worker.url + "/v1/tokenlake/capture", timeout=30).json()["weights"]
    httpx.post(stock.url + "/update_weight_version", json={"new_version": label}, timeout=30).raise_for_status()
    greedy = {"model": "tiny", "temperature": 0}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "What is", "max_tokens": 12, "logprobs": 1}),
        ("/v1/messages", {"messages": SHORT, "max_tokens": 12}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 12}),
    ]
    calls += [(path, {**body, "stream": True}) for path, body in calls]
    calls += [
        ("/v1/chat/completions", {"messages": SHORT, "model": "nobody"}),
        ("/tokenize", {"messages": SHORT}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "temperature": 0}}),
    ]
    for path, body in calls:
        ours, theirs = set[Any](), set[Any]()
        # Where a stream is cut into pieces is a matter of timing: both are asked until they cut it alike.
        for _ in range(20 if "stream" in body else 1):
            ours.add(_said(worker, path, {**greedy, **body}))
            theirs.add(_said(stock, path, {**greedy, **body}))
            if ours & theirs:
                break
        assert ours & theirs, (path, ours, theirs)
    paths, stocks = (httpx.get(one.url + "/openapi.json", timeout=30).json()["paths"] for one in (worker, stock))
    added = {path for path in paths if path not in stocks}
    assert added == {"/v1/tokenlake/capture", "/v1/tokenlake/chat/completions", "/v1/tokenlake/weights"}
    assert {path: paths[path] for path in stocks} == stocks


def _said(server: Served, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of an answer, without what differs from call to call."""
    answer = httpx.post(server.url + path, json=body, headers={"X-Request-Id": "same"}, timeout=60)
    return answer.status_code, re.sub(
        rb'"(id|item_id|created|created_at|request_id)": ?("[^"]*"|[0-9.]+)', b"", answer.content
    )


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
