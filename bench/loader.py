"""Published rows to padded tensors by the loader, and other ways to the same tensors: four groups of four a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

import tokenlake
from bench import tokenlake_stage
from bench.workload import GROUP_SIZE, Rollout
from tokenlake.finalize import RowLoader
from tokenlake.finalize.publish import publish_due
from tokenlake.finalize.tensors import padded
from tokenlake.store.lake import OwnedLake

__all__ = [
    "GROUPS",
    "TENSORS",
    "copied",
    "from_lake",
    "from_lists",
    "from_parquet",
    "from_parquet_buffers",
    "published",
]

GROUPS = 4
"""Groups of a batch."""
TENSORS = ("input_ids", "token_mask", "logprobs", "attention_mask", "position_ids", "rewards")
Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]


def published(path: Path, work: Sequence[Rollout]) -> pa.Table:
    """A lake whose groups are published, and all its rows."""
    tokenlake_stage.fill(path, work)
    with OwnedLake.open(path) as lake:
        publish_due(lake)
    with tokenlake.open(path) as lake:
        return lake.sql("SELECT * FROM ready_rows ORDER BY group_id, length(sample_id), sample_id").to_arrow_table()


def from_lake(path: Path) -> Iterator[Any]:
    """The loader, as a trainer has it."""
    return iter(RowLoader(path, groups_per_batch=GROUPS))


def from_parquet(path: Path) -> Iterator[Tensors]:
    """A Parquet file, a row group a batch, its columns as Python lists."""
    file = pq.ParquetFile(path)
    for number in range(file.num_row_groups):
        yield collate(file.read_row_group(number, columns=list(COLUMNS)).to_pylist())


def from_parquet_buffers(path: Path) -> Iterator[Any]:
    """A Parquet file, a row group a batch, its decoded buffers laid out by the loader's own code."""
    file = pq.ParquetFile(path)
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        yield padded(table, list(dict.fromkeys(table.column("group_id").to_pylist())), 0)


class Lists(Dataset[Row]):
    """Rows in memory, as Python lists."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def from_lists(rows: Sequence[Row]) -> Iterator[Tensors]:
    """What most trainers do."""
    return iter(DataLoader(Lists(rows), batch_size=GROUPS * GROUP_SIZE, collate_fn=collate))


COLUMNS = ("input_ids", "token_mask", "logprobs", "reward")


def collate(rows: Sequence[Row]) -> Tensors:
    """Lists, padded to the longest, as tensors."""
    width = max(len(row["input_ids"]) for row in rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    there = torch.arange(width)[None] < lengths[:, None]

    def tensor(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] + [0] * (width - len(row[name])) for row in rows], dtype=kind)

    return {
        "input_ids": tensor("input_ids", torch.int64),
        "token_mask": tensor("token_mask", torch.float32),
        "logprobs": tensor("logprobs", torch.float32),
        "attention_mask": there.to(torch.int64),
        "position_ids": torch.arange(width)[None] * there,
        "rewards": torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
    }


def copied(batches: Sequence[Any]) -> Iterator[Tensors]:
    """A plain copy of every tensor."""
    for batch in batches:
        yield {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
