"""A capture worker on a real socket: the real prompter, capture core and writer over the scripted engine, without vLLM.

Its shapes are those of `tokenlake worker`, which tests/vllm holds against the real thing; `edit` makes it lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.api.scripted_engine import ScriptedEngine
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.capture_ask import CALL_PATH, CAPTURE_PATH, CaptureAsk
from tokenlake.ingest.engine import SamplingParams
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.prompter import Prompter
from tokenlake.ingest.shared_deltas import SharedDeltas
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.format import create_lake, read_lake


class StubWorker:
    """One worker; `engine` answers as scripted."""

    def __init__(self, lake: Path, worker_id: str = "w0") -> None:
        create_lake(lake)
        self.url = ""
        self.engine = ScriptedEngine(max_model_len=1000)
        self.writer = DeltaWriter(lake, worker_id, remember=64)
        self.prompter = Prompter(self.engine, Prefixes(SharedDeltas(lake, self.writer), 1_000_000), lambda: None)
        self.capture = CaptureCore(self.writer)
        self.bodies: list[dict[str, Any]] = []
        self.status: int | None = None
        self.gone = threading.Event()
        self.edit: Callable[[dict[str, Any]], None] = lambda report: None
        """Changes `ng_capture` of an answer, in place."""
        self.state: dict[str, Any] = {
            "captures": True,
            "weights": "default",
            "worker_id": worker_id,
            "lake_id": read_lake(lake)["lake_id"],
            "model": "scripted",
            "max_model_len": 1000,
            "stop_ids": [9],
            "pad_id": 0,
            "vocab_size": 1000,
            "logprob_mode": "raw",
            "opens_thinking": False,
            "parses": True,
            "parses_tools": True,
            "tokenizer_digest": "t",
            "template_digest": "t",
        }

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(CAPTURE_PATH, self._state, methods=["GET"]),
                Route(CALL_PATH, self._call, methods=["POST"]),
            ]
        )

    async def _state(self, _: Request) -> Response:
        return JSONResponse(self.state)

    async def _call(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if self.status is not None:
            return JSONResponse({"error": {"message": "token 123", "type": "x", "code": self.status}}, self.status)
        ask = CaptureAsk.from_json(body["ng_capture"])
        tools = body.get("tools")
        prompt = await asyncio.to_thread(self.prompter.build, body["messages"], tools, ask.parent, ask.cause)
        report: dict[str, Any] = {
            "prompt_tokens": len(prompt.ids),
            "parent_call_id": prompt.parent and prompt.parent.call_id,
            "parent_chain_hash": prompt.parent and prompt.parent.chain_hash.hex(),
            "cause": prompt.cause,
            "coords": None,
        }
        if len(prompt.ids) >= 1000:
            error = {"message": "full", "type": "context_overflow", "param": None, "code": 400}
            return JSONResponse({"error": error, "ng_capture": report}, 400)
        running = asyncio.ensure_future(self.engine.generate(prompt.ids, SamplingParams(), request_id=ask.call_id))
        while self.engine.hold and not running.done():
            if (await request.receive())["type"] == "http.disconnect":
                self.gone.set()
                return Response(status_code=499)
        made = await running
        ticket = self.capture.begin(
            rollout_id=ask.rollout_id,
            attempt=ask.attempt,
            call_id=ask.call_id,
            parent=prompt.link,
            sampling=(body["temperature"], body["top_p"], body["top_k"], "raw"),
        )
        coords = self.capture.complete(
            ticket,
            prompt_token_ids=prompt.ids,
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            finish_reason=made.finish_reason,
            weight_version=made.weight_version,
            weight_version_end=made.weight_version_end,
        )
        report["coords"] = coords.to_json()
        self.edit(report)
        usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(made.token_ids)}
        turn = self.engine.parse(made.token_ids, made.text)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
        message = {"role": "assistant", "content": turn.content, "reasoning": turn.reasoning, "tool_calls": calls}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else made.finish_reason, "stop_reason": None}
        if not body["stream"]:
            whole = {"choices": [{**choice, "message": message}], "usage": usage, "ng_capture": report}
            return JSONResponse(whole)
        pieces: list[dict[str, Any]] = [{"reasoning": turn.reasoning}] if turn.reasoning else []
        pieces += [{"content": char} for char in turn.content or ""]
        for index, call in enumerate(calls):
            whole_text = call["function"]["arguments"]
            head = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            pieces += [{"tool_calls": [head]}]
            pieces += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in whole_text]
        events = [
            {"ng_capture": {**report, "coords": None}},
            *({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces),
            {"choices": [{**choice, "delta": {}}]},
            {"choices": [], "usage": usage},
            {"ng_capture": report},
        ]
        said = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return Response(said, headers={"content-type": "text/event-stream"})


@contextlib.contextmanager
def stub_worker(lake: Path, worker_id: str = "w0") -> Iterator[StubWorker]:
    """A stub that listens, until the block ends."""
    stub = StubWorker(lake, worker_id)
    listener = socket.create_server(("127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(stub.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        stub.writer.close()
