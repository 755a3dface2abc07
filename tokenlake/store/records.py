"""Records read back: by hand where our writer wrote them, through pyarrow where compaction or another hand did."""

from __future__ import annotations

import struct
from dataclasses import fields, make_dataclass
from itertools import pairwise
from typing import Any, cast

import pyarrow as pa

from tokenlake.store.delta import Delta
from tokenlake.store.encode import DELTA_LAYOUT, EVENT_LAYOUT
from tokenlake.store.schema import DELTA, LINEAGE, ROW
from tokenlake.store.shape import Kind
from tokenlake.store.walk import read_batch

__all__ = [
    "DeltaKey",
    "conform",
    "delta_at",
    "delta_keys",
    "event_rows",
    "logprob_nulls",
    "row_keys",
    "segments_of",
    "spans_of",
]

DeltaKey = tuple[str, int, str, bytes, int]
"""rollout_id, attempt, call_id, digest, staged_at of a record."""

_HEAD = {leaf.name: i for i, leaf in enumerate(leaf for leaf in DELTA_LAYOUT.leaves if leaf.kind != Kind.STRUCT)}
_VERSION, _ATTEMPT, _DIGEST, _STAGED = (_HEAD[n] for n in ("schema_version", "attempt", "digest", "staged_at"))
_ROLLOUT, _CALL = _HEAD["rollout_id"], _HEAD["call_id"]
_Thawed: Any = make_dataclass("_Thawed", [(field.name, field.type) for field in fields(Delta)], slots=True)
"""A `Delta` that can still be changed: to freeze it afterwards takes a tenth of what it takes to fill a frozen one."""
_EVENT_LEAVES = [leaf for leaf in EVENT_LAYOUT.leaves if leaf.kind != Kind.STRUCT]


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with exactly our columns: NULL where an older version lacked one."""
    if batch.schema.equals(schema):
        return batch
    columns: list[pa.Array] = []
    for column in schema:
        at = batch.schema.get_field_index(column.name)
        found = batch.column(at) if at >= 0 else None
        fits = found is not None and found.type.equals(column.type)
        columns.append(cast("pa.Array", found) if fits else pa.nulls(batch.num_rows, column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def delta_keys(view: memoryview, start: int, end: int, schema: pa.Schema) -> list[DeltaKey] | None:
    """The keys of the records in the message between two positions; None: unreadable."""
    values = DELTA_LAYOUT.decode_head(view, start, end)
    if values is not None:
        rollout, call = values[_ROLLOUT], values[_CALL]
        if values[_VERSION] < 1 or not rollout or not call or 0 in rollout or 0 in call:
            return None
        try:
            return [(rollout.decode(), values[_ATTEMPT], call.decode(), values[_DIGEST], values[_STAGED])]
        except UnicodeDecodeError:
            return None
    batch = read_batch(view[start:end], schema)
    if batch is None:
        return None
    batch = conform(batch, DELTA)
    names = ("rollout_id", "attempt", "call_id", "digest", "staged_at")
    columns = [batch.column(name) for name in names]
    columns[-1] = columns[-1].cast(pa.int64())
    keys = list(zip(*(column.to_pylist() for column in columns), strict=True))
    return None if any(None in key for key in keys) else cast("list[DeltaKey]", keys)


def logprob_nulls(valid: memoryview | None, count: int) -> tuple[int, ...]:
    """The positions that a validity bitmap leaves out."""
    if valid is None:
        return ()
    return tuple(i for i in range(count) if not valid[i // 8] >> i % 8 & 1)


def delta_at(view: memoryview, start: int, end: int, row: int, schema: pa.Schema) -> Delta | None:
    """The record of row `row` in the message between two positions, as a `Delta` of its own bytes; None: unreadable."""
    decoded = DELTA_LAYOUT.decode(view, start, end)
    if decoded is None or row != 0:
        batch = read_batch(view[start:end], schema)
        if batch is None or row >= batch.num_rows:
            return None
        return _from_batch(conform(batch, DELTA).slice(row, 1))
    shape, raw, tails = decoded
    values: list[Any] = list(raw)
    for absent in shape.absent:
        values[absent] = None
    try:
        texts = [None if value is None else value.decode() for value in values[14:21]]
        extras = None if tails[0] is None else tails[0].tobytes().decode()
        spans = None if values[21] is None else spans_of(values[21])
        segments = None if values[22] is None else segments_of(values[22])
    except (UnicodeDecodeError, struct.error):
        return None
    mode, rollout, call, parent, root, way, finish = cast("list[Any]", texts)
    ids, mask, logprobs = [None if tail is None else tail[0].tobytes() for tail in tails[1:]]
    nulls = () if logprobs is None else logprob_nulls(tails[3][1], len(logprobs) // 4)
    made = _Thawed(
        schema_version=values[0],
        rollout_id=rollout,
        attempt=values[1],
        call_id=call,
        parent_call_id=parent,
        root_call_id=root,
        depth=values[2],
        mode=way,
        prev_len=values[3],
        cum_len=values[4],
        token_ids=ids,
        token_mask=mask,
        logprobs=logprobs,
        logprob_nulls=nulls,
        weight_version=values[5],
        weight_version_end=values[6],
        weight_version_spans=spans,
        generation_segments=segments,
        finish_reason=finish,
        sampling=(values[11], values[12], values[13], mode),
        extras=extras,
        extras_digest=values[8],
        chain_hash=values[9],
        digest=values[10],
        staged_at=values[7],
    )
    made.__class__ = Delta
    return made


def spans_of(raw: bytes) -> tuple[tuple[int, int, int], ...]:
    """(version, start, end) triples from the list offsets and the children's buffers, as the encoder laid them out."""
    n = _count(raw)
    pad = n % 2 * 4
    flat = struct.unpack_from(f"<{n}q{n}i{pad}x{n}i", raw, 8)
    return tuple(zip(flat[:n], flat[n : 2 * n], flat[2 * n :], strict=True))


