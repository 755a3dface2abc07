"""Capture: from what an engine sampled to one durable, digested delta.

The core knows no engine and no HTTP. `begin` opens a ticket before the model runs, `complete` turns the engine's own
ids and log-probabilities into a delta, stages it and returns coordinates, `abort` closes a ticket that sampled nothing.
It fails closed: whatever is missing, misaligned or refused by the disk becomes `capture_failed` coordinates with a
reason that is counted, and no exception reaches the serving path. What a call costs grows with what it adds and not
with its history: that is compared with the parent's ids where the caller holds them, and bound by the parent's chain
hash; it is neither converted nor hashed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tokenlake.clock import now_us
from tokenlake.errors import CaptureFailed, Conflict, StorageFailed, TokenlakeError
from tokenlake.ingest.arrays import Ids, check_signs, float32, int32
from tokenlake.ingest.coords import Coords, failure
from tokenlake.store.delta import Delta, Place, Sampling
from tokenlake.store.digest import ArrayBytes, canonical_extras, chain_hash, delta_digest, extras_digest
from tokenlake.store.schema import SCHEMA_VERSION

__all__ = ["CaptureCore", "Claims", "ParentLink", "Stager", "Ticket", "refusal"]


class Stager(Protocol):
    """What the core needs of a delta writer: durable when `stage` returns."""

    def stage(self, delta: Delta) -> Place:
        """Append the delta; return where it lies once it is durable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentLink:
    """The call that a new call continues."""

    call_id: str
    root_call_id: str | None
    depth: int | None
    cum_len: int
    """Tokens of the parent's whole sequence, prompt and answer."""
    chain_hash: bytes
    token_ids: bytes | None = None
    """The parent's whole sequence, raw little-endian int32, when the caller holds it: the prompt must start with it."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One call between `begin` and `complete` or `abort`."""

    rollout_id: str
    attempt: int
    call_id: str
    parent: ParentLink | None
    sampling: Sampling
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a record from elsewhere says of itself; staged as claimed, for the views to judge."""

    mode: str | None = None
    digest: bytes | None = None


_NO_CLAIMS = Claims()


class CaptureCore:
    """Builds and stages deltas for one writer. Thread-safe: it holds no state between calls.

    `strict=False` is for records that come from elsewhere: a well-formed record that is false (a prompt that does not
    start with the parent it claims, log-probabilities that are missing, misaligned or not finite) is staged as it is,
    so that the views can name what is wrong with it.
    """

    def __init__(self, writer: Stager, *, strict: bool = True) -> None:
        self._writer = writer
        self._strict = strict

    def begin(
        self,
        *,
        rollout_id: str,
        attempt: int,
        call_id: str,
        parent: ParentLink | None = None,
        sampling: Sampling = (None, None, None, None),
    ) -> Ticket:
        """Open a call. Cheap, touches no disk."""
        return Ticket(rollout_id=rollout_id, attempt=attempt, call_id=call_id, parent=parent, sampling=sampling)

    def abort(self, ticket: Ticket, reason: str) -> Coords:
        """Close a call that will not be staged; `reason` is what the gate records."""
        ticket.closed = True
        return self._failed(ticket, reason)

    def complete(
        self,
        ticket: Ticket,
        *,
        prompt_token_ids: Ids | None,
        token_ids: Ids | None,
        logprobs: Sequence[float | None] | None,
        finish_reason: str | None,
        weight_version: int | None,
        weight_version_end: int | None,
        weight_version_spans: Sequence[tuple[int, int, int]] | None = None,
        generation_segments: Sequence[tuple[int, int, str]] | None = None,
        extras: Mapping[str, Any] | None = None,
        claims: Claims | None = None,
    ) -> Coords:
        """Stage what the engine sampled and return its coordinates; durable when the disposition is `staged`.

        The arguments are those of `build`. Never raises: see the module's promise.
        """
        coords, delta = self.build(
            ticket,
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            weight_version=weight_version,
            weight_version_end=weight_version_end,
            weight_version_spans=weight_version_spans,
            generation_segments=generation_segments,
            extras=extras,
            claims=claims,
        )
        if delta is None:
            return coords
        try:
            return replace(coords, place=self._writer.stage(delta))
        except (TokenlakeError, OSError) as error:
            return self._failed(ticket, refusal(error))

    def build(
        self,
        ticket: Ticket,
        *,
        prompt_token_ids: Ids | None,
        token_ids: Ids | None,
        logprobs: Sequence[float | None] | None,
        finish_reason: str | None,
        weight_version: int | None,
        weight_version_end: int | None,
        weight_version_spans: Sequence[tuple[int, int, int]] | None = None,
        generation_segments: Sequence[tuple[int, int, str]] | None = None,
        extras: Mapping[str, Any] | None = None,
        claims: Claims | None = None,
    ) -> tuple[Coords, Delta | None]:
        """What the engine sampled as a delta that is yet to be staged, and its coordinates but for the place.

        `prompt_token_ids` is the whole prompt the engine was given, at best as an int32 buffer, `token_ids` the sampled
        ids, `logprobs` one natural-log probability for each; `claims` only comes with records from elsewhere. Without a
        delta the coordinates say why there is none. Never raises.
        """
        if ticket.closed:
            return self._failed(ticket, "already_completed"), None
        ticket.closed = True
        try:
            prompt = int32(prompt_token_ids, "prompt_ids_missing")
            sampled = int32(token_ids, "token_ids_missing")
            delta, prompt_digest = self._build(
                ticket,
                prompt,
                sampled,
                logprobs,
                finish_reason,
                weight_version,
                weight_version_end,
                weight_version_spans,
                generation_segments,
                extras,
                claims or _NO_CLAIMS,
            )
        except TokenlakeError as error:
            return self._failed(ticket, refusal(error)), None
        return Coords.of(delta, len(sampled) // 4, prompt_digest), delta

    def _build(
        self,
        ticket: Ticket,
        prompt: memoryview,
        sampled: memoryview,
        logprobs: Sequence[float | None] | None,
        finish_reason: str | None,
        weight_version: int | None,
        weight_version_end: int | None,
        spans: Sequence[tuple[int, int, int]] | None,
        segments: Sequence[tuple[int, int, str]] | None,
        extras: Mapping[str, Any] | None,
        claims: Claims,
    ) -> tuple[Delta, bytes]:
        parent = ticket.parent
        prev_len = 0 if parent is None else parent.cum_len
        prefix_hash = None if parent is None else parent.chain_hash
        if parent is not None and not _continues(parent, prompt):
            if self._strict:
                raise failure("prefix_mismatch")
            known = prompt[: 4 * prev_len]
            prefix_hash = chain_hash(None, ArrayBytes(len(known) // 4, known))
        suffix = prompt[4 * prev_len :]
        raw_ids = b"".join((suffix, sampled))
        check_signs(raw_ids)
        carried, answered = len(suffix) // 4, len(sampled) // 4
        count = carried + answered
        values, nulls = self._logprobs(logprobs, answered, carried)
        ids = ArrayBytes(count, raw_ids)
        mask = bytes(carried) + b"\1" * answered
        try:
            canonical = canonical_extras(extras)
        except TokenlakeError as error:
            raise failure("extras_invalid") from error
        _check_versions(weight_version, weight_version_end, spans, answered)
        extras_hash = extras_digest(canonical)
        chain = chain_hash(prefix_hash, ids)
        mode = claims.mode or ("text" if parent is None else "token_in")
        digest = claims.digest or delta_digest(
            schema_version=SCHEMA_VERSION,
            rollout_id=ticket.rollout_id,
            attempt=ticket.attempt,
            call_id=ticket.call_id,
            parent_call_id=None if parent is None else parent.call_id,
            mode=mode,
            prev_len=prev_len,
            cum_len=prev_len + count,
            weight_version=weight_version,
            weight_version_end=weight_version_end,
            finish_reason=finish_reason,
            sampling=ticket.sampling,
            extras_digest=extras_hash,
            chain_hash=chain,
            token_ids=ids,
            token_mask=ArrayBytes(count, mask),
            logprobs=None if values is None else ArrayBytes(len(values) // 4, values, nulls),
        )
        depth = 0 if parent is None else (None if parent.depth is None else parent.depth + 1)
        delta = Delta(
            schema_version=SCHEMA_VERSION,
            attempt=ticket.attempt,
            depth=depth,
            prev_len=prev_len,
            cum_len=prev_len + count,
            weight_version=weight_version,
            weight_version_end=weight_version_end,
            staged_at=now_us(),
            extras_digest=extras_hash,
            chain_hash=chain,
            digest=digest,
            sampling=ticket.sampling,
            rollout_id=ticket.rollout_id,
            call_id=ticket.call_id,
            parent_call_id=None if parent is None else parent.call_id,
            root_call_id=ticket.call_id if parent is None else parent.root_call_id,
            mode=mode,
            finish_reason=finish_reason,
            weight_version_spans=None if spans is None else tuple(spans),
            generation_segments=None if segments is None else tuple(segments),
            extras=canonical,
            token_ids=raw_ids,
            token_mask=mask,
            logprobs=values,
            logprob_nulls=nulls,
        )
        return delta, chain_hash(prefix_hash, ArrayBytes(carried, suffix))

    def _logprobs(
        self, logprobs: Sequence[float | None] | None, sampled: int, carried: int
    ) -> tuple[bytes | None, tuple[int, ...]]:
        if logprobs is None:
            if self._strict and sampled:
                raise failure("logprobs_missing")
            return (bytes(4 * carried), ()) if not sampled else (None, ())
        if self._strict and len(logprobs) != sampled:
            raise failure("logprobs_misaligned")
        values, nulls = float32(logprobs, strict=self._strict)
        return bytes(4 * carried) + values, tuple(carried + position for position in nulls)

    @staticmethod
    def _failed(ticket: Ticket, reason: str) -> Coords:
        parent = ticket.parent
        prev_len = 0 if parent is None else parent.cum_len
        return Coords(
            disposition="capture_failed",
            reason=reason,
            rollout_id=ticket.rollout_id,
            attempt=ticket.attempt,
            call_id=ticket.call_id,
            parent_call_id=None if parent is None else parent.call_id,
            mode="text" if parent is None else "token_in",
            prev_len=prev_len,
            cum_len=prev_len,
            sampling=ticket.sampling,
        )


def refusal(error: TokenlakeError | OSError) -> str:
    """Why a capture failed that met this error."""
    if isinstance(error, Conflict):
        return "call_id_conflict"
    if isinstance(error, CaptureFailed | StorageFailed):
        return error.detail.get("reason", "stage_failed")
    return "stage_failed"


def _continues(parent: ParentLink, prompt: memoryview) -> bool:
    """Whether the prompt starts with the parent's sequence, as far as the caller can tell."""
    size = 4 * parent.cum_len
    if parent.token_ids is None:
        return len(prompt) >= size
    return len(parent.token_ids) == size and bytes(prompt[:size]) == parent.token_ids


def _check_versions(
    start: int | None, end: int | None, spans: Sequence[tuple[int, int, int]] | None, sampled: int
) -> None:
    """Spans cover the sampled tokens from 0 without gaps, and begin and end with the stamped versions."""
    if not spans:
        return
    position = 0
    for _, first, last in spans:
        if first != position or last < first:
            raise failure("versions_invalid")
        position = last
    if position != sampled or (spans[0][0], spans[-1][0]) != (start, end):
        raise failure("versions_invalid")
