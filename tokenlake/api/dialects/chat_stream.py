"""OpenAI chat completions, streamed: chunks of one message, then `[DONE]`."""

from __future__ import annotations

from typing import Any

from tokenlake.api.dialects.dialect import Answer, Dialect, Head, rest
from tokenlake.api.dialects.sse import COMMENT, event
from tokenlake.ingest.engine import ToolCall, TurnDelta

__all__ = ["ChatEncoder", "served_call", "usage"]

_DONE = b"data: [DONE]\n\n"


class ChatEncoder:
    """Writes one answer as `chat.completion.chunk` events.

    Text flows; tool calls, the marker, the finish reason and usage come with the end.
    """

    keep_alive = COMMENT

    def __init__(self, dialect: Dialect, *, fold: bool, include_usage: bool) -> None:
        self._dialect = dialect
        self._fold = fold
        self._include_usage = include_usage
        self._chunk: dict[str, Any] = {}
        self._shown: dict[str, str] = {}

    def start(self, head: Head) -> bytes:
        """The chunk that names the role."""
        self._chunk = {
            "id": self._dialect.response_id(head.call_id),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        return self._write({"role": "assistant", "content": ""})

    def delta(self, delta: TurnDelta) -> bytes:
        """Text that is certain."""
        kind, text = delta.kind, delta.text
        first = kind not in self._shown
        self._shown[kind] = self._shown.get(kind, "") + text
        if kind == "content":
            return self._write({"content": (self._unfolded() if first else "") + text})
        if self._fold:
            return self._write({"content": ("<think>" if first else "") + text})
        return self._write({"reasoning": text, "reasoning_content": text})

    def end(self, answer: Answer) -> bytes:
        """What is left of the text, the tool calls, the finish reason, usage, and the terminator."""
        out = [self.delta(delta) for delta in rest(self._shown, answer.turn)]
        if "content" not in self._shown and (closing := self._unfolded()):
            out.append(self._write({"content": closing}))
        for index, call in enumerate(answer.turn.tool_calls):
            out.append(self._write({"tool_calls": [{"index": index, **served_call(call)}]}))
        out.append(self._write({"ng_call_id": answer.call_id}, answer.finish_reason))
        if self._include_usage:
            out.append(event({**self._chunk, "choices": [], "usage": usage(answer)}))
        return b"".join([*out, _DONE])

    def error(self, status: int, kind: str, message: str) -> bytes:
        """An error in place of the rest."""
        return event(self._dialect.error(status, kind, message, None))

    def _unfolded(self) -> str:
        """What closes a folded think block, where one is open."""
        return "</think>" if self._fold and "reasoning" in self._shown else ""

    def _write(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        empty = {"usage": None} if self._include_usage else {}
        return event({**self._chunk, "choices": [choice], **empty})


def served_call(call: ToolCall) -> dict[str, Any]:
    """A tool call as a message carries it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(answer: Answer) -> dict[str, int]:
    """Lengths of prompt and answer."""
    prompt, completion = answer.head.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
