"""A streamed answer put together again, so that it is checked exactly as one that came whole.

Chunks carry pieces of text, ids and log-probabilities; the prompt's ids come with the first, counts with the last.
A piece that never came is missed by the checks: ids are as many as the server counts, log-probabilities as ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

__all__ = ["Assembly"]

_LISTS = ("token_logprobs", "tokens", "content")
_LAST = ("finish_reason", "stop_reason", "weight_versions")


class Assembly:
    """Chunks in, one answer out."""

    def __init__(self) -> None:
        self._body: dict[str, Any] = {}
        self._choices: dict[object, dict[str, Any]] = {}

    def feed(self, chunk: Mapping[str, Any]) -> str:
        """Take one chunk; the text it brought."""
        for name in ("prompt_token_ids", "usage"):
            if chunk.get(name) is not None:
                self._body[name] = chunk[name]
        said = ""
        for piece in cast("list[Any]", chunk.get("choices") or []):
            if isinstance(piece, dict):
                fields = cast("dict[str, Any]", piece)
                index = fields.get("index", 0)
                choice = self._choices.setdefault(index, {"index": index, "text": ""})
                said += _add(choice, fields)
        return said

    def answer(self) -> dict[str, Any]:
        """The answer as it would have come whole."""
        return {**self._body, "choices": list(self._choices.values())}


def _add(choice: dict[str, Any], piece: Mapping[str, Any]) -> str:
    text = piece.get("text")
    said = text if isinstance(text, str) else ""
    choice["text"] += said
    if piece.get("prompt_token_ids") is not None:
        choice["prompt_token_ids"] = piece["prompt_token_ids"]
    for name in _LAST:
        if piece.get(name) is not None:
            choice[name] = piece[name]
    _extend(choice, "token_ids", piece.get("token_ids"))
    given = piece.get("logprobs")
    if isinstance(given, dict):
        found = choice.setdefault("logprobs", {})
        for name in _LISTS:
            _extend(found, name, cast("dict[str, Any]", given).get(name))
    return said


def _extend(into: dict[str, Any], name: str, values: object) -> None:
    if isinstance(values, list):
        into.setdefault(name, []).extend(cast("list[Any]", values))
