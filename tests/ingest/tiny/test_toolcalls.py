"""Reading a sampled text as an assistant turn."""

from __future__ import annotations

import pytest

from tokenlake.ingest.tiny import TinyEngine
from tokenlake.ingest.toolcalls import parse_turn


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = block('{"name": "calculator", "arguments": {"expression": "1 + 1"}}')


def test_a_tool_call_alone_has_no_content() -> None:
    turn = parse_turn(GOOD)
    (call,) = turn.tool_calls
    assert (turn.content, turn.reasoning) == (None, None)
    assert (call.name, call.arguments) == ("calculator", '{"expression": "1 + 1"}')


@pytest.mark.parametrize("arguments", ['{"b" :1,"a":  2.0}', "{}", '{"x": "\\u00e9 } ]"}', '{"x": {"y": [1, {}]}}'])
@pytest.mark.parametrize("form", ['{{"name": "f", "arguments": {0}}}', ' {{ "arguments" : {0} , "name" : "f" }} '])
def test_arguments_are_the_text_as_sampled(form: str, arguments: str) -> None:
    (call,) = parse_turn(block(form.format(arguments))).tool_calls
    assert (call.name, call.arguments) == ("f", arguments)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "calculator(1)",
        '{"name": "f", "arguments": {"x": 1}',
        '{"name": "f", "arguments": {"x": 1}} }',
        '{"name": "f", "arguments": {x: 1}}',
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {}, "extra": 1}',
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f", "arguments": ' + "[" * 100_000,
    ],
)
def test_a_malformed_call_stays_content(body: str) -> None:
    turn = parse_turn(block(body))
    assert turn.tool_calls == []
    assert turn.content == block(body)


def test_an_unfinished_call_stays_content() -> None:
    assert parse_turn(GOOD.removesuffix("</tool_call>")).tool_calls == []


def test_good_calls_beside_a_bad_one() -> None:
    bad = block('{"name": }')
    turn = parse_turn(f"Go.\n{GOOD}\n{bad}\n{GOOD}")
    assert len({call.id for call in turn.tool_calls}) == 2
    assert turn.content is not None
    assert turn.content.startswith("Go.")
    assert bad in turn.content


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", None, None),
        (" A \n", None, " A \n"),
        ("<think>\nR\n</think>\n\nA", "R", "A"),
        ("<think>R</think>", "R", None),
        ("<think>\n\n</think>\n\nA", None, "A"),
        ("<think>\nR and no end", "R and no end", None),
        ("A <think>R</think>", None, "A <think>R</think>"),
    ],
)
def test_thinking(text: str, reasoning: str | None, content: str | None) -> None:
    turn = parse_turn(text)
    assert (turn.reasoning, turn.content) == (reasoning, content)


def test_a_call_inside_thinking_is_thinking() -> None:
    turn = parse_turn(f"<think>\n{GOOD}\n</think>\n\nA")
    assert (turn.tool_calls, turn.content) == ([], "A")


def test_a_parsed_turn_renders_to_the_text_it_came_from(idle_engine: TinyEngine) -> None:
    for said in (GOOD, f"Go.\n{GOOD}", f"<think>\nR\n</think>\n\n{GOOD}", f"{GOOD}\n{GOOD}", "Answer: 4"):
        turn = idle_engine.parse([], said)
        calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in turn.tool_calls]
        message = {
            "role": "assistant",
            "content": turn.content,
            "reasoning_content": turn.reasoning,
            "tool_calls": calls,
        }
        assert idle_engine.render_text([message], None, add_generation_prompt=False) == (
            f"<|im_start|>assistant\n{said}<|im_end|>\n"
        )
