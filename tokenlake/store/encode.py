"""Records to IPC messages: one delta, one lineage event, or several events at once."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from tokenlake.errors import InvalidInput
from tokenlake.store.delta import Delta
from tokenlake.store.layout import Layout
from tokenlake.store.schema import DELTA, LINEAGE
from tokenlake.store.shape import Kind, Shape

__all__ = ["DELTA_LAYOUT", "EVENT_LAYOUT", "encode_delta", "encode_event", "encode_events", "event_columns"]

DELTA_LAYOUT = Layout(DELTA, "extras")
EVENT_LAYOUT = Layout(LINEAGE, "served_text")

_EVENT_NAMES = frozenset(LINEAGE.names)
_MAX_SHAPES = 1024
_MAX_PROFILES = 256


def encode_delta(delta: Delta) -> bytes:
    """The IPC message of one delta. Raises `InvalidInput` for a value its column cannot hold."""
    temperature, top_p, top_k, logprob_mode = delta.sampling
    parent, root, finish, extras = delta.parent_call_id, delta.root_call_id, delta.finish_reason, delta.extras
    spans, segments = delta.weight_version_spans, delta.generation_segments
    ids, mask, logprobs = delta.token_ids, delta.token_mask, delta.logprobs
    try:
        args: list[Any] = [delta.schema_version, delta.attempt]
        key: list[Any] = []
        _number(delta.depth, args, key)
        args += (delta.prev_len, delta.cum_len)
        _number(delta.weight_version, args, key)
        _number(delta.weight_version_end, args, key)
        args += (delta.staged_at, delta.extras_digest, delta.chain_hash, delta.digest)
        for number in (temperature, top_p, top_k):
            _number(number, args, key)
        names = (logprob_mode, delta.rollout_id, delta.call_id, parent, root, delta.mode, finish)
        for text in names:
            if text is None:
                key.append(None)
            else:
                raw = text.encode()
                key.append(len(raw))
                args += (1, len(raw), raw)
        for nested in (None if spans is None else _spans(spans), None if segments is None else _segments(segments)):
            if nested is None:
                key.append(None)
            else:
                key.append(nested[:2])
                args += (1, nested[0], nested[2])
        tails = (
            None if extras is None else extras.encode(),
            None if ids is None else (ids, ()),
            None if mask is None else (mask, ()),
            None if logprobs is None else (logprobs, delta.logprob_nulls),
        )
        return DELTA_LAYOUT.assemble(DELTA_LAYOUT.shape(tuple(key)), args, tails)
    except (struct.error, UnicodeEncodeError) as error:
        raise InvalidInput(f"call {delta.call_id!r} holds a value that its column cannot: {error}") from error


def _number(value: float | None, args: list[Any], key: list[Any]) -> None:
    if value is None:
        key.append(None)
    else:
        key.append(1)
        args += (1, value)


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
    names = tuple(event)
    profile = _profiles.get(names) or _profile(names)
    args: list[Any] = []
    sizes: list[int] = []
    try:
        for name, kind in profile.head:
            value = event[name]
            if kind == 2:
                raw = value.encode()
                sizes.append(len(raw))
                args += (1, len(raw), raw)
            elif kind == 1:
                args += (1, value)
            else:
                args.append(value)
        found = tuple(sizes)
        shape = profile.shapes.get(found) or profile.shape(found)
        return EVENT_LAYOUT.assemble(shape, args, [event[name].encode() if name else None for name in profile.tails])
    except (struct.error, UnicodeEncodeError, AttributeError, TypeError) as error:
        kind = event.get("event_type")
        raise InvalidInput(f"lineage event {kind!r} holds a value that its column cannot: {error}") from error


class _Profile:
    """What an event with these columns needs: events of a type mostly have the same ones."""

    def __init__(self, names: frozenset[str]) -> None:
        self.head = [(leaf.name, leaf.kind) for leaf in EVENT_LAYOUT.leaves if leaf.name in names]
        self.tails = [tail.name if tail.name in names else None for tail in EVENT_LAYOUT.tails]
        self.shapes: dict[tuple[int, ...], Shape] = {}
        self._names = names

    def shape(self, sizes: tuple[int, ...]) -> Shape:
        """The shape for the texts' sizes, in their order."""
        given = iter(sizes)
        key: list[int | None] = []
        for leaf in EVENT_LAYOUT.leaves:
            if leaf.kind == Kind.REQUIRED:
                if leaf.name not in self._names:
                    raise TypeError(f"{leaf.name} is missing")
            elif leaf.name not in self._names:
                key.append(None)
            else:
                key.append(1 if leaf.kind == Kind.OPTIONAL else next(given))
        if len(self.shapes) >= _MAX_SHAPES:
            self.shapes.clear()
        self.shapes[sizes] = shape = EVENT_LAYOUT.shape(tuple(key))
        return shape


_profiles: dict[tuple[str, ...], _Profile] = {}


def _profile(names: tuple[str, ...]) -> _Profile:
    if len(_profiles) >= _MAX_PROFILES:
        _profiles.clear()
    _profiles[names] = made = _Profile(frozenset(names))
    return made


def encode_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    """One IPC message with several events: kept all or none. Raises `InvalidInput` for a value that does not fit."""
    if len(events) == 1:
        return encode_event(events[0])
    given = set[str]().union(*events)
    try:
        columns = [
            _column(field, [event.get(field.name) for event in events])
            if field.name in given or not field.nullable
            else pa.nulls(len(events), field.type)
            for field in LINEAGE
        ]
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidInput(f"a lineage event holds a value that its column cannot: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=LINEAGE).serialize().to_pybytes()


def _column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    """Not by `pa.array`, which imports pandas where it is installed: the first event would wait for half a second."""
    kind, absent, valid = field.type, values.count(None), None
    if absent and not field.nullable:
        raise TypeError(f"{field.name} is missing")
    if absent:
        valid = _bits([value is not None for value in values])
        nothing: Any = (
            "" if pa.types.is_string(kind) else bytes(kind.byte_width) if pa.types.is_fixed_size_binary(kind) else 0
        )
        values = [nothing if value is None else value for value in values]
    if pa.types.is_string(kind):
        texts = [value.encode() for value in values]
        ends = pa.py_buffer(array("i", accumulate(map(len, texts), initial=0)))
        return pa.StringArray.from_buffers(len(values), ends, pa.py_buffer(b"".join(texts)), valid, absent)
    if pa.types.is_fixed_size_binary(kind):
        if any(len(value) != kind.byte_width for value in values):
            raise ValueError(f"{field.name} has {kind.byte_width} bytes")
        data = pa.py_buffer(b"".join(values))
    elif pa.types.is_boolean(kind):
        data = _bits(values)
    else:
        code = "d" if pa.types.is_floating(kind) else "i" if pa.types.is_int32(kind) else "q"
        data = pa.py_buffer(array(code, values))
    return pa.Array.from_buffers(kind, len(values), [valid, data], absent)


def _bits(flags: Sequence[bool]) -> pa.Buffer:
    packed = int("".join("1" if flag else "0" for flag in reversed(flags)), 2)
    return pa.py_buffer(packed.to_bytes(-(-len(flags) // 8), "little"))
