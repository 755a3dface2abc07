"""Ready rows to an object store, for trainers on other machines; beside a running service, as any reader.

What is there is never changed: files first, then the entry of the catalog that names them. So an export that was killed
has shown nothing or whole groups, and the next one goes on behind the last entry; what had been written before that
entry is written again under the same names. Two exports at once say the same thing twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import Conflict
from tokenlake.store.exported import Catalog, Entry, ExportedFile, ExportedGroup, check_digests, versions_name
from tokenlake.store.objects import Objects, sha256_of
from tokenlake.store.query import fetch
from tokenlake.store.reader import Lake
from tokenlake.store.rowreader import MappedFiles, RowReader

__all__ = ["Export", "Exporter"]

_STRETCH = 256
"""Groups of an entry of the catalog, whose first is a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was written that was not there before."""

    groups: int
    files: int
    """Files of rows."""
    bytes: int
    """Of those."""


class Exporter:
    """One lake, and the store that its rows go to. Used by one thread."""

    def __init__(self, lake: Lake, store: Objects) -> None:
        self._lake = lake
        self._store = store
        self._catalog = Catalog(store)
        self._files = MappedFiles(lake.path)
        self._reader = RowReader(self._files)

    def run(self) -> Export:
        """Export the groups that were published since.

        Raises `DamagedLake` for rows that are not as they were published, `Conflict` where the store has rows of
        another lake, or other rows of this one (it was restored from a copy that knew less).
        """
        self._lake.refresh()
        self._catalog.refresh()
        found = fetch(self._lake, sql.read("reads/groups_to_export"), [])
        published = [*zip(*found.to_pydict().values(), strict=True)]
        known = [group.place for group in self._catalog.groups]
        same = known == [(group_id, number, n) for group_id, number, n, _ in published[: len(known)]]
        if self._catalog.lake_id not in (None, self._lake.lake_id) or not same:
            raise Conflict(
                f"{self._store.name} has rows that are not those of {self._lake.path}: name another folder",
                lake_id=self._catalog.lake_id,
            )
        sizes: list[int] = []
        while (start := len(self._catalog.groups)) < len(published):
            sizes += self._extend(published[start : start + _STRETCH - start % _STRETCH])
        return Export(groups=len(published) - len(known), files=len(sizes), bytes=sum(sizes))

    def _extend(self, published: list[tuple[str, int, int, str]]) -> list[int]:
        """Write what these groups need, then the entry with them; returns the sizes of new files of rows."""
        self._reader.read([(group_id, number, n) for group_id, number, n, _ in published])
        sizes: list[int] = []
        files = dict(self._catalog.files)
        for number in dict.fromkeys(number for _, number, _, _ in published):
            if number not in files:
                files[number], size = self._put_rows(number)
                sizes.append(size)
        versions = self._put_versions([group_id for group_id, *_ in published])
        pad = fetch(self._lake, sql.read("reads/pad_id"), []).columns[0].to_pylist()
        first = len(self._catalog.groups) // _STRETCH * _STRETCH
        groups = self._catalog.groups[first:] + [
            ExportedGroup(group_id=group_id, number=number, n=n, purpose=purpose, versions=versions)
            for group_id, number, n, purpose in published
        ]
        entry = Entry(
            lake_id=self._lake.lake_id,
            first=first,
            pad_id=int(pad[0] or 0) if pad else 0,
            groups=tuple(groups),
            files=tuple(files[number] for number in dict.fromkeys(group.number for group in groups)),
        )
        entry.put(self._store)
        self._catalog.take(entry)
        return sizes

    def _put_rows(self, number: int) -> tuple[ExportedFile, int]:
        data = self._files.open(number).read_buffer()
        check_digests(data, self._files.place(number))
        file = ExportedFile(number=number, sha256=sha256_of(data))
        self._store.put(file.name, data)
        return file, data.size

    def _put_versions(self, groups: list[str]) -> str:
        runs = fetch(self._lake, sql.read("reads/versions_of"), [groups], groups=groups)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, runs.schema) as writer:
            writer.write_table(runs)
        data = sink.getvalue()
        sha256 = sha256_of(data)
        self._store.put(versions_name(sha256), data)
        return sha256
