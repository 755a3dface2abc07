"""NeMo-Gym's capture behind one route: its ledger resolves a call, its capture stages it, its ledger records it.

It reads `python -m bench.nemo_gym_gate FOLDER` in NeMo-Gym's environment, prints its URL as one JSON line, serves until
its input ends, and then prints the seconds that each call took between its body and its answer.

The route is no code of NeMo-Gym, and does the least that puts its parts together: the tokens before a call come from a
dict, the engine answers at once with as many tokens as the other contenders' does, nothing checks who calls.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from nemo_gym.token_id_capture import CaptureLedgerCommit, FileLineageStore
from nemo_gym.token_id_capture.staging import CaptureAdmission, RolloutTokenCapture
from starlette.requests import Request
from starlette.responses import Response

from bench.nemo_gym_peer import JsonLines, ledger_record, output_item
from tokenlake.ids import mint_call_id

_SAMPLED = 32
_STOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    coords: Any
    token_ids: list[int]
    """The whole sequence."""
    keys: tuple[str, ...]
    """What its chain was staged under."""


class _Gate:
    """One route."""

    def __init__(self, folder: Path) -> None:
        self._capture = RolloutTokenCapture(sink=JsonLines(folder / "stage.jsonl"), weight_version_fn=lambda: 1)
        self._store = FileLineageStore(folder / "ledger")
        self._staged: dict[str, _Staged] = {}
        self.handled: list[float] = []
        """Seconds of each call between its body and its answer."""

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/ng-rollout/{rollout_id}/v1/chat/completions", self._call, methods=["POST"])
        return app

    async def _call(self, request: Request) -> Response:
        body = await request.body()
        began = time.monotonic()
        messages: list[dict[str, Any]] = json.loads(body)["messages"]
        call_id, text = await self._answer(request.path_params["rollout_id"], messages)
        self.handled.append(time.monotonic() - began)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": f"chatcmpl-{call_id}", "object": "chat.completion", "created": int(time.time())}
        return Response(json.dumps({**answer, "model": "stub", "choices": [choice]}), media_type="application/json")

    async def _answer(self, rollout_id: str, messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
        items = [output_item(each["content"]) if each["role"] == "assistant" else each for each in messages]
        found = await self._store.resolve(rollout_id, items)
        known = len(messages) > 1
        if known != (found.match is not None):
            raise AssertionError(f"{rollout_id}: a request of {len(messages)} messages is resolved to {found}")
        before = None if found.match is None else self._staged[found.match.model_call_id]
        call_id = mint_call_id()
        admission: dict[str, Any] = {"mode": "text"}
        if before is not None:
            admission = {
                "mode": "token_in",
                "parent_call_id": before.coords.model_call_id,
                "prev_len": len(before.token_ids),
                "required_prefix_token_ids": before.token_ids,
                "parent_chain_hash": before.coords.chain_hash,
            }
        ticket = self._capture.begin_call(
            CaptureAdmission(rollout_id=rollout_id, model_call_id=call_id, **admission), weight_version=1
        )
        new = f"\x01user\x02{messages[-1]['content']}\x03\n\x01assistant\x02"
        prompt = [*(before.token_ids if before else ()), *map(ord, new)]
        text = (call_id * 2)[: _SAMPLED - 1]
        sampled = [*map(ord, text), _STOP]
        coords = await asyncio.to_thread(
            self._capture.complete_call,
            ticket,
            prompt_token_ids=prompt,
            generated_token_ids=sampled,
            generated_logprobs=[-0.5] * len(sampled),
        )
        if coords.disposition != "staged":
            raise AssertionError(f"{rollout_id} {call_id} was not staged: {coords}")
        staged = _Staged(
            coords=coords, token_ids=prompt + sampled, keys=(*(before.keys if before else ()), coords.staging_key)
        )
        await self._store.record(
            CaptureLedgerCommit(
                rollout_id=rollout_id,
                record=ledger_record(coords),
                staging_chain=staged.keys,
                request_items=items,
                response_items=[output_item(text)],
            )
        )
        self._staged[call_id] = staged
        return call_id, text


async def _serve(folder: Path) -> None:
    gate = _Gate(folder)
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(gate.app(), log_level="warning", timeout_keep_alive=75))
    serving = asyncio.create_task(server.serve([listener]))
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    # As `tokenlake serve` has it, for a service of which calls leave hardly a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    print(json.dumps(gate.handled), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
