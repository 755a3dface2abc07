"""Records to IPC messages: one delta, one lineage event, or several events at once."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tokenlake.errors import InvalidInput
from tokenlake.store.delta import Delta
from tokenlake.store.layout import Layout
from tokenlake.store.schema import DELTA, LINEAGE
from tokenlake.store.shape import Kind

__all__ = ["DELTA_LAYOUT", "EVENT_LAYOUT", "encode_delta", "encode_event", "encode_events", "event_columns"]

DELTA_LAYOUT = Layout(DELTA, "extras")
EVENT_LAYOUT = Layout(LINEAGE, "served_text")

_EVENT_HEAD = tuple((leaf.name, leaf.kind == Kind.TEXT) for leaf in EVENT_LAYOUT.leaves)
_EVENT_TAIL = tuple(tail.name for tail in EVENT_LAYOUT.tails)
_EVENT_NAMES = frozenset(LINEAGE.names)


def encode_delta(delta: Delta) -> bytes:
    """The IPC message of one delta. Raises `InvalidInput` for a value its column cannot hold."""
    temperature, top_p, top_k, logprob_mode = delta.sampling
    parent, root, finish, extras = delta.parent_call_id, delta.root_call_id, delta.finish_reason, delta.extras
    spans, segments = delta.weight_version_spans, delta.generation_segments
    ids, mask, logprobs = delta.token_ids, delta.token_mask, delta.logprobs
    try:
        return DELTA_LAYOUT.encode(
            (
                delta.schema_version,
                delta.attempt,
                delta.depth,
                delta.prev_len,
                delta.cum_len,
                delta.weight_version,
                delta.weight_version_end,
                delta.staged_at,
                delta.extras_digest,
                delta.chain_hash,
                delta.digest,
                True,
                temperature,
                top_p,
                top_k,
                None if logprob_mode is None else logprob_mode.encode(),
                delta.rollout_id.encode(),
                delta.call_id.encode(),
                None if parent is None else parent.encode(),
                None if root is None else root.encode(),
                delta.mode.encode(),
                None if finish is None else finish.encode(),
                None if spans is None else _spans(spans),
                None if segments is None else _segments(segments),
            ),
            (
                None if extras is None else extras.encode(),
                None if ids is None else (ids, ()),
                None if mask is None else (mask, ()),
                None if logprobs is None else (logprobs, delta.logprob_nulls),
            ),
        )
    except (struct.error, UnicodeEncodeError) as error:
        raise InvalidInput(f"call {delta.call_id!r} holds a value that its column cannot: {error}") from error


def _spans(spans: Sequence[tuple[int, int, int]]) -> tuple[int, int, bytes]:
    n = len(spans)
    pad = n % 2 * 4
    columns = zip(*spans, strict=True) if n else ((), (), ())
    versions, starts, ends = columns
    return n, 0, struct.pack(f"<{n}q{n}i{pad}x{n}i{pad}x", *versions, *starts, *ends)


def _segments(segments: Sequence[tuple[int, int, str]]) -> tuple[int, int, bytes]:
    n = len(segments)
    if n == 0:
        return 0, 0, b""
    pad = n % 2 * 4
    causes = [cause.encode() for _, _, cause in segments]
    offsets = [0]
    for cause in causes:
        offsets.append(offsets[-1] + len(cause))
    head = struct.pack(
        f"<{n}i{pad}x{n}i{pad}x{n + 1}i{4 - pad}x",
        *(start for start, _, _ in segments),
        *(end for _, end, _ in segments),
        *offsets,
    )
    return n, offsets[-1], head + b"".join(causes)


def event_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The non-NULL columns of an event, checked by name. Raises `InvalidInput` for an unknown one."""
    if not columns.keys() <= _EVENT_NAMES:
        unknown = sorted(columns.keys() - _EVENT_NAMES)
        raise InvalidInput(f"unknown lineage columns: {', '.join(unknown)}", columns=unknown)
    return {name: value for name, value in columns.items() if value is not None}


def encode_event(event: Mapping[str, Any]) -> bytes:
    """The IPC message of one lineage event, times in microseconds. Raises `InvalidInput` for what does not fit."""
    get = event.get
    try:
        values = [
            value.encode() if text and value is not None else value
            for value, text in [(get(name), text) for name, text in _EVENT_HEAD]
        ]
        tails = [None if (value := get(name)) is None else value.encode() for name in _EVENT_TAIL]
        return EVENT_LAYOUT.encode(values, tails)
    except (struct.error, UnicodeEncodeError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"lineage event {get('event_type')!r} holds a value that its column cannot: {error}"
        ) from error


def encode_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    """One IPC message with several events: kept all or none. Raises `InvalidInput` for a value that does not fit."""
    if len(events) == 1:
        return encode_event(events[0])
    try:
        batch = pa.RecordBatch.from_pylist([dict(event) for event in events], schema=LINEAGE)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise InvalidInput(f"a lineage event holds a value that its column cannot: {error}") from error
    return batch.serialize().to_pybytes()
