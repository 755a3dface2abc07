"""`python -m bench.loader`: published rows to padded tensors, beside other ways to the same tensors.

Every contender gives equal tensors of the same rows in the same batches, or nothing is measured. The floor is a plain
copy of those tensors, ready-made, into fresh memory. Files lie in the page cache. Rates are from the second batch on;
what comes before, opening and that batch, is told beside them: opening a lake reads all its lineage.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

import tokenlake
from bench import tokenlake_stage
from bench.measure import Sample, ratio, summarize
from bench.workload import GROUP_SIZE, rollouts
from tokenlake.finalize import RowLoader
from tokenlake.finalize.publish import publish_due
from tokenlake.finalize.tensors import padded
from tokenlake.store.lake import OwnedLake

ROLLOUTS, CALLS, DELTA, GROUPS = 512, 8, 256, 4
"""Rollouts, calls of each, tokens of a call; groups of a batch."""
TENSORS = ("input_ids", "token_mask", "logprobs", "attention_mask", "position_ids", "rewards")
Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]


def published(path: Path, seed: int) -> pa.Table:
    """A lake whose groups are published, and all its rows."""
    tokenlake_stage.fill(path, rollouts(ROLLOUTS, calls=CALLS, delta=DELTA, seed=seed))
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


def main() -> None:
    """Fill, compare, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.loader", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as folder:
        lake, file = Path(folder) / "lake", Path(folder) / "rows.parquet"
        table = published(lake, arguments.seed)
        pq.write_table(table, file, row_group_size=GROUPS * GROUP_SIZE)
        wanted = list(from_lake(lake))
        contenders: dict[str, Callable[[], Iterator[Any]]] = {
            "plain copy of the tensors": partial(copied, wanted),
            "tokenlake, RowLoader": partial(from_lake, lake),
            "Parquet, buffers": partial(from_parquet_buffers, file),
            "Parquet, lists": partial(from_parquet, file),
            "torch Dataset of lists": partial(from_lists, table.select(COLUMNS).to_pylist()),
        }
        for name, run in contenders.items():
            _check(name, list(run()), wanted)
        samples: dict[str, list[Sample]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name, run in contenders.items():
                samples[name].append(_sample(run))
    for name in contenders:
        to_copy, to_loader = (ratio(samples[name], samples[base]) for base in list(contenders)[:2])
        summary = summarize(samples[name])
        rates = f"{summary.tokens_per_s / 1e6:8.2f} M tokens/s  {to_copy:6.3f}x a copy  {to_loader:6.3f}x the loader"
        print(f"{name:28} {rates}  first batch after {summary.p50_ms or 0.0:7.1f} ms")


def _check(name: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for batch, other in zip(found, wanted, strict=True):
        for tensor in TENSORS:
            if not torch.equal(batch[tensor], other[tensor]):
                raise AssertionError(f"{name} gives another {tensor}")


def _sample(run: Callable[[], Iterator[Any]]) -> Sample:
    opening = time.perf_counter()
    batches = run()
    next(batches)
    start = time.perf_counter()
    rest = sum(1 for _ in itertools.islice(batches, ROLLOUTS // GROUP_SIZE // GROUPS - 1))
    seconds = time.perf_counter() - start
    tokens = rest * GROUPS * GROUP_SIZE * CALLS * DELTA
    return Sample(units=rest, tokens=tokens, seconds=seconds, latencies=[start - opening])


if __name__ == "__main__":
    main()
