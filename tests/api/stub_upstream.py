"""An upstream on a real socket: vLLM's routes and shapes over the scripted engine, with switches to misbehave.

The shapes are those of vLLM 0.32 (`/tokenize`, `/detokenize`, `/v1/completions`, `/inference/v1/generate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.api.scripted_engine import ScriptedEngine

PATHS = {"completions": "/v1/completions", "generate": "/inference/v1/generate"}


class StubUpstream:
    """Answers with what `answers` holds next, else with `[3, 9]`; id 9 ends a turn."""

    def __init__(self) -> None:
        self.url = ""
        self.loop: asyncio.AbstractEventLoop
        self.engine = ScriptedEngine(max_model_len=1000)
        self.answers: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """Every path, in order."""
        self.missing: set[str] = {PATHS["generate"]}
        self.status: dict[str, int] = {}
        self.hang: set[str] = set()
        self.cut: set[str] = set()
        """Paths whose connection breaks in the middle of the answer."""
        self.edit: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """Changes a generation's answer."""
        self.dropped: set[int] = set()
        """Places of the pieces of a stream that are never sent."""
        self.endless = False
        """A stream ends without `[DONE]`."""
        self.processed = False
        self.weight_versions: list[dict[str, Any]] | None = None
        self.models: list[dict[str, Any]] = [{"id": "stub", "object": "model", "max_model_len": 1000}]
        self.info: dict[str, Any] | None = None
        self.key: str | None = None
        self.raw: list[tuple[str, bytes, dict[str, str]]] = []
        """Target, body and headers of what only a proxy sends here."""
        self.events: list[bytes] = [b"data: 1\n\n", b"data: 2\n\n"]
        self._released = asyncio.Semaphore(0)
        self.gone = threading.Event()
        """Set when a client hung up."""

    def release(self, events: int = 1) -> None:
        """Let a stream send its next events."""
        for _ in range(events):
            self.loop.call_soon_threadsafe(self._released.release)

    def app(self) -> Starlette:
        routes = {
            "/v1/models": (self._models, "GET"),
            "/version": (self._version, "GET"),
            "/tokenizer_info": (self._info, "GET"),
            "/tokenize": (self._tokenize, "POST"),
            "/detokenize": (self._detokenize, "POST"),
            PATHS["completions"]: (self._completions, "POST"),
            PATHS["generate"]: (self._generate, "POST"),
        }
        known = [Route(path, self._guarded(path, run), methods=[method]) for path, (run, method) in routes.items()]
        every = ["GET", "POST", "PUT", "DELETE"]
        return Starlette(routes=[*known, Route("/{path:path}", self._guarded("*", self._anything), methods=every)])

    def _guarded(self, path: str, run: Callable[[Any], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            self.asked.append(request.url.path)
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if path in self.missing:
                return JSONResponse({"detail": "Not Found"}, 404)
            if path in self.status:
                error = {"message": "Token id 123 is out of vocabulary", "type": "BadRequestError", "param": None}
                return JSONResponse({"error": error}, self.status[path])
            if path in self.hang:
                await request.body()
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                self.gone.set()
            if path in self.cut:
                return StreamingResponse(_broken(), headers={"content-type": "application/json"})
            return await run(request) if path == "*" else await run(await request.body())

        return guarded

    async def _models(self, _: bytes) -> Response:
        return JSONResponse({"object": "list", "data": self.models})

    async def _version(self, _: bytes) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _info(self, _: bytes) -> Response:
        return JSONResponse(self.info, 404 if self.info is None else 200)

    async def _tokenize(self, raw: bytes) -> Response:
        body = json.loads(raw)
        if "prompt" in body:
            ids = self.engine.encode(body["prompt"])
        else:
            if any(message["role"] == "robot" for message in body["messages"]):
                return JSONResponse({"error": {"message": "unknown role", "type": "BadRequestError"}}, 400)
            generation = body["add_generation_prompt"]
            ids = self.engine.render(body["messages"], body.get("tools"), add_generation_prompt=generation)
        return JSONResponse({"count": len(ids), "max_model_len": 1000, "tokens": ids, "token_strs": None})

    async def _detokenize(self, raw: bytes) -> Response:
        return JSONResponse({"prompt": self.engine.decode(json.loads(raw)["tokens"])})

    async def _completions(self, raw: bytes) -> Response:
        body = json.loads(raw)
        ids, logprobs, finish = self._sample(body["prompt"], body)
        named = [f"token_id:{token}" for token in ids]
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.engine.decode([token for token in ids if token != 9]),
            "logprobs": {"token_logprobs": logprobs, "tokens": named, "text_offset": [], "top_logprobs": []},
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
        }
        top = {"id": "cmpl", "object": "text_completion"}
        return self._answered(top, choice, body["prompt"], ids, stream=body.get("stream", False))

    async def _generate(self, raw: bytes) -> Response:
        body = json.loads(raw)
        ids, logprobs, finish = self._sample(body["token_ids"], body["sampling_params"])
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.engine.decode([token for token in ids if token != 9]),
            "logprobs": {"content": [{"token": chr(i), "logprob": p} for i, p in zip(ids, logprobs, strict=True)]},
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
            "weight_versions": self.weight_versions,
        }
        top = {"request_id": "r", "output_mode": "text", "prompt_token_ids": body["token_ids"]}
        return self._answered(top, choice, body["token_ids"], ids, stream=body.get("stream", False))

    def _sample(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], list[float], str]:
        allowed = params.get("allowed_token_ids")
        if allowed:
            ids = allowed if allowed == [9] else allowed * params["max_tokens"]
        else:
            self.prompts.append(prompt)
            self.bodies.append(params)
            ids = (self.answers.pop(0) if self.answers else [3, 9])[: params["max_tokens"]]
        logprobs = [0.0 if allowed and self.processed else -(index + 1) / 8 for index in range(len(ids))]
        return list(ids), logprobs, "stop" if ids[-1:] == [9] else "length"

    def _answered(
        self, top: dict[str, Any], choice: dict[str, Any], prompt: list[int], ids: list[int], *, stream: bool
    ) -> Response:
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        answer = {**top, "choices": [choice], "usage": usage}
        answer = self.edit(answer) if self.edit else answer
        if not stream:
            return JSONResponse(answer)
        events = [event for place, event in enumerate(_pieces(answer)) if place not in self.dropped]
        said = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        end = [] if self.endless else [b"data: [DONE]\n\n"]
        return Response(b"".join(said + end), headers={"content-type": "text/event-stream"})

    async def _anything(self, request: Request) -> Response:
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        self.raw.append((request.scope["raw_path"].decode() + query, body, dict(request.headers)))
        headers = {"x-kept": "yes", "connection": "x-hop", "x-hop": "no", "content-type": "text/event-stream"}
        if b'"stream"' in body:
            return StreamingResponse(self._stream(request), headers=headers)
        return Response(b'{"spaces" :  "kept",\n"\xc3\xa9": 1}' + body, 203, headers)

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        try:
            for event in self.events:
                await self._released.acquire()
                if event == b"cut":
                    raise ConnectionResetError
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.gone.set()
            raise


