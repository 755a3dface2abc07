"""Anthropic messages, read.

One user message may answer several tool calls and say something: each tool result is a turn of its own, and so is the
text between them, in order. Whatever an assistant message holds is one turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenlake.api.dialects.content import (
    TurnMaker,
    function_tool,
    items,
    mapping,
    optional_text,
    text_part,
    text_parts,
    unicode_text,
)
from tokenlake.api.dialects.marker import marker_of
from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import Tool
from tokenlake.ingest.messages import Conversation, Turn, TurnCall

__all__ = ["UNREADABLE", "AnthropicReader"]

UNREADABLE = "unreadable_arguments"
"""The only key of a tool input that stands for arguments which are not a JSON object: the text as it was sampled."""


class AnthropicReader:
    """Reads system text, messages and tools of a message request."""

    def __init__(self, make: TurnMaker) -> None:
        self._make = make

    def conversation(self, system: object, messages: object, tools: object) -> Conversation:
        """The conversation of a request; raises `InvalidInput` naming the field that is malformed or unsupported."""
        given = items(messages, "messages")
        if not given:
            raise InvalidInput("messages must be a non-empty array", field="messages")
        turns: list[Turn] = []
        if system:
            turns.append(self._make.instructions("system", text_parts(system, "system")))
        for index, message in enumerate(given):
            where = f"messages[{index}]"
            fields = mapping(message, where)
            role, content = fields.get("role"), fields.get("content")
            if role == "assistant":
                turns.append(self.assistant(content, f"{where}.content"))
            elif role == "user":
                turns += _user(content, f"{where}.content")
            else:
                raise InvalidInput(f"{where}.role must be one of assistant, user", field=f"{where}.role")
        if turns[-1].role == "assistant":
            raise InvalidInput("messages: an answer that is begun for the model is not supported", field="messages")
        shown = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(items(tools, "tools")))
        return Conversation(turns=tuple(turns), tools=shown)

    def assistant(self, content: object, where: str = "content") -> Turn:
        """The turn of an assistant message; also reads back what was served."""
        if content is None or isinstance(content, str):
            return self._make.assistant(text_parts(content, where), None, ())
        parts: list[str] = []
        thoughts: list[str] = []
        calls: list[TurnCall] = []
        marker: str | None = None
        for index, block in enumerate(items(content, where)):
            here = f"{where}[{index}]"
            fields = mapping(block, here)
            kind = fields.get("type")
            if kind == "thinking":
                thoughts += filter(None, [optional_text(fields, "thinking", here)])
                marker = marker_of(fields.get("signature")) or marker
            elif kind == "tool_use":
                calls.append(_call(fields, here))
                marker = marker_of(fields.get("id")) or marker
            elif kind != "redacted_thinking":
                # Redacted thinking is another provider's and cannot be read: it counts as reasoning that was dropped.
                parts += filter(None, [text_part(block, here)])
        return self._make.assistant(parts, "\n".join(thoughts), calls, marker=marker)


def _user(content: object, where: str) -> list[Turn]:
    if not isinstance(content, list):
        return [Turn(role="user", parts=text_parts(content, where))]
    turns: list[Turn] = []
    said: list[str] = []
    for index, block in enumerate(items(content, where)):  # pyright: ignore[reportUnknownArgumentType] - of JSON
        here = f"{where}[{index}]"
        fields = mapping(block, here)
        if fields.get("type") != "tool_result":
            said += filter(None, [text_part(block, here)])
            continue
        if said:
            turns.append(Turn(role="user", parts=tuple(said)))
            said = []
        answers = optional_text(fields, "tool_use_id", here)
        if answers is None:
            raise InvalidInput(f"{here}.tool_use_id is missing", field=f"{here}.tool_use_id")
        # `is_error` has no place in a chat template: what went wrong is what the content says.
        turns.append(
            Turn(role="tool", parts=text_parts(fields.get("content"), f"{here}.content"), tool_call_id=answers)
        )
    return [*turns, Turn(role="user", parts=tuple(said))] if said or not turns else turns


def _call(fields: Mapping[str, Any], where: str) -> TurnCall:
    given = fields.get("input")
    arguments: Any = {} if given is None else dict(mapping(given, f"{where}.input"))
    if arguments.keys() == {UNREADABLE} and isinstance(arguments[UNREADABLE], str):
        arguments = arguments[UNREADABLE]
    return TurnCall(
        id=optional_text(fields, "id", where),
        name=unicode_text(fields.get("name"), f"{where}.name"),
        # As text in every dialect, so that a template renders it alike in all of them.
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )


def _tool(tool: object, where: str) -> Tool:
    fields = mapping(tool, where)
    if fields.get("type") not in (None, "custom"):
        raise InvalidInput(f"{where}: a tool of type {fields['type']!r} is not supported", field=where)
    shown = {key: fields[key] for key in ("name", "description") if key in fields}
    return function_tool({**shown, "parameters": fields.get("input_schema")}, where)
