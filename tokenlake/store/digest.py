"""Digests of format 1: what binds every stored byte to what was sampled.

Arrow IPC has no checksums, so these are the checksum. Everything is SHA-256 over framed fields: integers are 8 bytes
little-endian, a text is its UTF-8 length and its bytes, an optional value is one byte 0 or 1 and then the value, an
array is its count, its raw little-endian elements and the positions of its NULLs (count, then each). A NULL array is
the count 2**64 - 1 alone, so that NULL, empty and 0.0 never hash alike. `docs/format.md` has the byte table,
`tests/golden/` the vectors; neither ever changes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import pyarrow as pa

from tokenlake.errors import InvalidInput
from tokenlake.store.schema import LINEAGE

__all__ = [
    "ZERO_HASH",
    "ArrayBytes",
    "canonical_extras",
    "chain_hash",
    "delta_digest",
    "event_hash",
    "extras_digest",
    "row_digest",
]

ZERO_HASH = bytes(32)
"""What the first event of a writer names as its predecessor."""

_Buffer = bytes | bytearray | memoryview
_u64 = struct.Struct("<Q").pack
_i64 = struct.Struct("<q").pack
_f64 = struct.Struct("<d").pack
_NULL_ARRAY = b"\xff" * 8
_NO_NULLS = bytes(8)
_LETS_GO = 2048
_LARGE = 1 << 16


@dataclass(frozen=True, slots=True)
class ArrayBytes:
    """One array as it is hashed: `count` elements, their raw bytes (zero where NULL), and the positions of NULLs."""

    count: int
    raw: _Buffer
    nulls: Sequence[int] = ()


def _text(value: str) -> bytes:
    raw = value.encode()
    return _u64(len(raw)) + raw


def _opt_text(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + _text(value)


def _opt_int(value: int | None) -> bytes:
    return b"\0" if value is None else b"\1" + _i64(value)


def _opt_float(value: float | None) -> bytes:
    return b"\0" if value is None else b"\1" + _f64(value)


def _parts(array: ArrayBytes | None) -> tuple[_Buffer, ...]:
    if array is None:
        return (_NULL_ARRAY,)
    if not array.nulls:
        return (_u64(array.count), array.raw, _NO_NULLS)
    return (_u64(array.count), array.raw, struct.pack(f"<{len(array.nulls) + 1}Q", len(array.nulls), *array.nulls))


def _sha256(parts: Sequence[_Buffer]) -> bytes:
    """Hash of the parts, one after the other.

    hashlib lets other threads run for every piece from `_LETS_GO` bytes on, and for the size of a call's arrays taking
    turns costs many times the hashing: less than `_LARGE` is hashed without letting go.
    """
    if sum(map(len, parts)) >= _LARGE:
        h = hashlib.sha256()
        for part in parts:
            h.update(part)
        return h.digest()
    data = b"".join(parts)
    h = hashlib.sha256(data[: _LETS_GO - 1])
    for start in range(_LETS_GO - 1, len(data), _LETS_GO - 1):
        h.update(data[start : start + _LETS_GO - 1])
    return h.digest()


def chain_hash(parent: bytes | None, token_ids: ArrayBytes | None) -> bytes:
    """Hash of a whole token sequence, built one delta at a time; `parent` is None for a root. 32 bytes."""
    before = b"tokenlake.chain.1" + (b"\0" if parent is None else b"\1" + parent)
    if token_ids is None:
        return _sha256((before, _NULL_ARRAY))
    return _sha256((before, _u64(token_ids.count), token_ids.raw))


def canonical_extras(extras: Mapping[str, Any] | None) -> str | None:
    """Canonical JSON of an extras envelope: keys sorted, no spaces, UTF-8; None stays None.

    Raises `InvalidInput` for what JSON cannot hold (NaN, infinities, bytes, keys that are not strings).
    """
    if extras is None:
        return None
    try:
        return json.dumps(_checked(extras), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput("extras must be a JSON object of finite numbers, texts, lists and objects") from error


def _checked(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        if not all(isinstance(key, str) for key in items):
            raise TypeError("key")
        return {key: _checked(item) for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [_checked(item) for item in cast("Iterable[Any]", value)]
    return value


_NO_EXTRAS = hashlib.sha256(b"tokenlake.extras.1\0").digest()


def extras_digest(extras: str | None) -> bytes:
    """Digest of canonical extras text (`canonical_extras`); of their absence for None. 32 bytes."""
    if extras is None:
        return _NO_EXTRAS
    return hashlib.sha256(b"tokenlake.extras.1\1" + _text(extras)).digest()


def delta_digest(
    *,
    schema_version: int,
    rollout_id: str,
    attempt: int,
    call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    cum_len: int,
    weight_version: int | None,
    weight_version_end: int | None,
    finish_reason: str | None,
    sampling: tuple[float | None, float | None, int | None, str | None] | None,
    extras_digest: bytes,
    chain_hash: bytes,
    token_ids: ArrayBytes | None,
    token_mask: ArrayBytes | None,
    logprobs: ArrayBytes | None,
) -> bytes:
    """The checksum of one delta record. 32 bytes."""
    if sampling is None:
        bound = b"\0"
    else:
        temperature, top_p, top_k, logprob_mode = sampling
        bound = b"\1" + _opt_float(temperature) + _opt_float(top_p) + _opt_int(top_k) + _opt_text(logprob_mode)
    return _sha256(
        (
            b"tokenlake.delta.1",
            _u64(schema_version),
            _text(rollout_id),
            _i64(attempt),
            _text(call_id),
            _opt_text(parent_call_id),
            _text(mode),
            _i64(prev_len),
            _i64(cum_len),
            _opt_int(weight_version),
            _opt_int(weight_version_end),
            _opt_text(finish_reason),
            bound,
            extras_digest,
            chain_hash,
            *_parts(token_ids),
            *_parts(token_mask),
            *_parts(logprobs),
        )
    )


def row_digest(
    *,
    schema_version: int,
    sample_id: str,
    rollout_id: str,
    group_id: str,
    segment_index: int,
    segment_count: int,
    attempt: int,
    sample_mask: int,
    reason: str | None,
    reward: float | None,
    weight_version_min: int | None,
    weight_version_max: int | None,
    group_min_wv: int | None,
    group_max_wv: int | None,
    temperature: float | None,
    logprob_mode: str | None,
    truncated: bool,
    turns: int,
    sampled_tokens: int,
    dropped_sampled_tokens: int,
    terminal_call_id: str | None,
    call_ids: Sequence[str],
    prompt_ids_for_adv: ArrayBytes | None,
    input_ids: ArrayBytes | None,
    token_mask: ArrayBytes | None,
    logprobs: ArrayBytes | None,
) -> bytes:
    """The checksum of one training row: every column of it but `published_at`. 32 bytes."""
    return _sha256(
        (
            b"tokenlake.row.1",
            _u64(schema_version),
            _text(sample_id),
            _text(rollout_id),
            _text(group_id),
            _i64(segment_index),
            _i64(segment_count),
            _i64(attempt),
            _i64(sample_mask),
            _opt_text(reason),
            _opt_float(reward),
            _opt_int(weight_version_min),
            _opt_int(weight_version_max),
            _opt_int(group_min_wv),
            _opt_int(group_max_wv),
            _opt_float(temperature),
            _opt_text(logprob_mode),
            _i64(int(truncated)),
            _i64(turns),
            _i64(sampled_tokens),
            _i64(dropped_sampled_tokens),
            _opt_text(terminal_call_id),
            _u64(len(call_ids)),
            *(_text(call_id) for call_id in call_ids),
            *_parts(prompt_ids_for_adv),
            *_parts(input_ids),
            *_parts(token_mask),
            *_parts(logprobs),
        )
    )


_UNBOUND = ("prev_hash", "event_hash")
_KINDS = {pa.string(): b"t", pa.float64(): b"f", pa.binary(32): b"b"}
_EVENT_FIELDS = tuple(
    (field.name, (kind := _KINDS.get(field.type, b"i")), _text(field.name) + kind)
    for field in LINEAGE
    if field.name not in _UNBOUND
)
"""Each column's name, what it holds (a text, a float, 32 bytes or an integer), and its name framed before that."""


