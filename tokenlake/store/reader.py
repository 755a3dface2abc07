"""The reader's side of a lake: any number of processes, beside a running owner, without its index file.

A `Lake` builds its own in-memory index from the Arrow files and refreshes it by what was appended. Every query runs on
a cursor of its own, so threads may share one `Lake`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import duckdb

from tokenlake.errors import TokenlakeError
from tokenlake.store.format import read_lake
from tokenlake.store.index import Index
from tokenlake.store.query import run_query

__all__ = ["Lake", "open"]


class Lake:
    """A lake opened for reading.

    Picklable: it travels as its path and is opened anew where it arrives. A forked child that uses an inherited handle
    opens its own instead. Raises `NotFound` where there is no lake, `FormatError` for a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lake_id: str = read_lake(self.path)["lake_id"]
        self._closed = False
        self._open()

    def sql(self, query: str, params: Sequence[Any] | dict[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """A DuckDB relation (`.fetchall()`, `.to_arrow_table()`, ...) of one query. Raises `QueryError`."""
        return run_query(self._index().cursor(query=query), query, params)

    def connect(self, *, groups: Sequence[str] | None = None) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection of the caller's own, with all relations, views and functions; closing it is theirs too.

        With `groups` the relations hold only these groups and what belongs to none: one group costs one group.
        """
        return self._index().cursor(groups)

    def refresh(self) -> None:
        """See what was written since the last refresh. Connections that are open already see it too."""
        self._index().refresh()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if not self._closed and self._pid == os.getpid():
            self._state.close()
        self._closed = True

    @property
    def decoded(self) -> int:
        """How many records queries have looked up on disk so far."""
        return self._index().fetcher.decoded

    def _open(self) -> None:
        self._pid = os.getpid()
        self._state = Index(self.path, duckdb.connect(":memory:"))
        self._state.refresh()

    def _index(self) -> Index:
        if self._closed:
            raise TokenlakeError(f"lake {self.path} is closed: open it again")
        if self._pid != os.getpid():
            _inherited.append(self._state)
            self._open()
        return self._state

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self.path),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_inherited: list[Index] = []
"""What a forked child must never touch, not even to free it: its threads and locks belong to the parent."""


def open(path: str | os.PathLike[str]) -> Lake:  # noqa: A001  # `tokenlake.open(path)` is the documented door
    """Open a lake for reading. Raises `NotFound` where there is no lake, `FormatError` for a newer format."""
    return Lake(path)
