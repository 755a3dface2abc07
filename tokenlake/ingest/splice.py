"""The splice: the exact ids of the parent, then what the template writes after the parent's answer.

The place where the answer ends is found by rendering, not by searching for an end-of-turn id or cutting by length: the
answer is replaced by two probes that differ in their last character, and what the two renderings have in common at
their end is the close of the turn and everything later. That holds when the template strips old thinking, writes text
between end-of-turn and the next header, or drops a turn that has nothing visible, because the real answer is never
rendered to find its end. The probes stand in a short conversation (the later messages only); that it says the same as
the whole one is checked against the whole rendering for short conversations and then at every power of two, so that
the cost of a rollout stays linear.

If the answer ended on one of the engine's stop ids, that id stands for the template's end-of-turn, or is the header of
the next turn where the template writes no end-of-turn, and nothing is added for it; if not, the template's end-of-turn
follows as carried tokens. What cannot be proven raises `SpliceFailed`.
"""

from __future__ import annotations

import os.path
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tokenlake.ingest.engine import Message, Tool

__all__ = ["SpliceFailed", "Spliced", "Template", "splice"]

_ALWAYS_WHOLE = 32
_PROBES = ("Probe x", "Probe y")


class SpliceFailed(Exception):
    """The end of the parent's answer cannot be proven in the rendering; `reason` says which step failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Template(Protocol):
    """What the splice needs of an engine."""

    @property
    def stop_ids(self) -> Collection[int]:
        """Ids any of which ends a generation."""
        ...

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> str:
        """The chat template's text; raises `ValueError` for what it cannot express."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens written in it included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spliced:
    """A prompt that starts with the parent's exact ids."""

    prompt_ids: array[int]
    carried_from: int
    """Length of the parent's sequence: from here on the ids are rendered, mask 0."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows the last character of the answer."""

    text: str
    closing: str
    """How the template closes the answer's turn when nothing follows, as far as `text` begins like that."""
    whole: bool
    """`closing` is all of it: false where the next turn's header takes the place of the end-of-turn."""
    exact: bool
    """The probe's last character is the answer's last: false when template text of the answer itself may follow it."""


def splice(
    template: Template,
    parent_ids: array[int],
    messages: Sequence[Message],
    parent_messages: int,
    tools: Sequence[Tool] | None,
) -> Spliced:
    """Join `parent_ids` (the parent's prompt and answer) with the rendering of what follows the answer.

    `messages` is the whole new conversation; the parent's answer is `messages[parent_messages - 1]`.

    Raises `SpliceFailed` when the boundary cannot be proven.
    """
    if not 0 < parent_messages <= len(messages) or messages[parent_messages - 1].get("role") != "assistant":
        raise SpliceFailed("no_answer")
    if not parent_ids:
        raise SpliceFailed("no_parent_ids")
    try:
        tail = _tail(template, messages, parent_messages, tools)
    except ValueError as error:
        raise SpliceFailed("not_renderable") from error
    suffix = _cut(template, tail, parent_ids[-1])
    return Spliced(prompt_ids=parent_ids + array("i", suffix), carried_from=len(parent_ids))


def _tail(template: Template, messages: Sequence[Message], count: int, tools: Sequence[Tool] | None) -> _Tail:
    answer, later = messages[count - 1], list(messages[count:])
    # A power of two in [count, len(messages)]: a conversation that grows by several messages meets each one.
    whole = len(messages) <= _ALWAYS_WHOLE or (count - 1).bit_length() != len(messages).bit_length()
    try:
        tail = _probe(template, [{"role": "user", "content": "x"}], answer, later, tools)
    except (ValueError, SpliceFailed):
        tail = None
    if tail is not None and not whole:
        return tail
    rendering = template.render_text(messages, tools, add_generation_prompt=True)
    if tail is None or not rendering.endswith(tail.text[len(tail.closing) :]):
        tail = _probe(template, list(messages[: count - 1]), answer, later, tools)
        if not rendering.endswith(tail.text[len(tail.closing) :]):
            raise SpliceFailed("history_dependent")
    return tail


def _probe(
    template: Template,
    before: list[Message],
    answer: Message,
    later: list[Message],
    tools: Sequence[Tool] | None,
) -> _Tail:
    def common(messages: list[Message], *, generation: bool) -> str:
        first, second = (
            template.render_text([*before, _variant(answer, probe), *messages], tools, add_generation_prompt=generation)
            for probe in _PROBES
        )
        shared = _common_end(first, second)
        ends = (first[: len(first) - len(shared)], second[: len(second) - len(shared)])
        if not all(end.endswith(probe) for end, probe in zip(ends, _PROBES, strict=True)):
            raise SpliceFailed("answer_not_rendered")
        return shared

    text = common(later, generation=True)
    closing = common([], generation=False)
    begun = os.path.commonprefix([text, closing])  # noqa: RUF071 - of texts, which is wanted here
    return _Tail(text, begun, whole=begun == closing, exact=not answer.get("tool_calls"))


def _variant(answer: Message, probe: str) -> Message:
    """The answer with its last written text replaced: the content, or the last tool call's arguments."""
    variant: Message = {"role": "assistant", "content": probe}
    calls = cast("list[dict[str, Any]]", answer.get("tool_calls") or [])
    if calls:
        last = calls[-1]
        function = cast("dict[str, Any]", last["function"])
        arguments: Any = {"a": probe}
        if isinstance(function.get("arguments"), str):
            arguments = f'{{"a": "{probe}"}}'
        variant["content"] = ""
        variant["tool_calls"] = [*calls[:-1], {**last, "function": {**function, "arguments": arguments}}]
    return variant


def _common_end(first: str, second: str) -> str:
    """Longest common suffix, found by halving: slices compare at the speed of memory."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[-middle:] == second[-middle:]:
            low = middle
        else:
            high = middle - 1
    return first[len(first) - low :]


def _cut(template: Template, tail: _Tail, last: int) -> list[int]:
    """The ids that follow the parent's last one."""
    ended = last in template.stop_ids
    ids = template.encode(tail.text)
    starts = bool(ids) and ids[0] in template.stop_ids
    closing = [] if starts else template.encode(tail.closing)
    stop = 0 if starts and tail.closing else _first_stop(template, closing)
    if stop is None and ended and ids[: len(closing) + 1] == [*closing, last]:
        # The answer ended on the id that opens the next turn, which stands there once.
        return ids[len(closing) + 1 :]
    if not tail.whole:
        raise SpliceFailed("closing_differs")
    if stop is None:
        return _without_stop(ids, closing, tail, ended=ended)
    # The end-of-turn must lie in the closing: a stop id of a later message is not this answer's.
    if not starts and ids[: stop + 1] != closing[: stop + 1]:
        raise SpliceFailed("closing_retokenized")
    if ended:
        return ids[stop + 1 :]
    return ids if tail.exact else ids[stop:]


def _without_stop(ids: list[int], closing: list[int], tail: _Tail, *, ended: bool) -> list[int]:
    """The template closes a turn without any of the engine's stop ids."""
    if not tail.exact:
        raise SpliceFailed("no_end_of_turn")
    if not ended or not closing:
        return ids
    if len(closing) == 1 and ids[:1] == closing:
        return ids[1:]
    raise SpliceFailed("no_end_of_turn")


def _first_stop(template: Template, ids: Sequence[int]) -> int | None:
    return next((index for index, token in enumerate(ids) if token in template.stop_ids), None)
