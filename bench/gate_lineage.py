"""W4 for Tokenlake: what the gate does for a call without tokens.

`resolve` is a request's way to its parent: the messages of its parsed body are read into turns, fingerprinted, and
looked up among the calls of the attempt. `record` is a call's way into lineage: the request digest, the fingerprint of
the served answer, the event, one durable append, and the fold into the state that the next request is resolved by. Both
go through the service's own objects. What a worker says of the call that it staged is made up before the clock.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.conversations import DELTA, Conversation, Seconds
from bench.stub_engine import StubEngine
from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest
from tokenlake.api.flight import Flight
from tokenlake.api.rollouts import Attempt
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment
from tokenlake.ids import mint_call_id
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import AssistantTurn
from tokenlake.ingest.fingerprint import History, json_digest, trace
from tokenlake.ingest.prompter import Origin
from tokenlake.ingest.resolve import Resolution
from tokenlake.store.delta import Place
from tokenlake.store.lake import OwnedLake

__all__ = ["play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    body: dict[str, Any]
    request: ModelRequest
    history: History
    found: Resolution


def play(path: Path, work: Sequence[Conversation], turns: int) -> Seconds:
    """Record every call and resolve the request after it; raises where that is not given to be its child."""
    with OwnedLake.open(path) as lake:
        environment = Environment(token="t", token_given=True, capability_key="ab" * 32, state_dir=path)
        service = Service(lake, StubEngine(), environment=environment)
        return asyncio.run(_Player(service, work).play(turns))


class _Player:
    def __init__(self, service: Service, work: Sequence[Conversation]) -> None:
        self._service, self._work = service, work
        self._seconds = Seconds()

    async def play(self, turns: int) -> Seconds:
        await self._service.ledger.append(*_registered(self._work))
        asked = [self._resolve(said, self._attempt(said), 0) for said in self._work]
        for turn in range(turns):
            for at, said in enumerate(self._work):
                attempt = self._attempt(said)
                call_id = await self._record(said, attempt, asked[at], turn)
                asked[at] = self._resolve(said, attempt, turn + 1)
                parent = asked[at].found.parent
                if parent is None or parent.call_id != call_id:
                    raise AssertionError(f"{said.rollout_id}: the request after turn {turn} is resolved to {parent}")
        return self._seconds

    def _attempt(self, said: Conversation) -> Attempt:
        rollout = self._service.control.rollout(said.rollout_id)
        if rollout is None:
            raise AssertionError(f"{said.rollout_id} is not registered")
        return rollout.current

    def _resolve(self, said: Conversation, attempt: Attempt, turn: int) -> _Resolved:
        body: dict[str, Any] = {"model": "stub", "messages": said.request(turn)}
        began = time.perf_counter()
        request = self._service.chat.request(body)
        history = trace(request.conversation)
        traced = time.perf_counter()
        found = attempt.lineage.resolve(history)
        end = time.perf_counter()
        if turn:
            self._seconds.resolve.append(end - began)
            self._seconds.look_up.append(end - traced)
        return _Resolved(body=body, request=request, history=history, found=found)

    async def _record(self, said: Conversation, attempt: Attempt, asked: _Resolved, turn: int) -> str:
        parent, call_id = asked.found.parent, mint_call_id()
        coords = _coords(attempt, call_id, asked.found, turn)
        answer = Answer(
            head=Head(call_id=call_id, model="stub", created=0, prompt_tokens=coords.cum_len - coords.sampled_tokens),
            turn=AssistantTurn(content=said.answers[turn], reasoning=None, tool_calls=[]),
            finish_reason="stop",
            completion_tokens=coords.sampled_tokens,
        )
        began = time.perf_counter()
        flight = Flight(
            attempt=attempt,
            request=asked.request,
            dialect=self._service.chat,
            request_digest=json_digest(asked.body),
            idempotency_digest=None,
            call_id=call_id,
        )
        committed = await self._service.recorder.commit(
            flight, asked.history, Origin(parent, asked.found.cause), answer, coords
        )
        self._seconds.record.append(time.perf_counter() - began)
        if not committed:
            raise AssertionError(f"{said.rollout_id}: turn {turn} was not committed")
        return call_id


def _registered(work: Sequence[Conversation]) -> list[dict[str, Any]]:
    sizes: dict[str, int] = {}
    for said in work:
        sizes[said.group_id] = sizes.get(said.group_id, 0) + 1
    events: list[dict[str, Any]] = [
        {"event_type": "group_registered", "group_id": name, "n": n} for name, n in sizes.items()
    ]
    return events + [
        {
            "event_type": "rollout_registered",
            "group_id": said.group_id,
            "rollout_id": said.rollout_id,
            "attempt": 0,
        }
        for said in work
    ]


def _coords(attempt: Attempt, call_id: str, found: Resolution, turn: int) -> Coords:
    """What a worker would say of a call that it staged."""
    parent = found.parent
    return Coords(
        disposition="staged",
        rollout_id=attempt.rollout_id,
        attempt=attempt.attempt,
        call_id=call_id,
        parent_call_id=parent and parent.call_id,
        root_call_id=call_id if parent is None else parent.root_call_id,
        depth=turn,
        mode="text" if parent is None else "token_in",
        prev_len=turn * DELTA,
        delta_len=DELTA,
        cum_len=(turn + 1) * DELTA,
        sampled_tokens=DELTA // 2,
        weight_version=1,
        weight_version_end=1,
        sampling=(1.0, 1.0, None, "processed"),
        finish_reason="stop",
        digest=secrets.token_bytes(32),
        chain_hash=secrets.token_bytes(32),
        extras_digest=secrets.token_bytes(32),
        prompt_digest=secrets.token_bytes(32),
        place=Place(writer="w0", segment=0, byte_offset=turn * 8192, byte_length=8192),
    )
