"""One call's delta as the hot path holds it, and the place where it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenlake.store.schema import SCHEMA_VERSION

__all__ = ["Delta", "DeltaId", "Place", "Sampling", "same_content"]

Sampling = tuple[float | None, float | None, int | None, str | None]
"""temperature, top_p, top_k, logprob mode; None where the engine does not tell."""

DeltaId = tuple[str, int, str]
"""rollout_id, attempt and call_id of a delta."""

_Buffer = bytes | bytearray | memoryview
_ARRAYS = ("token_ids", "token_mask", "logprobs")
_BOUND = (
    *("schema_version", "parent_call_id", "mode", "prev_len", "cum_len", "weight_version", "weight_version_end"),
    *("finish_reason", "sampling", "extras", "chain_hash"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a call adds to its parent. The three arrays are parallel and hold raw little-endian elements."""

    schema_version: int = SCHEMA_VERSION
    rollout_id: str
    attempt: int
    call_id: str
    parent_call_id: str | None
    """None: a root."""
    root_call_id: str | None
    """None: the claimed ancestry has no root."""
    depth: int | None
    """Calls above this one; 0 for a root, None where `root_call_id` is None."""
    mode: str
    """`token_in` or `text`."""
    prev_len: int
    """Tokens of the parent's whole sequence."""
    cum_len: int
    """Tokens of this call's whole sequence."""
    token_ids: _Buffer | None
    """int32: rendered prompt suffix, then sampled ids. None: a NULL list (a damaged or foreign record)."""
    token_mask: _Buffer | None
    """uint8: 0 carried, 1 sampled."""
    logprobs: _Buffer | None
    """float32, natural log; 0.0 wherever the mask is 0. None: the engine gave none."""
    logprob_nulls: tuple[int, ...] = ()
    """Positions of `logprobs` that are NULL; their raw elements are zero."""
    weight_version: int | None
    """At the first sampled token; None: unknown."""
    weight_version_end: int | None
    """At the last sampled token; None: unknown."""
    weight_version_spans: tuple[tuple[int, int, int], ...] | None = None
    """(version, start, end) over sampled tokens; None: the engine does not tell."""
    generation_segments: tuple[tuple[int, int, str], ...] | None = None
    """(start, end, cause) of a generation that was aborted and resumed; None: one piece."""
    finish_reason: str | None
    sampling: Sampling
    extras: str | None
    """Canonical JSON; None: none."""
    extras_digest: bytes
    chain_hash: bytes
    digest: bytes
    staged_at: int
    """Microseconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a delta lies: the IPC message at `byte_offset` of `deltas/<writer>/<segment>.arrow`."""

    writer: str
    segment: int
    byte_offset: int
    """Bytes from the start of the file."""
    byte_length: int
    """Bytes of the whole message: metadata and body."""
    batch_row: int = 0
    """Row within the message's batch; compaction makes batches of many."""

    def columns(self) -> dict[str, Any]:
        """The `LINEAGE` columns that say the same."""
        return {
            "writer": self.writer,
            "segment": self.segment,
            "byte_offset": self.byte_offset,
            "byte_length": self.byte_length,
            "batch_row": self.batch_row,
        }


def same_content(one: Delta, other: Delta) -> bool:
    """Whether two records of one key and digest agree in what a digest covers.

    One of them may have lost some of its bytes with the power, before it was acknowledged.
    """
    return all(getattr(one, name) == getattr(other, name) for name in _BOUND) and all(
        _raw(getattr(one, name)) == _raw(getattr(other, name)) for name in _ARRAYS
    )


def _raw(data: _Buffer | None) -> bytes | None:
    return None if data is None else bytes(data)
