"""The hand-made encoder against pyarrow: same values for every record; what it does not know it leaves to pyarrow."""

import math
import struct
from itertools import accumulate, permutations
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.long import either
from tokenlake.errors import InvalidInput
from tokenlake.store.columns import columns_of
from tokenlake.store.delta import Delta
from tokenlake.store.encode import DELTA_LAYOUT, EVENT_LAYOUT, encode_delta, encode_event, encode_events
from tokenlake.store.plain import Plain, read_plain
from tokenlake.store.records import delta_at, event_rows
from tokenlake.store.schema import DELTA, LINEAGE

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ID = st.text("abc_-0é", min_size=1, max_size=9)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
HASH = st.binary(min_size=32, max_size=32)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    n = draw(st.integers(0, 20))
    logprobs = draw(st.none() | st.lists(st.floats(width=32), min_size=n, max_size=n))
    nulls = () if logprobs is None else tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=4)) if n else ()))
    raw = None
    if logprobs is not None:
        raw = struct.pack(f"<{n}f", *(0.0 if i in nulls else v for i, v in enumerate(logprobs)))
    return Delta(
        schema_version=draw(st.integers(1, 9)),
        rollout_id=draw(ID),
        attempt=draw(INT32),
        call_id=draw(ID),
        parent_call_id=draw(st.none() | TEXT),
        root_call_id=draw(st.none() | TEXT),
        depth=draw(st.none() | INT32),
        mode=draw(TEXT),
        prev_len=draw(INT64),
        cum_len=draw(INT64),
        token_ids=struct.pack(f"<{n}i", *draw(st.lists(INT32, min_size=n, max_size=n))),
        token_mask=draw(st.binary(min_size=n, max_size=n)),
        logprobs=raw,
        logprob_nulls=nulls,
        weight_version=draw(st.none() | INT64),
        weight_version_end=draw(st.none() | INT64),
        weight_version_spans=draw(st.none() | st.lists(st.tuples(INT64, INT32, INT32), max_size=4).map(tuple)),
        generation_segments=draw(st.none() | st.lists(st.tuples(INT32, INT32, TEXT), max_size=4).map(tuple)),
        finish_reason=draw(st.none() | TEXT),
        sampling=draw(
            st.tuples(
                st.none() | st.floats(allow_nan=False),
                st.none() | st.floats(allow_nan=False),
                st.none() | INT32,
                st.none() | TEXT,
            )
        ),
        extras=draw(st.none() | TEXT),
        extras_digest=draw(HASH),
        chain_hash=draw(HASH),
        digest=draw(HASH),
        staged_at=draw(st.integers(0, 2**52)),
    )


def floats(raw: bytes, nulls: tuple[int, ...]) -> list[float | None]:
    values = struct.unpack(f"<{len(raw) // 4}f", raw)
    return [None if i in nulls else v for i, v in enumerate(values)]


def as_columns(delta: Delta) -> dict[str, Any]:
    """The record as pyarrow should see it."""
    columns = {name: getattr(delta, name) for name in DELTA.names}
    columns["sampling"] = dict(zip(("temperature", "top_p", "top_k", "logprob_mode"), delta.sampling, strict=True))
    spans, segments = delta.weight_version_spans, delta.generation_segments
    if spans is not None:
        columns["weight_version_spans"] = [dict(zip(("version", "start", "end"), s, strict=True)) for s in spans]
    if segments is not None:
        columns["generation_segments"] = [dict(zip(("start", "end", "cause"), s, strict=True)) for s in segments]
    columns["token_ids"] = list(struct.unpack(f"<{len(delta.token_ids or b'') // 4}i", delta.token_ids or b""))
    columns["token_mask"] = list(delta.token_mask or b"")
    columns["logprobs"] = None if delta.logprobs is None else floats(bytes(delta.logprobs), delta.logprob_nulls)
    return columns


