"""A sampled text read as an assistant turn.

The turn keeps the arguments as the model wrote them, byte for byte, because the next prompt is rendered from them and
the lineage compares them. What is not a well-formed tool call stays in the content: the agent sees what the model
said.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from json import JSONDecodeError, JSONDecoder

from tokenlake.ingest.engine import AssistantTurn, ToolCall

__all__ = ["certain", "parse_turn", "without_begun"]

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK, _UNTHINK, _CALL = "<think>", "</think>", "<tool_call>"
_DECODER = JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_turn(text: str, *, calls: bool = True) -> AssistantTurn:
    """Split a text into thinking, content and tool calls.

    A thinking block counts at the very start only; one that never ends is all thinking. Tool calls are
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order. Without a well-formed one the content is the
    rest exactly as it is; with one, the white space around the calls is dropped. Empty parts are None. Without `calls`
    none is looked for.
    """
    reasoning, rest = _split_thinking(text)
    found: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read_call(match[1])
        if call is None:
            return match[0]
        found.append(ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=call[0], arguments=call[1]))
        return ""

    content = _BLOCK.sub(take, rest) if calls else rest
    if found:
        content = content.strip()
    return AssistantTurn(content=content or None, reasoning=reasoning, tool_calls=found)


def certain(text: str) -> tuple[str, str]:
    """(reasoning, content) of a text that goes on: the beginnings of what `parse_turn` says, whatever follows.

    White space at an edge of the content is stripped if a tool call follows and kept if none does, so it is not certain
    until something follows it, and never at the beginning.
    """
    start = text.lstrip()
    if _THINK.startswith(start):
        return "", ""
    reasoning = ""
    if start.startswith(_THINK):
        reasoning, thought, text = start.removeprefix(_THINK).partition(_UNTHINK)
        if not thought:
            return without_begun(reasoning, (_UNTHINK,)).strip("\n"), ""
        reasoning, text = reasoning.strip("\n"), text.lstrip("\n")
    said, called, _ = text.partition(_CALL)
    if not called:
        said = without_begun(said, (_CALL,))
    return reasoning, "" if said[:1].isspace() else said.rstrip()


def without_begun(text: str, marks: Iterable[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    begun = (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
    return text[: len(text) - max(begun, default=0)]


def _split_thinking(text: str) -> tuple[str | None, str]:
    start = text.lstrip()
    if not start.startswith(_THINK):
        return None, text
    thinking, _, rest = start.removeprefix(_THINK).partition(_UNTHINK)
    return thinking.strip("\n") or None, rest.lstrip("\n")


def _read_call(block: str) -> tuple[str, str] | None:
    """(name, text of the arguments) of one JSON object with just these keys, or None."""
    try:
        members = _members(block.strip())
    except (JSONDecodeError, RecursionError):
        return None
    if members.keys() != {"name", "arguments"}:
        return None
    name, arguments = json.loads(members["name"]), members["arguments"]
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        return None
    return name, arguments


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written; JSONDecodeError otherwise, also for a repeated key."""
    found: dict[str, str] = {}
    place = _expect(text, 0, "{")
    while True:
        key, place = _decode(text, place)
        if not isinstance(key, str) or key in found:
            raise JSONDecodeError("a key is no text or is repeated", text, place)
        start = _expect(text, place, ":")
        _, place = _decode(text, start)
        found[key] = text[start:place]
        end = _skip(text, place)
        if text[end : end + 1] == "}" and end + 1 == len(text):
            return found
        place = _expect(text, place, ",")


def _decode(text: str, place: int) -> tuple[object, int]:
    return _DECODER.raw_decode(text, _skip(text, place))


def _expect(text: str, place: int, mark: str) -> int:
    """The first place after the mark and the white space around it."""
    place = _skip(text, place)
    if text[place : place + 1] != mark:
        raise JSONDecodeError(f"expected {mark!r}", text, place)
    return _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place
