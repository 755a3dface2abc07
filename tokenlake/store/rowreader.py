"""Reading published rows straight from their files: record batches over a memory map, or over what was fetched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, Self

import pyarrow as pa

from tokenlake.errors import DamagedLake
from tokenlake.store.records import conform
from tokenlake.store.schema import ROW

__all__ = ["MappedFiles", "Place", "RowFiles", "RowReader"]

Place = tuple[str, int, int]
"""Where a group's rows are: group id, number of its file, N."""

_MAX_FILES = 64
_MAX_BYTES = 1 << 30


class RowFiles(Protocol):
    """Files of rows by number."""

    def place(self, number: int) -> str:
        """What to call a file."""
        ...

    def open(self, number: int) -> pa.NativeFile:
        """A file, whole. Raises `OSError` where it is not there."""
        ...

    def only(self, numbers: Collection[int]) -> Self:
        """The same with no more than these files, which is what a task needs of many."""
        ...


@dataclass(frozen=True, slots=True)
class MappedFiles:
    """The files of a lake on this machine, mapped."""

    root: Path

    def place(self, number: int) -> str:
        """As `RowFiles` says."""
        return str(self.root / "rows" / f"{number:06d}.arrow")

    def open(self, number: int) -> pa.NativeFile:
        """As `RowFiles` says, mapped."""
        return pa.memory_map(self.place(number))

    def only(self, numbers: Collection[int]) -> Self:  # noqa: ARG002  # a folder has them all
        """As `RowFiles` says."""
        return self


class RowReader:
    """Rows by group, of one lake. Used by one thread.

    It keeps the 64 files it read last; of those that were fetched into memory, 1 GiB beside the one that is read.
    """

    def __init__(self, files: RowFiles) -> None:
        self._given = files
        self._sizes: dict[int, int] = {}
        self._files: OrderedDict[int, Mapping[str, list[pa.RecordBatch]]] = OrderedDict()

    def read(self, groups: Sequence[Place]) -> pa.Table:
        """The rows of groups, each group's in the order of its rollouts.

        The arrays lie in the files' own buffers, read-only. Raises `DamagedLake` when a group is not there with all
        segments of its N rollouts.
        """
        batches: list[pa.RecordBatch] = []
        for group_id, number, n in groups:
            found = self._file(number).get(group_id, [])
            if not _whole(found, n):
                raise DamagedLake(
                    f"{self._given.place(number)} does not hold the {n} rollouts of group {group_id}: run `tokenlake "
                    "audit`",
                    group_id=group_id,
                )
            batches += found
        return pa.Table.from_batches(batches, ROW)

    def _file(self, number: int) -> Mapping[str, list[pa.RecordBatch]]:
        """Where each group of a file is: slices of its batches."""
        known = self._files.get(number)
        if known is None:
            known = self._files[number] = self._open(number)
            while len(self._files) > _MAX_FILES or (len(self._files) > 1 and sum(self._sizes.values()) > _MAX_BYTES):
                self._sizes.pop(self._files.popitem(last=False)[0])
        self._files.move_to_end(number)
        return known

    def _open(self, number: int) -> Mapping[str, list[pa.RecordBatch]]:
        slices: dict[str, list[pa.RecordBatch]] = {}
        try:
            file = self._given.open(number)
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                batch = conform(reader.get_batch(index), ROW)
                start = 0
                for group_id, run in groupby(batch.column("group_id").to_pylist()):
                    length = len(list(run))
                    slices.setdefault(group_id, []).append(batch.slice(start, length))
                    start += length
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedLake(f"{self._given.place(number)} cannot be read: run `tokenlake audit` ({error})") from error
        self._sizes[number] = 0 if isinstance(file, pa.MemoryMappedFile) else file.size()
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