def read(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    batch = ipc.read_record_batch(pa.py_buffer(message), schema)
    batch.validate(full=True)
    return batch


def same(one: Any, other: Any) -> bool:
    """Equal, a NaN being equal to a NaN."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(deltas())
@settings(max_examples=either(60, 300), deadline=None)
def test_a_delta_reads_in_pyarrow_as_it_was_given(delta: Delta) -> None:
    batch = read(encode_delta(delta), DELTA)
    found = batch.set_column(
        batch.schema.get_field_index("staged_at"), "staged_at", batch.column("staged_at").cast(pa.int64())
    ).to_pylist()[0]
    expected = as_columns(delta)
    assert {name for name in DELTA.names if not same(found[name], expected[name])} == set()


@given(deltas())
@settings(max_examples=either(60, 300), deadline=None)
def test_a_delta_reads_back_as_it_was_given_by_hand_and_through_pyarrow(delta: Delta) -> None:
    message = encode_delta(delta)
    foreign = read(message, DELTA).serialize().to_pybytes()
    assert DELTA_LAYOUT.decode(message, 0, len(message)) is not None
    for form in (message, foreign):
        assert delta_at(memoryview(form), 0, len(form), 0, DELTA) == delta


@given(st.lists(deltas(), min_size=1, max_size=5))
@settings(max_examples=either(20, 100), deadline=None)
def test_many_deltas_become_the_columns_that_pyarrow_reads(given_deltas: list[Delta]) -> None:
    messages = [encode_delta(delta) for delta in given_deltas]
    rows = [DELTA_LAYOUT.decode(message, 0, len(message)) for message in messages]
    made = pa.RecordBatch.from_arrays(columns_of(DELTA_LAYOUT, [row for row in rows if row]), schema=DELTA)
    made.validate(full=True)
    assert len(made) == len(messages)
    expected = pa.Table.from_batches([read(message, DELTA) for message in messages]).combine_chunks().to_pylist()
    for one, other in zip(made.to_pylist(), expected, strict=True):
        assert {name for name in DELTA.names if not same(one[name], other[name])} == set()


def test_a_shape_is_recognized_by_a_process_that_did_not_write_it(make_delta: Any) -> None:
    spans, segments = ((3, 0, 1), (4, 1, 2)), ((0, 1, "abort"), (1, 2, "done"))
    message = encode_delta(make_delta(weight_version_spans=spans, generation_segments=segments, extras='{"a":1}'))
    DELTA_LAYOUT._by_meta.clear()
    assert DELTA_LAYOUT.decode(message, 0, len(message)) is not None


def test_a_changed_byte_anywhere_never_breaks_the_reader(make_delta: Any) -> None:
    delta = make_delta(generation_segments=((0, 1, "abort"),), weight_version_spans=((3, 0, 1),))
    message = encode_delta(delta)
    for at in range(len(message)):
        damaged = bytearray(message)
        damaged[at] ^= 0x41
        found = delta_at(memoryview(damaged), 0, len(damaged), 0, DELTA)
        assert found is None or isinstance(found, Delta)


def test_a_number_below_zero_in_the_places_of_a_tail_is_no_place(make_delta: Any) -> None:
    message = encode_delta(make_delta(extras='{"a":1}', logprob_nulls=(0,)))
    end = DELTA_LAYOUT.tail_buffers_at + DELTA_LAYOUT._tail_buffers.size
    for at in range(DELTA_LAYOUT.tail_buffers_at, end, 8):
        damaged = bytearray(message)
        damaged[at + 7] ^= 0x80
        assert DELTA_LAYOUT.decode(damaged, 0, len(damaged)) is None


@given(st.lists(deltas(), min_size=1, max_size=6))
@settings(max_examples=either(40, 200), deadline=None)
def test_many_deltas_read_at_once_are_those_read_one_by_one(given_deltas: list[Delta]) -> None:
    data, places = segment_of(given_deltas)
    plain = at_once(data, places)
    assert (plain is not None) == all(d.logprobs is not None and not d.logprob_nulls for d in given_deltas)
    if plain is not None:
        assert differing(plain, data, places) == set()


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_many_deltas_are_read_in_any_order(make_delta: Any, order: tuple[int, ...]) -> None:
    data, places = segment_of([make_delta(f"c{i}", n=4 + i, extras='{"a":1}') for i in range(3)])
    wanted = [places[at] for at in order]
    plain = at_once(data, wanted)
    assert plain is not None
    assert differing(plain, data, wanted) == set()


def test_a_changed_byte_anywhere_reads_at_once_as_it_reads_alone(make_delta: Any) -> None:
    one = make_delta(generation_segments=((0, 1, "abort"),), weight_version_spans=((3, 0, 1),), extras='{"a":1}')
    data, places = segment_of([make_delta(), one, make_delta(call_id="c1", parent_call_id="c0", depth=1)])
    read_at_once = 0
    for at in range(places[1][0], sum(places[1])):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        plain = at_once(memoryview(damaged), places)
        if plain is not None:
            read_at_once += 1
            assert differing(plain, memoryview(damaged), places) == set()
    assert read_at_once > 100


def test_a_text_that_is_damaged_is_not_read_at_once(make_delta: Any) -> None:
    data, places = segment_of([make_delta(), make_delta(extras='{"a":"\u00e9"}', finish_reason="st\u00f6p")])
    assert at_once(data, places) is not None
    for letter in ("\u00e9", "\u00f6"):
        damaged = bytearray(data)
        damaged[bytes(data).index(letter.encode()) + 1] = 0x20
        assert at_once(memoryview(damaged), places) is None


def at_once(data: memoryview, places: list[tuple[int, int]]) -> Plain | None:
    plain = read_plain(DELTA_LAYOUT, data, *(pa.array(each, pa.int64()) for each in zip(*places, strict=True)))
    return plain if plain is not None and plain.readable() else None


def segment_of(given_deltas: list[Delta]) -> tuple[memoryview, list[tuple[int, int]]]:
    """Messages one after the other, and where each is."""
    messages = [encode_delta(delta) for delta in given_deltas]
    starts = accumulate(map(len, messages), initial=0)
    return memoryview(b"".join(messages)), [(start, len(each)) for start, each in zip(starts, messages, strict=False)]


def differing(plain: Plain, data: memoryview, places: list[tuple[int, int]]) -> set[str]:
    """The columns in which reading at once and reading one by one disagree."""
    rows = [DELTA_LAYOUT.decode(data, start, start + length) for start, length in places]
    alone = pa.RecordBatch.from_arrays(columns_of(DELTA_LAYOUT, [row for row in rows if row]), schema=DELTA)
    found = plain.batch()
    found.validate(full=True)
    # A damaged time may be one that Python has no object for.
    at = DELTA.get_field_index("staged_at")
    read = [b.set_column(at, "staged_at", b.column(at).cast(pa.int64())).to_pylist() for b in (found, alone)]
    pairs = zip(*read, strict=True)
    return {name for one, other in pairs for name in DELTA.names if not same(one[name], other[name])}


EVENT_VALUES = {
    pa.int32(): INT32,
    pa.int64(): INT64,
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): TEXT,
    pa.binary(32): HASH,
    pa.timestamp("us", tz="UTC"): st.integers(0, 2**52),
}
EVENTS = st.fixed_dictionaries(
    {f.name: EVENT_VALUES[f.type] for f in LINEAGE if not f.nullable} | {"schema_version": st.just(1)},
    optional={f.name: EVENT_VALUES[f.type] for f in LINEAGE if f.nullable},
)


@given(EVENTS)
@settings(max_examples=either(40, 200), deadline=None)
def test_an_event_reads_back_as_it_was_given_by_hand_and_through_pyarrow(event: dict[str, Any]) -> None:
    message = encode_event(event)
    foreign = read(message, LINEAGE).serialize().to_pybytes()
    assert EVENT_LAYOUT.decode(message, 0, len(message)) is not None
    for form in (message, foreign):
        assert event_rows(memoryview(form), 0, len(form), LINEAGE) == [event]


@given(st.lists(EVENTS, min_size=2, max_size=4))
@settings(max_examples=either(10, 50), deadline=None)
def test_several_events_are_one_message(events: list[dict[str, Any]]) -> None:
    message = encode_events(events)
    assert event_rows(memoryview(message), 0, len(message), LINEAGE) == events
    batch = read(message, LINEAGE)
    batch.validate(full=True)
    assert batch.equals(pa.RecordBatch.from_pylist(events, schema=LINEAGE))


@pytest.mark.parametrize("change", [{"attempt": 2**40}, {"attempt": "1"}, {"prev_len": None}, {"call_id": "\ud800"}])
def test_a_value_that_does_not_fit_is_refused(make_delta: Any, change: dict[str, Any]) -> None:
    values = {name: getattr(make_delta(), name) for name in Delta.__slots__} | change
    with pytest.raises(InvalidInput):
        encode_delta(Delta(**values))
