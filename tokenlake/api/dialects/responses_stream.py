"""OpenAI Responses, streamed: items that open, grow and close, then the whole response."""

from __future__ import annotations

from typing import Any, Protocol

from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest, rest
from tokenlake.api.dialects.responses_items import call_item, message_item, reasoning_item
from tokenlake.api.dialects.sse import COMMENT, event
from tokenlake.ingest.engine import ToolCall, TurnDelta

__all__ = ["ResponsesEncoder"]

_DELTAS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class Bodies(Protocol):
    """What is needed of the dialect."""

    def frame(self, request: ModelRequest, head: Head) -> dict[str, Any]:
        """A response that has no output yet."""
        ...

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:
        """The whole response."""
        ...

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        ...


class ResponsesEncoder:
    """Writes one answer as events of the Responses API.

    Text flows; the message closes, and function calls come, with the end.
    """

    keep_alive = COMMENT

    def __init__(self, bodies: Bodies, request: ModelRequest) -> None:
        self._bodies = bodies
        self._request = request
        self._number = -1
        self._index = -1
        self._call_id = ""
        self._open: str | None = None
        """Kind of the text item that is open."""
        self._shown: dict[str, str] = {}

    def start(self, head: Head) -> bytes:
        """The response exists and is in progress."""
        self._call_id = head.call_id
        frame = self._bodies.frame(self._request, head)
        return self._event("response.created", response=frame) + self._event("response.in_progress", response=frame)

    def delta(self, delta: TurnDelta) -> bytes:
        """Text that is certain."""
        out = b"" if self._open == delta.kind else self._close() + self._begin(delta.kind)
        self._shown[delta.kind] += delta.text
        return out + self._part(f"{_DELTAS[delta.kind]}.delta", delta=delta.text)

    def end(self, answer: Answer) -> bytes:
        """What is left of the text, the function calls, and the whole response."""
        out = [self.delta(delta) for delta in rest(self._shown, answer.turn)]
        calls = answer.turn.tool_calls
        if not calls and self._open != "content":
            out.append(self._close() + self._begin("content"))
        out.append(self._close(cut=answer.finish_reason == "length"))
        out += [self._call(index, call) for index, call in enumerate(calls)]
        body = self._bodies.body(self._request, answer)
        return b"".join([*out, self._event(f"response.{body['status']}", response=body)])

    def error(self, status: int, kind: str, message: str) -> bytes:
        """An error in place of the rest: flat as the API documents it, nested as its SDK looks for it."""
        body = self._bodies.error(status, kind, message, None)
        return self._event("error", code=kind, message=message, param=None, **body)

    def _begin(self, kind: str) -> bytes:
        self._open, self._shown[kind] = kind, ""
        self._index += 1
        item: dict[str, Any] = {**self._item(kind), "status": "in_progress", "content": []}
        part = self._item(kind)["content"][0]
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._part("response.content_part.added", part=part)

    def _close(self, *, cut: bool = False) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        item = self._item(kind, cut=cut)
        done = self._part(f"{_DELTAS[kind]}.done", kind, text=self._shown[kind])
        part = self._part("response.content_part.done", kind, part=item["content"][0])
        return done + part + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, index: int, call: ToolCall) -> bytes:
        self._index += 1
        item = call_item(self._call_id, index, call)
        where = {"item_id": item["id"], "output_index": self._index}
        opened = {**item, "arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=self._index, item=opened),
                self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
                self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
                self._event("response.output_item.done", output_index=self._index, item=item),
            )
        )

    def _item(self, kind: str, *, cut: bool = False) -> dict[str, Any]:
        if kind == "reasoning":
            return reasoning_item(self._call_id, self._shown[kind])
        return message_item(self._call_id, self._shown[kind], cut=cut)

    def _part(self, name: str, kind: str | None = None, **fields: Any) -> bytes:
        item = self._item(kind or self._open or "content")
        return self._event(name, item_id=item["id"], output_index=self._index, content_index=0, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)
