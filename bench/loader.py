"""`python -m bench.loader`: published rows to padded batches, beside other ways to the same tensors.

Every contender gives equal tensors of the same rows in the same batches, or nothing is measured. The floor is a plain
copy of those tensors, ready-made, into fresh memory. Files lie in the page cache: what is measured is the way from there.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

from bench.measure import Sample, ratio, summarize
from tokenlake.finalize import RowLoader
from tokenlake.store.lake import OwnedLake
from tokenlake.store.schema import ROW

GROUPS, ROLLOUTS, AT_ONCE = 64, 8, 4
"""Groups, rollouts of each, groups of a batch."""
TENSORS = ("input_ids", "token_mask", "logprobs", "attention_mask", "position_ids", "rewards", "sample_mask")
COLUMNS = ("input_ids", "token_mask", "logprobs", "reward", "sample_mask")
Batches = Iterator[dict[str, torch.Tensor]]


def rows(group: int, tokens: int, draw: np.random.Generator) -> pa.Table:
    """A group's rows of `tokens` on average, a third of them prompt."""
    made: list[dict[str, Any]] = []
    for index in range(ROLLOUTS):
        length = int(draw.integers(tokens // 2, tokens + tokens // 2))
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        known = {field.name: None if field.nullable else _EMPTY[str(field.type)] for field in ROW}
        made.append(
            known
            | {"sample_id": f"g{group}_g{index}", "rollout_id": f"g{group}_g{index}", "group_id": f"g{group}"}
            | {"segment_index": 0, "segment_count": 1, "sample_mask": 1, "reward": float(index % 2)}
            | {"input_ids": draw.integers(0, 150_000, length, np.int32), "token_mask": mask}
            | {"logprobs": np.where(mask, -draw.exponential(1.0, length), 0.0).astype(np.float32)}
        )
    return pa.Table.from_pylist(made, ROW)


_EMPTY: dict[str, Any] = {}


def fill(path: Path, tokens: int, seed: int) -> pa.Table:
    """A lake that has published these rows, 16 groups a file."""
    draw = np.random.default_rng(seed)
    everything: list[pa.Table] = []
    with OwnedLake.open(path) as lake:
        for first in range(0, GROUPS, 16):
            part = pa.concat_tables([rows(group, tokens, draw) for group in range(first, first + 16)])
            segment = lake.write_rows(part)
            names = [{"group_id": f"g{group}", "n": ROLLOUTS} for group in range(first, first + 16)]
            lake.lineage.append_many([{"event_type": "group_registered"} | name for name in names])
            lake.lineage.append_many([{"event_type": "group_published", "segment": segment} | name for name in names])
            everything.append(part)
    return pa.concat_tables(everything)
