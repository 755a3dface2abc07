"""The echo path, as people capture tokens who have no lake: the arrays travel with the agent's messages.

The twin of the gate over the same engine. Its answers carry the ids of prompt and answer and the log-probabilities in
the message, as NeMo-RL's and NeMo-Gym's servers do it; an agent that echoes whole messages carries them back with every
later call, and hands all of them to the trainer in the end. Rendering, splice and parsing are Tokenlake's own, so that
the two paths differ in how tokens travel and in nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tokenlake.api.answers import served_finish
from tokenlake.api.dialects import ChatDialect
from tokenlake.api.dialects.chat_reader import ChatReader
from tokenlake.api.dialects.content import TurnMaker
from tokenlake.api.dialects.dialect import Answer, Head
from tokenlake.api.dialects.sse import compact
from tokenlake.ids import mint_call_id
from tokenlake.ingest.engine import Engine
from tokenlake.ingest.messages import Conversation, to_messages
from tokenlake.ingest.splice import splice

__all__ = ["EchoTwin", "Row", "echoed_row"]

_PROMPT, _SAMPLED, _LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is trained on; the log-probabilities as the bits of their float32."""

    input_ids: list[int]
    token_mask: list[int]
    logprobs: bytes


class EchoTwin:
    """Chat completions over one engine, and the trainer's door that takes finished conversations."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dialect = ChatDialect(ChatReader(TurnMaker()))
        self.rows: dict[str, Row] = {}
        """What the trainer has, by rollout."""
        self.delivered = 0
        """Bytes of the conversations that it was sent."""

    def app(self) -> FastAPI:
        """Its routes; the engine runs while they are served."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
            await self._engine.start()
            try:
                yield
            finally:
                await self._engine.stop()

        app = FastAPI(lifespan=lifespan, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self._call, methods=["POST"])
        app.add_api_route("/trainer/{rollout_id}", self._deliver, methods=["POST"])
        return app

    async def _call(self, request: Request) -> Response:
        body = json.loads(await request.body())
        asked = self._dialect.request(body)
        prompt = await asyncio.to_thread(self._prompt, body["messages"], asked.conversation)
        head = Head(
            call_id=mint_call_id(),
            model=self._engine.name,
            created=int(time.time()),
            prompt_tokens=len(prompt),
        )
        made = await self._engine.generate(prompt, asked.params, request_id=head.call_id)
        turn = self._engine.parse(made.token_ids, made.text)
        finish = served_finish(turn, made.finish_reason)
        answer = Answer(head=head, turn=turn, finish_reason=finish, completion_tokens=len(made.token_ids))
        served = self._dialect.body(asked, answer)
        served["choices"][0]["message"] |= {
            _PROMPT: prompt.tolist(),
            _SAMPLED: made.token_ids,
            _LOGPROBS: made.logprobs,
        }
        return Response(compact(served), media_type="application/json")

    def _prompt(self, messages: Messages, conversation: Conversation) -> array[int]:
        """The ids that the last answer came with, and what the template writes after it."""
        turns, tools = to_messages(conversation.turns), conversation.tools or None
        for at in range(len(messages) - 1, -1, -1):
            if _SAMPLED in messages[at]:
                known = array("i", [*messages[at][_PROMPT], *messages[at][_SAMPLED]])
                return splice(self._engine, known, turns, at + 1, tools).prompt_ids
        return array("i", self._engine.render(turns, tools, add_generation_prompt=True))

    async def _deliver(self, request: Request, rollout_id: str) -> Response:
        body = await request.body()
        self.delivered += len(body)
        self.rows[rollout_id] = echoed_row(json.loads(body)["messages"])
        return Response(status_code=204)


def echoed_row(messages: Messages) -> Row:
    """A training row from what an agent carried; raises `ValueError` where its calls do not continue each other."""
    calls = [message for message in messages if _SAMPLED in message]
    ids = [*calls[-1][_PROMPT], *calls[-1][_SAMPLED]]
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for call in calls:
        start, end = len(call[_PROMPT]), len(call[_PROMPT]) + len(call[_SAMPLED])
        if [*call[_PROMPT], *call[_SAMPLED]] != ids[:end]:
            raise ValueError("an answer is no prefix of the last one")
        mask[start:end] = [1] * (end - start)
        logprobs[start:end] = call[_LOGPROBS]
    return Row(input_ids=ids, token_mask=mask, logprobs=array("f", logprobs).tobytes())
