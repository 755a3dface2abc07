"""Every column of a lake, declared once, as Arrow schemas.

SQL DDL, wire models and `docs/format.md` are checked against these by tests. A record carries `schema_version`;
a reader refuses a newer one and fills columns that an older one lacks with NULL.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = [
    "DELTA",
    "EVENT_TYPES",
    "FORMAT_VERSION",
    "LINEAGE",
    "PLACE",
    "PLACEHOLDER_REASONS",
    "ROW",
    "SCHEMA_VERSION",
]

FORMAT_VERSION = 1
SCHEMA_VERSION = 1

_utf8 = pa.string()
_hash = pa.binary(32)
_time = pa.timestamp("us", tz="UTC")
_version_spans = pa.list_(
    pa.struct([pa.field("version", pa.int64()), pa.field("start", pa.int32()), pa.field("end", pa.int32())])
)
_segments = pa.list_(pa.struct([pa.field("start", pa.int32()), pa.field("end", pa.int32()), pa.field("cause", _utf8)]))
_sampling = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("logprob_mode", _utf8),
    ]
)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


DELTA = pa.schema(
    [
        _required("schema_version", pa.int32()),
        _required("attempt", pa.int32()),
        pa.field("depth", pa.int32()),
        _required("prev_len", pa.int64()),
        _required("cum_len", pa.int64()),
        pa.field("weight_version", pa.int64()),
        pa.field("weight_version_end", pa.int64()),
        _required("staged_at", _time),
        _required("extras_digest", _hash),
        _required("chain_hash", _hash),
        _required("digest", _hash),
        pa.field("sampling", _sampling),
        _required("rollout_id", _utf8),
        _required("call_id", _utf8),
        pa.field("parent_call_id", _utf8),
        pa.field("root_call_id", _utf8),
        _required("mode", _utf8),
        pa.field("finish_reason", _utf8),
        pa.field("weight_version_spans", _version_spans),
        pa.field("generation_segments", _segments),
        pa.field("extras", _utf8),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("token_mask", pa.list_(pa.uint8())),
        pa.field("logprobs", pa.list_(pa.float32())),
    ]
)
"""One call's delta. `token_ids`, `token_mask` (0 carried, 1 sampled) and `logprobs` (0.0 where the mask is 0) are
parallel: rendered prompt suffix first, sampled ids after. `prev_len`, `cum_len`: tokens. NULL `weight_version`:
unknown. NULL `depth`, `root_call_id`: the claimed ancestry has no root. `extras`: canonical JSON, NULL for none."""

PLACE = pa.schema(
    [
        _required("writer", _utf8),
        _required("segment", pa.int32()),
        _required("byte_offset", pa.int64()),
        _required("byte_length", pa.int32()),
        _required("batch_row", pa.int32()),
    ]
)
"""Where a record lies: `<writer>/<segment>.arrow`, the encapsulated IPC message at `byte_offset` (from the file's
start) of `byte_length` bytes, and the row in its batch."""

LINEAGE = pa.schema(
    [
        _required("schema_version", pa.int32()),
        _required("event_seq", pa.int64()),
        _required("at", _time),
        pa.field("attempt", pa.int32()),
        pa.field("depth", pa.int32()),
        pa.field("prev_len", pa.int64()),
        pa.field("delta_len", pa.int32()),
        pa.field("cum_len", pa.int64()),
        pa.field("sampled_tokens", pa.int32()),
        pa.field("weight_version", pa.int64()),
        pa.field("weight_version_end", pa.int64()),
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("segment", pa.int32()),
        pa.field("byte_offset", pa.int64()),
        pa.field("byte_length", pa.int32()),
        pa.field("batch_row", pa.int32()),
        pa.field("n", pa.int32()),
        pa.field("reward", pa.float64()),
        pa.field("answered", pa.bool_()),
        pa.field("deadline_at", _time),
        pa.field("cutoff_at", _time),
        pa.field("extras_digest", _hash),
        pa.field("chain_hash", _hash),
        pa.field("digest", _hash),
        pa.field("prompt_digest", _hash),
        pa.field("fingerprint", _hash),
        pa.field("context_digest", _hash),
        pa.field("request_digest", _hash),
        pa.field("idempotency_digest", _hash),
        _required("prev_hash", _hash),
        _required("event_hash", _hash),
        _required("event_type", _utf8),
        _required("event_writer", _utf8),
        pa.field("group_id", _utf8),
        pa.field("rollout_id", _utf8),
        pa.field("call_id", _utf8),
        pa.field("parent_call_id", _utf8),
        pa.field("root_call_id", _utf8),
        pa.field("mode", _utf8),
        pa.field("finish_reason", _utf8),
        pa.field("logprob_mode", _utf8),
        pa.field("writer", _utf8),
        pa.field("response_id", _utf8),
        pa.field("dialect", _utf8),
        pa.field("reason", _utf8),
        pa.field("purpose", _utf8),
        pa.field("terminal_call_id", _utf8),
        pa.field("terminal_selection", _utf8),
        pa.field("consumer", _utf8),
        pa.field("claim_id", _utf8),
        pa.field("checkpoint", _utf8),
        pa.field("served_text", _utf8),
        pa.field("detail", _utf8),
    ]
)
"""One event of the gate. Which columns an event type uses is told in `docs/format.md`; the others are NULL.
`detail` is JSON text for what nobody filters on (a group's meta, a policy's settings, a receipt)."""

ROW = pa.schema(
    [
        _required("schema_version", pa.int32()),
        _required("segment_index", pa.int32()),
        _required("segment_count", pa.int32()),
        _required("attempt", pa.int32()),
        _required("sample_mask", pa.uint8()),
        pa.field("reward", pa.float64()),
        pa.field("weight_version_min", pa.int64()),
        pa.field("weight_version_max", pa.int64()),
        pa.field("group_min_wv", pa.int64()),
        pa.field("group_max_wv", pa.int64()),
        pa.field("temperature", pa.float64()),
        _required("truncated", pa.bool_()),
        _required("turns", pa.int32()),
        _required("sampled_tokens", pa.int32()),
        _required("dropped_sampled_tokens", pa.int32()),
        _required("published_at", _time),
        _required("row_digest", _hash),
        _required("sample_id", _utf8),
        _required("rollout_id", _utf8),
        _required("group_id", _utf8),
        pa.field("reason", _utf8),
        pa.field("terminal_call_id", _utf8),
        pa.field("logprob_mode", _utf8),
        _required("call_ids", pa.list_(_utf8)),
        _required("prompt_ids_for_adv", pa.list_(pa.int32())),
        _required("input_ids", pa.list_(pa.int32())),
        _required("token_mask", pa.list_(pa.uint8())),
        _required("logprobs", pa.list_(pa.float32())),
    ]
)
"""One training sequence. `input_ids`, `token_mask` and `logprobs` are parallel; `sample_mask` 0 is a placeholder, whose
`reason` comes from `PLACEHOLDER_REASONS` and whose `reward` is NULL."""

EVENT_TYPES = (
    "lake_opened",
    "model_registered",
    "policy_set",
    "weight_version_published",
    "worker_registered",
    "group_registered",
    "rollout_registered",
    "call_committed",
    "call_failed",
    "call_overflowed",
    "rollout_frozen",
    "rollout_sealed",
    "rollout_failed",
    "group_published",
    "group_dropped",
    "rows_claimed",
    "rows_consumed",
    "rows_released",
    "segment_replaced",
    "retired",
    "import_committed",
)
"""What the gate can decide. State is a fold over these."""

PLACEHOLDER_REASONS = (
    "never_sealed",
    "incomplete",
    "environment_failed",
    "agent_failed",
    "verifier_failed",
    "timeout",
    "cancelled",
    "rollout_failed",
    "capture_failed",
    "call_failed",
    "call_id_conflict",
    "unresolved_parent",
    "no_calls",
    "terminal_ambiguous",
    "terminal_unknown",
    "delta_missing",
    "retired",
    "duplicate_record",
    "unknown_schema",
    "digest_mismatch",
    "chain_hash_mismatch",
    "length_mismatch",
    "parent_missing",
    "parent_foreign",
    "parent_length_mismatch",
    "parent_cycle",
    "lineage_mismatch",
    "mask_invalid",
    "token_ids_missing",
    "token_id_negative",
    "token_id_out_of_vocabulary",
    "logprobs_missing",
    "logprob_null",
    "logprob_nan",
    "logprob_infinite",
    "logprob_positive",
    "logprob_sentinel",
    "logprob_nonzero_unsampled",
    "weight_version_mismatch",
    "non_finite_reward",
    "reward_missing",
    "no_sampled_tokens",
    "mixed_weight_version",
    "undelivered",
)
"""The closed list of reasons a row may be a placeholder for. A rollout that was failed with another word is
`rollout_failed`; the word itself stays in lineage."""
