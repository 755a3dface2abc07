"""One captured call between its sampling and its record, as the ledger's thread asks for it: delta, then event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.api.dialects.dialect import Answer
from tokenlake.api.flight import Flight
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.coords import Coords, failure
from tokenlake.ingest.engine import Generation, LogprobMode
from tokenlake.ingest.prompter import Origin, Prompt
from tokenlake.store.delta import Delta, Place

__all__ = ["Recording", "checked"]


class Recording:
    """A call that is staged, then committed. `event` holds the columns that its capture does not give."""

    def __init__(
        self,
        flight: Flight,
        prompt: Prompt,
        generation: Generation,
        answer: Answer,
        event: Mapping[str, Any],
        *,
        capture: CaptureCore,
        logprob_mode: LogprobMode,
    ) -> None:
        self._flight = flight
        self._prompt = prompt
        self._generation = generation
        self._answer = answer
        self._event = event
        self._capture = capture
        self._logprob_mode = logprob_mode
        self.coords: Coords | None = None
        """Without the place; None until the delta was asked for."""

    @property
    def name(self) -> tuple[str, int, str]:
        """Rollout, attempt and call."""
        return self._flight.attempt.rollout_id, self._flight.attempt.attempt, self._flight.call_id

    def delta(self) -> Delta:
        """What is staged; raises `CaptureFailed` where nothing can be. Heavy: for a thread."""
        rollout_id, attempt, call_id = self.name
        params, generation = self._flight.request.params, self._generation
        ticket = self._capture.begin(
            rollout_id=rollout_id,
            attempt=attempt,
            call_id=call_id,
            parent=self._prompt.link,
            sampling=(params.temperature, params.top_p, params.top_k, self._logprob_mode),
        )
        if generation.fault is not None:
            raise failure(generation.fault)
        coords, delta = self._capture.build(
            ticket,
            prompt_token_ids=self._prompt.ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            weight_version=generation.weight_version,
            weight_version_end=generation.weight_version_end,
            weight_version_spans=generation.weight_version_spans,
        )
        self.coords = checked(coords, self._flight, self._prompt, self._answer)
        if delta is None:
            raise failure("stage_failed")
        return delta

    def committed(self, place: Place) -> Mapping[str, Any] | None:
        """The event of a delta that is durable there; None: the attempt ended while the call ran."""
        if self.coords is None or self._flight.attempt.over:
            return None
        return {**self._event, **self.coords.columns(), **place.columns()}


def checked(coords: Coords, flight: Flight, origin: Origin, answer: Answer) -> Coords:
    """Coordinates of what was staged and asked for; raises `CaptureFailed` for others."""
    if coords.disposition == "capture_failed":
        raise failure(coords.reason or "stage_failed")
    parent, sampled = origin.parent, answer.completion_tokens
    asked = (
        *(flight.attempt.rollout_id, flight.attempt.attempt, flight.call_id),
        *((None, 0) if parent is None else (parent.call_id, parent.cum_len)),
        *(answer.head.prompt_tokens + sampled, sampled),
    )
    given = (
        *(coords.rollout_id, coords.attempt, coords.call_id, coords.parent_call_id, coords.prev_len),
        *(coords.prev_len + coords.delta_len, coords.sampled_tokens),
    )
    whole = coords.cum_len == coords.prev_len + coords.delta_len and coords.chain_hash is not None
    if asked != given or not whole:
        raise failure("coords_contradict")
    return coords