def _pieces(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """One piece a token, then the counts, as vLLM streams them."""
    (whole,) = answer["choices"]
    last = len(whole["token_ids"]) - 1
    pieces: list[dict[str, Any]] = []
    for place, token in enumerate(whole["token_ids"]):
        piece: dict[str, Any] = {"index": 0, "text": "" if token == 9 else chr(token), "token_ids": [token]}
        piece["logprobs"] = {name: values[place : place + 1] for name, values in whole["logprobs"].items()}
        piece["finish_reason"] = whole["finish_reason"] if place == last else None
        if place == last:
            piece["weight_versions"] = whole.get("weight_versions")
        if place == 0 and "prompt_token_ids" in whole:
            piece["prompt_token_ids"] = whole["prompt_token_ids"]
        first = {"prompt_token_ids": answer["prompt_token_ids"]} if place == 0 and "prompt_token_ids" in answer else {}
        pieces.append({**first, "choices": [piece]})
    return [*pieces, {"choices": [], "usage": answer["usage"]}]


async def _broken() -> AsyncIterator[bytes]:
    yield b'{"id": "half'
    raise ConnectionResetError


@contextlib.contextmanager
def stub_upstream() -> Iterator[StubUpstream]:
    """A stub that listens, until the block ends."""
    stub = StubUpstream()
    listener = socket.create_server(("127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(stub.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = threading.Event()

    async def main() -> None:
        stub.loop = asyncio.get_running_loop()
        listening.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    listening.wait()
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
