"""Compaction: many small batches of deltas become few large ones, with one rollout's calls side by side.

Only sealed segments without damage are touched. Their records are written to a new segment, which is synced and then
renamed into `deltas/_compacted/`: that is the commit. It names in its own schema what it replaces, so whoever opens the
lake after a crash finishes the work. Then `segment_replaced` is appended to lineage and the old segments are removed.
Between rename and removal a record is there twice under one key, which every reader takes for one.

Records that `retired` events name are left out; that is how retention removes them. Bytes that are kept are kept as
they are, right or wrong: compaction does not judge.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import StorageFailed
from tokenlake.store.batchfile import write_batches
from tokenlake.store.deltas import COMPACTED
from tokenlake.store.format import write_durable
from tokenlake.store.index import Index
from tokenlake.store.lineage import LineageLog
from tokenlake.store.schema import DELTA, PLACE
from tokenlake.store.segment import FLOOR, make_directory, next_number, segment_numbers, sync_directory

__all__ = ["Compaction", "Compactor"]

_log = logging.getLogger(__name__)
_REPLACES = b"tokenlake.replaces"
_BATCH_ROWS = 256
_BATCH_BYTES = 8 << 20
_SMALL_ROWS, _SMALL_BYTES = 64, 1 << 20
"""A segment whose batches are on average smaller than both is worth rewriting."""

_Key = tuple[str, int]
"""Writer and number of a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What one run did."""

    replaced: int = 0
    """Segments that were removed."""
    written: int = 0
    """Segments that stand for them."""
    records: int = 0
    """Deltas that were written again."""
    retired: int = 0
    """Deltas that retention removed."""
    bytes_before: int = 0
    """Of the segments that were removed."""
    bytes_after: int = 0
    """Of those that stand for them."""

    def __add__(self, other: Compaction) -> Compaction:
        return Compaction(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    key: _Key
    size: int
    due: bool


class _UnreadableError(Exception):
    """A record of this segment cannot be read, or differs from the copy that stands for it."""

    def __init__(self, key: _Key) -> None:
        super().__init__(key)
        self.key = key


class Compactor:
    """Rewrites the deltas of one lake; its caller owns the lake and runs one at a time.

    A run holds one batch in memory, and needs as much free disk as one segment of `max_bytes`.
    """

    def __init__(self, root: Path, index: Index, lineage: LineageLog, max_bytes: int) -> None:
        self._root = root
        self._index = index
        self._lineage = lineage
        self._max_bytes = max_bytes
        self._directory = root / "deltas" / COMPACTED

    def worth(self, min_records: int) -> bool:
        """Whether that many small batches wait, open segments included, or records that retention removes."""
        ((small, retired),) = self._select("index/waiting_records", [COMPACTED, _SMALL_BYTES])
        return retired or small >= min_records

    def run(self) -> Compaction:
        """Rewrite what is worth it. Raises `StorageFailed` when the disk refuses: then nothing has changed."""
        self.finish()
        total = Compaction()
        left: set[_Key] = set()
        for job in self._jobs(left):
            chosen = job
            while any(source.due for source in chosen):
                try:
                    total += self._replace(chosen)
                    break
                except _UnreadableError as unreadable:
                    _log.warning("%s is left as it is: a record of it is damaged", self._path(unreadable.key))
                    left.add(unreadable.key)
                    chosen = [source for source in job if source.key not in left]
        return total

    def finish(self) -> None:
        """Complete what a crash interrupted after its commit."""
        named = {number for (number,) in self._select("index/replacements", [COMPACTED])}
        removed = False
        for number in segment_numbers(self._directory):
            mapped = self._index.maps.get(f"deltas/{COMPACTED}/{number:06d}.arrow")
            about = mapped.schema.metadata if mapped is not None and mapped.schema is not None else None
            if about is None or _REPLACES not in about:
                continue
            keys = [(writer, segment) for writer, segment in json.loads(about[_REPLACES])]
            if number not in named:
                self._record(number, keys)
            removed |= self._remove(keys)
        if removed:
            self._index.refresh()

    # ---------------------------------------------------------------- choosing

    def _jobs(self, left: set[_Key]) -> Iterator[list[_Source]]:
        """Segments to rewrite together, at most `max_bytes` where it is more than one."""
        due: list[_Source] = []
        compact: list[_Source] = []
        for source in self._sources():
            (due if source.due else compact).append(source)
        job: list[_Source] = []
        for source in due:
            if job and sum(each.size for each in job) + source.size > self._max_bytes:
                yield job
                job = []
            job.append(source)
        if not job:
            return
        # A small compacted segment is merged once as much again has come: so each byte is rewritten a few times only.
        for source in sorted(compact, key=lambda each: each.size):
            total = sum(each.size for each in job)
            if source.size > total or total + source.size > self._max_bytes or source.key in left:
                break
            job.append(source)
        yield job

    def _sources(self) -> list[_Source]:
        found: list[_Source] = []
        for writer, segment, records, batches, size, retired in self._select("index/compactable", []):
            if not self._path((writer, segment)).exists():
                continue
            small = records < _SMALL_ROWS * batches and size < _SMALL_BYTES * batches
            due = retired > 0 or records == 0 or (small and writer != COMPACTED)
            if due or writer == COMPACTED:
                found.append(_Source(key=(writer, segment), size=size, due=due))
        return found

    # ---------------------------------------------------------------- writing

    def _replace(self, sources: Sequence[_Source]) -> Compaction:
        keys = [source.key for source in sources]
        found = self._select("index/records_in", [[writer for writer, _ in keys], [segment for _, segment in keys]])
        kept: list[tuple[Any, ...]] = []
        retired = 0
        for record in found:
            place, share, gone, copy = record[:8], record[8], record[9], record[10:]
            if gone:
                retired += 1
            elif copy[0] is None:
                kept.append((*place, share))
            elif self._said(place) != self._said((*copy, *place[5:])):
                raise _UnreadableError((place[0], place[1]))
        number = None
        if kept:
            number = self._write(kept, keys)
        self._record(number, keys, records=len(kept), retired=retired)
        self._remove(keys)
        self._index.refresh()
        return Compaction(
            replaced=len(keys),
            written=int(number is not None),
            records=len(kept),
            retired=retired,
            bytes_before=sum(source.size for source in sources),
            bytes_after=0 if number is None else self._path((COMPACTED, number)).stat().st_size,
        )

    def _said(self, place: tuple[Any, ...]) -> str:
        """All of a record but when it was staged, in a form in which a NaN equals itself."""
        return repr(self._batch([place], DELTA).drop_columns("staged_at").to_pylist())

    def _write(self, records: Sequence[tuple[Any, ...]], keys: Sequence[_Key]) -> int:
        try:
            make_directory(self._directory)
            number = next_number(self._directory)
            schema = DELTA.with_metadata({_REPLACES: json.dumps(keys).encode()})
            write_batches(self._path((COMPACTED, number)), schema, self._batches(records, schema))
        except OSError as error:
            raise StorageFailed(
                f"{self._directory} could not take a compacted segment ({error.strerror or error}); nothing has "
                "changed: free space or check the disk, then try again",
                errno=error.errno,
            ) from error
        return number

    def _batches(self, records: Sequence[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        start = size = 0
        for stop, record in enumerate(records):
            if stop > start and (stop - start == _BATCH_ROWS or size + record[8] > _BATCH_BYTES):
                yield self._batch(records[start:stop], schema)
                start, size = stop, 0
            size += record[8]
        yield self._batch(records[start:], schema)

    def _batch(self, records: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
        table = self._read([record[:8] for record in records])
        return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], schema=schema)

    def _read(self, places: Sequence[tuple[Any, ...]]) -> pa.Table:
        """The records at places, in their order."""
        kinds = [*(field.type for field in PLACE), pa.string(), pa.int32(), pa.string()]
        columns = zip(*places, strict=True)
        found = self._index.fetcher.deltas([pa.array(c, kind) for c, kind in zip(columns, kinds, strict=True)])
        if found.null_count:
            missing: int = found.is_null().to_pylist().index(True)
            writer, segment, *_ = places[missing]
            raise _UnreadableError((writer, segment))
        return pa.Table.from_struct_array(found)

    # ---------------------------------------------------------------- after the commit

    def _record(self, number: int | None, keys: Sequence[_Key], **counts: int) -> None:
        replaced: dict[str, list[int]] = {}
        for writer, segment in sorted(keys):
            replaced.setdefault(writer, []).append(segment)
        detail = json.dumps({"replaced": replaced, **counts}, sort_keys=True)
        self._lineage.append("segment_replaced", writer=COMPACTED, segment=number, detail=detail)

    def _remove(self, keys: Sequence[_Key]) -> bool:
        """Remove segments; True: some were there. Their numbers stay taken."""
        removed = False
        for writer in sorted({writer for writer, _ in keys}):
            directory = self._root / "deltas" / writer
            present = segment_numbers(directory)
            going = sorted({segment for name, segment in keys if name == writer} & set(present))
            if not going:
                continue
            removed = True
            try:
                if going[-1] == present[-1]:
                    write_durable(directory / FLOOR, str(next_number(directory)).encode())
                for segment in going:
                    (directory / f"{segment:06d}.arrow").unlink()
                sync_directory(directory)
            except OSError as error:
                raise StorageFailed(
                    f"{directory} keeps segments that were replaced ({error.strerror or error}); they do no harm, and "
                    "the next start removes them",
                    errno=error.errno,
                ) from error
        return removed

    def _path(self, key: _Key) -> Path:
        return self._root / "deltas" / key[0] / f"{key[1]:06d}.arrow"

    def _select(self, name: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        text = sql.read(name)
        con = self._index.cursor(query=text)
        try:
            return con.execute(text, list(params)).fetchall()
        finally:
            con.close()
