"""What is said of a vector of deltas at once is what is said of each of them one element at a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tokenlake.store import facts
from tokenlake.store.sequence import pack

NAN, INF = float("nan"), float("inf")
SOUND: tuple[Any, ...] = ([1, 2, 3], [0, 1, 1], [0.0, -0.5, -2.0])
ODD: dict[str, tuple[Any, ...]] = {
    "no ids": (None, [0, 1, 1], [0.0, -0.5, -2.0]),
    "no mask": ([1, 2, 3], None, [0.0, -0.5, -2.0]),
    "no logprobs": ([1, 2, 3], [0, 1, 1], None),
    "nothing": (None, None, None),
    "empty": ([], [], []),
    "one sampled": ([9], [1], [-1.0]),
    "none sampled": ([9, 8], [0, 0], [0.0, 0.0]),
    "an id is NULL": ([1, None, 3], [0, 1, 1], [0.0, -0.5, -2.0]),
    "a negative id": ([1, -2, 3], [0, 1, 1], [0.0, -0.5, -2.0]),
    "an id past the vocabulary": ([1, 10, 3], [0, 1, 1], [0.0, -0.5, -2.0]),
    "a mask of two": ([1, 2, 3], [0, 2, 1], [0.0, -0.5, -2.0]),
    "a mask with a hole": ([1, 2, 3], [1, 0, 1], [-1.0, 0.0, -2.0]),
    "a NULL in the mask": ([1, 2, 3], [0, None, 1], [0.0, -0.5, -2.0]),
    "a NULL logprob": ([1, 2, 3], [0, 1, 1], [0.0, None, -2.0]),
    "NaN": ([1, 2, 3], [0, 1, 1], [0.0, NAN, -2.0]),
    "infinite": ([1, 2, 3], [0, 1, 1], [0.0, -INF, INF]),
    "positive": ([1, 2, 3], [0, 1, 1], [0.0, 0.5, -2.0]),
    "a sentinel": ([1, 2, 3], [0, 1, 1], [0.0, -9999.0, -2.0]),
    "a value before the first sampled token": ([1, 2, 3], [0, 1, 1], [-0.1, -0.5, -2.0]),
    "minus zero before it": ([1, 2, 3], [0, 1, 1], [-0.0, -0.5, -2.0]),
    "too few logprobs": ([1, 2, 3], [0, 0, 1], [0.0]),
}


def facts_of(vocab_size: int | None, *deltas: tuple[Any, ...]) -> list[dict[str, Any]]:
    columns = zip(*deltas, strict=True)
    arrays = [
        pa.array(column, pa.list_(kind))
        for column, kind in zip(columns, (pa.int32(), pa.uint8(), pa.float32()), strict=True)
    ]
    none = pa.nulls(len(deltas), pa.binary(32))
    sizes = pa.array([vocab_size] * len(deltas), pa.int64())
    return facts.struct_of(none, none, pack(arrays), *facts.of_arrays(sizes, *arrays)).to_pylist()


@pytest.mark.parametrize("vocab_size", [10, None])
def test_an_odd_delta_among_sound_ones_changes_nothing_for_them(vocab_size: int | None) -> None:
    mixed = [each for odd in ODD.values() for each in (SOUND, odd)]
    found = facts_of(vocab_size, *mixed)
    assert found[::2] == facts_of(vocab_size, SOUND) * len(ODD)
    for odd, said in zip(ODD.values(), found[1::2], strict=True):
        assert list(said.values())[3:] == list(facts._of_one(vocab_size, *odd))


def test_each_odd_delta_is_told_by_its_fact() -> None:
    said = {name: {k for k, v in facts_of(10, odd)[0].items() if v is False} for name, odd in ODD.items()}
    assert said == {
        "no ids": {"ids_whole"},
        "no mask": {"mask_sound"},
        "no logprobs": set(),
        "nothing": {"ids_whole", "mask_sound"},
        "empty": set(),
        "one sampled": set(),
        "none sampled": set(),
        "an id is NULL": {"ids_whole"},
        "a negative id": {"ids_positive"},
        "an id past the vocabulary": {"ids_in_vocabulary"},
        "a mask of two": {"mask_sound", "logprobs_zero_unsampled"},
        "a mask with a hole": {"mask_sound"},
        "a NULL in the mask": {"mask_sound", "logprobs_zero_unsampled"},
        "a NULL logprob": {"logprobs_whole"},
        "NaN": {"logprobs_no_nan"},
        "infinite": {"logprobs_finite"},
        "positive": {"logprobs_not_positive"},
        "a sentinel": {"logprobs_no_sentinel"},
        "a value before the first sampled token": {"logprobs_zero_unsampled"},
        "minus zero before it": set(),
        "too few logprobs": set(),
    }


def test_lengths_and_the_first_sampled_token() -> None:
    names = ("ids_len", "mask_len", "logprobs_len", "first_sampled")
    (sound,) = facts_of(None, SOUND)
    assert [sound[name] for name in names] == [3, 3, 3, 2]
    (absent,) = facts_of(None, ODD["nothing"])
    assert [absent[name] for name in names] == [None] * 4
    (carried,) = facts_of(None, ODD["none sampled"])
    assert [carried[name] for name in names] == [2, 2, 2, None]
