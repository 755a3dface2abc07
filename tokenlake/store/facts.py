"""What the views check of the arrays of a delta, for a whole vector of deltas at once.

Nearly every delta is sound, and few steps show it: its elements are compared at once with those of all others, its mask
and the log-probabilities before its first sampled token as bytes. A delta that does not look sound is looked at one
element at a time (`_of_one`), which is also the definition of each fact.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.store.sequence import PACKED

__all__ = ["FACTS", "of_arrays", "struct_of"]

_INT, _BOOL = pa.int32(), pa.bool_()
_SENTINEL = -9999.0
_LAST_BITS = struct.unpack("<I", struct.pack("<f", _SENTINEL))[0] - 1
"""The bits of the least log-probability that is sound, as an unsigned number."""

_Fine = Callable[[pa.Array], tuple[bool, Callable[[], pa.Array]]]
"""Whether all of some elements that are not NULL are fine, and which of them."""
_ARRAY_FACTS = {
    "ids_len": _INT,
    "mask_len": _INT,
    "logprobs_len": _INT,
    "first_sampled": _INT,
    "ids_whole": _BOOL,
    "ids_positive": _BOOL,
    "ids_in_vocabulary": _BOOL,
    "mask_sound": _BOOL,
    "logprobs_whole": _BOOL,
    "logprobs_no_nan": _BOOL,
    "logprobs_finite": _BOOL,
    "logprobs_not_positive": _BOOL,
    "logprobs_no_sentinel": _BOOL,
    "logprobs_zero_unsampled": _BOOL,
}
FACTS = pa.struct({"digest": pa.binary(32), "chain_hash": pa.binary(32), "packed": PACKED, **_ARRAY_FACTS})
"""Lengths and `first_sampled`, which counts from 1, are NULL where there is no array or no sampled token; `mask_sound`:
zeros, then ones. A fact has nothing against an array that is absent, but for `ids_whole` and `mask_sound`."""

_INT_MAX = 2**31 - 1
_NOTHING = bytes(1 << 16)
_Facts = tuple[Any, ...]


def struct_of(*columns: pa.Array) -> pa.Array:
    """A vector of `FACTS`."""
    names = [FACTS.field(i).name for i in range(FACTS.num_fields)]
    return pa.StructArray.from_arrays(list(columns), names=names)


def of_arrays(vocab_size: pa.Array, ids: pa.Array, mask: pa.Array, logprobs: pa.Array) -> list[pa.Array]:
    """The facts but the digests; `vocab_size` is NULL where it is unknown."""
    known: int | None = pc.min(vocab_size).as_py()
    odd = _rows_where_not(ids, _between(0, _INT_MAX if known is None else known - 1))
    odd |= _rows_where_not(mask, _between(0, 1))
    odd |= _rows_where_not(logprobs, _log_probabilities)
    masks, chances_raw = _raw(mask), _raw(logprobs)
    trained, valued = _bounds(mask), _bounds(logprobs)
    firsts: list[int] = []
    for row, ((start, end), (low, high)) in enumerate(zip(pairwise(trained), pairwise(valued), strict=True)):
        first = masks.find(1, start, end)
        carried = end - start if first < 0 else first - start
        firsts.append(carried)
        # No element of the mask is above 1: what comes before the first 1 is 0.
        ones = first < 0 or masks.find(0, first, end) < 0
        zeros = low + carried <= high and chances_raw.startswith(_zeros(4 * carried), 4 * low)
        if not (ones and zeros):
            odd.add(row)
    lengths = [pc.list_value_length(each).cast(_INT) for each in (ids, mask, logprobs)]
    carried_by = pa.array(firsts, _INT)
    first_sampled = pc.if_else(pc.less(carried_by, lengths[1]), pc.add(carried_by, 1), pa.scalar(None, _INT))
    sound = [*lengths, first_sampled, *[pa.repeat(True, len(ids))] * (len(_ARRAY_FACTS) - 4)]
    return _replaced(
        sound, {row: _of_one(*(each[row].as_py() for each in (vocab_size, ids, mask, logprobs))) for row in odd}
    )


def _replaced(columns: list[pa.Array], rows: Mapping[int, _Facts]) -> list[pa.Array]:
    """The columns with some rows changed."""
    if not rows:
        return columns
    lists = [column.to_pylist() for column in columns]
    for row, facts in rows.items():
        for values, fact in zip(lists, facts, strict=True):
            values[row] = fact
    return [pa.array(values, kind) for values, kind in zip(lists, _ARRAY_FACTS.values(), strict=True)]


def _zeros(count: int) -> bytes:
    return _NOTHING[:count] if count <= len(_NOTHING) else bytes(count)


def _of_one(
    vocab_size: int | None, ids: list[int | None] | None, mask: list[int | None] | None, logprobs: list[Any] | None
) -> _Facts:
    numbers = [each for each in ids or () if each is not None]
    chances = [each for each in logprobs or () if each is not None]
    first = mask.index(1) if mask is not None and 1 in mask else None
    carried = None if mask is None else len(mask) if first is None else first
    return (
        None if ids is None else len(ids),
        None if mask is None else len(mask),
        None if logprobs is None else len(logprobs),
        None if first is None else first + 1,
        ids is not None and len(numbers) == len(ids),
        min(numbers, default=0) >= 0,
        vocab_size is None or max(numbers, default=-1) < vocab_size,
        mask is not None and mask == [0] * (carried or 0) + [1] * (len(mask) - (carried or 0)),
        logprobs is None or len(chances) == len(logprobs),
        not any(map(math.isnan, chances)),
        not any(map(math.isinf, chances)),
        not any(0.0 < each < math.inf for each in chances),
        not any(-math.inf < each <= _SENTINEL for each in chances),
        carried is None or not any(each is not None and each < 0.0 for each in (logprobs or ())[:carried]),
    )


def _between(least: int, most: int) -> _Fine:
    def fine(values: pa.Array) -> tuple[bool, Callable[[], pa.Array]]:
        low, high = (each.as_py() for each in pc.min_max(values, min_count=0).values())
        whole = low is None or (low >= least and high <= most)
        return whole, lambda: pc.and_(pc.greater_equal(values, least), pc.less_equal(values, most))

    return fine


def _log_probabilities(values: pa.Array) -> tuple[bool, Callable[[], pa.Array]]:
    """Not positive, above the sentinel.

    The greatest of bits is found many times as fast as that of floats: it is a positive number (or NaN) as signed bits,
    and what is too negative (or NaN) as unsigned ones.
    """
    signed, bits = (pc.max(values.view(kind)).as_py() or 0 for kind in (pa.int32(), pa.uint32()))
    whole = signed <= 0 and bits <= _LAST_BITS
    return whole, lambda: pc.and_(pc.less_equal(values, 0.0), pc.greater(values, _SENTINEL))


def _rows_where_not(lists: pa.Array, fine: _Fine) -> set[int]:
    """Lists that are NULL, hold a NULL, or an element that is not `fine`."""
    rows = set(pc.indices_nonzero(lists.is_null()).to_pylist()) if lists.null_count else set[int]()
    values = lists.values
    whole, which = fine(values)
    if whole and values.null_count == 0:
        return rows
    bounds = _bounds(lists)
    for at in pc.indices_nonzero(pc.invert(which()).fill_null(True)).to_pylist():
        rows.add(bisect_right(bounds, at) - 1)
    return rows


def _bounds(lists: pa.Array) -> Sequence[int]:
    """Where each list starts in the values of all, and where the last one ends."""
    return lists.offsets.to_pylist()


def _raw(lists: pa.Array) -> bytes:
    """The elements of all lists, from the first that their offsets count from."""
    values = lists.values
    data, width = values.buffers()[1], values.type.bit_width // 8
    start = values.offset * width
    return b"" if data is None else data[start : start + len(values) * width].to_pybytes()
