"""Rows as tensors: padded to a rectangle, or packed many to a sequence.

A row's arrays are views of the Arrow buffers themselves, so of the memory map where the rows come from a folder; the
only copy is the one into the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenlake.errors import ConfigError, DamagedLake, MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("the loader needs torch: pip install 'tokenlake[torch]'") from error

__all__ = ["Batch", "NextToken", "next_token", "packed", "padded"]

Runs = Sequence[Mapping[str, Any]]
_Place = tuple[int, int]
"""The sequence a row lies in, -1: in none; and where it begins there."""
_Stretch = tuple[int, int, int]
"""Where elements go, and where they begin and end in their buffer."""
_UNKNOWN = -1
_from_numpy = cast("Callable[[npt.NDArray[Any]], torch.Tensor]", torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]
"""Its stub has an array of unknown elements. It takes a third of what `as_tensor` takes."""


class Batch(TypedDict):
    """Whole groups: R rows, placeholders included, in S sequences of T positions.

    Padded: S = R, a row a sequence from its start. Packed: a valid row lies at `row_start` of the sequence
    `row_sequence`, among others; a placeholder, which trains nothing, lies nowhere.
    """

    input_ids: torch.Tensor
    """int64 [S, T]; `pad_id` where no row is."""
    token_mask: torch.Tensor
    """float32 [S, T]; 1 on sampled tokens."""
    logprobs: torch.Tensor
    """float32 [S, T]; the sampler's, 0.0 wherever `token_mask` is 0."""
    weight_versions: torch.Tensor
    """int64 [S, T]; the version a token was sampled under, -1: not sampled, unknown, or not asked for."""
    attention_mask: torch.Tensor
    """int64 [S, T]; 1 on tokens, 0 where no row is."""
    position_ids: torch.Tensor
    """int64 [S, T]; a token's place in its row, from 0; 0 where no row is."""
    sequence_ids: torch.Tensor
    """int64 [S, T]; the row a token belongs to, counted from 1 within its sequence; 0 where no row is."""
    row_sequence: torch.Tensor
    """int64 [R]; the sequence a row lies in, -1: in none."""
    row_start: torch.Tensor
    """int64 [R]; where it begins there."""
    lengths: torch.Tensor
    """int64 [R]; tokens."""
    sample_mask: torch.Tensor
    """float32 [R]; 1 valid, 0 placeholder."""
    rewards: torch.Tensor
    """float64 [R]; 0.0 on a placeholder, which `sample_mask` takes out."""
    weight_version_min: torch.Tensor
    """int64 [R]; -1 where unknown."""
    group_index: torch.Tensor
    """int64 [R]; which of the batch's groups a row belongs to."""
    segment_index: torch.Tensor
    """int64 [R]; 0 unless a rollout has several rows."""
    sample_ids: list[str]
    group_ids: list[str]
    """The batch's groups, in the order of `group_index`."""
    reasons: list[str | None]


class NextToken(NamedTuple):
    """What a causal model is trained on: at each position the token after it. [S, T-1] each."""

    inputs: torch.Tensor
    """int64; what the model reads, with `position_ids` and `sequence_ids` of the batch cut the same way."""
    targets: torch.Tensor
    """int64; the next token."""
    mask: torch.Tensor
    """float32; 1 where the next token was sampled and is of the same row."""
    logprobs: torch.Tensor
    """float32; the sampler's, of the targets."""
    weight_versions: torch.Tensor
    """int64; of the targets."""


def next_token(batch: Batch) -> NextToken:
    """A batch shifted by one: a row's first token is nobody's target, also where rows are packed."""
    rows = batch["sequence_ids"]
    same = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] > 0)
    return NextToken(
        inputs=batch["input_ids"][:, :-1],
        targets=batch["input_ids"][:, 1:],
        mask=batch["token_mask"][:, 1:] * same,
        logprobs=batch["logprobs"][:, 1:],
        weight_versions=batch["weight_versions"][:, 1:],
    )


def padded(table: pa.Table, groups: Sequence[str], pad_id: int, runs: Runs = ()) -> Batch:
    """A row a sequence, padded right to the longest."""
    lengths = _lengths(table)
    places = [(number, 0) for number in range(len(lengths))]
    return _laid_out(table, groups, pad_id, runs, lengths, places, len(lengths), max(lengths, default=0))


def packed(table: pa.Table, groups: Sequence[str], pad_id: int, width: int, runs: Runs = ()) -> Batch:
    """Valid rows in as few sequences of `width` positions as taking each into the first with room for it gives.

    Raises `ConfigError` for a row that is longer.
    """
    room: list[int] = []
    lengths = _lengths(table)
    places: list[_Place] = []
    names, valid = table.column("sample_id").to_pylist(), table.column("sample_mask").to_pylist()
    for length, name, counts in zip(lengths, names, valid, strict=True):
        if not counts:
            places.append((-1, 0))
            continue
        if length > width:
            raise ConfigError(f"row {name} has {length} tokens, more than pack_tokens {width}", sample_id=name)
        sequence = next((number for number, left in enumerate(room) if left >= length), len(room))
        if sequence == len(room):
            room.append(width)
        places.append((sequence, width - room[sequence]))
        room[sequence] -= length
    return _laid_out(table, groups, pad_id, runs, lengths, places, len(room), width)


