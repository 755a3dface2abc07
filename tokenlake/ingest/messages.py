"""Conversations without a dialect: what the wire makes different is made equal here, once.

Every dialect is read into the same list of `Turn`s, so that fingerprints, parents and renderings do not know which API
an agent speaks. A turn becomes exactly one template message, so a count of turns is a count of messages. What cannot be
captured faithfully as text (images, audio) is refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from tokenlake.ingest.engine import Message, Tool

__all__ = ["Conversation", "Turn", "TurnCall", "text_turn", "to_messages"]


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


_Thawed: Any = make_dataclass("_Thawed", [(field.name, field.type) for field in fields(Turn)], slots=True)
"""A `Turn` that can still be changed: to freeze it afterwards takes a tenth of what it takes to fill a frozen one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a request asks the model to continue."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    """Tools in OpenAI form; missing, null and empty are no tools."""


def text_turn(role: str, text: str, marker: str | None = None) -> Turn:
    """A turn of one text and nothing else, as nearly all of a long conversation is, at a third of the cost."""
    made = _Thawed(role, (text,), None, (), None, None, marker)
    made.__class__ = Turn
    return made


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
