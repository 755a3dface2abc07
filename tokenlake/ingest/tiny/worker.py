"""The embedded engine as a capture worker: a process of its own, behind the same routes as a worker over vLLM.

For clusters of processes on machines without vLLM: trying a deployment, testing it. Needs the `serve` extra as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any, cast

from tokenlake.errors import Conflict, ContextOverflow, EngineFailed, InvalidInput, MissingExtra
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.capture_ask import CALL_PATH, CAPTURE_PATH, WEIGHTS_PATH
from tokenlake.ingest.captured_call import CapturedCall, event, refusal, report
from tokenlake.ingest.engine import AssistantTurn, Generation, SamplingParams, TurnDelta
from tokenlake.ingest.parent import end_with_parent
from tokenlake.ingest.ports import check_port
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.prompter import Prompt, Prompter
from tokenlake.ingest.shared_deltas import SharedDeltas
from tokenlake.ingest.tiny.engine import TinyEngine
from tokenlake.ingest.versions import next_version
from tokenlake.ingest.worker_facts import WorkerFacts
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.format import create_lake, read_lake

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("a worker over the embedded engine needs a server: pip install 'tokenlake[serve]'") from error

__all__ = ["EmbeddedWorker", "run"]

_REMEMBERED = 65_536
"""Keys of deltas; the gate mints a key for every call, and a worker stages it once."""

_NEUTRAL = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""What a gate says of what this engine cannot do."""


