"""Writing calls down: staged and committed, overflowed, or failed with a reason. Nothing is answered before.

Three outcomes of a call that sampled something: it is committed; it failed, is written down as such and is answered all
the same (`on_capture_failure: continue`); or it is refused and its rollout fails (`abort`). Where not even the failure
can be written down, there is no answer, or no more of it: it would spoil the rollout, and a restart would not know.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Mapping
from typing import Any, cast

from tokenlake.api.answers import answer_detail
from tokenlake.api.control import UNDELIVERED, Control
from tokenlake.api.dialects.dialect import Answer
from tokenlake.api.flight import Flight
from tokenlake.api.ledger import Ledger
from tokenlake.api.metrics import Metrics
from tokenlake.api.rollouts import Attempt
from tokenlake.api.traces import Traces
from tokenlake.api.trail import note
from tokenlake.errors import CaptureFailed, Conflict, StorageFailed
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import Generation
from tokenlake.ingest.fingerprint import History
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.prompter import Origin, Prompt
from tokenlake.ingest.resolve import UNRESOLVED, Cause, since
from tokenlake.store.space import FreeSpace

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder:
    """The durable side of the gate."""

    def __init__(
        self,
        *,
        control: Control,
        ledger: Ledger,
        capture: CaptureCore,
        prefixes: Prefixes,
        metrics: Metrics,
        traces: Traces,
        space: FreeSpace,
    ) -> None:
        self._control = control
        self._ledger = ledger
        self._capture = capture
        self._prefixes = prefixes
        self._metrics = metrics
        self._traces = traces
        self._space = space

    def check_space(self) -> None:
        """Raise `StorageFailed` where what a call samples could not be staged: nothing is sampled then."""
        self._space.for_deltas()

    async def capture(
        self,
        flight: Flight,
        history: History,
        prompt: Prompt,
        generation: Generation,
        answer: Answer,
        logprob_mode: str,
    ) -> None:
        """Stage and commit one call; returns when its answer may be given.

        Raises `Conflict` for a call that came too late, `CaptureFailed` where a failed capture aborts, `StorageFailed`
        where lineage takes neither the call nor its failure.
        """
        coords = await asyncio.to_thread(self._stage, flight, prompt, generation, logprob_mode)
        if await self.commit(flight, history, prompt, answer, coords):
            self._remember(flight, prompt, generation, coords)

    async def commit(self, flight: Flight, history: History, origin: Origin, answer: Answer, coords: Coords) -> bool:
        """Commit a call by what its capture answered; whether it was. Raises as `capture` does."""
        reason = coords.reason
        if coords.disposition != "capture_failed":
            reason = _contradiction(coords, flight, origin, answer)
        if reason is None and not self._takes_commits(flight.attempt):
            error = Conflict(f"rollout {flight.attempt.rollout_id} ended while this call ran")
            raise await self.unanswered(flight, "late", error)
        if reason is None:
            event = self._event(flight, history, origin, answer) | coords.columns()
            try:
                with self._traces.span("commit"):
                    await self._ledger.commit({**event, "reason": origin.cause})
            except Conflict:
                reason = "call_id_conflict"
            except StorageFailed:
                reason = "commit_failed"
            else:
                note(mode=coords.mode, cause=origin.cause)
                self._metrics.committed(coords.mode, flight.dialect.name, origin.cause)
                self._metrics.stage_bytes.inc(0 if coords.place is None else coords.place.byte_length)
                return True
        self._metrics.capture_failures.labels(reason).inc()
        if self._control.policy.get("on_capture_failure") == "abort":
            refused = CaptureFailed("this call could not be captured and was discarded", reason=reason)
            await self.unanswered(flight, reason, refused)
            await self._ledger.append(
                {**flight.names, "call_id": None, "event_type": "rollout_failed", "reason": "capture_failed"}
            )
            raise refused
        await self._failed(flight, reason, answered=True)
        return False

    async def overflow(self, flight: Flight, history: History, origin: Origin, answer: Answer) -> None:
        """Write down a call whose prompt left no room and that is answered with an empty turn."""
        event = self._event(flight, history, origin, answer)
        parent = origin.parent and origin.parent.call_id
        await self._ledger.append(
            {**event, "event_type": "call_overflowed", "parent_call_id": parent, "finish_reason": "length"}
        )

    async def unanswered(self, flight: Flight, reason: str, error: Exception) -> Exception:
        """Record a call that the agent gets no answer of, or no more of, and hand back what to raise."""
        await self._failed(flight, reason, answered=flight.cut_off())
        return error

    async def delivered(self, attempt: Attempt, call_id: str, *, delivered: bool) -> None:
        """Record that nobody waited for the answer of a committed call, or that a retry got it after all."""
        known = call_id in attempt.undelivered
        if call_id not in attempt.calls or attempt.end is not None or known is not delivered:
            return
        event = {
            "group_id": split_rollout_id(attempt.rollout_id)[0],
            "rollout_id": attempt.rollout_id,
            "attempt": attempt.attempt,
            "call_id": call_id,
            "event_type": "call_failed",
            "reason": UNDELIVERED,
            "answered": False,
            "detail": json.dumps({"delivered": True}) if delivered else None,
        }
        await self._ledger.append(event)

    def _stage(self, flight: Flight, prompt: Prompt, generation: Generation, logprob_mode: str) -> Coords:
        """Runs in a thread: the only heavy hop."""
        params = flight.request.params
        ticket = self._capture.begin(
            rollout_id=flight.attempt.rollout_id,
            attempt=flight.attempt.attempt,
            call_id=flight.call_id,
            parent=prompt.link,
            sampling=(params.temperature, params.top_p, params.top_k, logprob_mode),
        )
        if generation.fault is not None:
            return self._capture.abort(ticket, generation.fault)
        with self._metrics.stage.time(), self._traces.span("stage"):
            return self._capture.complete(
                ticket,
                prompt_token_ids=prompt.ids,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                finish_reason=generation.finish_reason,
                weight_version=generation.weight_version,
                weight_version_end=generation.weight_version_end,
                weight_version_spans=generation.weight_version_spans,
            )

    def _remember(self, flight: Flight, prompt: Prompt, generation: Generation, coords: Coords) -> None:
        if coords.chain_hash is None or flight.call_id not in flight.attempt.calls:
            return
        try:
            sequence = prompt.ids.tobytes() + array("i", generation.token_ids).tobytes()
        except TypeError:
            # Ids that came as text are read back from the lake when they are needed.
            return
        self._prefixes.put(prompt.parent, coords.chain_hash, sequence)
        self._metrics.evictions.set(self._prefixes.evictions)

    def _event(self, flight: Flight, history: History, origin: Origin, answer: Answer) -> dict[str, Any]:
        after = history.answered(flight.dialect.turn(answer))
        detail: Mapping[str, Any] = {
            "preamble": after.preamble.hex(),
            "turns": after.turns,
            "reasoning": [(turn, digest.hex()) for turn, digest in since(after, origin.parent)] or None,
            "seed": history.fingerprint.hex() if origin.cause == "seeded" else None,
            "poison": "unresolved_parent" if self._poisons(origin.cause) else None,
            "answer": answer_detail(answer.turn),
            "stop_sequence": answer.stop_sequence,
        }
        return {
            **flight.names,
            "response_id": flight.dialect.response_id(flight.call_id),
            "dialect": flight.dialect.name,
            "fingerprint": after.fingerprint,
            "context_digest": after.context,
            "request_digest": flight.request_digest,
            "idempotency_digest": flight.idempotency_digest,
            "served_text": flight.dialect.text(answer),
            "detail": json.dumps({key: value for key, value in detail.items() if value is not None}),
        }

    async def _failed(self, flight: Flight, reason: str, *, answered: bool) -> None:
        """Write a failure down. Raises `StorageFailed` when the answer may not be given because that was refused."""
        note(reason=reason)
        event = {**flight.names, "event_type": "call_failed", "reason": reason, "answered": answered}
        try:
            await self._ledger.append(event)
        except StorageFailed as error:
            if answered and flight.cut_off():
                # Text of it has gone out: it poisons from memory, until the attempt ends and it is written first.
                self._control.apply({**event, "at": flight.attempt.touched_at})
                flight.attempt.unsaved += (event,)
            if answered:
                raise
            # The agent gets an error for this call either way, and a call it has no answer of spoils nothing.
            _log.warning("call %s failed (%s), which could not be written down: %s", flight.call_id, reason, error)

    def _takes_commits(self, attempt: Attempt) -> bool:
        rollout = self._control.rollout(attempt.rollout_id)
        return rollout is not None and rollout.current is attempt and attempt.end is None and not attempt.released

    def _poisons(self, cause: Cause | None) -> bool:
        policy = self._control.policy.get("on_unresolved", "root")
        action = cast("dict[str, str]", policy).get(cause or "", "root") if isinstance(policy, dict) else policy
        return cause in UNRESOLVED and action == "poison"


def _contradiction(coords: Coords, flight: Flight, origin: Origin, answer: Answer) -> str | None:
    """Whether the coordinates are of the call that was asked for."""
    parent, sampled = origin.parent, answer.completion_tokens
    attempt = flight.attempt
    asked = (
        *(attempt.rollout_id, attempt.attempt, flight.call_id),
        *((None, 0) if parent is None else (parent.call_id, parent.cum_len)),
        *(answer.head.prompt_tokens + sampled, sampled),
    )
    given = (
        *(coords.rollout_id, coords.attempt, coords.call_id, coords.parent_call_id, coords.prev_len),
        *(coords.prev_len + coords.delta_len, coords.sampled_tokens),
    )
    whole = coords.cum_len == coords.prev_len + coords.delta_len and coords.chain_hash is not None
    return None if asked == given and whole else "coords_contradict"
