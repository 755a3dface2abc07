"""The torch loader: ready rows as batches of whole groups, in a pinned order.

Source of the contract: `IterableDataset` of torch (its workers split the groups among themselves through
`get_worker_info`), and distributed ranks, which split before the workers do. A group is never split and never seen
twice. The lake is opened where iteration happens, so the loader can be pickled, spawned and forked.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from tokenlake import sql
from tokenlake.errors import ConfigError, MissingExtra
from tokenlake.store.reader import Lake

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise MissingExtra("the loader needs torch: pip install 'tokenlake[torch]'") from error

__all__ = ["Batch", "RowLoader"]


class Batch(TypedDict):
    """`groups_per_batch` whole groups; R rows (placeholders included), T tokens of the longest row, padded right."""

    input_ids: torch.Tensor
    """int64 [R, T]; `pad_id` beyond a row's length."""
    token_mask: torch.Tensor
    """float32 [R, T]; 1 on sampled tokens that are trained."""
    logprobs: torch.Tensor
    """float32 [R, T]; the sampler's, 0.0 wherever `token_mask` is 0."""
    attention_mask: torch.Tensor
    """int64 [R, T]; 1 on tokens, 0 on padding."""
    lengths: torch.Tensor
    """int64 [R]."""
    sample_mask: torch.Tensor
    """float32 [R]; 1 valid, 0 placeholder."""
    rewards: torch.Tensor
    """float32 [R]; 0.0 on a placeholder, which `sample_mask` takes out."""
    weight_version_min: torch.Tensor
    """int64 [R]; -1 where unknown."""
    group_index: torch.Tensor
    """int64 [R]; which of the batch's groups a row belongs to."""
    sample_ids: list[str]
    group_ids: list[str]
    """The batch's groups, in the order of `group_index`."""
    reasons: list[str | None]


class RowLoader(IterableDataset[Batch]):
    """Iterates a lake's ready rows once, in whole groups.

    `path`: the lake. `groups_per_batch`: groups in a batch. `pad_id`: what fills the end of shorter rows; None takes
    the registered model's, else 0. `seed`: shuffles the groups with this seed; None keeps the order of publication.
    `purpose`: `train`, `eval`, or None for both. `rank`, `world_size`: this process's share of the groups.
    `state_dict()` and `load_state_dict()` continue after the groups already handed out by this loader object; with
    worker processes the training process counts by calling `advance` for each batch it has used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        groups_per_batch: int = 1,
        pad_id: int | None = None,
        seed: int | None = None,
        purpose: str | None = "train",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if groups_per_batch < 1:
            raise ConfigError("groups_per_batch must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside world_size {world_size}")
        self._path = Path(path)
        self._groups_per_batch = groups_per_batch
        self._pad_id = pad_id
        self._seed = seed
        self._purpose = purpose
        self._rank = rank
        self._world_size = world_size
        self._done: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Which groups were handed out, and the order they came in."""
        return {"seed": self._seed, "done": list(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`; its seed must be this loader's, or the order would change."""
        if state["seed"] != self._seed:
            raise ConfigError("the saved state has another seed than this loader")
        self._done = list(state["done"])

    def advance(self, batch: Batch) -> None:
        """Count a batch as handed out."""
        self._done += batch["group_ids"]

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        shares = self._world_size * (1 if worker is None else worker.num_workers)
        share = self._rank if worker is None else self._rank * worker.num_workers + worker.id
        lake = Lake(self._path)
        try:
            pad_id = self._pad_id if self._pad_id is not None else _registered_pad(lake)
            groups = [row[0] for row in lake.sql(sql.read("reads/ready_groups"), [self._purpose]).fetchall()]
            if self._seed is not None:
                random.Random(self._seed).shuffle(groups)
            done = set(self._done)
            mine = [group for group in groups[share::shares] if group not in done]
            for start in range(0, len(mine), self._groups_per_batch):
                batch = _load(lake, mine[start : start + self._groups_per_batch], pad_id)
                if worker is None:
                    self.advance(batch)
                yield batch
        finally:
            lake.close()


def _registered_pad(lake: Lake) -> int:
    found = lake.sql(sql.read("reads/pad_id")).fetchall()
    return int(found[0][0] or 0) if found else 0


def _load(lake: Lake, groups: list[str], pad_id: int) -> Batch:
    table = lake.sql(sql.read("reads/ready_rows_of"), [groups]).to_arrow_table()
    columns: dict[str, list[Any]] = {
        name: table.column(name).to_pylist()
        for name in ("sample_id", "group_id", "reason", "reward", "sample_mask", "weight_version_min")
    }
    rows = table.num_rows
    arrays = {name: _arrays(table.column(name)) for name in ("input_ids", "token_mask", "logprobs")}
    lengths = torch.tensor([len(ids) for ids in arrays["input_ids"]], dtype=torch.int64)
    width = int(lengths.max()) if rows else 0
    input_ids = torch.full((rows, width), pad_id, dtype=torch.int64)
    token_mask = torch.zeros((rows, width), dtype=torch.float32)
    logprobs = torch.zeros((rows, width), dtype=torch.float32)
    for row, ids in enumerate(arrays["input_ids"]):
        length = len(ids)
        input_ids[row, :length] = ids
        token_mask[row, :length] = arrays["token_mask"][row]
        logprobs[row, :length] = arrays["logprobs"][row]
    position = {group: index for index, group in enumerate(groups)}
    return Batch(
        input_ids=input_ids,
        token_mask=token_mask,
        logprobs=logprobs,
        attention_mask=(torch.arange(width)[None, :] < lengths[:, None]).to(torch.int64),
        lengths=lengths,
        sample_mask=torch.tensor(columns["sample_mask"], dtype=torch.float32),
        rewards=torch.tensor([0.0 if r is None else r for r in columns["reward"]], dtype=torch.float32),
        weight_version_min=torch.tensor(
            [-1 if v is None else v for v in columns["weight_version_min"]], dtype=torch.int64
        ),
        group_index=torch.tensor([position[group] for group in columns["group_id"]], dtype=torch.int64),
        sample_ids=columns["sample_id"],
        group_ids=groups,
        reasons=columns["reason"],
    )


def _arrays(column: Any) -> list[torch.Tensor]:
    """One tensor a row, over the Arrow buffers themselves; never combines chunks of a list column."""
    tensors: list[torch.Tensor] = []
    for chunk in column.chunks:
        flat = torch.from_dlpack(chunk.values)
        offsets = chunk.offsets.to_pylist()
        tensors += [flat[begin:end] for begin, end in itertools.pairwise(offsets)]
    return tensors
