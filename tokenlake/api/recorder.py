"""Writing calls down: staged and committed, overflowed, or failed with a reason. Nothing is answered before.

Three outcomes of a call that sampled something: it is committed; it failed, is written down as such and is answered all
the same (`on_capture_failure: continue`); or it is refused and its rollout fails (`abort`). Where not even the failure
can be written down, there is no answer, or no more of it: it would spoil the rollout, and a restart would not know.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Coroutine, Mapping
from typing import Any, cast

from tokenlake.api.answers import answer_detail
from tokenlake.api.control import UNDELIVERED, Control, Event
from tokenlake.api.dialects.dialect import Answer
from tokenlake.api.flight import Flight
from tokenlake.api.ledger import Ledger
from tokenlake.api.metrics import Metrics
from tokenlake.api.recording import Recording, checked
from tokenlake.api.rollouts import Attempt
from tokenlake.api.traces import Traces
from tokenlake.api.trail import note
from tokenlake.errors import CaptureFailed, Conflict, StorageFailed
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.engine import Generation, LogprobMode
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
        logprob_mode: LogprobMode,
    ) -> None:
        """Stage and commit one call; returns when its answer may be given.

        Raises `Conflict` for a call that came too late, `CaptureFailed` where a failed capture aborts, `StorageFailed`
        where lineage takes neither the call nor its failure.
        """
        recording = Recording(
            flight,
            prompt,
            generation,
            answer,
            {**self._event(flight, history, prompt, answer), "reason": prompt.cause},
            capture=self._capture,
            logprob_mode=logprob_mode,
        )
        if await self._committed(flight, prompt, self._ledger.capture(recording)):
            self._remember(flight, prompt, generation, recording.coords)

    async def commit(self, flight: Flight, history: History, origin: Origin, answer: Answer, coords: Coords) -> bool:
        """Commit a call by what its capture answered; whether it was. Raises as `capture` does."""

        async def written() -> Event | None:
            columns = checked(coords, flight, origin, answer).columns()
            if flight.attempt.over:
                return None
            event = self._event(flight, history, origin, answer)
            return await self._ledger.commit({**event, **columns, "reason": origin.cause})

        return await self._committed(flight, origin, written())

    async def _committed(self, flight: Flight, origin: Origin, written: Coroutine[Any, Any, Event | None]) -> bool:
        """What becomes of a call when its event is written, or is not; whether it is committed."""
        try:
            with self._traces.span("commit"):
                event = await written
        except CaptureFailed as refused:
            reason: str = refused.detail["reason"]
        except Conflict:
            reason = "call_id_conflict"
        except StorageFailed:
            reason = "commit_failed"
        else:
            if event is None:
                error = Conflict(f"rollout {flight.attempt.rollout_id} ended while this call ran")
                raise await self.unanswered(flight, "late", error)
            note(mode=event["mode"], cause=origin.cause)
            self._metrics.committed(event["mode"], flight.dialect.name, origin.cause)
            self._metrics.stage_bytes.inc(event.get("byte_length", 0))
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

    def _remember(self, flight: Flight, prompt: Prompt, generation: Generation, coords: Coords | None) -> None:
        if coords is None or coords.chain_hash is None or flight.call_id not in flight.attempt.calls:
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

    def _poisons(self, cause: Cause | None) -> bool:
        policy = self._control.policy.get("on_unresolved", "root")
        action = cast("dict[str, str]", policy).get(cause or "", "root") if isinstance(policy, dict) else policy
        return cause in UNRESOLVED and action == "poison"
