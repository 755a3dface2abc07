"""Equal means equal: what the wire makes different hashes alike, and nothing else does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.api.dialects.chat_reader import ChatReader
from tokenlake.api.dialects.content import TurnMaker
from tokenlake.errors import InvalidInput
from tokenlake.ingest.fingerprint import canonical_arguments, trace
from tokenlake.ingest.messages import to_messages

USER = {"role": "user", "content": "hi"}
READER = ChatReader(TurnMaker())


def fingerprint(*messages: dict[str, Any]) -> bytes:
    return trace(READER.conversation(list(messages))).fingerprint


def context(*messages: dict[str, Any], tools: Any = None) -> bytes:
    return trace(READER.conversation(list(messages), tools)).context


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **more,
    }


SERVED = '{"b": 2, "a": 1}'


@pytest.mark.parametrize(
    "echo", ['{"a":1,"b":2}', {"a": 1, "b": 2}, '{"a":1,"b":2.0}', '{"a":1e0,"b":2}', ' {"b":2,\n"a":1} ']
)
def test_arguments_with_the_same_value_are_equal(echo: Any) -> None:
    assert fingerprint(called(echo)) == fingerprint(called(SERVED))


@pytest.mark.parametrize(
    "echo",
    [
        '{"a":true,"b":2}',
        '{"a":"1","b":2}',
        '{"a":1}',
        '{"a":1,"b":2,"c":null}',
        '{"a":1,"b":[2]}',
        '{"a":1,"b":2',
        '{"a":1,"b":3}',
        '{"A":1,"b":2}',
    ],
)
def test_arguments_with_another_value_differ(echo: Any) -> None:
    assert fingerprint(called(echo)) != fingerprint(called(SERVED))


def test_arguments_compare_escapes_order_and_invalid_text() -> None:
    assert canonical_arguments('{"x":"caf\\u00e9"}') == canonical_arguments('{"x":"café"}')
    assert canonical_arguments("[1,2]") != canonical_arguments("[2,1]")
    assert canonical_arguments('{"a":1,') == canonical_arguments('{"a":1,') != canonical_arguments('{"a":1, ')
    assert canonical_arguments("NaN") != canonical_arguments("null")
    assert canonical_arguments("1e999") != canonical_arguments("2e999")
    assert canonical_arguments("[" * 5000) != canonical_arguments("[" * 4999)
    assert canonical_arguments('"\\ud800"') != canonical_arguments('"\\ud801"')
    assert canonical_arguments("9" * 5000) != canonical_arguments("9" * 4999)
    with pytest.raises(InvalidInput):
        canonical_arguments(json.loads('{"a":' * 101 + "1" + "}" * 101))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values, written the slow way."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (isinstance(a, str) == isinstance(b, str))


@given(JSON, JSON, st.booleans(), st.integers(0, 4))
def test_arguments_are_equal_exactly_when_their_values_are(a: Any, b: Any, ascii_only: bool, indent: int) -> None:
    text = json.dumps(a, ensure_ascii=ascii_only, sort_keys=True, indent=indent)
    assert canonical_arguments(text) == canonical_arguments(json.dumps(a))
    assert (canonical_arguments(json.dumps(a)) == canonical_arguments(json.dumps(b))) == same(a, b)


def test_content_that_the_wire_writes_differently_is_equal() -> None:
    plain = fingerprint({"role": "assistant", "content": "a"})
    for echo in (
        {"content": [{"type": "text", "text": "a"}]},
        {"content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": ""}]},
        {"content": "a", "tool_calls": None, "refusal": None, "audio": None, "unknown": 1},
        {"content": "a", "tool_calls": [], "reasoning": None, "reasoning_content": ""},
    ):
        assert fingerprint({"role": "assistant", **echo}) == plain
    empty = fingerprint(called("{}"))
    assert fingerprint(called("{}", content="")) == fingerprint(called("{}", content=[])) == empty
    assert fingerprint({"role": "assistant"}) == fingerprint({"role": "assistant", "content": ""})


texts = st.lists(st.text(max_size=4), max_size=4)


@given(texts, texts)
def test_parts_never_run_into_each_other(a: list[str], b: list[str]) -> None:
    def digest(parts: list[str]) -> bytes:
        return fingerprint({"role": "assistant", "content": [{"type": "text", "text": part} for part in parts]})

    assert (digest(a) == digest(b)) == (list(filter(None, a)) == list(filter(None, b)))


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=2)), min_size=1, max_size=5))
def test_turns_never_run_into_each_other(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    joined = [{"role": turns[0][0], "content": "".join(text for _, text in turns)}]
    assert (context(*messages) == context(*joined)) == (len(turns) == 1)
    grown = trace(READER.conversation(messages))
    if turns[-1][0] == "assistant" and len(turns) > 1:
        assert trace(READER.conversation(messages[:-1])).answered(READER.turn(messages[-1])) == grown


def test_tool_call_ids_are_linkage() -> None:
    def conversation(first: str, second: str, answers: str) -> bytes:
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in (first, second)]
        return context(
            USER,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": answers, "content": "r"},
        )

    assert conversation("a", "b", "a") == conversation("x", "y", "x")
    assert conversation("a", "b", "a") != conversation("a", "b", "b")
    assert conversation("a", "b", "a") != conversation("a", "b", "unknown")


def test_reasoning_is_beside_the_fingerprint() -> None:
    kept = trace(READER.conversation([USER, {"role": "assistant", "content": "a", "reasoning": "r"}]))
    alias = trace(READER.conversation([USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}]))
    dropped = trace(READER.conversation([USER, {"role": "assistant", "content": "a"}]))
    assert kept.reasoning == alias.reasoning != dropped.reasoning == ()
    assert kept.fingerprint == alias.fingerprint == dropped.fingerprint
    folded = {"role": "assistant", "content": "<think>r</think>a"}
    assert fingerprint(folded) != dropped.fingerprint
    unfolded = trace(ChatReader(TurnMaker(unfold=True)).conversation([USER, folded]))
    assert (unfolded.fingerprint, unfolded.reasoning) == (kept.fingerprint, kept.reasoning)


def test_tools_and_system_text_are_preamble() -> None:
    system = {"role": "system", "content": "s"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    again = {"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}

    def preamble(*messages: dict[str, Any], tools: Any = None) -> bytes:
        return trace(READER.conversation(list(messages), tools)).preamble

    assert preamble(system, USER, tools=[tool]) == preamble(system, tools=[again])
    assert preamble(system, USER) == preamble(system, USER, tools=[]) != preamble(system, USER, tools=[tool])
    assert preamble(system, USER) != preamble({"role": "system", "content": "t"}, USER)


def test_strip_rules_apply_before_hashing_and_rendering_alike() -> None:
    reader = ChatReader(TurnMaker(strip=[re.compile(r"n=\w+;\n?")]))
    first, second = (
        reader.conversation([{"role": "system", "content": f"H: n={nonce};\nBe brief"}, USER]) for nonce in ("aa", "bb")
    )
    assert trace(first).context == trace(second).context
    assert to_messages(first.turns) == to_messages(second.turns)
    assert to_messages(first.turns)[0]["content"] == "H: Be brief"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ("text", "messages[0]"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(message: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        READER.conversation([message])
    assert refused.value.detail["field"] == field


@pytest.mark.parametrize("unfold", [False, True])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("content", ["plain", "", "é", "<think>why</think>so", ["a"], [{"type": "text", "text": "a"}]])
def test_a_message_in_a_conversation_reads_as_it_does_alone(role: str, content: Any, unfold: bool) -> None:
    reader = ChatReader(TurnMaker(strip=[re.compile("la")], unfold=unfold))
    for more in ({}, {"name": "n"}, {"refusal": None}):
        message = {"role": role, "content": content, **more}
        assert reader.conversation([message]).turns == (reader.turn(message),)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"refusal": None},
        {"refusal": None, "ng_call_id": "c"},
        {"ng_call_id": "c"},
        {"ng_call_id": ""},
        {"ng_call_id": None},
        {"refusal": "no"},
        {"name": "n"},
        {"tool_calls": []},
        {"reasoning": "r"},
        {"content": "\u00e9"},
        {"content": ""},
    ],
    ids=str,
)
def test_a_message_is_read_alike_in_one_step_and_field_by_field(role: str, more: dict[str, Any]) -> None:
    message = {"role": role, "content": "said", **more}
    assert READER.conversation([message]).turns == (READER.turn(message),)


@pytest.mark.parametrize("marker", [1, True, [], "\ud800"])
def test_a_marker_that_is_no_text_is_refused(marker: Any) -> None:
    with pytest.raises(InvalidInput):
        READER.conversation([{"role": "assistant", "content": "said", "ng_call_id": marker}])
