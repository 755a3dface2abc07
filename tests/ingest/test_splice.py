"""The splice joins exact parent ids with what the template writes after the answer, or refuses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tokenlake.ingest.splice import SpliceFailed
from tokenlake.ingest.splice import splice as splice_ids

Messages = Sequence[dict[str, Any]]


def splice(toy: Toy, parent: Sequence[int], messages: Messages, count: int, tools: None) -> Any:
    """The splice over plain lists."""
    spliced = splice_ids(toy, array("i", parent), messages, count, tools)
    assert spliced.prompt_ids[: spliced.carried_from].tolist() == list(parent)
    return SimpleNamespace(prompt_ids=spliced.prompt_ids.tolist(), carried_from=spliced.carried_from)


class Toy:
    """A tokenizer of one id a character: 1 begins, 101 user, 102 assistant, 103 tool, 9 ends a turn, 8 the newline."""

    def __init__(self, render: Callable[[Messages, bool], str], stop_ids: tuple[int, ...] = (9,)) -> None:
        self._render = render
        self.stop_ids = stop_ids
        self.rendered = 0
        self.encoded = 0

    def render_text(self, messages: Messages, tools: object, *, add_generation_prompt: bool) -> str:
        text = self._render(messages, add_generation_prompt)
        self.rendered += len(text)
        return text

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return [ord(char) for char in text]


def t(*ids: int) -> str:
    return "".join(map(chr, ids))


def chatml(messages: Messages, generation: bool, *, close: str = t(9, 8)) -> str:
    heads = {"user": t(101), "assistant": t(102), "tool": t(103)}
    turns = [heads[m["role"]] + m["content"] + close for m in messages]
    return t(1) + "".join(turns) + (t(102) if generation else "")


def user(*ids: int) -> dict[str, Any]:
    return {"role": "user", "content": t(*ids)}


def answer(*ids: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": t(*ids), **more}


PROMPT = [1, 101, 5, 9, 8, 102]


@pytest.mark.parametrize(
    ("generated", "echoed", "suffix"),
    [
        pytest.param([3, 9], [3], [8, 101, 6, 9, 8, 102], id="ended"),
        pytest.param([3, 4], [3, 4], [9, 8, 101, 6, 9, 8, 102], id="length-stop"),
        pytest.param([9], [], [8, 101, 6, 9, 8, 102], id="empty"),
        pytest.param([], [], [9, 8, 101, 6, 9, 8, 102], id="nothing-sampled"),
        pytest.param([3, 9], [77, 78], [8, 101, 6, 9, 8, 102], id="retokenized-to-another-length"),
    ],
)
def test_turn_boundaries(generated: list[int], echoed: list[int], suffix: list[int]) -> None:
    spliced = splice(Toy(chatml), [*PROMPT, *generated], [user(5), answer(*echoed), user(6)], 2, None)
    assert spliced.prompt_ids == [*PROMPT, *generated, *suffix]
    assert spliced.carried_from == len(PROMPT) + len(generated)


def test_a_stop_id_that_is_also_the_next_header_is_written_once() -> None:
    def template(messages: Messages, generation: bool) -> str:
        text = t(1)
        for message in messages:
            match message["role"]:
                case "user":
                    text += t(101) + message["content"] + t(9, 8)
                case "assistant":
                    text += t(102) + message["content"] + t(103)
                case _:
                    text += message["content"]
        return text + (t(102) if generation else "")

    messages = [user(5), answer(3), {"role": "tool", "content": t(60)}]
    spliced = splice(Toy(template, (9, 103)), [*PROMPT, 3, 103], messages, 2, None)
    assert spliced.prompt_ids == [*PROMPT, 3, 103, 60, 102]


def test_another_stop_id_stands_for_the_templates_end_of_turn() -> None:
    spliced = splice(Toy(chatml, (9, 7)), [*PROMPT, 3, 7], [user(5), answer(3), user(6)], 2, None)
    assert spliced.prompt_ids == [*PROMPT, 3, 7, 8, 101, 6, 9, 8, 102]


def headers_only(messages: Messages, generation: bool) -> str:
    """No end-of-turn: the next turn's header, on which the engine stops, ends a turn."""
    text = t(1)
    for message in messages:
        text += t({"user": 101, "assistant": 102, "tool": 103}[message["role"]]) + message["content"]
        for call in message.get("tool_calls", ()):
            text += t(40) + str(call["function"]["arguments"]) + t(41)
    return text + (t(102) if generation else "")


