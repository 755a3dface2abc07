"""The chat template: messages and tools in, one text out.

The template is a Jinja file like the ones models ship with, because the capture core has to cope with what such
templates do: they strip old thinking, write an end-of-turn that nobody sampled, and put a newline after it. Messages
are brought into one shape before they reach it, so that a string and one text part render alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenlake.ingest.engine import Message, Tool

__all__ = ["ChatTemplate"]

_PATH = Path(__file__).with_name("chat_template.jinja")
_ROLES = ("system", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatTemplate:
    """The compiled template; immutable and safe to share between threads."""

    def __init__(self) -> None:
        source = _PATH.read_text(encoding="utf-8")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self.digest = hashlib.sha256(source.encode()).hexdigest()
        """SHA-256 hex of the template file."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        add_generation_prompt: bool,
        keep_thinking: bool = False,
    ) -> str:
        """The text of a conversation.

        `keep_thinking` renders the thinking of every turn, as a conversation looks whose sampled ids are carried on.

        Raises:
            ValueError: an unknown role, content that is not text, or a tool call without a name.
        """
        return self._template.render(
            messages=[_normal(message, index) for index, message in enumerate(messages)],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            keep_thinking=keep_thinking,
        )


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _normal(message: Message, index: int) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in _ROLES:
        raise ValueError(f"messages[{index}]: role {role!r} is none of {', '.join(_ROLES)}")
    content = _text(message.get("content"), index)
    if role != "assistant":
        return {"role": role, "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ValueError(f"messages[{index}]: reasoning is not a text")
    if not reasoning and content.startswith("<think>") and "</think>" in content:
        reasoning, content = content.removeprefix("<think>").split("</think>", 1)
        content = content.lstrip("\n")
    calls = [_call(call, index) for call in message.get("tool_calls") or ()]
    return {"role": role, "content": content, "reasoning": reasoning.strip("\n"), "tool_calls": calls}


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part, index) for part in cast("Sequence[object]", content))
    raise ValueError(f"messages[{index}]: content is neither a text nor a list of text parts")


def _part(part: object, index: int) -> str:
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, object]", part)
        text = fields.get("text")
        if fields.get("type", "text") in _TEXT_PARTS and isinstance(text, str):
            return text
        raise ValueError(f"messages[{index}]: content part of type {fields.get('type')!r} is not text")
    raise ValueError(f"messages[{index}]: content part is not an object")


def _call(call: Mapping[str, Any], index: int) -> dict[str, str]:
    function: Mapping[str, Any] = call.get("function") or call
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"messages[{index}]: a tool call has no name")
    return {"name": name, "arguments": arguments if isinstance(arguments, str) else _to_json(arguments)}
