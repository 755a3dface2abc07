"""Reading published rows straight from their files: record batches over the memory map, nothing copied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import DamagedLake
from tokenlake.store.records import conform
from tokenlake.store.schema import ROW

__all__ = ["RowReader"]

_MAX_FILES = 64


class RowReader:
    """Rows by group, of one lake. Used by one thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: OrderedDict[int, Mapping[str, list[pa.RecordBatch]]] = OrderedDict()

    def read(self, groups: Sequence[tuple[str, int, int]]) -> pa.Table:
        """The rows of groups given as (group id, number of its file, N), each group's in the order of its rollouts.

        The arrays lie in the memory map, read-only. Raises `DamagedLake` when a group is not there with all segments of
        its N rollouts.
        """
        batches: list[pa.RecordBatch] = []
        for group_id, number, n in groups:
            found = self._file(number).get(group_id, [])
            if not _whole(found, n):
                raise DamagedLake(
                    f"rows/{number:06d}.arrow of {self._root} does not hold the {n} rollouts of group {group_id}: run "
                    "`tokenlake audit`",
                    group_id=group_id,
                )
            batches += found
        return pa.Table.from_batches(batches, ROW)

    def _file(self, number: int) -> Mapping[str, list[pa.RecordBatch]]:
        """Where each group of a file is: slices of its batches."""
        known = self._files.get(number)
        if known is None:
            known = self._files[number] = self._open(self._root / "rows" / f"{number:06d}.arrow")
            while len(self._files) > _MAX_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return known

    def _open(self, path: Path) -> Mapping[str, list[pa.RecordBatch]]:
        slices: dict[str, list[pa.RecordBatch]] = {}
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            for index in range(reader.num_record_batches):
                batch = conform(reader.get_batch(index), ROW)
                start = 0
                for group_id, run in groupby(batch.column("group_id").to_pylist()):
                    length = len(list(run))
                    slices.setdefault(group_id, []).append(batch.slice(start, length))
                    start += length
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedLake(f"{path} cannot be read: run `tokenlake audit` ({error})") from error
        return slices


def _whole(batches: Sequence[pa.RecordBatch], n: int) -> bool:
    """Whether n rollouts are there with all their segments."""
    there: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    for batch in batches:
        names = (batch.column(name).to_pylist() for name in ("rollout_id", "segment_index", "segment_count"))
        for rollout_id, index, count in zip(*names, strict=True):
            there.setdefault(rollout_id, set()).add(index)
            counts[rollout_id] = count
    return len(there) == n and all(there[name] == set(range(count)) for name, count in counts.items())
