"""The items of an OpenAI response. Their ids carry the call that served them (`marker.py`)."""

from __future__ import annotations

from typing import Any

from tokenlake.api.dialects.dialect import Answer
from tokenlake.api.dialects.marker import marked
from tokenlake.ingest.engine import ToolCall

__all__ = ["call_item", "message_item", "output", "reasoning_item", "usage"]

Item = dict[str, Any]


def output(answer: Answer) -> list[Item]:
    """The items of an answer; a message also where nothing else would stand for the turn when it is echoed."""
    call_id, turn = answer.call_id, answer.turn
    served: list[Item] = []
    if turn.reasoning is not None:
        served.append(reasoning_item(call_id, turn.reasoning))
    if turn.content is not None or not turn.tool_calls:
        served.append(message_item(call_id, turn.content or "", cut=answer.finish_reason == "length"))
    return served + [call_item(call_id, index, call) for index, call in enumerate(turn.tool_calls)]


def reasoning_item(call_id: str, text: str) -> Item:
    """What the model thought, as it thought it; no summary is made."""
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": marked("rs", call_id), "summary": [], "content": [part], "status": "completed"}


def message_item(call_id: str, text: str, *, cut: bool = False) -> Item:
    """What the model said; `cut` by a limit."""
    return {
        "type": "message",
        "id": marked("msg", call_id),
        "role": "assistant",
        "status": "incomplete" if cut else "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def call_item(call_id: str, index: int, call: ToolCall) -> Item:
    """One function call, its arguments as they were sampled."""
    return {
        "type": "function_call",
        "id": marked("fc", call_id, index),
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def usage(answer: Answer) -> dict[str, Any]:
    """Lengths of prompt and answer; reasoning is not counted apart."""
    prompt, completion = answer.head.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
