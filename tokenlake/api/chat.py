"""The OpenAI chat-completions dialect: its request, its answer and its error shape.

What would change the sampled distribution or the rendering and is not built is refused by name; what is only a hint is
ignored. An answer holds no token id and no log-probability, and no key that could hold one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.api.settings import Reasoning
from tokenlake.errors import InvalidInput
from tokenlake.ingest.engine import AssistantTurn, SamplingParams
from tokenlake.ingest.messages import ChatReader, Conversation, Turn

__all__ = ["Answer", "ChatDialect", "ModelRequest"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prediction": (),
    "web_search_options": (),
}
"""Parameters that are accepted only when they change nothing: null, or one of these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call as the gate needs it, whatever dialect it came in."""

    conversation: Conversation
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was sampled, as every dialect serves it."""

    call_id: str
    model: str
    created: int
    """Seconds since the epoch."""
    turn: AssistantTurn
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int


class ChatDialect:
    """Reads and writes `/v1/chat/completions`."""

    name = "chat"

    def __init__(self, reader: ChatReader, reasoning: Reasoning) -> None:
        self._reader = reader
        self._reasoning = reasoning

    def request(self, body: Mapping[str, Any]) -> ModelRequest:
        """Parse a request body; raises `InvalidInput` naming the parameter."""
        for name, values in _NEUTRAL.items():
            value = body.get(name)
            if value is not None and not any(_same(value, neutral) for neutral in values):
                raise InvalidInput(f"{name} is not supported with this value", field=name)
        conversation = self._reader.conversation(body.get("messages"), body.get("tools"))
        limit = _number(body, "max_completion_tokens", integer=True, low=1)
        if limit is None:
            limit = _number(body, "max_tokens", integer=True, low=1)
        temperature = _number(body, "temperature", low=0, high=2)
        top_p = _number(body, "top_p", low=0, high=1)
        if top_p == 0:
            raise InvalidInput("top_p must be above 0", field="top_p")
        top_k = _number(body, "top_k", integer=True, low=-1)
        seed = _number(body, "seed", integer=True)
        params = SamplingParams(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=1.0 if top_p is None else float(top_p),
            top_k=0 if top_k is None or top_k < 0 else int(top_k),
            max_tokens=None if limit is None else int(limit),
            stop=_stop(body.get("stop")),
            seed=None if seed is None else int(seed),
        )
        return ModelRequest(conversation=conversation, params=params)

    def response_id(self, call_id: str) -> str:
        """The response id of a call."""
        return f"chatcmpl-{call_id}"

    def message(self, answer: Answer) -> dict[str, Any]:
        """The assistant message that is served, with the marker that makes its echo exact."""
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
        if turn.reasoning is not None:
            if self._reasoning == "fold":
                message["content"] = f"<think>{turn.reasoning}</think>{turn.content or ''}"
            else:
                message["reasoning"] = message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        message["ng_call_id"] = answer.call_id
        return message

    def turn(self, answer: Answer) -> Turn:
        """The served message as it will be read when it is echoed."""
        return self._reader.turn(self.message(answer))

    def body(self, answer: Answer) -> dict[str, Any]:
        """The response body."""
        return {
            "id": self.response_id(answer.call_id),
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [{"index": 0, "message": self.message(answer), "finish_reason": answer.finish_reason}],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    @staticmethod
    def error(status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        shape = "invalid_request_error" if status < 500 and status not in (401, 403) else kind
        return {"error": {"message": message, "type": shape, "param": field, "code": kind}}


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _number(
    body: Mapping[str, Any], name: str, *, integer: bool = False, low: float | None = None, high: float | None = None
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name} must be {kind}", field=name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidInput(f"{name} is out of range", field=name)
    return value


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in cast("list[object]", texts)):
        raise InvalidInput("stop must be a non-empty string or an array of them", field="stop")
    return tuple(cast("list[str]", texts))
