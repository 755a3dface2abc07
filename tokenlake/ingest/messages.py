"""Conversations without a dialect: what the wire makes different is made equal here, once.

Every dialect is read into the same list of `Turn`s, so that fingerprints, parents and renderings do not know which API
an agent speaks. A turn becomes exactly one template message, so a count of turns is a count of messages. What cannot be
captured faithfully as text (images, audio) is refused by name, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import Message, Tool

__all__ = ["ChatReader", "Conversation", "Turn", "TurnCall", "to_messages"]

_TEXT_KINDS = frozenset({"text", "input_text", "output_text"})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_THINK = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCall:
    """One tool call in an assistant turn."""

    id: str | None
    """Linkage only: which tool result belongs to it. Never hashed as text."""
    name: str
    arguments: Any
    """JSON text as it was sent, or the value itself when the client sent an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of any dialect."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    parts: tuple[str, ...] = ()
    """Non-empty texts in order; missing, null and empty content are all no part."""
    reasoning: str | None = None
    """What an assistant turn thought, where the client kept it; None when absent or empty."""
    tool_calls: tuple[TurnCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool turn: the call it answers."""
    name: str | None = None
    marker: str | None = None
    """`ng_call_id` of an echoed assistant turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a request asks the model to continue."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    """Tools in OpenAI form; missing, null and empty are no tools."""


class ChatReader:
    """Reads OpenAI chat-completions messages.

    `strip` are patterns removed from system and developer text before anything sees it, so that a nonce or date neither
    breaks a match nor reaches the model. `unfold` says that this service serves reasoning folded into content; without
    it a leading `<think>` block of an assistant turn is content like any other.
    """

    def __init__(self, *, strip: Sequence[re.Pattern[str]] = (), unfold: bool = False) -> None:
        self._strip = tuple(strip)
        self._unfold = unfold

    def conversation(self, messages: object, tools: object = None) -> Conversation:
        """The conversation of a request; raises `InvalidInput` naming the field that is malformed or unsupported."""
        if not isinstance(messages, list) or not messages:
            raise InvalidInput("messages must be a non-empty array", field="messages")
        turns = tuple(
            self.turn(message, f"messages[{index}]") for index, message in enumerate(cast("list[object]", messages))
        )
        return Conversation(turns=turns, tools=_tools(tools))

    def turn(self, message: object, where: str = "message") -> Turn:
        """One message; also reads back the message that was served, so that both sides are normalized by one code."""
        if not isinstance(message, Mapping):
            raise InvalidInput(f"{where} must be an object", field=where)
        fields = cast("Mapping[str, Any]", message)
        role = fields.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidInput(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", field=f"{where}.role")
        parts = _parts(fields.get("content"), f"{where}.content")
        reasoning = None
        calls: tuple[TurnCall, ...] = ()
        if role == "assistant":
            for key in ("audio", "function_call"):
                if fields.get(key):
                    raise InvalidInput(f"{where}.{key} is not supported", field=f"{where}.{key}")
            reasoning = _text(fields, "reasoning", where) or _text(fields, "reasoning_content", where)
            parts += _some((_text(fields, "refusal", where),))
            calls = _calls(fields.get("tool_calls"), f"{where}.tool_calls")
            if self._unfold and reasoning is None and parts and (found := _THINK.match(parts[0])):
                reasoning = found[1] or None
                parts = _some((parts[0][found.end() :], *parts[1:]))
        elif role in ("system", "developer"):
            parts = _some(map(self._stripped, parts))
        tool_call_id = _text(fields, "tool_call_id", where) if role == "tool" else None
        if role == "tool" and tool_call_id is None:
            raise InvalidInput(f"{where}.tool_call_id is missing", field=f"{where}.tool_call_id")
        return Turn(
            role=role,
            parts=parts,
            reasoning=reasoning,
            tool_calls=calls,
            tool_call_id=tool_call_id,
            name=_text(fields, "name", where),
            marker=_text(fields, "ng_call_id", where) if role == "assistant" else None,
        )

    def _stripped(self, text: str) -> str:
        for pattern in self._strip:
            text = pattern.sub("", text)
        return text


def to_messages(turns: Sequence[Turn]) -> list[Message]:
    """Template messages, one for each turn; several texts of one turn are joined by a newline, as servers do."""
    return [_message(turn) for turn in turns]


def _message(turn: Turn) -> Message:
    message: Message = {"role": turn.role, "content": "\n".join(turn.parts)}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name is not None:
        message["name"] = turn.name
    return message


def _text(fields: Mapping[str, Any], key: str, where: str) -> str | None:
    value = fields.get(key)
    if value is None or value == "":
        return None
    return _unicode(value, f"{where}.{key}")


def _unicode(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{where} must be a string", field=where)
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidInput(f"{where} holds half a surrogate pair, which is not text", field=where)
    return value


def _parts(content: object, where: str) -> tuple[str, ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (_unicode(content, where),)
    if not isinstance(content, list):
        raise InvalidInput(f"{where} must be a string or an array of text parts", field=where)
    return _some(_part(part, f"{where}[{index}]") for index, part in enumerate(cast("list[object]", content)))


def _some(texts: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(text for text in texts if text)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return _unicode(part, where)
    if not isinstance(part, Mapping):
        raise InvalidInput(f"{where} must be a content part", field=where)
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind == "refusal":
        return _unicode(fields.get("refusal"), f"{where}.refusal")
    if kind not in _TEXT_KINDS:
        raise InvalidInput(
            f"{where}: content of type {kind!r} is not supported; this service captures text only", field=where
        )
    return _unicode(fields.get("text"), f"{where}.text")


def _calls(value: object, where: str) -> tuple[TurnCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be an array", field=where)
    return tuple(_call(item, f"{where}[{index}]") for index, item in enumerate(cast("list[object]", value)))


def _call(item: object, where: str) -> TurnCall:
    fields = _object(item)
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise InvalidInput(f"{where}.function must be an object", field=where)
    inner = cast("Mapping[str, Any]", function)
    name = _unicode(inner.get("name"), f"{where}.function.name")
    arguments: Any = inner.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str | dict):
        raise InvalidInput(f"{where}.function.arguments must be JSON text or an object", field=where)
    return TurnCall(id=_text(fields, "id", where), name=name, arguments=arguments)


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput("tools must be an array", field="tools")
    for index, tool in enumerate(cast("list[object]", value)):
        fields = _object(tool)
        function = fields.get("function")
        if fields.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidInput(f"tools[{index}] must be of type function", field=f"tools[{index}]")
        _unicode(cast("Mapping[str, Any]", function).get("name"), f"tools[{index}].function.name")
    return tuple(cast("list[Tool]", value))
