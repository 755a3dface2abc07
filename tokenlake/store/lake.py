"""The owner's side of a lake: the one process that writes lineage, rows and `index.duckdb`."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import LakeLocked, StorageFailed, TokenlakeError
from tokenlake.program import program_version
from tokenlake.store.compact import Compaction, Compactor
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.encode import DELTA_LAYOUT
from tokenlake.store.format import create_lake, read_lake
from tokenlake.store.index import Index
from tokenlake.store.index_file import memory_index, open_index, remove_index
from tokenlake.store.lineage import LINEAGE_MAX_BYTES, LineageLog
from tokenlake.store.lock import SEGMENTS_LOCK, DirectoryLock, check_process
from tokenlake.store.planned import Planned
from tokenlake.store.query import run_query
from tokenlake.store.records import delta_keys
from tokenlake.store.recover import recover_directory
from tokenlake.store.rowfile import RowWriter
from tokenlake.store.schema import DELTA, FORMAT_VERSION
from tokenlake.store.segment import SEGMENT_MAX_BYTES, SEGMENT_MAX_ELEMENTS, make_directory
from tokenlake.store.snapshot import remove_snapshot, write_snapshot
from tokenlake.store.space import FreeSpace

__all__ = ["OwnedLake"]

_log = logging.getLogger(__name__)
_LINEAGE_WRITER = "gate"


class OwnedLake:
    """A lake opened by its one owner. Thread-safe; used only in the process that opened it.

    `segment_max_bytes` and `segment_max_elements` bound the segments it writes. Raises `LakeLocked` (which names the
    owner's pid) while another process owns the lake, `NotFound` without `create`, `FormatError` for a newer format,
    `DamagedLake` when acknowledged lineage is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        segment_max_bytes: int = SEGMENT_MAX_BYTES,
        segment_max_elements: int = SEGMENT_MAX_ELEMENTS,
    ) -> None:
        self.path = Path(path)
        self.space = FreeSpace(self.path)
        """How much of the disk stays free; nothing unless its `floor` is set."""
        try:
            self._open(create, segment_max_bytes, segment_max_elements)
        except (OSError, duckdb.Error) as error:
            raise StorageFailed(
                f"lake {self.path} could not be opened: {error}: check the disk, then start again",
                errno=getattr(error, "errno", None),
            ) from error

    def _open(self, create: bool, segment_max_bytes: int, segment_max_elements: int) -> None:
        if create:
            make_directory(self.path)
        else:
            read_lake(self.path)
        self._pid = os.getpid()
        self._bounds = {"segment_max_bytes": segment_max_bytes, "segment_max_elements": segment_max_elements}
        self._what = f"lake {self.path}"
        self._lock = DirectoryLock(self.path / "owner.lock", self._what)
        self._writers: dict[str, DeltaWriter] = {}
        self._mutex = threading.Lock()
        self._compacting = threading.Lock()
        self._closed = False
        opened = False
        try:
            if create:
                create_lake(self.path)
            self.lake_id: str = read_lake(self.path)["lake_id"]
            self.lineage = LineageLog(
                self.path,
                _LINEAGE_WRITER,
                segment_max_bytes=min(segment_max_bytes, LINEAGE_MAX_BYTES),
                opening=self._opening(),
                space=self.space,
            )
            try:
                self._recover()
                self._rows = RowWriter(self.path / "rows")
                self._index = open_index(self.path)
                self._finish_compaction()
                opened = True
            finally:
                if not opened:
                    self.lineage.close()
        finally:
            if not opened:
                self._lock.release()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        segment_max_bytes: int = SEGMENT_MAX_BYTES,
        segment_max_elements: int = SEGMENT_MAX_ELEMENTS,
    ) -> Self:
        """As the constructor."""
        return cls(path, create=create, segment_max_bytes=segment_max_bytes, segment_max_elements=segment_max_elements)

    def _opening(self) -> dict[str, Any]:
        """The event that says who writes from here on."""
        about = {
            "lake_id": self.lake_id,
            "format_version": FORMAT_VERSION,
            "tokenlake": program_version(),
            "host": socket.gethostname(),
            "pid": self._pid,
        }
        return {"event_type": "lake_opened", "detail": json.dumps(about)}

    # ---------------------------------------------------------------- writing

    def delta_writer(self, name: str, *, remember: int | None = None) -> DeltaWriter:
        """The writer of this name, made when first asked for; `remember` as it says.

        Raises `LakeLocked` while another process has it.
        """
        self._check()
        with self._mutex:
            if name not in self._writers:
                self.lineage.check()
                self._writers[name] = DeltaWriter(self.path, name, remember=remember, space=self.space, **self._bounds)
            return self._writers[name]

    def write_rows(self, table: pa.Table) -> int:
        """Write training rows (a table of `ROW`) durably as one file and return its number; no event names it yet."""
        self._check()
        self.space.for_events()
        self.lineage.check()
        return self._rows.write(table)

    # ---------------------------------------------------------------- reading

    def read_delta(self, place: Place) -> Delta:
        """The record that was staged at a place, also when compaction has moved it. Raises `NotFound`."""
        return self.read_deltas([place])[0]

    def read_deltas(self, places: Sequence[Place]) -> list[Delta]:
        """The records at several places, as `read_delta`: each segment is looked at once. Raises `NotFound`."""
        self._check()
        index = self._index
        try:
            return index.read_deltas(places)
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)
            return self._index.read_deltas(places)

    def find_delta(self, rollout_id: str, attempt: int, call_id: str) -> tuple[Place, bytes] | None:
        """(place, digest) of the delta with this key, of any writer, or None."""
        self._check()
        writers = list(self._writers.values())
        for writer in writers:
            found = writer.find(rollout_id, attempt, call_id)
            if found is not None:
                return found
        self._refresh([writer.name for writer in writers if writer.knows_all])
        index, key = self._index, (rollout_id, attempt, call_id)
        try:
            return index.find_delta(key)
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)
            return self._index.find_delta(key)

    def open_events(self) -> list[dict[str, Any]]:
        """What a gate that starts has to fold: all events of open groups, and the latest of those that belong to none.

        In order, non-NULL columns only, times in microseconds. Costs what is open, not what ever was.
        """
        self.refresh()
        return self._folded("index/open_events", [])

    def events_of(self, groups: Sequence[str], *, refresh: bool = True) -> list[dict[str, Any]]:
        """Every event of some groups, in the same form; without `refresh` those of the last one, which is quicker."""
        self._check()
        if refresh:
            self._refresh()
        return self._folded("index/events_of_groups", [list(groups)])

    def connect(self, *, groups: Sequence[str] | None = None, query: str | None = None) -> duckdb.DuckDBPyConnection:
        """A refreshed DuckDB connection of the caller's own, with all relations, views and functions.

        With `groups` the relations hold only these groups and what belongs to none. With `query` it is only sure to
        have the views that this text names, which is quicker.
        """
        self.refresh()
        return self._cursor(groups, query=query)

    def planned(self, groups: Sequence[str]) -> AbstractContextManager[Planned]:
        """The statements that are planned once, over these groups as of now; one caller at a time."""
        self.refresh()
        index = self._index
        try:
            return index.planned(*index.of_groups(groups))
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)
            return self._index.planned(*self._index.of_groups(groups))

    def sql(self, query: str, params: Sequence[Any] | dict[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """A DuckDB relation of one query over the refreshed lake. Raises `QueryError`."""
        self.refresh()
        return run_query(self._cursor(query=query), query, params)

    def refresh(self) -> None:
        """Take what was written since the last refresh into the index."""
        self._check()
        self._refresh()

    def compact(self, *, min_records: int = 0) -> Compaction:
        """Rewrite small batches of deltas as large ones, and remove what retention retired; readers see no difference.

        It does nothing while fewer than `min_records` small batches wait and nothing that is there was retired.

        Raises `LakeLocked` while a backup is made, `StorageFailed` when the disk refuses, or where another process may
        own the lake by now: then nothing has changed.
        """
        self.refresh()
        self.lineage.check()
        index = self._index
        try:
            if not self._compactor().worth(min_records):
                return Compaction()
            lock = DirectoryLock(self.path / SEGMENTS_LOCK, f"the set of segments of {self.path}")
            try:
                with self._compacting:
                    for writer in list(self._writers.values()):
                        writer.roll()
                    self.refresh()
                    index = self._index
                    return self._compactor().run()
            finally:
                lock.release()
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)
            raise StorageFailed(f"{self._what} was not compacted: its index could not be written; try again") from error

    def snapshot(self) -> bool:
        """Write down what readers of a large lake open quickly by, if enough is new; whether it was written."""
        self.refresh()
        return self._write_snapshot()

    def rebuild(self) -> float:
        """Drop the index file, build it anew from the Arrow files, and return the seconds that took."""
        self._check()
        start = time.monotonic()
        with self._mutex:
            self._index.close()
            remove_index(self.path)
            remove_snapshot(self.path)
            self._index = open_index(self.path)
        seconds = time.monotonic() - start
        _log.info("index of %s was rebuilt in %.2f s", self.path, seconds)
        return seconds

    def close(self) -> None:
        """Seal and anchor everything and let the lake go, also when the disk refuses. Idempotent."""
        if self._closed:
            return
        check_process(self._pid, self._what)
        self._closed = True
        with ExitStack() as last_first:
            for let_go in (self._lock.release, self._index.close, self._write_snapshot, self.lineage.close):
                last_first.callback(let_go)
            for writer in self._writers.values():
                last_first.callback(writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_snapshot(self) -> bool:
        """Whether one was written: not into a folder that is another lake's by now."""
        return self._lock.lost() is None and write_snapshot(self.path, self._index, self.space)

    def _refresh(self, skip: Sequence[str] = ()) -> None:
        """Refresh the index; one that the disk refuses to write goes on in memory, so that reading goes on."""
        index = self._index
        try:
            index.refresh(skip=skip)
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)

    def _cursor(self, groups: Sequence[str] | None = None, *, query: str | None = None) -> duckdb.DuckDBPyConnection:
        """A connection to the index, for whose views the disk may be written to as well."""
        index = self._index
        try:
            return index.cursor(groups, query=query)
        except duckdb.Error as error:
            self._go_on_in_memory(index, error)
            return self._index.cursor(groups, query=query)

    def _go_on_in_memory(self, index: Index, error: duckdb.Error) -> None:
        with self._mutex:
            if self._index is index:
                self._index = memory_index(self.path, error)
                index.close()

    def _folded(self, name: str, params: list[Any]) -> list[dict[str, Any]]:
        con = self._cursor(query="")
        try:
            table = con.sql(sql.read(name), params=params).to_arrow_table()
        finally:
            con.close()
        return [{key: value for key, value in event.items() if value is not None} for event in table.to_pylist()]

    def _check(self) -> None:
        if self._closed:
            raise TokenlakeError(f"{self._what} is closed: open it again")
        check_process(self._pid, self._what)

    def _compactor(self) -> Compactor:
        return Compactor(self.path, self._index, self.lineage, self._bounds["segment_max_bytes"])

    def _finish_compaction(self) -> None:
        """Complete what a crash interrupted, unless a backup is made: then it is left to the next one."""
        try:
            lock = DirectoryLock(self.path / SEGMENTS_LOCK, f"the set of segments of {self.path}")
        except LakeLocked:
            return
        try:
            self._compactor().finish()
        finally:
            lock.release()

    def _recover(self) -> None:
        """Seal what dead delta writers left; a live writer keeps its folder locked and is left alone."""
        for directory in sorted((self.path / "deltas").iterdir()):
            if not directory.is_dir():
                continue
            lock = DirectoryLock.acquire_if_free(directory / "writer.lock", f"writer {directory.name}")
            if lock is None:
                continue
            try:
                recover_directory(directory, DELTA, DELTA_LAYOUT.prefix, delta_keys)
            except OSError as error:
                raise StorageFailed(f"{directory} could not be recovered: {error}") from error
            finally:
                lock.release()
