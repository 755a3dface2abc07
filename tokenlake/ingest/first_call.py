"""A generation that ends with its first tool call: what `parallel_tool_calls: false` asks for.

The rule is that of a stop sequence: generation ends where the first whole call does, whatever was sampled after it. So
what is kept is exactly what was sampled under that rule, an end of turn after the call is not part of it, and nobody is
shown less than what the next prompt starts with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tokenlake.errors import EngineFailed
from tokenlake.ingest.engine import AssistantTurn, Generation

__all__ = ["Reader", "until_first_call"]


class Reader(Protocol):
    """What is needed of an engine."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of these ids."""
        ...

    def parse(self, token_ids: Sequence[int], text: str, *, calls: bool = True) -> AssistantTurn:
        """A generation as an assistant turn."""
        ...


def until_first_call(engine: Reader, generation: Generation) -> Generation:
    """The generation up to the id that completes its first tool call, or all of it where there is none.

    Decodes: for a thread. Raises `EngineFailed` where its ids do not say the calls that its text does.
    """
    ids = generation.token_ids
    if not engine.parse(ids, generation.text).tool_calls:
        return generation

    def text(length: int) -> str:
        return engine.decode(ids[:length], skip_special=True)

    def called(length: int) -> bool:
        return bool(engine.parse(ids[:length], text(length)).tool_calls)

    end = bisect_left(range(len(ids) + 1), True, key=called)
    if generation.fault is not None or end > len(ids):
        raise EngineFailed("the answer holds tool calls, and its ids do not say where the first one ends")
    spans = generation.weight_version_spans
    kept = (
        None if spans is None else [(version, start, min(last, end)) for version, start, last in spans if start < end]
    )
    return replace(
        generation,
        token_ids=ids[:end],
        logprobs=generation.logprobs[:end],
        finish_reason="stop",
        text=text(end),
        weight_version_end=kept[-1][0] if kept else generation.weight_version_end,
        weight_version_spans=kept,
        stop_sequence=None,
    )
