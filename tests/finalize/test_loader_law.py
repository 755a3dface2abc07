"""Every row once: for any number of workers and ranks, with and without `drop_last`, stopped and resumed anywhere."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.finalize.conftest import Field, call, group
from tokenlake.finalize import RowLoader, loader
from tokenlake.finalize.publish import set_policy
from tokenlake.finalize.sources import LakeSource
from tokenlake.finalize.tensors import Batch

NAMES = [f"g{number}" for number in range(10)]
Row = tuple[str, int]


class Once:
    """A lake's rows, read once: what the law is about is who gets which."""

    def __init__(self, path: Path) -> None:
        source = LakeSource(path)
        self._names = source.groups("train")
        self._tables = {name: source.rows([name]) for name in self._names}
        self.everything: list[Row] = [row for table in self._tables.values() for row in rows_of(table)]
        source.close()

    def groups(self, purpose: str | None) -> list[str]:
        assert purpose == "train"
        return self._names

    def rows(self, groups: Sequence[str]) -> pa.Table:
        return pa.concat_tables([self._tables[name] for name in groups])

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        raise AssertionError(groups)

    def pad_id(self) -> int:
        return 0

    def close(self) -> None:
        return


def rows_of(table: pa.Table) -> list[Row]:
    return list(zip(table["sample_id"].to_pylist(), table["segment_index"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Ten groups of one to three rows, one of them of a rollout with two segments."""
    field = Field(tmp_path_factory.mktemp("law"))
    set_policy(field.lake, {"rows": "segments"})
    records = [record for name in NAMES[:9] for record in group(name, [1.0, None, 0.5][: 1 + int(name[1]) % 3])]
    field.publish(
        *records,
        {"type": "group", "group_id": "g9", "n": 1},
        call("g9_g0", "a", [1], [2]),
        call("g9_g0", "b", [3], [4]),
        {"type": "seal", "rollout_id": "g9_g0", "reward": 1.0, "terminal_call_id": "a"},
    )
    field.lake.close()
    return Once(field.path)


def passed(made: RowLoader, workers: int, patch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """One pass as a `DataLoader` makes it: worker processes have copies and take turns, the caller counts."""
    if workers == 0:
        yield from made
        return
    turns: list[Iterator[Batch]] = []
    for number in range(workers):
        patch.setattr(loader, "get_worker_info", lambda n=number: SimpleNamespace(id=n, num_workers=workers))
        turns.append(iter(list(copy.deepcopy(made))))
    patch.undo()
    for batch in itertools.chain.from_iterable(itertools.zip_longest(*turns)):
        if batch is not None:
            made.advance(batch)
            yield batch


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 16])
def test_every_row_comes_once_wherever_it_was_stopped_and_resumed(
    once: Once, monkeypatch: pytest.MonkeyPatch, workers: int, ranks: int, *, drop_last: bool
) -> None:
    def opened(_: RowLoader) -> Once:
        return once

    def made(rank: int, state: dict[str, Any] | None, *, drop: bool) -> RowLoader:
        new = RowLoader("lake", groups_per_batch=size, rank=rank, world_size=ranks, drop_last=drop)
        new.load_state_dict(state or new.state_dict())
        return new

    patch = pytest.MonkeyPatch()
    monkeypatch.setattr(RowLoader, "_opened", opened)
    for size, stop in itertools.product((1, 3), range(len(NAMES) + 1)):
        seen: list[Row] = []
        for rank in range(ranks):
            state: dict[str, Any] | None = None
            for limit, drop in ((stop, drop_last), (None, drop_last), (None, False)):
                current = made(rank, state, drop=drop)
                left = len(NAMES[rank::ranks]) - len(current.state_dict()["done"])
                batches = list(itertools.islice(passed(current, workers, patch), limit))
                seen += [
                    row
                    for batch in batches
                    for row in zip(batch["sample_ids"], batch["segment_index"].tolist(), strict=True)
                ]
                state = json.loads(json.dumps(current.state_dict()))
                taken = sum(len(batch["group_ids"]) for batch in batches)
                if drop:
                    assert all(len(batch["group_ids"]) == size for batch in batches)
                    assert limit is not None or left - taken <= max(workers, 1) * (size - 1)
                elif limit is None:
                    assert taken == left
        assert sorted(seen) == sorted(once.everything), (size, stop)
