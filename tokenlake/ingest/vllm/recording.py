"""One call's view of vLLM's engine: what it samples is taken as the engine says it, and staged before it is let on.

Whatever a parser makes of the text later, and whether it is streamed, the ids and log-probabilities are the engine's
own output. The last piece of an answer is held back until the record is durable, so nothing ends that is not staged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import RetryableRequestError

from tokenlake.ingest.coords import Coords
from tokenlake.ingest.prompter import Prompt
from tokenlake.ingest.routed_experts import NAME, Routing
from tokenlake.ingest.versions import Versions, stamped

__all__ = ["RecordedEngine", "Sampled"]

_UNKNOWN = Versions(None, None, None)


@dataclass(slots=True)
class Sampled:
    """What one generation has sampled so far."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] | None = field(default_factory=list[float])
    """None once the engine gave a token without one."""
    finish_reason: str | None = None
    versions: Versions = _UNKNOWN
    extras: dict[str, Any] | None = None
    fault: str | None = None
    """Why what the engine said cannot be captured: one of `CAPTURE_FAILURES`."""


class RecordedEngine:
    """vLLM's `EngineClient` for one captured call; everything but `generate` is the engine's own.

    `stage` makes the record durable and runs in a thread; a client that goes away meanwhile does not cut it short.
    `routing`: of a model whose routed experts the engine gives.
    """

    def __init__(
        self, engine: Any, prompt: Prompt, stage: Callable[[Sampled], Coords], routing: Routing | None = None
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._stage = stage
        self._routing = routing
        self._prev_len = 0 if prompt.parent is None else prompt.parent.cum_len
        self._ids = prompt.ids.tolist()
        self._echoed: Any = None
        self.coords: Coords | None = None
        """Where the call was staged, or why not; None until its generation has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any]:
        """As the engine's, with the last output held back until the call is staged.

        Raises `RetryableRequestError` (503) for a generation that was aborted and for a record that broke.
        """
        if list(prompt.get("prompt_token_ids") or ()) != self._ids:
            raise RetryableRequestError("the serving layer changed the prompt of a captured call")
        params = sampling_params.clone()
        if params.logprobs is None:
            params.logprobs = 0
        if self._routing is not None:
            params.routed_experts_prompt_start = self._routing.start(self._prev_len)
        sampled = Sampled()
        async with contextlib.aclosing(self._engine.generate(prompt, params, request_id, **more)) as outputs:
            async for output in outputs:
                self._take(output, sampled)
                if output.finished:
                    if sampled.finish_reason == "abort":
                        raise RetryableRequestError("the generation was aborted: send the call again")
                    if sampled.finish_reason != "error":
                        staging = asyncio.ensure_future(asyncio.to_thread(self._stage, sampled))
                        self.coords = await asyncio.shield(staging)
                yield output

    def _take(self, output: Any, sampled: Sampled) -> None:
        if len(output.outputs) != 1 or output.outputs[0].index != 0:
            sampled.fault = "choices_invalid"
        # Every output comes with the same list: it is compared once.
        if output.prompt_token_ids is None:
            sampled.fault = "prompt_ids_missing"
        elif output.prompt_token_ids is not self._echoed:
            self._echoed = output.prompt_token_ids
            if list(self._echoed) != self._ids:
                sampled.fault = "prompt_ids_differ"
        for piece in output.outputs[:1]:
            self._take_tokens(list(piece.token_ids), piece.logprobs, sampled)
            if piece.finish_reason is not None:
                sampled.finish_reason = piece.finish_reason
                spans = piece.weight_versions or ()
                sampled.versions = stamped([(span.version, span.start, span.end) for span in spans])
                if self._routing is not None:
                    self._take_experts(self._routing, piece.routed_experts, sampled)

    def _take_tokens(self, ids: list[int], positions: Any, sampled: Sampled) -> None:
        sampled.token_ids += ids
        if ids and positions is None:
            sampled.logprobs = None
        elif len(positions or ()) != len(ids):
            sampled.fault = "logprobs_misaligned"
        elif sampled.logprobs is not None:
            found: list[Any] = [(at or {}).get(token) for at, token in zip(positions or (), ids, strict=True)]
            if None in found:
                sampled.logprobs = None
            else:
                sampled.logprobs += [entry.logprob for entry in found]

    def _take_experts(self, routing: Routing, rows: Any, sampled: Sampled) -> None:
        cum_len = len(self._prompt.ids) + len(sampled.token_ids)
        try:
            sampled.extras = {NAME: routing.envelope(rows, prev_len=self._prev_len, cum_len=cum_len)}
        except ValueError:
            sampled.fault = "extras_invalid"
