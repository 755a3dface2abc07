"""Capture: from what an engine sampled to one durable, digested delta.

The core knows no engine and no HTTP. `begin` opens a ticket before the model runs, `complete` turns the engine's own
ids and log-probabilities into a delta, stages it and returns coordinates, `abort` closes a ticket that sampled nothing.
It fails closed: whatever is missing, misaligned or refused by the disk becomes `capture_failed` coordinates with a
reason that is counted, and no exception reaches the serving path. Coordinates hold ids, lengths, digests and the place;
never a token or a log-probability.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from tokenlake.errors import CaptureFailed, Conflict, TokenlakeError
from tokenlake.store.delta import Delta, Place, Sampling
from tokenlake.store.digest import (
    ArrayBytes,
    canonical_extras,
    chain_hash,
    delta_digest,
    extras_digest,
    prompt_digest,
)
from tokenlake.store.schema import SCHEMA_VERSION

__all__ = ["CAPTURE_FAILURES", "CaptureCore", "Claims", "Coords", "ParentLink", "Stager", "Ticket"]

CAPTURE_FAILURES = (
    "prompt_ids_missing",
    "token_ids_missing",
    "token_id_invalid",
    "logprobs_missing",
    "logprobs_misaligned",
    "logprob_not_finite",
    "prefix_mismatch",
    "segment_missing",
    "versions_invalid",
    "extras_invalid",
    "call_id_conflict",
    "stage_failed",
    "already_completed",
)
"""Why a capture can fail; the closed list that is counted."""

_TOKEN_PREFIX = "token_id:"
_MAX_ID = 2**31 - 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """What the gate learns of a capture."""

    disposition: Literal["staged", "capture_failed"]
    rollout_id: str
    attempt: int
    call_id: str
    parent_call_id: str | None
    reason: str | None = None
    root_call_id: str | None = None
    depth: int | None = None
    mode: str = "text"
    prev_len: int = 0
    delta_len: int = 0
    cum_len: int = 0
    sampled_tokens: int = 0
    weight_version: int | None = None
    weight_version_end: int | None = None
    sampling: Sampling = (None, None, None, None)
    finish_reason: str | None = None
    digest: bytes | None = None
    chain_hash: bytes | None = None
    extras_digest: bytes | None = None
    prompt_digest: bytes | None = None
    place: Place | None = None

    def columns(self) -> dict[str, Any]:
        """The `LINEAGE` columns of a `call_committed` event that come from the capture."""
        temperature, top_p, top_k, logprob_mode = self.sampling
        columns: dict[str, Any] = {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "call_id": self.call_id,
            "parent_call_id": self.parent_call_id,
            "root_call_id": self.root_call_id,
            "depth": self.depth,
            "mode": self.mode,
            "prev_len": self.prev_len,
            "delta_len": self.delta_len,
            "cum_len": self.cum_len,
            "sampled_tokens": self.sampled_tokens,
            "weight_version": self.weight_version,
            "weight_version_end": self.weight_version_end,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "logprob_mode": logprob_mode,
            "finish_reason": self.finish_reason,
            "digest": self.digest,
            "chain_hash": self.chain_hash,
            "extras_digest": self.extras_digest,
            "prompt_digest": self.prompt_digest,
        }
        if self.place is not None:
            columns |= {
                "writer": self.place.writer,
                "segment": self.place.segment,
                "byte_offset": self.place.byte_offset,
                "byte_length": self.place.byte_length,
                "batch_row": self.place.batch_row,
            }
        return columns


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
        prompt_token_ids: Sequence[int] | None,
        token_ids: Sequence[int | str] | None,
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

        `prompt_token_ids` is the whole prompt the engine was given, `token_ids` the sampled ids (`token_id:N` texts are
        read as N), `logprobs` one natural-log probability for each; `claims` only comes with records from
        elsewhere. Never raises: see the module's promise.
        """
        if ticket.closed:
            return self._failed(ticket, "already_completed")
        ticket.closed = True
        try:
            delta, prompt = self._build(
                ticket,
                _ids(prompt_token_ids, "prompt_ids_missing"),
                _ids(token_ids, "token_ids_missing"),
                logprobs,
                finish_reason,
                weight_version,
                weight_version_end,
                weight_version_spans,
                generation_segments,
                extras,
                claims or _NO_CLAIMS,
            )
            place = self._writer.stage(delta)
        except CaptureFailed as failure:
            return self._failed(ticket, failure.detail["reason"])
        except Conflict:
            return self._failed(ticket, "call_id_conflict")
        except (TokenlakeError, OSError):
            return self._failed(ticket, "stage_failed")
        return self._staged(ticket, delta, len(token_ids or ()), prompt, place)

    def _build(
        self,
        ticket: Ticket,
        prompt: array[int],
        sampled: array[int],
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
        raw_prompt = prompt.tobytes()
        prev_len = 0 if parent is None else parent.cum_len
        prefix_hash = None if parent is None else parent.chain_hash
        if parent is not None and not self._continues(parent, raw_prompt):
            if self._strict:
                raise _failure("prefix_mismatch")
            prefix_hash = chain_hash(None, _i32(raw_prompt[: 4 * prev_len]))
        carried = max(0, len(prompt) - prev_len)
        raw_ids = raw_prompt[4 * prev_len :] + sampled.tobytes()
        values, nulls = self._logprobs(logprobs, len(sampled), carried)
        count = carried + len(sampled)
        ids = ArrayBytes(count, raw_ids)
        mask = bytes(carried) + b"\1" * len(sampled)
        try:
            canonical = canonical_extras(extras)
        except TokenlakeError as error:
            raise _failure("extras_invalid") from error
        _check_versions(weight_version, weight_version_end, spans, len(sampled))
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
            staged_at=time.time_ns() // 1000,
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
        return delta, prompt_digest(ArrayBytes(len(prompt), raw_prompt))

    @staticmethod
    def _continues(parent: ParentLink, raw_prompt: bytes) -> bool:
        if parent.token_ids is None:
            return len(raw_prompt) >= 4 * parent.cum_len
        return len(parent.token_ids) == 4 * parent.cum_len and raw_prompt.startswith(parent.token_ids)

    def _logprobs(
        self, logprobs: Sequence[float | None] | None, sampled: int, carried: int
    ) -> tuple[bytes | None, tuple[int, ...]]:
        if logprobs is None:
            if self._strict and sampled:
                raise _failure("logprobs_missing")
            return (bytes(4 * carried), ()) if not sampled else (None, ())
        if self._strict and len(logprobs) != sampled:
            raise _failure("logprobs_misaligned")
        nulls: tuple[int, ...] = ()
        try:
            values = array("f", cast("Sequence[float]", logprobs))  # the quick path; NULLs take the next
        except TypeError:
            nulls = tuple(carried + i for i, value in enumerate(logprobs) if value is None)
            try:
                values = array("f", [0.0 if value is None else value for value in logprobs])
            except TypeError as error:
                raise _failure("logprobs_missing") from error
        if self._strict and (nulls or not all(map(math.isfinite, values))):
            raise _failure("logprobs_missing" if nulls else "logprob_not_finite")
        return bytes(4 * carried) + values.tobytes(), nulls

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

    @staticmethod
    def _staged(ticket: Ticket, delta: Delta, sampled: int, prompt: bytes, place: Place) -> Coords:
        return Coords(
            disposition="staged",
            rollout_id=ticket.rollout_id,
            attempt=ticket.attempt,
            call_id=ticket.call_id,
            parent_call_id=delta.parent_call_id,
            root_call_id=delta.root_call_id,
            depth=delta.depth,
            mode=delta.mode,
            prev_len=delta.prev_len,
            delta_len=delta.cum_len - delta.prev_len,
            cum_len=delta.cum_len,
            sampled_tokens=sampled,
            weight_version=delta.weight_version,
            weight_version_end=delta.weight_version_end,
            sampling=ticket.sampling,
            finish_reason=delta.finish_reason,
            digest=delta.digest,
            chain_hash=delta.chain_hash,
            extras_digest=delta.extras_digest,
            prompt_digest=prompt,
            place=place,
        )


def _failure(reason: str) -> CaptureFailed:
    return CaptureFailed(f"the call could not be captured: {reason}", reason=reason)


def _i32(raw: bytes) -> ArrayBytes:
    return ArrayBytes(len(raw) // 4, raw)


def _ids(values: Sequence[int | str] | None, missing: str) -> array[int]:
    """Token ids as int32, or `CaptureFailed` when they are absent, not integers, or negative."""
    if values is None:
        raise _failure(missing)
    try:
        ids = array("i", cast("Sequence[int]", values))  # the quick path; texts take the next
    except (TypeError, OverflowError):
        ids = array("i", [_id(value) for value in values])
    if not ids.tobytes()[3::4].isascii():  # a sign bit; the whole array at memory speed
        raise _failure("token_id_invalid")
    return ids


def _id(value: object) -> int:
    if isinstance(value, str) and value.startswith(_TOKEN_PREFIX) and value[len(_TOKEN_PREFIX) :].isascii():
        digits = value[len(_TOKEN_PREFIX) :]
        value = int(digits) if digits.isdigit() else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ID:
        raise _failure("token_id_invalid")
    return value


def _check_versions(
    start: int | None, end: int | None, spans: Sequence[tuple[int, int, int]] | None, sampled: int
) -> None:
    """Spans cover the sampled tokens from 0 without gaps, and begin and end with the stamped versions."""
    if not spans:
        return
    position = 0
    for _, first, last in spans:
        if first != position or last < first:
            raise _failure("versions_invalid")
        position = last
    if position != sampled or (spans[0][0], spans[-1][0]) != (start, end):
        raise _failure("versions_invalid")
