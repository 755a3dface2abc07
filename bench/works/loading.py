"""The loader: published rows to padded tensors, beside a plain copy of them, Parquet, and Python lists."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow.parquet as pq
import torch

from bench import loader
from bench.measure import Sample
from bench.plan import Plan
from bench.table import Contender, Figure, Row
from bench.workload import GROUP_SIZE, rollouts

__all__ = ["rows"]

Batches = Callable[[], Iterator[Any]]
_BATCH = loader.GROUPS * GROUP_SIZE
_FIRST, _REST = "first", "rest"


def rows(plan: Plan) -> list[Row]:
    """The rows of loading; every contender gives equal tensors of the same rows in the same batches."""
    count, calls, delta = plan.size.load
    lake, file = plan.scratch / "lake", plan.scratch / "rows.parquet"
    table = loader.published(lake, rollouts(count, calls=calls, delta=delta, seed=plan.seed))
    pq.write_table(table, file, row_group_size=_BATCH)
    wanted = list(loader.from_lake(lake))
    lists = table.select(loader.COLUMNS).to_pylist()

    def contender(name: str, run: Batches) -> Contender:
        _check(name, list(run()), wanted)
        return Contender(name=name, run=lambda: _sample(run, count // _BATCH, _BATCH * calls * delta))

    ours = contender("tokenlake", partial(loader.from_lake, lake))
    copy = contender("copy", partial(loader.copied, wanted))
    parquet = contender("Parquet", partial(loader.from_parquet, file))
    buffers = contender("Arrow+layout", partial(loader.from_parquet_buffers, file))
    dataset = contender("Dataset", partial(loader.from_lists, lists))
    return [
        Row(
            work="loader",
            what="rows to padded tensors, after the first batch",
            unit="M tokens/s",
            ours=Figure(ours, _REST),
            floor=Figure(copy, _REST),
            peers=[Figure(each, _REST) for each in (parquet, buffers, dataset)],
        ),
        Row(
            work="loader",
            what="from nothing to the first batch",
            unit="ms",
            ours=Figure(ours, _FIRST),
            floor=Figure(copy, _FIRST),
            peers=[Figure(each, _FIRST) for each in (parquet, buffers)],
        ),
    ]


def _check(name: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for batch, other in zip(found, wanted, strict=True):
        for tensor in loader.TENSORS:
            if not torch.equal(batch[tensor], other[tensor]):
                raise AssertionError(f"{name} gives another {tensor}")


def _sample(run: Batches, batches: int, tokens: int) -> dict[str, Sample]:
    opening = time.perf_counter()
    found = run()
    next(found)
    start = time.perf_counter()
    rest = sum(1 for _ in itertools.islice(found, batches - 1))
    seconds = time.perf_counter() - start
    return {
        _FIRST: Sample(value=(start - opening) * 1e3),
        _REST: Sample(value=rest * tokens / seconds / 1e6),
    }
