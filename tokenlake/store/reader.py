"""The reader's side of a lake: any number of processes, beside a running owner, without its index file.

A `Lake` builds its own in-memory index from the Arrow files and refreshes it by what was appended. Every query runs on
a cursor of its own, so threads may share one `Lake`. `sql` asks a locked database that only reads; `connect` gives a
connection to a free one, and the index is built twice only where both are used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import InvalidInput, TokenlakeError
from tokenlake.store.delta import Delta, Place
from tokenlake.store.format import read_lake
from tokenlake.store.index import Index
from tokenlake.store.intake import delta_writers
from tokenlake.store.planned import Planned
from tokenlake.store.query import fetch_table, run_query
from tokenlake.store.snapshot import open_snapshot

__all__ = ["Lake", "RowLake", "open"]


class Lake:
    """A lake opened for reading.

    `memory_bytes` bounds what DuckDB keeps in memory; nothing spills to disk then. Picklable: it travels as its path
    and is opened anew where it arrives. A forked child that uses an inherited handle opens its own instead. Raises
    `NotFound` where there is no lake, `FormatError` for a newer format.
    """

    def __init__(self, path: str | os.PathLike[str], *, memory_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.lake_id: str = read_lake(self.path)["lake_id"]
        self._config: dict[str, Any] = {} if memory_bytes is None else {"memory_limit": f"{memory_bytes}B", **_NO_SPILL}
        self._closed = False
        self._open()

    def sql(self, query: str, params: Sequence[Any] | dict[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """A DuckDB relation (`.fetchall()`, `.to_arrow_table()`, ...) of one query. Raises `QueryError`.

        The query reads this lake and nothing else: no file, socket, extension, setting or variable of the process.
        """
        return run_query(self.locked_cursor(query), query, params)

    def fetch(self, query: str, params: Sequence[Any] | dict[str, Any] | None = None) -> pa.Table:
        """The whole result of one query, as Arrow. Raises `QueryError`, also for what fails only when it runs."""
        return fetch_table(self.sql(query, params))

    def locked_cursor(self, query: str) -> duckdb.DuckDBPyConnection:
        """A connection of the caller's own to the locked database, with the views that `query` names."""
        return self._index(locked=True).cursor(query=query)

    def connect(self, *, groups: Sequence[str] | None = None, query: str | None = None) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection of the caller's own, with all relations, views and functions; closing it is theirs too.

        With `groups` the relations hold only these groups and what belongs to none: one group costs one group. With
        `query` it is only sure to have the views that this text names, which is quicker.
        """
        return self._index(locked=False).cursor(groups, query=query)

    def planned(self, groups: Sequence[str]) -> AbstractContextManager[Planned]:
        """The statements that are planned once, over these groups; one caller at a time."""
        index = self._index(locked=False)
        return index.planned(*index.of_groups(groups))

    def read_delta(self, place: Place) -> Delta:
        """The record that was staged at a place, also when compaction has moved it. Raises `NotFound`."""
        return self.read_deltas([place])[0]

    def read_deltas(self, places: Sequence[Place]) -> list[Delta]:
        """The records at several places, as `read_delta`: each segment is looked at once. Raises `NotFound`."""
        return self._opened()[0].read_deltas(places)

    def scan_deltas(
        self, *, groups: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """The records that `SELECT * FROM deltas` gives, as Arrow batches that are read from disk one after the other.

        It is faster than the query, since DuckDB hands out lists element by element, and never holds more than a batch.
        `groups` and `columns` choose some. Nothing is verified: the views do that. Raises `InvalidInput` for a column
        that deltas do not have, and for a text where a list belongs.
        """
        for name, value in (("groups", groups), ("columns", columns)):
            if isinstance(value, str):
                raise InvalidInput(f"{name} is a list: give [{value!r}]", field=name)
        return self._opened()[0].scan_deltas(groups, columns)

    def refresh(self) -> None:
        """See what was written since the last refresh. Connections that are open already see it too."""
        for index in self._opened():
            self._take_in(index)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if not self._closed and self._pid == os.getpid():
            for index in self._opened():
                index.close()
        self._closed = True

    @property
    def decoded(self) -> int:
        """How many records queries have looked up on disk so far."""
        return sum(index.fetcher.decoded for index in self._opened())

    def _open(self) -> None:
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._spare: Index | None = self._build()
        self._indexes: dict[bool, Index] = {}

    def _build(self) -> Index:
        index = self._filled()
        if self._config:
            return index  # DuckDB wants some memory for each thread that it believes in
        with index.cursor(query="") as con:
            if con.execute(sql.read("snapshot/size")).fetchall()[0][0] >= _MANY:
                for name in _THREADS:
                    con.execute(sql.read(name))
        return index

    def _filled(self) -> Index:
        index = open_snapshot(self.path, self._config)
        if index is not None:
            try:
                self._take_in(index)
                self._hold(index)
                return index
            except duckdb.Error:
                index.close()
        index = Index(self.path, duckdb.connect(":memory:", config=self._config))
        self._take_in(index)
        return index

    def _take_in(self, index: Index) -> None:
        index.refresh()

    def _hold(self, index: Index) -> None:
        index.hold()  # a snapshot knows them without having read them

    def _opened(self) -> list[Index]:
        """The indexes there are: one, or two where both kinds are used."""
        if self._closed:
            raise TokenlakeError(f"lake {self.path} is closed: open it again")
        if self._pid != os.getpid():
            self._open()
        return [*self._indexes.values(), *([] if self._spare is None else [self._spare])]

    def _index(self, *, locked: bool) -> Index:
        """The locked or the free index. What was built at opening becomes the kind that is asked for first."""
        self._opened()
        with self._opening:
            if locked not in self._indexes:
                index, self._spare = self._spare or self._build(), None
                if locked:
                    index.lock()
                self._indexes[locked] = index
            return self._indexes[locked]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self.path),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowLake(Lake):
    """A lake opened for its lineage and rows, which takes in no delta: what is not asked for is not waited for.

    Of the relation `deltas` it has what a snapshot knew, so no view that reads it is to be asked.
    """

    def _take_in(self, index: Index) -> None:
        index.refresh(skip=delta_writers(self.path))

    def _hold(self, index: Index) -> None:
        """Nothing: no delta is read."""


_NO_SPILL = {"max_temp_directory_size": "0B"}
_MANY = 25_000
"""Events and records from which parts of a fold save more time than they cost."""
_THREADS = ("threads/more", "threads/not_run")


def open(path: str | os.PathLike[str]) -> Lake:  # noqa: A001  # `tokenlake.open(path)` is the documented door
    """Open a lake for reading. Raises `NotFound` where there is no lake, `FormatError` for a newer format."""
    return Lake(path)
