"""OpenAI chat-completions messages, read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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
from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import Tool
from tokenlake.ingest.messages import Conversation, Turn, TurnCall, text_turn

__all__ = ["ChatReader"]

_PLAIN = 2
"""Fields of a message that has a role and a content and nothing else."""
_SERVED = frozenset({"role", "content", "refusal", "ng_call_id"})
"""Fields of an answer without tool calls as this service gives it."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatReader:
    """Reads messages and tools of a chat completion."""

    def __init__(self, make: TurnMaker) -> None:
        self._make = make

    def conversation(self, messages: object, tools: object = None) -> Conversation:
        """The conversation of a request; raises `InvalidInput` naming the field that is malformed or unsupported."""
        given = items(messages, "messages")
        if not given:
            raise InvalidInput("messages must be a non-empty array", field="messages")
        turns = tuple(
            self._plain(message) or self.turn(message, f"messages[{index}]") for index, message in enumerate(given)
        )
        shown = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(items(tools, "tools")))
        return Conversation(turns=turns, tools=shown)

    def turn(self, message: object, where: str = "message") -> Turn:
        """One message; also reads back the message that was served, so that both sides are normalized by one code."""
        fields = mapping(message, where)
        role = fields.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidInput(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", field=f"{where}.role")
        parts, name = text_parts(fields.get("content"), f"{where}.content"), optional_text(fields, "name", where)
        if role == "assistant":
            return self._assistant(fields, parts, name, where)
        if role in ("system", "developer"):
            return self._make.instructions(role, parts, name)
        answers = optional_text(fields, "tool_call_id", where) if role == "tool" else None
        if role == "tool" and answers is None:
            raise InvalidInput(f"{where}.tool_call_id is missing", field=f"{where}.tool_call_id")
        return Turn(role=role, parts=parts, tool_call_id=answers, name=name)

    def _plain(self, message: object) -> Turn | None:
        """The turn of a message that is a role and a text, as most of a long conversation is; None: look closer."""
        if not isinstance(message, dict):
            return None
        fields = cast("dict[str, Any]", message)
        role, text = fields.get("role"), fields.get("content")
        if not isinstance(text, str) or not text or not text.isascii():
            return None
        if role == "user" and len(fields) == _PLAIN:
            return text_turn("user", text)
        marker = fields.get("ng_call_id")
        if role != "assistant" or not fields.keys() <= _SERVED or fields.get("refusal") is not None:
            return None
        if marker is None or (isinstance(marker, str) and marker.isascii()):
            return self._make.answer(text, marker or None)
        return None

    def _assistant(self, fields: Mapping[str, Any], parts: tuple[str, ...], name: str | None, where: str) -> Turn:
        for key in ("audio", "function_call"):
            if fields.get(key):
                raise InvalidInput(f"{where}.{key} is not supported", field=f"{where}.{key}")
        calls = items(fields.get("tool_calls"), f"{where}.tool_calls")
        return self._make.assistant(
            parts + some((optional_text(fields, "refusal", where),)),
            optional_text(fields, "reasoning", where) or optional_text(fields, "reasoning_content", where),
            [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)],
            name=name,
            marker=optional_text(fields, "ng_call_id", where),
        )


def _call(item: object, where: str) -> TurnCall:
    fields = mapping(item, where)
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise InvalidInput(f"{where}.function must be an object", field=where)
    inner = mapping(function, where)  # pyright: ignore[reportUnknownArgumentType] - of JSON
    arguments: Any = inner.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str | dict):
        raise InvalidInput(f"{where}.function.arguments must be JSON text or an object", field=where)
    name = unicode_text(inner.get("name"), f"{where}.function.name")
    return TurnCall(id=optional_text(fields, "id", where), name=name, arguments=arguments)


def _tool(tool: object, where: str) -> Tool:
    fields = mapping(tool, where)
    function = fields.get("function")
    if fields.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidInput(f"{where} must be of type function", field=where)
    return function_tool(mapping(function, where), f"{where}.function")  # pyright: ignore[reportUnknownArgumentType] - of JSON
