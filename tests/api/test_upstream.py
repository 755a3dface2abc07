"""Capture at the gate over an unmodified server: exact prompts out, checked answers back, every failure named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.scripted_engine import ScriptedEngine, text
from tests.api.stub_upstream import PATHS, StubUpstream, stub_upstream
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.api.backend import Backend, Capture, upstream_backend
from tokenlake.api.cli import main
from tokenlake.api.settings import Environment, Settings
from tokenlake.errors import ConfigError
from tokenlake.ingest.upstream import UpstreamEngine

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def backend(url: str, capture: Capture = "gate", *, key: str | None = None, **settings: Any) -> Backend:
    environment = Environment(
        token=TOKEN, token_given=True, capability_key=None, state_dir=Path("unused"), upstream_key=key
    )
    return asyncio.run(upstream_backend(url, capture, Settings(**settings), environment))


@pytest.fixture
def stub() -> Iterator[StubUpstream]:
    with stub_upstream() as made:
        yield made


@contextlib.contextmanager
def served(opened: Opener, stub: StubUpstream, capture: Capture = "gate", **settings: Any) -> Iterator[Door]:
    with opened(engine=backend(stub.url, capture, key=stub.key, **settings), **settings) as door:
        for seen in (stub.asked, stub.prompts, stub.bodies, stub.raw):
            seen.clear()
        yield door


@pytest.mark.parametrize("route", ["completions", "generate"])
def test_turns_go_out_as_exact_ids_and_come_back_as_rows(opened: Opener, stub: StubUpstream, route: str) -> None:
    stub.missing = {path for name, path in PATHS.items() if name != route}
    with served(opened, stub) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        stub.answers = [[ord("{"), 4, ord("}"), 3, 9], [5, 6], [7, 9]]
        first = ask(agent, [U5], tools=[TOOL], temperature=0.5, max_tokens=7, top_p=0.5, stop=["z"], seed=3)
        second = ask(agent, [U5, echo(first), U6], tools=[TOOL])
        third = ask(agent, [U5, echo(first), U6, echo(second), U5], tools=[TOOL])
        assert third.choices[0].message.content == text(7)
        receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=third.id)
        assert [entry["mode"] for entry in receipt["manifest"]] == ["text", "token_in", "token_in"]
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        (row,) = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
    one, two, three = stub.prompts
    rendered = ScriptedEngine().render([U5], [TOOL], add_generation_prompt=True)
    assert one == rendered
    assert two == [*one, ord("{"), 4, ord("}"), 3, 9, 8, 101, 6, 9, 8, 102]
    assert three == [*two, 5, 6, 9, 8, 101, 5, 9, 8, 102]
    assert row["input_ids"] == [*three, 7, 9]
    assert row["logprob_mode"] == "raw"
    assert [value for value, trained in zip(row["logprobs"], row["token_mask"], strict=True) if trained] == [
        -0.125, -0.25, -0.375, -0.5, -0.625, -0.125, -0.25, -0.125, -0.25,
    ]  # fmt: skip
    asked = {name: stub.bodies[0][name] for name in ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed")}
    assert asked == {"temperature": 0.5, "top_p": 0.5, "top_k": 0, "max_tokens": 7, "stop": ["z"], "seed": 3}
    assert stub.bodies[1]["max_tokens"] == 1000 - len(two), "a server's own default would cut every answer"
    assert stub.bodies[1]["repetition_penalty"] == 1.0, "a model's own defaults would change what is sampled"


def test_weight_versions_are_what_the_upstream_says(opened: Opener, stub: StubUpstream) -> None:
    stub.missing = set()
    with served(opened, stub) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        assert door.client.set_weight_version(6)["workers"][0]["loaded_weight_version"] is None
        stub.weight_versions = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
        ask(agent, [U5])
        assert door.client.set_weight_version(7)["workers"][0]["loaded_weight_version"] == 7
        stub.weight_versions = [{"version": "default", "start": 0, "end": 2}]
        ask(agent, [U5])
        stub.weight_versions = [{"version": "7", "start": 0, "end": 1}]
        ask(agent, [U5])
        found = [(e.get("weight_version"), e.get("weight_version_end")) for e in door.events("call_committed")]
        assert found == [(6, 7), (None, None)]
        assert [event["reason"] for event in door.events("call_failed")] == ["versions_invalid"]


def choice(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer["choices"][0])
        return answer

    return edit


def fewer(chosen: dict[str, Any]) -> None:
    chosen["token_ids"] = chosen["token_ids"][:1]


def probabilities(values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda chosen: chosen["logprobs"].update(token_logprobs=values)


def twice(answer: dict[str, Any]) -> dict[str, Any]:
    first = answer["choices"][0]
    return {**answer, "choices": [{**first, "index": 1}, {**first, "index": 0}]}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no log-probabilities": (choice(lambda c: c.update(logprobs=None)), "logprobs_missing"),
    "null log-probabilities": (choice(probabilities([None, None])), "logprobs_missing"),
    "too few log-probabilities": (choice(probabilities([-0.1])), "logprobs_misaligned"),
    "too many log-probabilities": (choice(probabilities([-0.1, -0.2, -0.3])), "logprobs_misaligned"),
    "ids trimmed": (choice(fewer), "usage_mismatch"),
    "no ids": (choice(lambda c: c.update(token_ids=None)), "token_ids_missing"),
    "a negative id": (choice(lambda c: c.update(token_ids=[3, -1])), "token_id_invalid"),
    "an id that is none": (choice(lambda c: c.update(token_ids=[3, "9"])), "token_id_invalid"),
    "a true id": (choice(lambda c: c.update(token_ids=[3, True])), "token_id_invalid"),
    "ids in two forms": (choice(lambda c: c.update(token_ids=[4, 9])), "token_ids_contradict"),
    "no prompt ids": (choice(lambda c: c.update(prompt_token_ids=None)), "prompt_ids_missing"),
    "another prompt": (choice(lambda c: c["prompt_token_ids"].append(1)), "prompt_ids_differ"),
    "another count": (lambda a: {**a, "usage": {"completion_tokens": 5}}, "usage_mismatch"),
    "two choices": (twice, "choices_invalid"),
    "an unknown end": (choice(lambda c: c.update(finish_reason="tired")), "finish_reason_invalid"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_contradicts_itself_is_served_and_never_captured(opened: Opener, stub: StubUpstream, case: str) -> None:
    edit, reason = FAULTS[case]
    with served(opened, stub) as door:
        (rollout,) = door.register()
        stub.edit = edit
        answer = ask(door.agent(rollout), [U5])
        assert answer.choices[0].message.content == text(3)
        assert [(e["reason"], e["answered"]) for e in door.events("call_failed")] == [(reason, True)]
        assert not door.events("call_committed")
        assert door.client.seal("g_g0", reward=1.0)["reason"] in (reason, "capture_failed")


SOUND: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], list[int]]] = {
    "ids as texts": (choice(lambda c: c.update(token_ids=["token_id:3", "token_id:9"])), [3, 9]),
    "wide ids": (
        choice(lambda c: (c.update(token_ids=["token_id:151645", 9]), c["logprobs"].update(tokens=[]))),
        [151645, 9],
    ),
    "no counts": (lambda a: {**a, "usage": None}, [3, 9]),
    "text cut at a stop string": (choice(lambda c: c.update(text="")), [3, 9]),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_only_looks_odd_is_captured_as_given(opened: Opener, stub: StubUpstream, case: str) -> None:
    edit, ids = SOUND[case]
    with served(opened, stub) as door:
        (rollout,) = door.register()
        stub.edit = edit
        ask(door.agent(rollout), [U5])
        (event,) = door.events("call_committed")
        assert door.ids(event)[0][-2:] == ids


@pytest.mark.parametrize("route", ["completions", "generate"])
def test_a_stream_gives_the_record_that_a_whole_answer_gives(opened: Opener, stub: StubUpstream, route: str) -> None:
    stub.missing = {path for name, path in PATHS.items() if name != route}
    stub.weight_versions = [{"version": "4", "start": 0, "end": 5}]
    with served(opened, stub) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        stub.answers = [[80, 81, 82, 83, 9], [80, 81, 82, 83, 9]]
        whole = ask(agent, [U5])
        chunks = list(ask(agent, [U5], stream=True))
        said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
        assert "".join(said) == whole.choices[0].message.content == text(80, 81, 82, 83)
        assert len(said) > 1, "it is passed on as it comes"
        one, two = door.events("call_committed")
        query = "SELECT token_ids, token_mask, logprobs, weight_version, finish_reason FROM deltas WHERE call_id = ?"
        first, second = (door.service.lake.sql(query, [e["call_id"]]).fetchall() for e in (one, two))
        assert first == second
        assert one.get("weight_version") == (4 if route == "generate" else None)


@pytest.mark.parametrize("route", ["completions", "generate"])
def test_ids_that_never_came_are_missed(opened: Opener, stub: StubUpstream, route: str) -> None:
    stub.missing = {path for name, path in PATHS.items() if name != route}
    with served(opened, stub) as door:
        (rollout,) = door.register()
        stub.answers, stub.dropped = [[80, 81, 82, 83, 9]], {1, 3}
        list(ask(door.agent(rollout), [U5], stream=True))
        assert [(e["reason"], e["answered"]) for e in door.events("call_failed")] == [("usage_mismatch", True)]
        assert not door.events("call_committed")


def test_a_stream_without_an_end_is_a_failure(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        stub.endless = True
        with pytest.raises(openai.APIError):
            list(ask(door.agent(rollout), [U5], stream=True))
        assert [event["reason"] for event in door.events("call_failed")] == ["upstream_broke"]
        assert not door.events("call_committed")


def test_an_answer_that_ends_on_an_unknown_stop_id_teaches_it(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        stub.answers = [[3, 70]]
        stub.edit = choice(lambda c: c.update(finish_reason="stop", stop_reason=70, text=text(3)))
        first = ask(agent, [U5])
        stub.edit = None
        ask(agent, [U5, echo(first), U6])
        assert door.service.engine.stop_ids == (9, 70)
        assert stub.prompts[1][len(stub.prompts[0]) :] == [3, 70, 8, 101, 6, 9, 8, 102], "70 stands for the 9"


REFUSALS: dict[str, tuple[Callable[[StubUpstream], Any], str]] = {
    "no tokenize": (lambda s: s.missing.add("/tokenize"), "/tokenize does not serve this"),
    "no detokenize": (lambda s: s.missing.add("/detokenize"), "/detokenize does not serve this"),
    "no completions": (lambda s: s.missing.add(PATHS["completions"]), "/v1/completions does not serve this"),
    "no ids": (lambda s: setattr(s, "edit", FAULTS["no ids"][0]), "returns no token ids"),
    "no prompt ids": (lambda s: setattr(s, "edit", FAULTS["no prompt ids"][0]), "does not echo the prompt"),
    "another prompt": (lambda s: setattr(s, "edit", FAULTS["another prompt"][0]), "changed the prompt"),
    "no log-probabilities": (lambda s: setattr(s, "edit", FAULTS["no log-probabilities"][0]), "--max-logprobs"),
    "other counts": (lambda s: setattr(s, "edit", FAULTS["another count"][0]), "contradicts itself"),
    "no context length": (lambda s: setattr(s, "models", [{"id": "m"}]), "max_model_len"),
    "no model": (lambda s: setattr(s, "models", []), "names no model"),
    "another credential": (lambda s: setattr(s, "key", "secret"), "TOKENLAKE_UPSTREAM_KEY"),
    "processed log-probabilities": (lambda s: setattr(s, "processed", True), "--logprobs-mode raw_logprobs"),
    "broken": (lambda s: s.cut.add("/v1/models"), "ended the connection early"),
    "failing": (lambda s: s.status.update({"/tokenize": 500}), "answered 500"),
    "refusing": (lambda s: s.status.update({PATHS["completions"]: 400}), "refuses a probe"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_upstream_that_lacks_an_ability_is_refused_at_start(stub: StubUpstream, case: str) -> None:
    change, why = REFUSALS[case]
    change(stub)
    with pytest.raises(ConfigError) as refused:
        backend(stub.url)
    assert why in refused.value.message
    assert stub.url in refused.value.message


def test_a_tokenizer_that_does_not_give_its_rendering_back_is_refused(stub: StubUpstream) -> None:
    encode = stub.engine.encode
    stub.engine.encode = lambda written: encode(written.lstrip(chr(1)))  # type: ignore[method-assign]
    stub.engine.render = lambda *a, **k: encode(stub.engine.render_text(*a, **k))  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="does not give back the ids of its own rendering"):
        backend(stub.url)


def test_an_upstream_that_does_not_answer_is_refused_within_the_deadline(stub: StubUpstream) -> None:
    stub.hang.add("/tokenize")
    with pytest.raises(ConfigError, match=r"within 0\.2 s"):
        backend(stub.url, upstream_deadline_s=0.2)


def test_nobody_there_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for capture in ("gate", "off"):
        with pytest.raises(ConfigError, match="cannot connect to the upstream"):
            backend(url, capture)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://u:p@h", "http://h?x=1", "http://h:x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backend(url)
    assert "u:p" not in refused.value.message


def test_a_route_that_flags_leave_out_is_done_without(stub: StubUpstream) -> None:
    stub.missing, stub.status = set(), {PATHS["generate"]: 403}
    made = backend(stub.url)
    assert isinstance(made.engine, UpstreamEngine)
    assert made.engine.facts.route == "completions"


def test_facts_are_proven_and_registered(opened: Opener, stub: StubUpstream) -> None:
    stub.info = {"tokenizer_class": "T", "eos_token": chr(9), "pad_token": chr(77)}
    stub.key = "k"
    made = backend(stub.url + "/v1/", key="k", upstream_logprobs="raw")
    assert isinstance(made.engine, UpstreamEngine)
    facts = made.engine.facts
    assert (facts.name, facts.version, facts.max_model_len, facts.route) == ("stub", "0.32.0", 1000, "completions")
    assert (facts.stop_ids, facts.pad_id, facts.opens_thinking) == ((9,), 77, False)
    with opened(engine=made) as door:
        (event,) = door.events("model_registered")
        model = json.loads(event["detail"])
        assert (model["vocab_size"], model["stop_ids"]) == (None, [9])
        assert set(model) >= {"tokenizer", "template"}
        assert "model" not in model, "weights that nobody has seen have no digest"


FAILURES: dict[str, tuple[Callable[[StubUpstream], Any], int, str]] = {
    "busy": (lambda s: s.status.update({PATHS["completions"]: 429}), 503, "upstream_busy"),
    "failing": (lambda s: s.status.update({PATHS["completions"]: 502}), 503, "upstream_error"),
    "broken": (lambda s: s.cut.add(PATHS["completions"]), 503, "upstream_broke"),
    "no answer": (lambda s: setattr(s, "edit", lambda a: {**a, "choices": []}), 503, "upstream_malformed"),
    "refusing": (lambda s: s.status.update({PATHS["completions"]: 400}), 400, "refused"),
    "hanging": (lambda s: s.hang.add(PATHS["completions"]), 504, "deadline"),
    "hanging while it renders": (lambda s: s.hang.add("/tokenize"), 504, "upstream_deadline"),
    "breaking while it renders": (lambda s: s.cut.add("/tokenize"), 503, "upstream_broke"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_upstream_that_fails_is_a_named_error_and_poisons_nothing(
    opened: Opener, stub: StubUpstream, case: str
) -> None:
    change, status, reason = FAILURES[case]
    seconds = 3.0 if case.startswith("hanging") else 30.0
    with served(opened, stub, call_deadline_s=seconds, upstream_deadline_s=seconds) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        edit, cut, hang = stub.edit, set(stub.cut), set(stub.hang)
        change(stub)
        with pytest.raises(openai.APIStatusError) as failed:
            ask(agent, [U5])
        assert failed.value.status_code == status
        assert "123" not in failed.value.message, "the upstream's words may hold a token id"
        assert stub.url not in failed.value.message, "where the upstream is, is not for agents"
        assert [(e["reason"], e["answered"]) for e in door.events("call_failed")] == [(reason, False)]
        stub.edit, stub.cut, stub.hang, stub.status = edit, cut, hang, {}
        last = ask(agent, [U5])
        assert door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)["reason"] is None


def test_a_full_context_is_an_empty_turn_and_nothing_is_sent(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        answer = ask(door.agent(rollout), [{"role": "user", "content": "x" * 1000}])
        assert answer.choices[0].finish_reason == "length"
        assert door.events("call_overflowed")
        assert not stub.prompts


def test_what_the_template_refuses_is_the_callers_to_mend(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        assert isinstance(door.service.engine, UpstreamEngine)
        with pytest.raises(ValueError, match="unknown role"):
            door.service.engine.render([{"role": "robot", "content": "x"}], None, add_generation_prompt=True)


def test_a_client_that_hangs_up_aborts_upstream(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        stub.hang.add(PATHS["completions"])
        body = json.dumps({"messages": [U5]}).encode()
        head = (
            f"POST /ng-rollout/g_g0/v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
            f"x-api-key: {rollout['data_capability']}\r\n\r\n"
        )
        url = httpx.URL(door.url)
        with socket.create_connection((url.host, url.port)) as agent:
            agent.sendall(head.encode() + body)
            wait_for(door, lambda: PATHS["completions"] in stub.asked)
        assert stub.gone.wait(20)
        wait_for(door, lambda: door.events("call_failed"))
        assert [event["reason"] for event in door.events("call_failed")] == ["client_disconnected"]


def test_the_splice_does_not_ask_again_what_it_knows(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        messages: list[dict[str, Any]] = [U5]
        rounds: list[int] = []
        for _ in range(4):
            stub.asked.clear()
            messages += [echo(ask(agent, messages)), U6]
            rounds.append(len(stub.asked))
        assert [event["mode"] for event in door.events("call_committed")] == ["text"] + ["token_in"] * 3
        assert rounds[0] == 2
        assert rounds[2:] == [3, 3], "one rendering of the whole conversation, its text, and the answer"


def test_plain_calls_and_reads_go_straight_through(opened: Opener, stub: StubUpstream) -> None:
    with served(opened, stub) as door:
        (rollout,) = door.register()
        assert door.request("GET", "/v1/models").json() == {"object": "list", "data": stub.models}
        under = door.request("GET", "/ng-rollout/g_g0/v1/models", token=rollout["data_capability"])
        assert under.json() == {"object": "list", "data": stub.models}
        assert door.request("GET", "/ng-rollout/g_g0/v1/models", token="wrong").status_code == 401
        assert door.post("/v1/chat/completions", {"a": 1}, token="wrong").status_code == 401
        assert not stub.raw
        assert door.post("/v1/chat/completions", {"a": 1}).status_code == 203
        assert not door.events("call_committed")
        assert not door.events("call_failed")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--capture", "gate"], "needs --upstream"),
        (["--capture", "off"], "needs --upstream"),
        (["--upstream", "http://127.0.0.1:9"], "cannot connect to the upstream"),
        (["--upstream", "nowhere"], "http://host:port"),
    ],
)
def test_the_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert main(["serve", "--lake", str(tmp_path / "lake"), *arguments]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert not (tmp_path / "lake").exists()
