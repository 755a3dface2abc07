"""What all dialects read alike: texts, content parts, tools, and turns with their reasoning and stripped preambles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import Tool
from tokenlake.ingest.messages import Turn, TurnCall, text_turn

__all__ = ["TurnMaker", "function_tool", "items", "mapping", "optional_text", "some", "text_parts", "unicode_text"]

_TEXT_KINDS = frozenset({"text", "input_text", "output_text"})
_THINK = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)


class TurnMaker:
    """Makes the turns whose text depends on how this service is set up.

    `strip` are patterns removed from system and developer text before anything sees it, so that a nonce or date neither
    breaks a match nor reaches the model. `unfold` says that this service serves reasoning folded into content; without
    it a leading `<think>` block of an assistant turn is content like any other.
    """

    def __init__(self, *, strip: Sequence[re.Pattern[str]] = (), unfold: bool = False) -> None:
        self._strip = tuple(strip)
        self._unfold = unfold

    def instructions(self, role: str, parts: Sequence[str], name: str | None = None) -> Turn:
        """A system or developer turn."""
        return Turn(role=role, parts=some(map(self._stripped, parts)), name=name)

    def assistant(
        self,
        parts: Sequence[str],
        reasoning: str | None,
        calls: Sequence[TurnCall],
        *,
        name: str | None = None,
        marker: str | None = None,
    ) -> Turn:
        """A turn that the model wrote."""
        parts = tuple(parts)
        if self._unfold and not reasoning and parts and (found := _THINK.match(parts[0])):
            reasoning = found[1]
            parts = some((parts[0][found.end() :], *parts[1:]))
        return Turn(
            role="assistant",
            parts=parts,
            reasoning=reasoning or None,
            tool_calls=tuple(calls),
            name=name,
            marker=marker,
        )

    def answer(self, text: str, marker: str | None) -> Turn:
        """A turn that the model wrote: one text."""
        if self._unfold:
            return self.assistant((text,), None, (), marker=marker)
        return text_turn("assistant", text, marker)

    def _stripped(self, text: str) -> str:
        for pattern in self._strip:
            text = pattern.sub("", text)
        return text


def unicode_text(value: object, where: str) -> str:
    """A text that has a UTF-8 form, or `InvalidInput`."""
    if not isinstance(value, str):
        raise InvalidInput(f"{where} must be a string", field=where)
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidInput(f"{where} holds half a surrogate pair, which is not text", field=where)
    return value


def optional_text(fields: Mapping[str, Any], key: str, where: str) -> str | None:
    """A text field; None when it is missing, null or empty."""
    value = fields.get(key)
    return None if value is None or value == "" else unicode_text(value, f"{where}.{key}")


def some(texts: Iterable[str | None]) -> tuple[str, ...]:
    """The texts that are not empty."""
    return tuple(text for text in texts if text)


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object, or `InvalidInput`."""
    if not isinstance(value, (dict, Mapping)):
        raise InvalidInput(f"{where} must be an object", field=where)
    return cast("Mapping[str, Any]", value)


def items(value: object, where: str) -> list[object]:
    """A JSON array, empty when it is missing or null, or `InvalidInput`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be an array", field=where)
    return cast("list[object]", value)


def text_parts(content: object, where: str) -> tuple[str, ...]:
    """The texts of a content field: a string, or an array of text parts in any dialect's spelling."""
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (unicode_text(content, where),)
    if not isinstance(content, list):
        raise InvalidInput(f"{where} must be a string or an array of text parts", field=where)
    return some(text_part(part, f"{where}[{index}]") for index, part in enumerate(cast("list[object]", content)))


def text_part(part: object, where: str) -> str:
    """The text of one content part; what is not text is refused by name."""
    if isinstance(part, str):
        return unicode_text(part, where)
    fields = mapping(part, where)
    kind = fields.get("type")
    if kind == "refusal":
        return unicode_text(fields.get("refusal"), f"{where}.refusal")
    if not isinstance(kind, str) or kind not in _TEXT_KINDS:
        raise InvalidInput(
            f"{where}: content of type {kind!r} is not supported; this service captures text only", field=where
        )
    return unicode_text(fields.get("text"), f"{where}.text")


def function_tool(function: Mapping[str, Any], where: str) -> Tool:
    """A tool in the one form that is hashed and rendered, its keys in one order.

    What is missing, null or empty is left out, and so is `strict`, which asks for constrained decoding.
    """
    name = unicode_text(function.get("name"), f"{where}.name")
    shown: dict[str, Any] = {"name": name}
    for key in ("description", "parameters", *sorted(function.keys() - {"name", "description", "parameters"})):
        value = function.get(key)
        if key != "strict" and value is not None and value != "":
            shown[key] = value
    return {"type": "function", "function": shown}
