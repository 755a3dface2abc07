"""Answers that may be asked for again: the same key or an SDK's own retry gets the same answer and the same call.

Recent answers are in memory; older ones, and those from before a restart, are rebuilt from lineage.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tokenlake.api.dialects.dialect import Answer, Head
from tokenlake.errors import DamagedLake
from tokenlake.ingest.engine import AssistantTurn, ToolCall

__all__ = ["Answers", "answer_detail", "served_finish"]

Events = Callable[[str], list[dict[str, Any]]]
"""Lineage events of a rollout, for a thread."""


def served_finish(turn: AssistantTurn, finish_reason: str | None) -> str:
    """The finish reason the agent sees."""
    return "tool_calls" if turn.tool_calls else "length" if finish_reason == "length" else "stop"


def answer_detail(turn: AssistantTurn) -> dict[str, Any] | None:
    """What of an answer its served text does not say; None when the text says it all."""
    return asdict(turn) if turn.tool_calls or turn.reasoning is not None or turn.content is None else None


class Answers:
    """The latest answers by call id, and the way back to all others."""

    def __init__(self, events: Events, model: str, capacity: int) -> None:
        self._events = events
        self._model = model
        self._capacity = capacity
        self._held: OrderedDict[str, Answer] = OrderedDict()

    def put(self, answer: Answer) -> None:
        """Remember an answer that was just given."""
        self._held[answer.call_id] = answer
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    async def get(self, rollout_id: str, call_id: str) -> Answer:
        """The answer of a committed call."""
        held = self._held.get(call_id)
        if held is not None:
            return held
        for event in await asyncio.to_thread(self._events, rollout_id):
            if event["event_type"] == "call_committed" and event["call_id"] == call_id:
                answer = self._rebuilt(event)
                self.put(answer)
                return answer
        raise DamagedLake(f"call {call_id} of {rollout_id} is known but not in lineage", call_id=call_id)

    def _rebuilt(self, event: Mapping[str, Any]) -> Answer:
        detail = json.loads(event["detail"] or "{}")
        stored = detail.get("answer")
        if stored is None:
            turn = AssistantTurn(content=event["served_text"], reasoning=None, tool_calls=[])
        else:
            calls = [ToolCall(**call) for call in stored["tool_calls"]]
            turn = AssistantTurn(content=stored["content"], reasoning=stored["reasoning"], tool_calls=calls)
        head = Head(
            call_id=event["call_id"],
            model=self._model,
            created=int(event["at"].timestamp()),
            prompt_tokens=event["cum_len"] - event["sampled_tokens"],
        )
        return Answer(
            head=head,
            turn=turn,
            finish_reason=served_finish(turn, event["finish_reason"]),
            stop_sequence=detail.get("stop_sequence"),
            completion_tokens=event["sampled_tokens"],
        )