def segments_of(raw: bytes) -> tuple[tuple[int, int, str], ...]:
    """(start, end, cause) triples from the list offsets and the children's buffers, as the encoder laid them out."""
    n = _count(raw)
    if n == 0:
        return ()
    pad = n % 2 * 4
    head = struct.Struct(f"<{n}i{pad}x{n}i{pad}x{n + 1}i{4 - pad}x")
    flat = head.unpack_from(raw, 8)
    texts = raw[8 + head.size :]
    offsets = flat[2 * n :]
    if offsets[0] != 0 or list(offsets) != sorted(offsets) or not 0 <= len(texts) - offsets[-1] < 8:
        raise struct.error("offsets of causes do not hold together")
    causes = [texts[a:b].decode() for a, b in pairwise(offsets)]
    return tuple(zip(flat[:n], flat[n : 2 * n], causes, strict=True))


def _count(raw: bytes) -> int:
    zero, n = struct.unpack_from("<ii", raw)
    if zero != 0 or n < 0 or n > len(raw):
        raise struct.error("list offsets do not hold together")
    return n


def _from_batch(batch: pa.RecordBatch) -> Delta | None:
    record: dict[str, Any] = {}
    for name in DELTA.names:
        column = batch.column(name)
        if name == "staged_at":
            column = column.cast(pa.int64())
        record[name] = None if name in ("token_ids", "token_mask", "logprobs") else column[0].as_py()
    sampling: dict[str, Any] = record["sampling"] or {}
    spans, segments = record["weight_version_spans"], record["generation_segments"]
    logprobs = batch.column("logprobs")
    values = logprobs.flatten()
    record["token_ids"] = _raw(batch.column("token_ids"), 4)
    record["token_mask"] = _raw(batch.column("token_mask"), 1)
    record["logprobs"] = _raw(logprobs, 4)
    record["logprob_nulls"] = tuple(i for i, null in enumerate(values.is_null().to_pylist()) if null)
    record["sampling"] = tuple(sampling.get(n) for n in ("temperature", "top_p", "top_k", "logprob_mode"))
    record["weight_version_spans"] = None if spans is None else tuple(tuple(span.values()) for span in spans)
    record["generation_segments"] = None if segments is None else tuple(tuple(part.values()) for part in segments)
    return Delta(**record)


def _raw(column: pa.ListArray, width: int) -> bytes | None:
    if column.null_count:
        return None
    values = column.flatten()
    data = values.buffers()[1]
    start = values.offset * width
    return b"" if data is None else data[start : start + len(values) * width].to_pybytes()


def event_rows(view: memoryview, start: int, end: int, schema: pa.Schema) -> list[dict[str, Any]] | None:
    """The lineage events of one message, non-NULL columns only, times as microseconds; None: unreadable."""
    decoded = EVENT_LAYOUT.decode(view, start, end)
    if decoded is None:
        batch = read_batch(view[start:end], schema)
        if batch is None:
            return None
        batch = conform(batch, LINEAGE)
        columns = [
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns
        ]
        rows = pa.RecordBatch.from_arrays(columns, names=LINEAGE.names).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    shape, values, tails = decoded
    event: dict[str, Any] = {}
    try:
        for leaf, value, null in zip(_EVENT_LEAVES, values, shape.nulls, strict=True):
            if not null:
                event[leaf.name] = value.decode() if leaf.kind == Kind.TEXT else value
        for tail, value in zip(EVENT_LAYOUT.tails, tails, strict=True):
            if value is not None:
                event[tail.name] = bytes(value).decode()
    except UnicodeDecodeError:
        return None
    if event["schema_version"] < 1:
        return None
    if "answered" in event:
        event["answered"] = bool(event["answered"])
    return [event]


def row_keys(view: memoryview, schema: pa.Schema) -> list[tuple[str, int, int, str, str]] | None:
    """(sample_id, segment_index, segment_count, rollout_id, group_id) of one message's rows; None: unreadable."""
    batch = read_batch(view, schema)
    if batch is None:
        return None
    batch = conform(batch, ROW)
    names = ("sample_id", "segment_index", "segment_count", "rollout_id", "group_id")
    keys = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
    return None if any(None in key for key in keys) else cast("list[tuple[str, int, int, str, str]]", keys)
