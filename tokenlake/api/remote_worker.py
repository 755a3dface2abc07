"""One capture worker as the gate speaks with it: a call goes out with `ng_capture`, text and coordinates come back.

What comes back is checked against what was asked: the call, its parent with that parent's chain hash, the writer, how
it was sampled. What contradicts itself or is missing is a failed capture under its name; the text may still be served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.api.dialects.dialect import ModelRequest
from tokenlake.api.remote_answer import RemoteAnswer, count_of, object_of
from tokenlake.errors import ConfigError, ContextOverflow, EngineFailed
from tokenlake.ingest.capture_ask import CALL_PATH, CAPTURE_PATH, CaptureAsk
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import AssistantTurn, SamplingParams, TurnDelta
from tokenlake.ingest.messages import to_messages
from tokenlake.ingest.prompter import Origin
from tokenlake.ingest.resolve import Cause
from tokenlake.ingest.upstream.client import UpstreamClient, UpstreamRefused
from tokenlake.ingest.upstream.facts import UpstreamFacts
from tokenlake.ingest.upstream.sampled import distribution
from tokenlake.ingest.versions import version_of
from tokenlake.ingest.visible import VisibleTurn

__all__ = ["RemoteWorker", "Said", "WorkerState", "ask_state"]

_FALLBACKS = ("splice_failed", "prefix_unavailable")
"""Why a worker may make a root of a call that was asked for with a parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a worker answered."""

    origin: Origin
    coords: Coords
    prompt_tokens: int
    completion_tokens: int
    turn: AssistantTurn | None
    """As vLLM's parsers read it; None where vLLM has none and `text` is what was sampled."""
    text: str
    finish_reason: str
    stop_sequence: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker says of itself."""

    worker_id: str
    lake_id: str
    parses: bool
    weight_version: int | None
    facts: UpstreamFacts


async def ask_state(client: UpstreamClient) -> WorkerState:
    """The state of the worker behind a client; raises `ConfigError` for a server that does not capture."""
    try:
        body = await client.get(CAPTURE_PATH)
    except EngineFailed as error:
        if error.detail.get("reason") != "upstream_no_route":
            raise
        raise ConfigError(
            f"the server {client.url} does not capture: start it with `tokenlake worker`, or say --capture gate"
        ) from error
    try:
        if body["captures"] is not True:
            raise ValueError("it says that it does not capture")
        return WorkerState(
            worker_id=str(body["worker_id"]),
            lake_id=str(body["lake_id"]),
            parses=bool(body["parses"]),
            weight_version=version_of(body["weights"]),
            facts=UpstreamFacts(
                name=str(body["model"]),
                max_model_len=int(body["max_model_len"]),
                stop_ids=tuple(int(token) for token in body["stop_ids"]),
                pad_id=int(body["pad_id"]),
                vocab_size=int(body["vocab_size"]),
                logprob_mode=body["logprob_mode"],
                opens_thinking=bool(body["opens_thinking"]),
                tokenizer_digest=str(body["tokenizer_digest"]),
                template_digest=str(body["template_digest"]),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the server {client.url} is no capture worker of this version: {error}") from error


class RemoteWorker:
    """Sends the captured calls of some rollouts to one worker; belongs to the service's event loop."""

    def __init__(self, client: UpstreamClient, state: WorkerState) -> None:
        self.client = client
        self.state = state

    async def call(
        self,
        request: ModelRequest,
        ask: CaptureAsk,
        opened: Callable[[int], None],
        on_delta: Callable[[TurnDelta], None] | None,
    ) -> Said:
        """Have one call answered and staged; cancelling aborts it. `opened` is told the prompt's length first.

        Raises `ContextOverflow` (its `detail` has `cause` and `prompt_len`), `ValueError` for a request that the worker
        refuses, and `EngineFailed`.
        """
        body = self._body(request, ask) | {"stream": on_delta is not None}
        try:
            if on_delta is None:
                answer = RemoteAnswer(await self.client.post(CALL_PATH, body, bounded=False))
            else:
                answer = await self._streamed(body, opened, on_delta)
        except UpstreamRefused as error:
            if error.kind == "context_overflow":
                report = object_of(error.body.get("ng_capture"))
                detail = {"cause": report.get("cause"), "prompt_len": report.get("prompt_tokens")}
                raise ContextOverflow(
                    "the worker says that the prompt leaves no room for an answer", **detail
                ) from error
            # Its own words may hold a token id, which no error of ours does.
            named = f"parameter {error.field}" if error.field else error.kind
            raise ValueError(f"the worker refuses this call: {named}") from error
        return self._said(answer, ask, request.params)

    async def _streamed(
        self, body: dict[str, Any], opened: Callable[[int], None], on_delta: Callable[[TurnDelta], None]
    ) -> RemoteAnswer:
        answer = RemoteAnswer({})
        # What vLLM does not read is read here: a tool call is held back until it is one.
        visible = None if self.state.parses else VisibleTurn(())
        if visible is not None and self.state.facts.opens_thinking:
            visible.feed("<think>")
        first = True
        async with contextlib.aclosing(self.client.events(CALL_PATH, body)) as events:
            async for event in events:
                if first:
                    first = False
                    opened(count_of(object_of(event.get("ng_capture")).get("prompt_tokens")))
                pieces = answer.feed(event)
                if visible is not None:
                    pieces = visible.feed("".join(piece.text for piece in pieces))
                for piece in pieces:
                    on_delta(piece)
        return answer

    def _body(self, request: ModelRequest, ask: CaptureAsk) -> dict[str, Any]:
        params, conversation = request.params, request.conversation
        return {
            "model": self.state.facts.name,
            "messages": to_messages(conversation.turns),
            **({"tools": list(conversation.tools)} if conversation.tools else {}),
            **distribution(params),
            "max_completion_tokens": params.max_tokens,
            "ng_capture": ask.to_json(),
        }

    def _said(self, answer: RemoteAnswer, ask: CaptureAsk, params: SamplingParams) -> Said:
        report = answer.report
        origin = _origin(report, ask)
        prompt_tokens, completion_tokens = (
            count_of(answer.usage.get(f"{part}_tokens")) for part in ("prompt", "completion")
        )
        return Said(
            origin=origin or Origin(ask.parent, ask.cause),
            coords=self._coords(report, ask, origin, params),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            turn=answer.turn() if self.state.parses else None,
            text=answer.content,
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            stop_sequence=answer.stop_reason if isinstance(answer.stop_reason, str) else None,
        )

    def _coords(
        self, report: Mapping[str, Any], ask: CaptureAsk, origin: Origin | None, params: SamplingParams
    ) -> Coords:
        given = report.get("coords")
        if not isinstance(given, dict):
            return _failed(ask, "coords_missing")
        try:
            coords = Coords.from_json(cast("dict[str, Any]", given))
        except ValueError:
            return _failed(ask, "coords_contradict")
        if coords.disposition == "capture_failed":
            return coords
        sampling = (params.temperature, params.top_p, params.top_k, self.state.facts.logprob_mode)
        staged = coords.place is not None and coords.place.writer == self.state.worker_id
        known = None not in (coords.digest, coords.prompt_digest, coords.extras_digest)
        whole = origin is not None and staged and known and coords.sampling == sampling
        return coords if whole else _failed(ask, "coords_contradict")


def _origin(report: Mapping[str, Any], ask: CaptureAsk) -> Origin | None:
    """Where the worker's prompt came from; None where that is not what was asked for."""
    parent, cause = ask.parent, report.get("cause")
    used = (report.get("parent_call_id"), report.get("parent_chain_hash"))
    if parent is not None and used == (parent.call_id, parent.chain_hash.hex()) and cause is None:
        return Origin(parent, None)
    if used != (None, None):
        return None
    fell_back = parent is not None and cause in _FALLBACKS
    return Origin(None, cast("Cause", cause)) if fell_back or (parent is None and cause == ask.cause) else None


def _failed(ask: CaptureAsk, reason: str) -> Coords:
    return Coords(
        disposition="capture_failed",
        reason=reason,
        rollout_id=ask.rollout_id,
        attempt=ask.attempt,
        call_id=ask.call_id,
        parent_call_id=ask.parent and ask.parent.call_id,
    )