CALL = answer(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
TOOL = {"role": "tool", "content": t(60)}


@pytest.mark.parametrize(
    ("generated", "echoed", "later", "suffix"),
    [
        ([3, 101], answer(3), user(6), [6, 102]),
        ([3, 9], answer(3), user(6), [101, 6, 102]),
        ([3, 103], answer(3), user(6), [101, 6, 102]),
        ([3], answer(3), user(6), [101, 6, 102]),
        ([40, 41, 103], CALL, TOOL, [60, 102]),
    ],
    ids=["its-header", "end-of-text", "another-header", "length", "call"],
)
def test_a_template_of_headers_writes_each_once(
    generated: list[int], echoed: dict[str, Any], later: dict[str, Any], suffix: list[int]
) -> None:
    template = Toy(headers_only, (9, 101, 103))
    spliced = splice(template, [*PROMPT, *generated], [user(5), echoed, later], 2, None)
    assert spliced.prompt_ids == [*PROMPT, *generated, *suffix]


def thinking(messages: Messages, generation: bool) -> str:
    """Strips thinking from turns before the last user message, and drops a turn of which nothing is left."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    text = t(1)
    for index, message in enumerate(messages):
        thought = message.get("reasoning_content")
        if message["role"] == "assistant":
            kept = t(110) + thought + t(111) if thought and index > last else ""
            if kept or message["content"]:
                text += t(102) + kept + message["content"] + t(9, 8)
        else:
            text += t(101) + message["content"] + t(9, 8)
    return text + (t(102) if generation else "")


@pytest.mark.parametrize(
    ("generated", "echoed"),
    [([110, 7, 111, 9], answer(reasoning_content=t(7))), ([110, 7, 111, 3, 9], answer(3, reasoning_content=t(7)))],
)
def test_thinking_that_the_template_deletes_stays_in_the_prefix(generated: list[int], echoed: dict[str, Any]) -> None:
    spliced = splice(Toy(thinking), [*PROMPT, *generated], [user(5), echoed, user(6)], 2, None)
    assert spliced.prompt_ids == [*PROMPT, *generated, 8, 101, 6, 9, 8, 102]


def test_an_end_of_turn_written_by_a_user_does_not_move_the_boundary() -> None:
    spliced = splice(Toy(chatml), [*PROMPT, 3, 9], [user(5, 9, 8, 102), answer(3), user(9, 9, 6)], 2, None)
    assert spliced.prompt_ids == [*PROMPT, 3, 9, 8, 101, 9, 9, 6, 9, 8, 102]


def test_a_template_without_end_of_turn_is_proven_only_when_nothing_is_in_doubt() -> None:
    none = Toy(lambda m, g: chatml(m, g, close=""))
    assert splice(none, [*PROMPT, 3, 9], [user(5), answer(3), user(6)], 2, None).prompt_ids == [
        *PROMPT, 3, 9, 101, 6, 102,
    ]  # fmt: skip
    one = Toy(lambda m, g: chatml(m, g, close=t(50)))
    assert splice(one, [*PROMPT, 3, 9], [user(5), answer(3), user(6)], 2, None).prompt_ids[8:] == [101, 6, 50, 102]
    assert splice(one, [*PROMPT, 3], [user(5), answer(3), user(6)], 2, None).prompt_ids[7:] == [50, 101, 6, 50, 102]
    two = Toy(lambda m, g: chatml(m, g, close=t(50, 51)))
    with pytest.raises(SpliceFailed, match="no_end_of_turn"):
        splice(two, [*PROMPT, 3, 9], [user(5), answer(3), user(6)], 2, None)


def with_calls(messages: Messages, generation: bool) -> str:
    text = t(1)
    for message in messages:
        text += t({"user": 101, "assistant": 102, "tool": 103}[message["role"]]) + message["content"]
        for call in message.get("tool_calls", ()):
            text += "<" + call["function"]["name"] + str(call["function"]["arguments"]) + ">"
        text += t(9, 8)
    return text + (t(102) if generation else "")


@pytest.mark.parametrize("arguments", ['{"q": 1}', '{"q": "\t"}', {"q": 1}])
def test_a_turn_of_tool_calls_ends_after_the_last_call(arguments: object) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user(5), answer(tool_calls=[call]), {"role": "tool", "content": t(60), "tool_call_id": "x"}]
    spliced = splice(Toy(with_calls), [*PROMPT, 40, 41, 9], messages, 2, None)
    assert spliced.prompt_ids == [*PROMPT, 40, 41, 9, 8, 103, 60, 9, 8, 102]
    unfinished = splice(Toy(with_calls), [*PROMPT, 40, 41], messages, 2, None)
    assert unfinished.prompt_ids == [*PROMPT, 40, 41, 9, 8, 103, 60, 9, 8, 102]


def test_history_that_changes_what_follows_is_rendered_whole() -> None:
    def numbered(messages: Messages, generation: bool) -> str:
        text = "".join(f"{i}{m['role'][0]}{m['content']}\t\n" for i, m in enumerate(messages))
        return text + (f"{len(messages)}a" if generation else "")

    spliced = splice(Toy(numbered), [1, 2, 9], [user(5), answer(3), user(6), answer(3), user(6)], 4, None)
    assert bytes(spliced.prompt_ids[3:]).decode() == "\n4u\x06\t\n5a"


def test_a_rendering_that_depends_on_the_answer_is_refused() -> None:
    def echoing(messages: Messages, generation: bool) -> str:
        said = "".join(m["content"][:1] for m in messages if m["role"] == "assistant")
        return "".join(m["content"] + "\t" for m in messages) + (said if generation else "")

    with pytest.raises(SpliceFailed, match="history_dependent"):
        splice(Toy(echoing), [1, 2, 9], [user(5), answer(3), user(6)], 2, None)


def test_an_answer_that_is_never_rendered_cannot_be_spliced() -> None:
    with pytest.raises(SpliceFailed, match="answer_not_rendered"):
        splice(
            Toy(lambda m, g: chatml([x for x in m if x["role"] == "user"], g)),
            [*PROMPT, 3, 9],
            [user(5), answer(3), user(6)],
            2,
            None,
        )
    with pytest.raises(SpliceFailed, match="no_answer"):
        splice(Toy(chatml), [*PROMPT, 3, 9], [user(5), user(6)], 2, None)

    def refuses(messages: Messages, generation: bool) -> str:
        raise ValueError

    with pytest.raises(SpliceFailed, match="not_renderable"):
        splice(Toy(refuses), [*PROMPT, 3, 9], [user(5), answer(3), user(6)], 2, None)


def test_the_work_of_a_long_rollout_grows_with_its_length_and_not_with_its_square() -> None:
    def work(turns: int) -> tuple[int, int]:
        toy = Toy(chatml)
        messages = [user(5)]
        ids = [*PROMPT, 3, 9]
        for _ in range(turns):
            messages += [answer(3), user(6)]
            ids = [*splice(toy, ids, messages, len(messages) - 1, None).prompt_ids, 3, 9]
        assert ids == [ord(c) for c in chatml([*messages, answer(3)], False)][:-1]
        return toy.rendered, toy.encoded

    few, many = work(100), work(800)
    assert many[0] < 12 * few[0]
    assert many[1] < 9 * few[1]
