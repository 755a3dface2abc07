"""One captured call as a worker reads it and answers it; the same whatever samples.

A captured call is a chat completion with `ng_capture`. The answer has `ng_capture` too: what the prompt was, and where
the call was staged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from tokenlake.ingest.capture_ask import CaptureAsk
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import Message, Tool
from tokenlake.ingest.prompter import Prompt

__all__ = ["CapturedCall", "event", "refusal", "report"]

_TAKEN = {
    "model", "messages", "tools", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_completion_tokens", "stop", "seed", "n", "stream", "ng_capture",
}  # fmt: skip
"""What a captured call may say: more could change what is sampled without being recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """What was asked."""

    ask: CaptureAsk
    messages: list[Message]
    tools: list[Tool] | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Read a request; raises `ValueError` for one that cannot be captured."""
        unknown = sorted(set(body) - _TAKEN)
        if unknown:
            raise ValueError(f"a captured call does not take {', '.join(unknown)}")
        if body.get("n", 1) != 1:
            raise ValueError("a captured call has one choice: n must be 1")
        asked, messages, tools = body.get("ng_capture"), body.get("messages"), body.get("tools")
        if not isinstance(asked, dict) or not isinstance(messages, list) or not isinstance(tools, list | None):
            raise ValueError("a captured call has messages, and ng_capture that says which call it is")
        return cls(
            ask=CaptureAsk.from_json(cast("dict[str, Any]", asked)),
            messages=cast("list[Message]", messages),
            tools=cast("list[Tool] | None", tools),
        )


def report(prompt: Prompt, coords: Coords | None) -> dict[str, Any]:
    """`ng_capture` of an answer: what the prompt was, and where the call was staged."""
    return {
        "prompt_tokens": len(prompt.ids),
        "parent_call_id": prompt.parent and prompt.parent.call_id,
        "parent_chain_hash": prompt.parent and prompt.parent.chain_hash.hex(),
        "cause": prompt.cause,
        "coords": coords and coords.to_json(),
    }


def event(said: Mapping[str, Any]) -> str:
    """One event of a streamed answer."""
    return f"data: {json.dumps(said)}\n\n"


def refusal(kind: str, message: str, prompt: Prompt | None = None) -> dict[str, Any]:
    """The body of an error 400 in OpenAI's shape, with what the prompt was where there is one."""
    error: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": 400}}
    return error if prompt is None else {**error, "ng_capture": report(prompt, None)}
