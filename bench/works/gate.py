"""A call through the gate with an engine that samples at once, beside a plain route that answers at once.

Both are served by uvicorn in this process, and their agents, the same code, live in another. The plain route reads the
body, appends it to a file with one sync in a thread, and answers with as many bytes in the same form. NeMo-Gym's ledger
and capture stand behind one route in a process of their own.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from bench.agents import Agent, Played, play
from bench.measure import Sample, typical
from bench.peers import served
from bench.plan import Plan
from bench.soak import Soak, soak
from bench.table import Contender, Figure, Row
from tokenlake.api.serve import few_collections, in_thread
from tokenlake.ids import mint_call_id

__all__ = ["rows"]

_MANY = 64
_TEXT = 31
"""Characters that the engine says."""


def rows(plan: Plan) -> list[Row]:
    """The rows of the gate."""
    alone, many, turns = plan.size.gate
    ours_1, *others_1 = _contenders(plan, alone, turns, 1)
    ours, *others = _contenders(plan, many, turns, _MANY)

    def row(what: str, unit: str, ours: Contender, others: Sequence[Contender], measure: str) -> Row:
        floor, *peers = (Figure(each, measure) for each in others)
        return Row(work="gate", what=what, unit=unit, ours=Figure(ours, measure), floor=floor, peers=peers)

    return [
        row("a call as its agent sees it, 1 in flight", "ms", ours_1, others_1, "call"),
        row("overhead by the service's clock, 1 in flight", "ms", ours_1, others_1, "overhead"),
        row(f"{_MANY} calls in flight", "calls/s", ours, others, "rate"),
    ]


def _contenders(plan: Plan, rollouts: int, turns: int, in_flight: int) -> list[Contender]:
    """Ours, the floor, and NeMo-Gym where its environment is there."""

    def ours(folder: Path) -> dict[str, Sample]:
        found = soak(folder / "lake", rollouts=rollouts, turns=turns, in_flight=in_flight)
        if (found.calls, found.lost, found.duplicated, found.wrong_prefixes) != (rollouts * turns, 0, 0, 0):
            raise AssertionError(f"the gate lost or repeated a call: {_said(found)}")
        return _samples(found.latencies, found.overheads, found.seconds)

    def played(url: str) -> Played:
        agents: list[Agent] = [(f"soak{at}", f"{url}/ng-rollout/soak{at}/v1", "key") for at in range(rollouts)]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(play, (agents, turns, in_flight))

    def plain(folder: Path) -> dict[str, Sample]:
        route = _Plain(folder / "bodies")
        with closing(route), few_collections(), in_thread(route.app()) as (url, _):
            found = played(url)
        return checked(found, route.handled)

    def peer(python: Path, folder: Path) -> dict[str, Sample]:
        with served(python, folder) as (url, handled):
            found = played(url)
        return checked(found, handled)

    def checked(found: Played, handled: list[float]) -> dict[str, Sample]:
        if len(handled) != rollouts * turns:
            raise AssertionError(f"{len(handled)} of {rollouts * turns} calls were answered")
        return _samples(found.latencies, handled, found.seconds)

    made = [Contender(name="tokenlake", run=plan.fresh(ours)), Contender(name="FastAPI", run=plan.fresh(plain))]
    if "nemo-gym" in plan.peers:
        made.append(Contender(name="NeMo-Gym", run=plan.fresh(partial(peer, plan.peers["nemo-gym"]))))
    return made


def _samples(latencies: list[float], overheads: list[float], seconds: float) -> dict[str, Sample]:
    return {
        "call": typical(latencies),
        "overhead": typical(overheads),
        "rate": Sample(value=len(latencies) / seconds, latencies=latencies),
    }


def _said(found: Soak) -> str:
    return (
        f"{found.calls} calls, {found.lost} lost, {found.duplicated} duplicated, {found.wrong_prefixes} wrong prefixes"
    )


class _Plain:
    """One route."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.handled: list[float] = []
        """Seconds of each call between its body and its answer."""

    def close(self) -> None:
        os.close(self._handle)

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/ng-rollout/{rollout_id}/v1/chat/completions", self._call, methods=["POST"])
        return app

    async def _call(self, request: Request) -> Response:
        body = await request.body()
        began = time.monotonic()
        await asyncio.to_thread(self._append, body)
        self.handled.append(time.monotonic() - began)
        return Response(json.dumps(_answer(), separators=(",", ":")), media_type="application/json")

    def _append(self, body: bytes) -> None:
        os.write(self._handle, body)
        os.fdatasync(self._handle)


def _answer() -> dict[str, Any]:
    """As the gate's."""
    call_id = mint_call_id()
    message = {"role": "assistant", "content": (call_id * 2)[:_TEXT], "refusal": None, "ng_call_id": call_id}
    return {
        "id": f"chatcmpl-{call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "stub",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": _TEXT + 1, "total_tokens": 101 + _TEXT},
    }
