"""Anthropic messages: the request, the answer as content blocks, token counts, and the error shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenlake.api.dialects.anthropic_reader import UNREADABLE, AnthropicReader
from tokenlake.api.dialects.anthropic_stream import AnthropicEncoder
from tokenlake.api.dialects.content import TurnMaker, mapping
from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest
from tokenlake.api.dialects.marker import marked
from tokenlake.api.dialects.parameters import Neutral, flag, most_calls, refuse, sampling
from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import ToolCall
from tokenlake.ingest.messages import Conversation, Turn

__all__ = ["AnthropicDialect", "anthropic_error"]

_NEUTRAL: Neutral = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "mcp_servers": ([],),
    "output_format": (),
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class AnthropicDialect:
    """Reads and writes `/v1/messages`."""

    name = "anthropic"

    def __init__(self, make: TurnMaker) -> None:
        self._reader = AnthropicReader(make)

    def request(self, body: Mapping[str, Any]) -> ModelRequest:
        """Parse a request body; raises `InvalidInput` naming the parameter."""
        conversation = self.conversation(body)
        if body.get("max_tokens") is None:
            raise InvalidInput("max_tokens is missing", field="max_tokens")
        params = sampling(body, limit=("max_tokens",), stop="stop_sequences")
        choice = mapping(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
        asked = {"tool_choice": choice.get("type")}
        if flag(choice, "disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
        return ModelRequest(
            conversation=conversation, params=params, stream=flag(body, "stream"), most_calls=most_calls(asked)
        )

    def conversation(self, body: Mapping[str, Any]) -> Conversation:
        """What a request says, which is all that counting its tokens needs."""
        refuse(body, _NEUTRAL)
        if mapping(body.get("output_config") or {}, "output_config").get("format") is not None:
            raise InvalidInput("output_config.format is not supported", field="output_config.format")
        return self._reader.conversation(body.get("system"), body.get("messages"), body.get("tools"))

    def response_id(self, call_id: str) -> str:
        """The response id of a call."""
        return marked("msg", call_id)

    def text(self, answer: Answer) -> str:
        """The text of the text block."""
        return answer.turn.content or ""

    def turn(self, answer: Answer) -> Turn:
        """The served blocks as they will be read when they are echoed."""
        return self._reader.assistant(_blocks(answer))

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:  # noqa: ARG002 - of the protocol
        """The response body."""
        stopped = answer.stop_sequence is not None and answer.finish_reason == "stop"
        return {
            **self.frame(answer.head),
            "content": _blocks(answer),
            "stop_reason": "stop_sequence" if stopped else _STOPS[answer.finish_reason],
            "stop_sequence": answer.stop_sequence if stopped else None,
            "usage": _usage(answer.head.prompt_tokens, answer.completion_tokens),
        }

    def frame(self, head: Head) -> dict[str, Any]:
        """A message that has no content yet."""
        return {
            "id": self.response_id(head.call_id),
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(head.prompt_tokens, 0),
        }

    def encoder(self, request: ModelRequest) -> AnthropicEncoder:
        """A writer for one streamed answer."""
        return AnthropicEncoder(self, request)

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        return anthropic_error(status, kind, message, field)


def anthropic_error(status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:  # noqa: ARG001
    """The error body of this dialect, whose shape has no place for a code or a field: the message says both."""
    shape = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": shape, "message": message}}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    call_id, turn = answer.call_id, answer.turn
    blocks: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": marked("sig", call_id)})
    if turn.content is not None:
        blocks.append({"type": "text", "text": turn.content})
    for index, call in enumerate(turn.tool_calls):
        block = {"type": "tool_use", "id": marked("toolu", call_id, index), "name": call.name, "input": _input(call)}
        blocks.append(block)
    return blocks


def _input(call: ToolCall) -> dict[str, Any]:
    """Arguments as the object that the dialect wants, or what stands for them where they are none."""
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
        # Half a surrogate pair is JSON as long as it is escaped, but a client that decoded it could not send it back.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: call.arguments}  # pyright: ignore[reportUnknownVariableType]


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "output_tokens": completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
