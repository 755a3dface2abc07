"""Anthropic messages, streamed: content blocks that open, grow and close, one after the other."""

from __future__ import annotations

import json
from typing import Any, Protocol

from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest, rest
from tokenlake.api.dialects.marker import marked
from tokenlake.api.dialects.sse import event
from tokenlake.ingest.engine import TurnDelta

__all__ = ["AnthropicEncoder"]

_BLOCKS: dict[str, dict[str, str]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""How a block of each kind of text opens."""


class Bodies(Protocol):
    """What is needed of the dialect."""

    def frame(self, head: Head) -> dict[str, Any]:
        """A message that has no content yet."""
        ...

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:
        """The whole message."""
        ...

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        ...


class AnthropicEncoder:
    """Writes one answer as events of the Messages API.

    Text flows; the last block closes, and tool uses come, with the end.
    """

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, bodies: Bodies, request: ModelRequest) -> None:
        self._bodies = bodies
        self._request = request
        self._call_id = ""
        self._index = -1
        self._open: str | None = None
        """Kind of the text block that is open."""
        self._shown: dict[str, str] = {}

    def start(self, head: Head) -> bytes:
        """The message exists."""
        self._call_id = head.call_id
        return _event("message_start", message=self._bodies.frame(head))

    def delta(self, delta: TurnDelta) -> bytes:
        """Text that is certain."""
        block = _BLOCKS[delta.kind]
        out = b""
        if self._open != delta.kind:
            out, self._open = self._close() + self._begin(block), delta.kind
        self._shown[delta.kind] = self._shown.get(delta.kind, "") + delta.text
        return out + self._delta({"type": f"{block['type']}_delta", block["type"]: delta.text})

    def end(self, answer: Answer) -> bytes:
        """What is left of the text, the tool uses, and the event that ends the message."""
        body = self._bodies.body(self._request, answer)
        out = [*map(self.delta, rest(self._shown, answer.turn)), self._close()]
        for block in body["content"]:
            if block["type"] == "tool_use":
                out.append(self._begin({**block, "input": {}}))
                out.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])}))
                out.append(self._stop())
        stop = {key: body[key] for key in ("stop_reason", "stop_sequence")}
        out.append(_event("message_delta", delta=stop, usage=body["usage"]))
        return b"".join([*out, _event("message_stop")])

    def error(self, status: int, kind: str, message: str) -> bytes:
        """An error in place of the rest."""
        body = self._bodies.error(status, kind, message, None)
        return _event("error", error=body["error"])

    def _close(self) -> bytes:
        """Close the block that is open, a thinking block with its signature."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "reasoning":
            signed = self._delta({"type": "signature_delta", "signature": marked("sig", self._call_id)})
        return signed + self._stop()

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._index)


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
