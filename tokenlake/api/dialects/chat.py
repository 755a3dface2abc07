"""OpenAI chat completions: the request, the answer, and the error shape that the OpenAI dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.api.dialects.chat_reader import ChatReader
from tokenlake.api.dialects.chat_stream import ChatEncoder, served_call, usage
from tokenlake.api.dialects.content import mapping
from tokenlake.api.dialects.dialect import Answer, ModelRequest
from tokenlake.api.dialects.parameters import flag, most_calls, refuse, sampling
from tokenlake.ingest.messages import Turn

__all__ = ["ChatDialect", "openai_error"]


class ChatDialect:
    """Reads and writes `/v1/chat/completions`; `fold` serves reasoning as a `<think>` block of the content."""

    name = "chat"

    def __init__(self, reader: ChatReader, *, fold: bool = False) -> None:
        self._reader = reader
        self._fold = fold

    def request(self, body: Mapping[str, Any]) -> ModelRequest:
        """Parse a request body; raises `InvalidInput` naming the parameter."""
        refuse(body, {})
        conversation = self._reader.conversation(body.get("messages"), body.get("tools"))
        options = mapping(body.get("stream_options") or {}, "stream_options")
        return ModelRequest(
            conversation=conversation,
            params=sampling(body, limit=("max_completion_tokens", "max_tokens")),
            stream=flag(body, "stream"),
            most_calls=most_calls(body),
            echo={"include_usage": flag(options, "include_usage")},
        )

    def response_id(self, call_id: str) -> str:
        """The response id of a call."""
        return f"chatcmpl-{call_id}"

    def text(self, answer: Answer) -> str:
        """The content of the served message."""
        return self._message(answer)["content"] or ""

    def turn(self, answer: Answer) -> Turn:
        """The served message as it will be read when it is echoed."""
        return self._reader.turn(self._message(answer))

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:  # noqa: ARG002 - of the protocol
        """The response body."""
        return {
            "id": self.response_id(answer.call_id),
            "object": "chat.completion",
            "created": answer.head.created,
            "model": answer.head.model,
            "choices": [{"index": 0, "message": self._message(answer), "finish_reason": answer.finish_reason}],
            "usage": usage(answer),
        }

    def encoder(self, request: ModelRequest) -> ChatEncoder:
        """A writer for one streamed answer."""
        return ChatEncoder(self, fold=self._fold, include_usage=request.echo["include_usage"])

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        return openai_error(status, kind, message, field)

    def _message(self, answer: Answer) -> dict[str, Any]:
        """The assistant message that is served, with the marker that makes its echo exact."""
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
        if turn.reasoning is not None:
            if self._fold:
                message["content"] = f"<think>{turn.reasoning}</think>{turn.content or ''}"
            else:
                message["reasoning"] = message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [served_call(call) for call in turn.tool_calls]
        elif message["content"] is None:
            message["content"] = ""
        message["ng_call_id"] = answer.call_id
        return message


def openai_error(status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
    """The error body of both OpenAI dialects."""
    shape = "invalid_request_error" if status < 500 and status not in (401, 403) else kind
    return {"error": {"message": message, "type": shape, "param": field, "code": kind}}
