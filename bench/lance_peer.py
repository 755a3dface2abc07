"""Lance on the same calls, a row each; runs in an environment of its own.

The works that it answers for, with what each is told about how much there is to do:

- `stage` (rollouts, calls, tokens): an append a call, each a version of the dataset, through the handle that the append
  before gave. Lance syncs no file.
- `stage_processes` (processes, rollouts, calls, tokens): the rollouts in so many processes on one dataset. An append
  that loses against another is tried again by Lance, and by the writer when Lance gives up.
- `read` (rollouts, calls, tokens): all calls in one fragment with an index on the rollout, as compaction and
  `create_scalar_index` leave what was staged; the calls of a rollout, and all, to Arrow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.commit import CommitConflictError

from bench.answer import Found, answer
from bench.measure import Timing, one_by_one, rate, typical, writers
from bench.workload import Call, Rollout, rollouts

__all__: list[str] = []

_ARRAYS = ["token_ids", "token_mask", "logprobs"]
_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("call_id", pa.string()),
        ("parent_call_id", pa.string()),
        ("prev_len", pa.int64()),
        ("weight_version", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)


def _table(calls: Sequence[Call]) -> pa.Table:
    columns = [pa.array([getattr(call, field.name) for call in calls], field.type) for field in _SCHEMA]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _calls(work: Iterable[Rollout]) -> list[Call]:
    return [call for rollout in work for call in rollout.calls]


def _check(dataset: Any, calls: Sequence[Call]) -> None:
    """The dataset has these calls and no other, or nothing is told."""
    found = {(row["rollout_id"], row["call_id"]): row for row in dataset.to_table().to_pylist()}
    for call in calls:
        row = found.pop((call.rollout_id, call.call_id))
        if not all(np.array_equal(row[name], getattr(call, name)) for name in _ARRAYS):
            raise AssertionError(f"{call.rollout_id} {call.call_id}: the peer has other tokens")
    if found or dataset.count_rows() != len(calls):
        raise AssertionError(f"the peer has {dataset.count_rows()} rows of {len(calls)} calls")


class _Appending:
    """Appends tables, each with the handle that the append before gave."""

    def __init__(self, path: Path) -> None:
        self._dataset = lance.dataset(path)

    def put(self, table: pa.Table) -> None:
        self._dataset = lance.write_dataset(table, self._dataset, mode="append")

    def put_at_last(self, table: pa.Table) -> None:
        """Again from where the dataset is now, as long as another writer is first."""
        while True:
            try:
                return self.put(table)
            except CommitConflictError:
                self._dataset = lance.dataset(self._dataset.uri)


def stage(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Calls a second, each a version."""
    count, calls, delta = spec
    made = _calls(rollouts(count, calls=calls, delta=delta, seed=seed))
    path = folder / "stage.lance"
    lance.write_dataset(_SCHEMA.empty_table(), path)
    timing = one_by_one(_Appending(path).put, [_table([call]) for call in made])
    _check(lance.dataset(path), made)
    return {"stage": rate(timing, len(made))}


def stage_processes(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Calls a second of all processes."""
    processes, count, calls, delta = spec
    path = folder / "processes.lance"
    lance.write_dataset(_SCHEMA.empty_table(), path)
    parts = [(len(range(at, count, processes)), calls, delta, seed + at) for at in range(processes)]
    timing = writers(_writer, [(path, *part) for part in parts])
    made = [_calls(rollouts(many, calls=calls, delta=delta, seed=each)) for many, calls, delta, each in parts]
    _check(lance.dataset(path), [call for part in made for call in part])
    return {"stage": rate(timing, count * calls)}


def _writer(barrier: Barrier, path: Path, count: int, calls: int, delta: int, seed: int) -> Timing:
    tables = [_table([call]) for call in _calls(rollouts(count, calls=calls, delta=delta, seed=seed))]
    appending = _Appending(path)
    barrier.wait()
    return one_by_one(appending.put_at_last, tables)


def read(seed: int, spec: Sequence[int], folder: Path) -> Found:
    """Milliseconds of a rollout's calls; all calls, a second."""
    count, calls, delta = spec
    work = rollouts(count, calls=calls, delta=delta, seed=seed)
    path = folder / "read.lance"
    lance.write_dataset(_table(_calls(work)), path).create_scalar_index("rollout_id", "BTREE")
    dataset = lance.dataset(path)
    _check(dataset, _calls(work))

    def one(rollout: Rollout) -> None:
        # A filter takes no parameters; these names have no quotes.
        found = dataset.to_table(columns=_ARRAYS, filter=f"rollout_id = '{rollout.rollout_id}'")
        if found.num_rows != calls:
            raise AssertionError(f"the peer gives {found.num_rows} calls of {rollout.rollout_id}")

    order = np.random.default_rng(1).permutation(count)[:100]
    latencies = one_by_one(one, [work[int(at)] for at in order])[2]
    start = time.monotonic()
    found = dataset.to_table(columns=_ARRAYS)
    end = time.monotonic()
    return {"one": typical(latencies), "all": rate((start, end, []), found.num_rows)}


if __name__ == "__main__":
    answer(stage, stage_processes, read)
