"""OpenAI Responses: the request, and the answer as items.

Nothing is stored for later: `previous_response_id` is refused, and a conversation goes on by sending its items again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.api.dialects.chat import openai_error
from tokenlake.api.dialects.content import TurnMaker, items, mapping
from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest
from tokenlake.api.dialects.marker import marked
from tokenlake.api.dialects.parameters import Neutral, flag, most_calls, refuse, sampling
from tokenlake.api.dialects.responses_items import output, usage
from tokenlake.api.dialects.responses_reader import ResponsesReader
from tokenlake.api.dialects.responses_stream import ResponsesEncoder
from tokenlake.errors import InvalidInput
from tokenlake.ingest.messages import Turn

__all__ = ["ResponsesDialect"]

_NEUTRAL: Neutral = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
}
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
"""What an answer repeats of its request, and what it says where the request did not."""


class ResponsesDialect:
    """Reads and writes `/v1/responses`."""

    name = "responses"

    def __init__(self, make: TurnMaker) -> None:
        self._reader = ResponsesReader(make)

    def request(self, body: Mapping[str, Any]) -> ModelRequest:
        """Parse a request body; raises `InvalidInput` naming the parameter."""
        refuse(body, _NEUTRAL)
        form = mapping(body.get("text") or {}, "text").get("format")
        if form not in (None, {"type": "text"}):
            raise InvalidInput("text.format is not supported with this value", field="text.format")
        if any("logprobs" in str(wanted) for wanted in items(body.get("include"), "include")):
            raise InvalidInput("include: log-probabilities are not served", field="include")
        conversation = self._reader.conversation(body.get("instructions"), body.get("input"), body.get("tools"))
        given = {key: body[key] for key in _ECHOED if body.get(key) is not None}
        return ModelRequest(
            conversation=conversation,
            params=sampling(body, limit=("max_output_tokens",)),
            stream=flag(body, "stream"),
            most_calls=most_calls(body),
            echo={**_ECHOED, **given},
        )

    def response_id(self, call_id: str) -> str:
        """The response id of a call."""
        return marked("resp", call_id)

    def text(self, answer: Answer) -> str:
        """The text of the message item."""
        return answer.turn.content or ""

    def turn(self, answer: Answer) -> Turn:
        """The served items as they will be read when they are echoed."""
        (turn,) = self._reader.turns(list(output(answer)))
        return turn

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:
        """The response body."""
        cut = answer.finish_reason == "length"
        return {
            **self.frame(request, answer.head),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output(answer),
            "usage": usage(answer),
        }

    def frame(self, request: ModelRequest, head: Head) -> dict[str, Any]:
        """A response that has no output yet."""
        return {
            "id": self.response_id(head.call_id),
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
            **request.echo,
        }

    def encoder(self, request: ModelRequest) -> ResponsesEncoder:
        """A writer for one streamed answer."""
        return ResponsesEncoder(self, request)

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        return openai_error(status, kind, message, field)
