"""A capture worker's answer: vLLM's chat completion with `ng_capture` in it, whole or put together from its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tokenlake.errors import EngineFailed
from tokenlake.ingest.engine import AssistantTurn, ToolCall, TurnDelta

__all__ = ["RemoteAnswer", "count_of", "object_of"]


class RemoteAnswer:
    """Reads one answer; of a stream, `feed` takes what follows an empty body."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        choices = _choices(body)
        message = object_of(choices[0].get("message")) if choices else {}
        if body and not message:
            raise EngineFailed("the worker's answer holds no message", reason="upstream_malformed")
        self.content = str(message.get("content") or "")
        self.reasoning = str(message.get("reasoning") or "")
        self.finish_reason: Any = choices[0].get("finish_reason") if choices else None
        self.stop_reason: Any = choices[0].get("stop_reason") if choices else None
        self.usage = object_of(body.get("usage"))
        self.report = object_of(body.get("ng_capture"))
        self._calls: dict[int, dict[str, str]] = {}
        self._take_calls(message.get("tool_calls"))

    def feed(self, chunk: Mapping[str, Any]) -> list[TurnDelta]:
        """Take one event of a stream; the text that it brought."""
        self.report = object_of(chunk.get("ng_capture")) or self.report
        self.usage = object_of(chunk.get("usage")) or self.usage
        deltas: list[TurnDelta] = []
        for choice in _choices(chunk):
            delta = object_of(choice.get("delta"))
            reasoning, content = str(delta.get("reasoning") or ""), str(delta.get("content") or "")
            self.reasoning += reasoning
            self.content += content
            self._take_calls(delta.get("tool_calls"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = self.stop_reason if choice.get("stop_reason") is None else choice["stop_reason"]
            deltas += [TurnDelta(kind="reasoning", text=reasoning)] if reasoning else []
            deltas += [TurnDelta(kind="content", text=content)] if content else []
        return deltas

    def turn(self) -> AssistantTurn:
        """The message as vLLM's parsers read it."""
        calls = [
            ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"])
            for _, call in sorted(self._calls.items())
        ]
        return AssistantTurn(content=self.content or None, reasoning=self.reasoning or None, tool_calls=calls)

    def _take_calls(self, given: object) -> None:
        """Tool calls, or pieces of them: an id and a name come once, arguments in parts."""
        for place, item in enumerate(cast("list[Any]", given) if isinstance(given, list) else []):
            piece = object_of(item)
            function = object_of(piece.get("function"))
            index = piece.get("index")
            call = self._calls.setdefault(
                index if isinstance(index, int) else place, {"id": "", "name": "", "arguments": ""}
            )
            call["id"] = call["id"] or str(piece.get("id") or "")
            call["name"] = call["name"] or str(function.get("name") or "")
            call["arguments"] += str(function.get("arguments") or "")


def object_of(value: object) -> dict[str, Any]:
    """The JSON object; an empty one where there is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def count_of(value: object) -> int:
    """A count of tokens; raises `EngineFailed` for anything else."""
    if type(value) is not int or value < 0:
        raise EngineFailed("the worker does not say how many tokens there are", reason="upstream_malformed")
    return value


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("choices")
    return [object_of(item) for item in cast("list[Any]", given)] if isinstance(given, list) else []
