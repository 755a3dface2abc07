"""Reading published rows straight from their files: record batches over a memory map, or over what was fetched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from tokenlake.errors import DamagedLake
from tokenlake.store.records import conform
from tokenlake.store.schema import ROW

__all__ = ["MappedFiles", "Place", "RowFiles", "RowReader"]

Place = tuple[str, int, int]
"""Where a group's rows are: group id, number of its file, N."""

_NAMES = ("group_id", "rollout_id", "segment_index", "segment_count")
_WHOLE = [(0, 1)]
"""The segments of nearly every rollout."""
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


class _Slice(NamedTuple):
    """Rows of one batch of a file."""

    batch: int
    start: int
    end: int


class _Group(NamedTuple):
    """Where a group is in a file."""

    slices: list[_Slice]
    whole: int
    """Rollouts that are there with all their segments; -1 where one is not."""


@dataclass(frozen=True, slots=True)
class _File:
    """An open file."""

    batches: list[pa.RecordBatch]
    groups: Mapping[str, _Group]
    fetched: int
    """Bytes of memory that it takes; what is mapped takes none."""


class RowReader:
    """Rows by group, of one lake. Used by one thread.

    It keeps the 64 files it read last; of those that were fetched into memory, 1 GiB beside the one that is read.
    """

    def __init__(self, files: RowFiles) -> None:
        self._given = files
        self._files: OrderedDict[int, _File] = OrderedDict()

    def read(self, groups: Sequence[Place]) -> pa.Table:
        """The rows of groups, each group's in the order of its rollouts.

        The arrays lie in the files' own buffers, read-only. Raises `DamagedLake` when a group is not there with all
        segments of its N rollouts.
        """
        parts: list[tuple[_File, _Slice]] = []
        for group_id, number, n in groups:
            file = self._file(number)
            found = file.groups.get(group_id)
            if found is None or found.whole != n:
                raise DamagedLake(
                    f"{self._given.place(number)} does not hold the {n} rollouts of group {group_id}: run `tokenlake "
                    "audit`",
                    group_id=group_id,
                )
            for batch, start, end in found.slices:
                # Groups that follow one another are one batch: what is done with rows costs by the batch.
                follows = parts and parts[-1][0] is file and parts[-1][1][::2] == (batch, start)
                parts.append((file, _Slice(batch, parts.pop()[1].start if follows else start, end)))
        batches = [file.batches[batch].slice(start, end - start) for file, (batch, start, end) in parts]
        return pa.Table.from_batches(batches, ROW)

    def _file(self, number: int) -> _File:
        known = self._files.get(number)
        if known is None:
            known = self._files[number] = self._open(number)
            held = sum(file.fetched for file in self._files.values())
            while len(self._files) > _MAX_FILES or (len(self._files) > 1 and held > _MAX_BYTES):
                held -= self._files.popitem(last=False)[1].fetched
        self._files.move_to_end(number)
        return known

    def _open(self, number: int) -> _File:
        batches: list[pa.RecordBatch] = []
        slices: dict[str, list[_Slice]] = {}
        segments: dict[str, dict[str, list[tuple[int, int]]]] = {}
        try:
            file = self._given.open(number)
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                batches.append(conform(reader.get_batch(index), ROW))
                group_ids, rollout_ids, *parts = (batches[-1].column(name).to_pylist() for name in _NAMES)
                rows = zip(rollout_ids, zip(*parts, strict=True), strict=True)
                start = 0
                for group_id, run in groupby(group_ids):
                    end = start + len(list(run))
                    slices.setdefault(group_id, []).append(_Slice(index, start, end))
                    of_group = segments.setdefault(group_id, {})
                    for rollout_id, part in islice(rows, end - start):
                        of_group.setdefault(rollout_id, []).append(part)
                    start = end
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedLake(f"{self._given.place(number)} cannot be read: run `tokenlake audit` ({error})") from error
        groups = {name: _Group(found, _whole(segments[name])) for name, found in slices.items()}
        return _File(batches, groups, 0 if isinstance(file, pa.MemoryMappedFile) else file.size())


def _whole(rollouts: Mapping[str, Sequence[tuple[int, int]]]) -> int:
    """How many rollouts, given as the index and count of each segment, are there; -1 where a segment is not."""
    complete = all(
        found == _WHOLE or sorted(found) == [(at, found[-1][1]) for at in range(found[-1][1])]
        for found in rollouts.values()
    )
    return len(rollouts) if complete else -1