class EmbeddedWorker:
    """Takes captured calls for one embedded engine. Belongs to one event loop."""

    def __init__(self, *, facts: WorkerFacts, engine: TinyEngine, prompter: Prompter, capture: CaptureCore) -> None:
        self._facts = facts
        self._engine = engine
        self._prompter = prompter
        self._capture = capture

    def app(self) -> Starlette:
        """The routes that a gate asks, and no others."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            await self._engine.start()
            yield
            await self._engine.stop()

        routes = [
            Route(CAPTURE_PATH, self._health),
            Route(CALL_PATH, self._call, methods=["POST"]),
            Route(WEIGHTS_PATH, self._weights, methods=["PUT"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def _health(self, _: Request) -> Response:
        version = self._engine.weight_version
        weights = "default" if version is None else str(version)
        return JSONResponse({"captures": True, "weights": weights, **asdict(self._facts)})

    async def _weights(self, request: Request) -> Response:
        try:
            said = _object(await request.body()).get("version")
            await self._engine.set_weights(None, next_version(said, self._engine.weight_version))
        except InvalidInput as error:
            return _error(400, error.message)
        except Conflict as error:
            return _error(409, error.message)
        return await self._health(request)

    async def _call(self, request: Request) -> Response:
        try:
            body = _object(await request.body())
            call = CapturedCall.read(body)
            ask = call.ask
            prompt = await asyncio.to_thread(self._prompter.build, call.messages, call.tools, ask.parent, ask.cause)
            if len(prompt.ids) >= self._facts.max_model_len:
                full = refusal("context_overflow", "the prompt leaves no room for an answer", prompt)
                return JSONResponse(full, status_code=400)
            params = _params(body)
        except (InvalidInput, TypeError, ValueError) as error:
            return JSONResponse(refusal("invalid_request_error", str(error)), status_code=400)
        pieces: asyncio.Queue[TurnDelta | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answer(call, prompt, params, pieces.put_nowait))
        answering.add_done_callback(lambda _: pieces.put_nowait(None))
        if body.get("stream"):
            return StreamingResponse(_streamed(prompt, answering, pieces), media_type="text/event-stream")
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answering.done():
            answering.cancel()
            return Response(status_code=499)
        try:
            return JSONResponse(answering.result())
        except (ContextOverflow, EngineFailed, ValueError) as error:
            return _error(503 if isinstance(error, EngineFailed) else 400, str(error))

    async def _answer(
        self, call: CapturedCall, prompt: Prompt, params: SamplingParams, on_delta: Callable[[TurnDelta], None]
    ) -> dict[str, Any]:
        """A whole chat completion, once its record is durable."""
        made = await self._engine.generate(prompt.ids, params, request_id=call.ask.call_id, on_delta=on_delta)
        if made.finish_reason == "abort":
            raise EngineFailed("the generation was aborted: send the call again")
        coords = await asyncio.shield(asyncio.to_thread(self._stage, call, prompt, params, made))
        turn = self._engine.parse(made.token_ids, made.text)
        choice = {"index": 0, "finish_reason": made.finish_reason, "stop_reason": made.stop_sequence}
        return {
            "choices": [{**choice, "message": _message(turn)}],
            "usage": {"prompt_tokens": len(prompt.ids), "completion_tokens": len(made.token_ids)},
            "ng_capture": report(prompt, coords),
        }

    def _stage(self, call: CapturedCall, prompt: Prompt, params: SamplingParams, made: Generation) -> Any:
        ask = call.ask
        ticket = self._capture.begin(
            rollout_id=ask.rollout_id,
            attempt=ask.attempt,
            call_id=ask.call_id,
            parent=prompt.link,
            sampling=(params.temperature, params.top_p, params.top_k, self._facts.logprob_mode),
        )
        coords = self._capture.complete(
            ticket,
            prompt_token_ids=prompt.ids,
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            finish_reason=made.finish_reason,
            weight_version=made.weight_version,
            weight_version_end=made.weight_version_end,
            weight_version_spans=made.weight_version_spans,
        )
        if coords.chain_hash is not None:
            sequence = prompt.ids.tobytes() + array("i", made.token_ids).tobytes()
            self._prompter.remember(prompt, coords.chain_hash, sequence)
        return coords


def run(arguments: argparse.Namespace) -> int:
    """`tokenlake worker --engine tiny`."""
    parser = argparse.ArgumentParser(prog="tokenlake worker --engine tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    served = parser.parse_args(arguments.rest)
    check_port(served.port)
    create_lake(arguments.lake)
    if arguments.with_parent:
        end_with_parent()
    engine = TinyEngine()
    with contextlib.ExitStack() as held:
        writer = DeltaWriter(arguments.lake, arguments.worker_id, remember=_REMEMBERED)
        held.callback(writer.close)
        deltas = SharedDeltas(arguments.lake, writer)
        held.callback(deltas.close)
        facts = _facts(engine, writer.name, read_lake(arguments.lake)["lake_id"])
        prompter = Prompter(engine, Prefixes(deltas, arguments.prefix_cache_bytes), lambda: None)
        worker = EmbeddedWorker(facts=facts, engine=engine, prompter=prompter, capture=CaptureCore(writer))
        uvicorn.run(worker.app(), host=served.host, port=served.port, log_level="warning", access_log=False)
    return 0


def _facts(engine: TinyEngine, worker_id: str, lake_id: str) -> WorkerFacts:
    digests = engine.digests()
    return WorkerFacts(
        worker_id=worker_id,
        lake_id=lake_id,
        model=engine.name,
        max_model_len=engine.max_model_len,
        stop_ids=engine.stop_ids,
        pad_id=engine.pad_id,
        vocab_size=engine.vocab_size,
        logprob_mode=engine.logprob_mode,
        opens_thinking=False,
        parses=True,
        parses_tools=True,
        tokenizer_digest=digests["tokenizer"],
        template_digest=digests["template"],
    )


def _params(body: dict[str, Any]) -> SamplingParams:
    other = [name for name, neutral in _NEUTRAL.items() if body.get(name, neutral) != neutral]
    if other:
        raise ValueError(f"the embedded engine has no {', '.join(other)}")
    return SamplingParams(
        temperature=float(body.get("temperature", 1.0)),
        top_p=float(body.get("top_p", 1.0)),
        top_k=int(body.get("top_k", 0)),
        max_tokens=body.get("max_completion_tokens"),
        stop=tuple(body.get("stop") or ()),
        seed=body.get("seed"),
    )


def _message(turn: AssistantTurn) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.tool_calls
    ]
    return {"role": "assistant", "content": turn.content, "reasoning": turn.reasoning, "tool_calls": calls}


async def _streamed(
    prompt: Prompt, answering: asyncio.Future[dict[str, Any]], pieces: asyncio.Queue[TurnDelta | None]
) -> AsyncGenerator[str]:
    """Text as it becomes certain; what is left of the message, its end and where it was staged, once that is known."""
    told: dict[str, str] = {"content": "", "reasoning": ""}
    try:
        yield event({"ng_capture": report(prompt, None)})
        while (piece := await pieces.get()) is not None:
            told[piece.kind] += piece.text
            yield event({"choices": [{"index": 0, "delta": {piece.kind: piece.text}, "finish_reason": None}]})
        try:
            answer = answering.result()
        except (ContextOverflow, EngineFailed, ValueError) as error:
            yield event({"error": {"message": str(error), "type": "engine_failed", "code": 503}})
            return
        choice = answer["choices"][0]
        message = choice.pop("message")
        rest = {kind: (message[kind] or "")[len(text) :] for kind, text in told.items()}
        calls = [{**call, "index": index} for index, call in enumerate(message["tool_calls"])]
        yield event({"choices": [{**choice, "delta": {**rest, "tool_calls": calls}}]})
        yield event({"choices": [], "usage": answer["usage"]})
        yield event({"ng_capture": answer["ng_capture"]})
        yield "data: [DONE]\n\n"
    finally:
        answering.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _object(body: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("the body is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object")
    return cast("dict[str, Any]", value)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "error", "code": status}}, status)
