"""A capture worker: renders, splices, samples and stages one call, and answers text and coordinates.

It stands beside vLLM's own routes and touches none of them. A captured call is a chat completion with `ng_capture`: the
prompt is the parent's exact ids, read from the lake and joined with what the template writes after them; vLLM's serving
layer gets it ready-made, samples through a recording view of the engine, and parses tools and reasoning as ever.
"""

from __future__ import annotations

import asyncio
import copy
from array import array
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from tokenlake.errors import InvalidInput
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.capture_ask import CaptureAsk
from tokenlake.ingest.captured_call import CapturedCall, event, refusal, report
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.prompter import Prompt, Prompter
from tokenlake.ingest.routed_experts import Routing
from tokenlake.ingest.vllm.recording import RecordedEngine, Sampled
from tokenlake.ingest.worker_facts import WorkerFacts
from tokenlake.store.delta import Sampling

__all__ = ["CaptureWorker"]

_DONE = "data: [DONE]\n\n"


class CaptureWorker:
    """Takes the captured calls of one vLLM. `chat` is vLLM's own `OpenAIServingChat`."""

    def __init__(
        self, *, facts: WorkerFacts, chat: Any, prompter: Prompter, capture: CaptureCore, routing: Routing | None
    ) -> None:
        self.facts = facts
        self._chat = chat
        self._prompter = prompter
        self._capture = capture
        self._routing = routing

    async def health(self) -> dict[str, Any]:
        """What this worker is, and the label of the weights that it has loaded."""
        label = await self._chat.engine_client.get_weight_version()
        return {"captures": True, "weights": label, **asdict(self.facts)}

    async def relabel(self, version: int) -> None:
        """Say that the weights loaded now are the trainer's `version`; between two tokens of what runs."""
        await self._chat.engine_client.update_weight_version(str(version))

    async def call(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Answer one captured call; cancelling aborts its generation."""
        try:
            call = CapturedCall.read(body)
            ask = call.ask
            prompt = await asyncio.to_thread(self._prompter.build, call.messages, call.tools, ask.parent, ask.cause)
            room = self.facts.max_model_len - len(prompt.ids)
            if room < 1:
                full = refusal("context_overflow", "the prompt leaves no room for an answer", prompt)
                return JSONResponse(full, status_code=400)
            request = self._request(body, ask, prompt, room)
        except (InvalidInput, ValidationError, ValueError) as error:
            # A validation's own words repeat what was sent.
            said = "a field has a wrong value" if isinstance(error, ValidationError) else str(error)
            return JSONResponse(refusal("invalid_request_error", said), status_code=400)
        sampling = (request.temperature, request.top_p, request.top_k, self.facts.logprob_mode)
        engine = RecordedEngine(
            self._chat.engine_client,
            prompt,
            lambda sampled: self._staged(ask, prompt, sampled, sampling),
            self._routing,
        )
        # The serving object is vLLM's own but for the engine that it asks.
        chat = copy.copy(self._chat)
        chat.engine_client = engine
        made = await chat.create_chat_completion(request, raw_request)
        if isinstance(made, ErrorResponse):
            return JSONResponse(made.model_dump(), status_code=made.error.code)
        if request.stream:
            return StreamingResponse(_reported(made, prompt, engine), media_type="text/event-stream")
        return JSONResponse({**made.model_dump(), "ng_capture": report(prompt, engine.coords)})

    def _request(self, body: Mapping[str, Any], ask: CaptureAsk, prompt: Prompt, room: int) -> Any:
        asked = {name: value for name, value in body.items() if name != "ng_capture" and value is not None}
        limit = asked.get("max_completion_tokens", room)
        asked |= {
            "max_completion_tokens": min(limit, room),
            "kv_transfer_params": {"prompt_token_ids": prompt.ids.tolist()},
            # So that vLLM's own log names a call as lineage does.
            "request_id": ask.call_id,
        }
        if asked.get("stream"):
            asked["stream_options"] = {"include_usage": True}
        if not self.facts.parses_tools:
            asked["tool_choice"] = "none"
        if not self.facts.parses:
            # Markers of tools and thinking are special tokens of some models: the gate reads the turn from them.
            asked["skip_special_tokens"] = False
        return ChatCompletionRequest.model_validate(asked)

    def _staged(self, ask: CaptureAsk, prompt: Prompt, sampled: Sampled, sampling: Sampling) -> Coords:
        """Runs in a thread: the only heavy hop."""
        ticket = self._capture.begin(
            rollout_id=ask.rollout_id,
            attempt=ask.attempt,
            call_id=ask.call_id,
            parent=prompt.link,
            sampling=sampling,
        )
        if sampled.fault is not None:
            return self._capture.abort(ticket, sampled.fault)
        coords = self._capture.complete(
            ticket,
            prompt_token_ids=prompt.ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            weight_version=sampled.versions.first,
            weight_version_end=sampled.versions.last,
            weight_version_spans=sampled.versions.spans,
            extras=sampled.extras,
        )
        if coords.chain_hash is not None:
            sequence = prompt.ids.tobytes() + array("i", sampled.token_ids).tobytes()
            self._prompter.remember(prompt, coords.chain_hash, sequence)
        return coords


async def _reported(chunks: AsyncGenerator[str], prompt: Prompt, engine: RecordedEngine) -> AsyncGenerator[str]:
    """The stream of vLLM, between what the prompt was and where the call was staged."""
    yield event({"ng_capture": report(prompt, None)})
    async for chunk in chunks:
        if chunk == _DONE and engine.coords is not None:
            yield event({"ng_capture": report(prompt, engine.coords)})
        yield chunk
