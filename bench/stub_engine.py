"""An engine that samples at once: one id a character, every answer different, and all it saw is kept for the check."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenlake.ingest.engine import AssistantTurn, Generation, LogprobMode, SamplingParams, TurnDelta

__all__ = ["StubEngine"]

_STOP = 3


class StubEngine:
    """Answers of `length` tokens."""

    name = "stub"
    logprob_mode: LogprobMode = "processed"
    stop_ids = (_STOP,)
    max_model_len = 1_000_000
    vocab_size = 1_114_112
    pad_id = 0
    weight_version: int | None = 1
    running = True

    def __init__(self, length: int = 32) -> None:
        self.length = length
        self.seen: dict[str, tuple[array[int], array[int]]] = {}
        """Prompt and answer of each call, as arrays: the garbage collector of the measured process passes them by."""

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,  # noqa: ARG002
        *,
        request_id: str,
        on_delta: Callable[[TurnDelta], None] | None = None,  # noqa: ARG002
    ) -> Generation:
        """The call's own id, repeated: no two answers are alike."""
        text = (request_id * (self.length // len(request_id) + 1))[: self.length - 1]
        ids = [*map(ord, text), _STOP]
        self.seen[request_id] = (array("i", prompt_token_ids), array("i", ids))
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="stop",
            text=text,
            weight_version=1,
            weight_version_end=1,
            weight_version_spans=None,
        )

    async def abort(self, request_id: str) -> None:
        """Nothing runs long enough."""

    def render_text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """Role, content and an end of turn."""
        head = json.dumps(tools) if tools else ""
        turns = "".join(f"\x01{message['role']}\x02{message['content']}\x03\n" for message in messages)
        return head + turns + ("\x01assistant\x02" if add_generation_prompt else "")

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """As ids."""
        return self.encode(self.render_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """Code points."""
        return [*map(ord, text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:  # noqa: ARG002
        """Code points."""
        return "".join(map(chr, ids))

    def parse(self, token_ids: Sequence[int], text: str, *, calls: bool = True) -> AssistantTurn:  # noqa: ARG002
        """All of it is content."""
        return AssistantTurn(content=text, reasoning=None, tool_calls=[])

    def digests(self) -> dict[str, str]:
        """Names that never change."""
        return {"tokenizer": "stub", "template": "stub", "model": "stub"}

    async def set_weights(self, state: Mapping[str, Any] | None, version: int) -> None:  # noqa: ARG002
        """Take the label."""
        self.weight_version = version
