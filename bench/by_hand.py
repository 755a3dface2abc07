"""Verify and linearize without SQL: what `linear_rows` is measured against.

`numpy_row` is what a careful person writes by hand: the digests hash the arrays' own bytes and every other check is one
vectorized expression over the whole row. `numpy_table` does the same for every record that the lake's own reader found
on disk, and so shows what the format costs by itself, without SQL. `python_row` holds the same tokens in lists and
looks at one token at a time: each id is packed on its own, each mask and log-probability is compared on its own. All
check the same things; `numpy_row` and `python_row` start from records that are already in memory, so neither pays for
reading a file or for finding the chain.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.workload import Call, Rollout
from tokenlake.ingest.coords import Coords

__all__ = ["ArrayRecord", "ListRecord", "array_records", "list_records", "numpy_row", "numpy_table", "python_row"]

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.float32]]
_SENTINEL = -9999.0
_NO_NULLS = bytes(8)
_u64 = struct.Struct("<Q").pack
_i64 = struct.Struct("<q").pack
_i32 = struct.Struct("<i").pack
_f32 = struct.Struct("<f").pack


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tags:
    rollout_id: str
    call_id: str
    parent_call_id: str | None
    prev_len: int
    cum_len: int
    weight_version: int
    mode: str
    extras_digest: bytes
    chain_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """One staged call as numpy arrays."""

    tags: _Tags
    token_ids: npt.NDArray[np.int32]
    token_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRecord:
    """One staged call as Python lists."""

    tags: _Tags
    token_ids: list[int]
    token_mask: list[int]
    logprobs: list[float]


def array_records(rollout: Rollout, coords: Sequence[Coords]) -> list[ArrayRecord]:
    """The calls of a rollout, root first, with the digests that capture gave them."""
    return [
        ArrayRecord(tags=_tags(call, at), token_ids=call.token_ids, token_mask=call.token_mask, logprobs=call.logprobs)
        for call, at in zip(rollout.calls, coords, strict=True)
    ]


def list_records(rollout: Rollout, coords: Sequence[Coords]) -> list[ListRecord]:
    """As `array_records`, in Python lists."""
    return [
        ListRecord(
            tags=_tags(call, at),
            token_ids=call.token_ids.tolist(),
            token_mask=call.token_mask.tolist(),
            logprobs=call.logprobs.tolist(),
        )
        for call, at in zip(rollout.calls, coords, strict=True)
    ]


def _tags(call: Call, at: Coords) -> _Tags:
    if at.digest is None or at.chain_hash is None or at.extras_digest is None:
        raise AssertionError(f"{call.rollout_id} {call.call_id} was not staged: {at.reason}")
    return _Tags(
        rollout_id=call.rollout_id,
        call_id=call.call_id,
        parent_call_id=call.parent_call_id,
        prev_len=call.prev_len,
        cum_len=call.cum_len,
        weight_version=call.weight_version,
        mode=at.mode,
        extras_digest=at.extras_digest,
        chain_hash=at.chain_hash,
        digest=at.digest,
    )


def _text(value: str) -> bytes:
    raw = value.encode()
    return _u64(len(raw)) + raw


def _head(tags: _Tags, chain: bytes) -> bytes:
    parent = b"\0" if tags.parent_call_id is None else b"\1" + _text(tags.parent_call_id)
    version = b"\1" + _i64(tags.weight_version)
    return b"".join(
        (
            b"tokenlake.delta.1",
            _u64(1),
            _text(tags.rollout_id),
            _i64(0),
            _text(tags.call_id),
            parent,
            _text(tags.mode),
            _i64(tags.prev_len),
            _i64(tags.cum_len),
            version,
            version,
            b"\1" + _text("stop"),
            b"\1\0\0\0\0",
            tags.extras_digest,
            chain,
        )
    )


def _chain_head(parent: bytes | None, count: int) -> bytes:
    return b"tokenlake.chain.1" + (b"\0" if parent is None else b"\1" + parent) + _u64(count)


def _check(condition: object, tags: _Tags, what: str) -> None:
    if not condition:
        raise ValueError(f"{tags.rollout_id} {tags.call_id}: {what}")


def numpy_row(records: Sequence[ArrayRecord]) -> Row:
    """Verify the chain and return its row; raises ValueError at the first call that is not what was sampled."""
    parent: str | None = None
    chain: bytes | None = None
    starts: list[int] = []
    length = 0
    for record in records:
        tags, ids, mask, logprobs = record.tags, record.token_ids, record.token_mask, record.logprobs
        count = len(ids)
        _check(tags.parent_call_id == parent and tags.prev_len == length, tags, "parent")
        _check(count == len(mask) == len(logprobs) and tags.cum_len == length + count, tags, "lengths")
        hashed = hashlib.sha256(_chain_head(chain, count))
        hashed.update(ids.data)
        chain = hashed.digest()
        _check(chain == tags.chain_hash, tags, "chain hash")
        size, no_nulls = _u64(count), _NO_NULLS
        arrays = (size, ids.data, no_nulls, size, mask.data, no_nulls, size, logprobs.data, no_nulls)
        _check(hashlib.sha256(b"".join((_head(tags, chain), *arrays))).digest() == tags.digest, tags, "digest")
        starts.append(length)
        parent, length = tags.call_id, tags.cum_len
    tags = records[0].tags
    ids = np.concatenate([record.token_ids for record in records])
    mask = np.concatenate([record.token_mask for record in records])
    logprobs = np.concatenate([record.logprobs for record in records])
    sampled = logprobs[mask == 1]
    _check(ids.min() >= 0 and mask.max() <= 1, tags, "ids and mask")
    # A call's sampled tokens are its last: the mask falls only where a call begins.
    falls = np.flatnonzero(mask[1:] < mask[:-1]) + 1
    _check(np.isin(falls, starts).all(), tags, "order of the mask")
    _check(np.count_nonzero(logprobs) == np.count_nonzero(sampled), tags, "logprobs of the prompt")
    _check(np.isfinite(sampled).all() and sampled.max() <= 0 and sampled.min() > _SENTINEL, tags, "logprobs")
    return ids, mask, logprobs


def numpy_table(deltas: pa.Table) -> list[Row]:
    """The rows of all rollouts of a table of deltas that is sorted by rollout and place in the chain."""
    arrays = [_slices(deltas.column(name)) for name in ("token_ids", "token_mask", "logprobs")]
    names = [each.name for each in fields(_Tags)]
    tags = [
        _Tags(**dict(zip(names, values, strict=True)))
        for values in zip(*(deltas.column(name).to_pylist() for name in names), strict=True)
    ]
    chains: dict[str, list[ArrayRecord]] = {}
    for each, ids, mask, logprobs in zip(tags, *arrays, strict=True):
        record = ArrayRecord(tags=each, token_ids=ids, token_mask=mask, logprobs=logprobs)
        chains.setdefault(each.rollout_id, []).append(record)
    return [numpy_row(records) for records in chains.values()]


def _slices(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """Each list of a column as a view of its bytes."""
    found: list[npt.NDArray[Any]] = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(), chunk.offsets.to_pylist()
        found += [values[start:end] for start, end in pairwise(ends)]
    return found


def python_row(records: Sequence[ListRecord]) -> tuple[list[int], list[int], list[float]]:
    """As `numpy_row`, one token at a time."""
    parent: str | None = None
    chain: bytes | None = None
    row_ids: list[int] = []
    row_mask: list[int] = []
    row_logprobs: list[float] = []
    for record in records:
        tags, count = record.tags, len(record.token_ids)
        _check(tags.parent_call_id == parent and tags.prev_len == len(row_ids), tags, "parent")
        _check(count == len(record.token_mask) == len(record.logprobs), tags, "lengths")
        raw_ids = b"".join(_i32(token) for token in record.token_ids)
        chain = hashlib.sha256(_chain_head(chain, count) + raw_ids).digest()
        _check(chain == tags.chain_hash, tags, "chain hash")
        raw_mask = bytes(record.token_mask)
        raw_logprobs = b"".join(_f32(value) for value in record.logprobs)
        digest = hashlib.sha256(_head(tags, chain))
        for raw in (raw_ids, raw_mask, raw_logprobs):
            digest.update(_u64(count) + raw + _u64(0))
        _check(digest.digest() == tags.digest, tags, "digest")
        seen = False
        for token, trained, value in zip(record.token_ids, record.token_mask, record.logprobs, strict=True):
            _check(token >= 0, tags, "ids")
            if trained == 1:
                seen = True
                _check(math.isfinite(value) and _SENTINEL < value <= 0.0, tags, "logprobs")
            else:
                _check(trained == 0 and not seen and value == 0.0, tags, "mask")
        row_ids += record.token_ids
        row_mask += record.token_mask
        row_logprobs += record.logprobs
        _check(tags.cum_len == len(row_ids), tags, "lengths")
        parent = tags.call_id
    return row_ids, row_mask, row_logprobs
