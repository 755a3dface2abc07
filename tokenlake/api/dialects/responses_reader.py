"""OpenAI Responses items, read.

What one model call wrote is one turn: its reasoning, its message and its function calls, which the wire spreads over
items. A new turn begins where an item cannot follow in the same call (reasoning, then message, then calls), or where
the items' ids say that another call wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenlake.api.dialects.content import (
    TurnMaker,
    function_tool,
    items,
    mapping,
    optional_text,
    some,
    text_parts,
    unicode_text,
)
from tokenlake.api.dialects.marker import marker_of
from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import Tool
from tokenlake.ingest.messages import Conversation, Turn, TurnCall

__all__ = ["ResponsesReader"]

_INSTRUCTIONS = ("system", "developer")
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


@dataclass(slots=True)
class _Written:
    """Items of one model call, as they come."""

    last: int
    """Place of the last item in `_ORDER`."""
    marker: str | None
    parts: tuple[str, ...] = ()
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[TurnCall] = field(default_factory=list[TurnCall])

    def takes(self, kind: str, marker: str | None) -> bool:
        """Whether an item can be of the same call."""
        if marker is not None and self.marker is not None and marker != self.marker:
            return False
        place = _ORDER[kind]
        return place > self.last or (place == self.last and kind != "message")


class ResponsesReader:
    """Reads instructions, input items and tools of a response."""

    def __init__(self, make: TurnMaker) -> None:
        self._make = make

    def conversation(self, instructions: object, given: object, tools: object) -> Conversation:
        """The conversation of a request; raises `InvalidInput` naming the field that is malformed or unsupported."""
        turns: list[Turn] = []
        if instructions is not None and instructions != "":
            turns.append(self._make.instructions("system", text_parts(instructions, "instructions")))
        if isinstance(given, str):
            turns.append(Turn(role="user", parts=text_parts(given, "input")))
        else:
            turns += self.turns(items(given, "input"))
        if not turns:
            raise InvalidInput("input must be a non-empty string or array", field="input")
        shown = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(items(tools, "tools")))
        return Conversation(turns=tuple(turns), tools=shown)

    def turns(self, given: list[object]) -> list[Turn]:
        """Turns of a list of items, the model's items gathered."""
        turns: list[Turn] = []
        written: _Written | None = None
        for index, item in enumerate(given):
            where = f"input[{index}]"
            fields = mapping(item, where)
            kind = _kind(fields, where)
            if kind in _ORDER and (kind != "message" or fields.get("role") == "assistant"):
                marker = marker_of(fields.get("id"))
                if written is None or not written.takes(kind, marker):
                    turns += self._closed(written)
                    written = _Written(_ORDER[kind], marker)
                written.last, written.marker = _ORDER[kind], written.marker or marker
                _take(written, kind, fields, where)
                continue
            turns += self._closed(written)
            written = None
            turns.append(self._other(kind, fields, where))
        return turns + self._closed(written)

    def _closed(self, written: _Written | None) -> list[Turn]:
        if written is None:
            return []
        reasoning = "\n".join(written.reasoning)
        return [self._make.assistant(written.parts, reasoning, written.calls, marker=written.marker)]

    def _other(self, kind: str, fields: Mapping[str, Any], where: str) -> Turn:
        if kind == "function_call_output":
            answers = optional_text(fields, "call_id", where)
            if answers is None:
                raise InvalidInput(f"{where}.call_id is missing", field=f"{where}.call_id")
            return Turn(role="tool", parts=text_parts(fields.get("output"), f"{where}.output"), tool_call_id=answers)
        role = fields.get("role")
        parts = text_parts(fields.get("content"), f"{where}.content")
        if role in _INSTRUCTIONS:
            return self._make.instructions(role, parts)
        if role != "user":
            known = "assistant, developer, system, user"
            raise InvalidInput(f"{where}.role must be one of {known}", field=f"{where}.role")
        return Turn(role="user", parts=parts)


def _kind(fields: Mapping[str, Any], where: str) -> str:
    kind = fields.get("type", "message" if "role" in fields else None)
    if not isinstance(kind, str) or kind not in {*_ORDER, "function_call_output"}:
        raise InvalidInput(f"{where}: an item of type {kind!r} is not supported", field=where)
    return kind


def _take(written: _Written, kind: str, fields: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        written.parts += text_parts(fields.get("content"), f"{where}.content")
    elif kind == "function_call":
        written.calls.append(
            TurnCall(
                id=optional_text(fields, "call_id", where),
                name=unicode_text(fields.get("name"), f"{where}.name"),
                arguments=unicode_text(fields.get("arguments") or "", f"{where}.arguments"),
            )
        )
    else:
        # Encrypted reasoning is another provider's and cannot be read: it counts as reasoning that was dropped.
        written.reasoning += _thoughts(fields, "content", where) or _thoughts(fields, "summary", where)


def _thoughts(fields: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    parts = items(fields.get(key), f"{where}.{key}")
    return some(optional_text(mapping(part, f"{where}.{key}"), "text", f"{where}.{key}") for part in parts)


def _tool(tool: object, where: str) -> Tool:
    fields = mapping(tool, where)
    if fields.get("type") != "function":
        raise InvalidInput(f"{where} must be of type function", field=where)
    return function_tool({key: value for key, value in fields.items() if key != "type"}, where)