def _laid_out(
    table: pa.Table,
    groups: Sequence[str],
    pad_id: int,
    runs: Runs,
    lengths: Sequence[int],
    places: Sequence[_Place],
    sequences: int,
    width: int,
) -> Batch:
    shape = (sequences, width)
    # numpy: an assignment of a row costs it a tenth of what it costs torch, and a batch has thousands.
    input_ids, positions, numbers, there = (np.empty(shape, np.int64) for _ in range(4))
    token_mask, logprobs = np.empty(shape, np.float32), np.empty(shape, np.float32)
    _lay(table, {"input_ids": input_ids, "token_mask": token_mask, "logprobs": logprobs}, lengths, places, width)
    versions = np.full(shape, _UNKNOWN, np.int64)
    ramp = np.arange(width)
    # As for one row that fills its sequence: what differs is written over, most often the padding alone.
    positions[:] = ramp
    numbers.fill(1)
    there.fill(1)
    held, ends = [0] * sequences, [0] * sequences
    for (sequence, start), length in zip(places, lengths, strict=True):
        if sequence < 0:
            continue
        held[sequence] += 1
        ends[sequence] = start + length
        if held[sequence] > 1:
            part = slice(start, start + length)
            positions[sequence, part], numbers[sequence, part] = ramp[:length], held[sequence]
    for sequence, end in enumerate(ends):
        if end < width:
            input_ids[sequence, end:] = pad_id
            for array in (token_mask, logprobs, positions, numbers, there):
                array[sequence, end:] = 0
    columns: dict[str, list[Any]] = {
        name: table.column(name).to_pylist()
        for name in (
            "sample_id",
            "segment_index",
            "group_id",
            "reason",
            "reward",
            "sample_mask",
            "weight_version_min",
        )
    }
    if runs:
        place_of = dict(zip(zip(columns["sample_id"], columns["segment_index"], strict=True), places, strict=True))
        for run in runs:
            sequence, start = place_of[run["sample_id"], run["segment_index"]]
            if sequence >= 0:
                versions[sequence, start + run["begins"] : start + run["ends"]] = run["weight_version"]
    index = {group: number for number, group in enumerate(groups)}
    return Batch(
        input_ids=_from_numpy(input_ids),
        token_mask=_from_numpy(token_mask),
        logprobs=_from_numpy(logprobs),
        weight_versions=_from_numpy(versions),
        attention_mask=_from_numpy(there),
        position_ids=_from_numpy(positions),
        sequence_ids=_from_numpy(numbers),
        row_sequence=_tensor([place[0] for place in places], np.int64),
        row_start=_tensor([place[1] for place in places], np.int64),
        lengths=_tensor(lengths, np.int64),
        sample_mask=_tensor(columns["sample_mask"], np.float32),
        rewards=_tensor([0.0 if each is None else each for each in columns["reward"]], np.float64),
        weight_version_min=_tensor(
            [_UNKNOWN if each is None else each for each in columns["weight_version_min"]], np.int64
        ),
        group_index=_tensor([index[group] for group in columns["group_id"]], np.int64),
        segment_index=_tensor(columns["segment_index"], np.int64),
        sample_ids=columns["sample_id"],
        group_ids=list(groups),
        reasons=columns["reason"],
    )


def _tensor(values: Sequence[Any], kind: npt.DTypeLike) -> torch.Tensor:
    return _from_numpy(np.array(values, kind))


def _lay(
    table: pa.Table,
    targets: Mapping[str, npt.NDArray[Any]],
    lengths: Sequence[int],
    places: Sequence[_Place],
    width: int,
) -> None:
    """Copy the lists of columns to the places of their rows."""
    known: dict[tuple[int, ...], list[_Stretch]] = {}
    for name, target in targets.items():
        flat, row = target.reshape(-1), 0
        for values, offsets in _lists(table.column(name)):
            stretches = known.get((row, *offsets))
            if stretches is None:
                sizes = [last - first for first, last in itertools.pairwise(offsets)]
                for size, length in zip(sizes, lengths[row:], strict=False):
                    if size != length:
                        raise DamagedLake(f"a row has {length} input_ids and {size} {name}: run `tokenlake audit`")
                stretches = known[row, *offsets] = list(_stretches(offsets, places[row:], width))
            for to, begin, end in stretches:
                flat[to : to + end - begin] = values[begin:end]
            row += len(offsets) - 1


def _stretches(offsets: Sequence[int], places: Sequence[_Place], width: int) -> Iterator[_Stretch]:
    """What is copied in one go: lists that follow one another here and there."""
    begin = end = to = 0
    for (first, last), (sequence, start) in zip(itertools.pairwise(offsets), places, strict=False):
        if sequence < 0:
            continue
        at = sequence * width + start
        if first != end or at != to + end - begin:
            yield to, begin, end
            begin, to = first, at
        end = last
    yield to, begin, end


def _lengths(table: pa.Table) -> list[int]:
    """Tokens of each row."""
    offsets = (chunk.offsets.to_pylist() for chunk in table.column("input_ids").chunks)
    return [end - begin for each in offsets for begin, end in itertools.pairwise(each)]


def _lists(column: pa.ChunkedArray) -> Iterator[tuple[npt.NDArray[Any], list[int]]]:
    """Of each chunk the elements of its lists, which are the Arrow buffer itself, and where each list begins and ends.

    No chunk of a list column is ever combined with another.
    """
    for chunk in column.chunks:
        yield chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_pylist()
