"""The chat template at the places where a splice has to cut."""

from __future__ import annotations

from typing import Any

import pytest

from tokenlake.ingest.tiny import TinyEngine, tasks
from tokenlake.ingest.tiny.template import ChatTemplate

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
NEXT = {"role": "user", "content": "V"}
CALL = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression":  "1 + 1"}'}}
HEAD = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
TAIL = "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"


def text(messages: list[dict[str, Any]], *, prompt: bool = True, tools: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate().render(messages, tools, add_generation_prompt=prompt)


@pytest.mark.parametrize(
    ("turn", "body"),
    [
        pytest.param({"content": "A"}, "A", id="answer"),
        pytest.param({"content": ""}, "", id="empty turn"),
        pytest.param({"content": None, "tool_calls": []}, "", id="null content"),
        pytest.param({"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}, "AB", id="parts"),
        pytest.param(
            {"content": None, "tool_calls": [CALL]},
            '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "1 + 1"}}\n</tool_call>',
            id="tool call, arguments as written",
        ),
        pytest.param(
            {"content": "Go.", "tool_calls": [CALL, CALL]},
            "Go." + '\n<tool_call>\n{"name": "calculator", "arguments": {"expression":  "1 + 1"}}\n</tool_call>' * 2,
            id="content and two tool calls",
        ),
    ],
)
def test_boundary_after_an_assistant_turn(turn: dict[str, Any], body: str) -> None:
    history = [SYSTEM, USER, {"role": "assistant", **turn}]
    without, whole = text(history, prompt=False), text([*history, NEXT])
    assert text(history[:2]) == HEAD
    assert without == HEAD + body + "<|im_end|>\n"
    assert whole == without + TAIL


def test_boundary_ids_are_those_of_the_parts(idle_engine: TinyEngine) -> None:
    answer = [*idle_engine.encode("Answer: 4"), idle_engine.stop_ids[0]]
    whole = idle_engine.render(
        [SYSTEM, USER, {"role": "assistant", "content": "Answer: 4"}, NEXT], None, add_generation_prompt=True
    )
    prompt = idle_engine.render([SYSTEM, USER], None, add_generation_prompt=True)
    assert whole == prompt + answer + idle_engine.encode("\n" + TAIL)


def test_a_tool_result_is_a_turn_of_its_own() -> None:
    turn = {"role": "assistant", "tool_calls": [CALL]}
    history = [SYSTEM, USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    assert text(history).endswith("</tool_call><|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_thinking_stays_within_the_turn_and_is_stripped_before_the_last_user_message() -> None:
    turn = {"role": "assistant", "content": "A", "reasoning_content": "R"}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert text([USER, turn, tool]).count("<think>\nR\n</think>\n\nA<|im_end|>") == 1
    assert "R" not in text([USER, turn, NEXT])
    assert text([USER, turn, NEXT]) == text([USER, {"role": "assistant", "content": "A"}, NEXT])


def test_a_thinking_only_turn_renders_empty_in_history() -> None:
    turn = {"role": "assistant", "content": None, "reasoning": "R"}
    assert text([SYSTEM, USER, turn, NEXT]) == HEAD + "<|im_end|>\n" + TAIL


def test_thinking_folded_into_content_counts_as_thinking() -> None:
    folded = {"role": "assistant", "content": "<think>\nR\n</think>\n\nA"}
    apart = {"role": "assistant", "content": "A", "reasoning_content": "R"}
    for after in ([], [NEXT]):
        assert text([USER, folded, *after]) == text([USER, apart, *after])


def test_keep_thinking_keeps_it_everywhere() -> None:
    turn = {"role": "assistant", "content": "A", "reasoning": "R"}
    rendered = ChatTemplate().render([USER, turn, NEXT], None, add_generation_prompt=False, keep_thinking=True)
    assert "<think>\nR\n</think>\n\nA" in rendered


def test_tools_are_listed_with_or_without_a_system_message() -> None:
    with_system = text([SYSTEM, USER], tools=[tasks.CALCULATOR_TOOL])
    without = text([USER], tools=[tasks.CALCULATOR_TOOL])
    assert with_system.startswith("<|im_start|>system\nS\n\n# Tools\n")
    assert without.startswith("<|im_start|>system\n# Tools\n")
    assert with_system.count('"name": "calculator"') == without.count('"name": "calculator"') == 1
    assert text([SYSTEM, USER], tools=[]) == text([SYSTEM, USER])


def test_a_second_system_message_stays_in_its_place() -> None:
    assert text([SYSTEM, USER, SYSTEM], prompt=False).endswith("U<|im_end|>\n<|im_start|>system\nS<|im_end|>\n")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "narrator", "content": "x"}, "role 'narrator'"),
        ({"content": "x"}, "role None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url' is not text"),
        ({"role": "user", "content": 7}, "neither"),
        ({"role": "user", "content": ["x"]}, "not an object"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}, "no name"),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_its_place(message: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]") as caught:
        text([USER, message])
    assert named in str(caught.value)
