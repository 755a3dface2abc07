"""The upstream's own chat template and tokenizer, over its `/tokenize` and `/detokenize`.

A rendering is two round trips (ids, then their text), and the splice renders the same short probe conversations for
every turn: answers to small requests are kept, bounded in bytes, under the exact request.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tokenlake.errors import EngineFailed
from tokenlake.ingest.engine import Message, Tool

__all__ = ["UpstreamTemplate"]

Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Posts a body to a path and waits for the answer."""

_CACHE_BYTES = 16_777_216
_LARGEST = 65_536
"""Characters of a request that is kept: whole conversations are rendered once each."""


class UpstreamTemplate:
    """Renders, encodes and decodes; safe to share between threads."""

    def __init__(self, model: str, ask: Ask) -> None:
        self.model = model
        self._ask = ask
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """Ids of the template's text; ValueError for what the template cannot express."""
        body: dict[str, Any] = {
            "messages": [_spelled(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            body["tools"] = list(tools)
        return self._tokens(body)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> str:
        """As `render`, before tokenization."""
        return self.decode(self.render(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens written in it included, nothing added around it."""
        return self._tokens({"prompt": text, "add_special_tokens": False}) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        if not ids:
            return ""
        text = self._cached("/detokenize", {"tokens": list(ids)}).get("prompt")
        if not isinstance(text, str):
            raise EngineFailed("the upstream's /detokenize answered no text", reason="upstream_malformed")
        return text

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        tokens: Any = self._cached("/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(
            type(token) is int and token >= 0 for token in cast("list[Any]", tokens)
        ):
            raise EngineFailed("the upstream's /tokenize answered no ids", reason="upstream_malformed")
        return cast("list[int]", tokens)

    def _cached(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        whole = {"model": self.model, **body}
        written = json.dumps([path, whole], ensure_ascii=False)
        if len(written) > _LARGEST:
            return self._ask(path, whole)
        key = hashlib.sha256(written.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found[0]
        answer = self._ask(path, whole)
        size = len(written) + 8 * len(answer.get("tokens") or answer.get("prompt") or ())
        with self._lock:
            if key not in self._kept:
                self._kept[key] = (answer, size)
                self._size += size
            while self._size > _CACHE_BYTES:
                _, (_, freed) = self._kept.popitem(last=False)
                self._size -= freed
        return answer


def _spelled(message: Message) -> Message:
    """The message in vLLM's spelling: it reads `reasoning` and hands it to templates under both names."""
    reasoning = message.get("reasoning_content")
    return {**message, "reasoning": reasoning} if reasoning else message