@lru_cache(maxsize=256)
def _bound_fields(names: tuple[str, ...]) -> tuple[tuple[str, bytes, bytes], ...]:
    """The columns among `names` in the order of the schema; events of one type share it."""
    unknown = sorted(set(names) - set(LINEAGE.names))
    if unknown:
        raise InvalidInput(f"unknown lineage columns: {', '.join(unknown)}", columns=unknown)
    return tuple(field for field in _EVENT_FIELDS if field[0] in names)


def event_hash(prev_hash: bytes, event: Mapping[str, Any]) -> bytes:
    """Hash of a lineage event, chained to the writer's event before it.

    `event` maps `LINEAGE` column names to values (int, float, bool, str, bytes; times as int microseconds); absent and
    None are the same. A value is bound as its column holds it. Unknown keys are an `InvalidInput`, because they would
    not be bound, and so are values that their column cannot hold. 32 bytes.
    """
    parts = [b"tokenlake.event.1", prev_hash]
    name = ""
    try:
        for name, kind, head in _bound_fields(tuple(event)):
            value = event[name]
            if value is None:
                continue
            if kind == b"t":
                raw = value.encode()
                parts += (head, _u64(len(raw)), raw)
            elif kind == b"i":  # bool is one
                parts += (head, _i64(value))
            elif kind == b"f":
                parts += (head, _f64(value))
            elif isinstance(value, bytes) and len(value) == 32:
                parts += (head, _u64(32), value)
            else:
                raise TypeError(f"not 32 bytes but a {type(value).__name__}")
    except (struct.error, AttributeError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InvalidInput(f"lineage column {name} holds a value that it cannot: {error}", column=name) from error
    return hashlib.sha256(b"".join(parts)).digest()
