"""What a capture answers: coordinates. Ids, lengths, digests and the place; never a token or a log-probability."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from tokenlake.errors import CaptureFailed
from tokenlake.store.delta import Delta, Place, Sampling

__all__ = ["CAPTURE_FAILURES", "Coords", "failure", "place_of"]

CAPTURE_FAILURES = (
    "choices_invalid",
    "prompt_ids_missing",
    "prompt_ids_differ",
    "token_ids_missing",
    "token_ids_contradict",
    "token_id_invalid",
    "logprobs_missing",
    "logprobs_misaligned",
    "logprob_not_finite",
    "usage_mismatch",
    "finish_reason_invalid",
    "prefix_mismatch",
    "segment_missing",
    "versions_invalid",
    "extras_invalid",
    "call_id_conflict",
    "stage_failed",
    "disk_full",
    "already_completed",
)
"""Why a capture can fail; the closed list that is counted."""
_DISPOSITIONS = ("staged", "capture_failed")
_WHOLE = ("attempt", "prev_len", "delta_len", "cum_len", "sampled_tokens")
_VERSIONS = ("depth", "weight_version", "weight_version_end")
_WRITER = re.compile(r"[A-Za-z0-9_-]{1,100}")
_DIGESTS = ("digest", "chain_hash", "extras_digest", "prompt_digest")


def failure(reason: str) -> CaptureFailed:
    """The error of a capture that cannot go on; `reason` is one of `CAPTURE_FAILURES`."""
    return CaptureFailed(f"the call could not be captured: {reason}", reason=reason)


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

    @classmethod
    def of(cls, delta: Delta, sampled: int, prompt_digest: bytes, place: Place | None = None) -> Self:
        """Of a delta; `sampled` counts what it sampled, `prompt_digest` is its prompt's chain hash."""
        return cls(
            disposition="staged",
            rollout_id=delta.rollout_id,
            attempt=delta.attempt,
            call_id=delta.call_id,
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
            sampling=delta.sampling,
            finish_reason=delta.finish_reason,
            digest=delta.digest,
            chain_hash=delta.chain_hash,
            extras_digest=delta.extras_digest,
            prompt_digest=prompt_digest,
            place=place,
        )

    def to_json(self) -> dict[str, Any]:
        """As a worker sends it: digests in hexadecimal."""
        return {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """What a worker sent; raises `ValueError` for what is no coordinates."""
        given = dict(body)
        try:
            given |= {name: None if given[name] is None else _digest(given[name]) for name in _DIGESTS}
            given["place"] = None if given["place"] is None else place_of(given["place"])
            given["sampling"] = tuple(given["sampling"])
            made = cls(**given)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no coordinates: {error}") from error
        whole = [getattr(made, name) for name in _WHOLE]
        whole += [value for name in _VERSIONS if (value := getattr(made, name)) is not None]
        if not all(type(value) is int and value >= 0 for value in whole) or made.disposition not in _DISPOSITIONS:
            raise ValueError("no coordinates: a number or the disposition is wrong")
        return made

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
        return columns if self.place is None else columns | self.place.columns()


def place_of(body: Mapping[str, Any]) -> Place:
    """A place as it travels; raises `ValueError` or `TypeError` for what is none, also for a folder of no writer."""
    place = Place(**body)
    numbers = (place.segment, place.byte_offset, place.byte_length, place.batch_row)
    if _WRITER.fullmatch(place.writer) is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a place is malformed")
    return place


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != 32:
        raise ValueError("no coordinates: a digest has another length")
    return digest
