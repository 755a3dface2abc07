"""Verifying a lake of any size again from its bytes, in memory that does not grow with it.

The index of an audit is its own, in a file, and every stretch of it is built from the lake's files; the findings are
taken for some groups at a time, as many as fit a number of bytes. What was looked at is kept beside that index, so an
audit that was interrupted goes on where it stopped when it is given the same folder again, and looks anew at the groups
that changed since. A lake is pinned by one digest over everything the gate decided and every row it published
(`docs/format.md`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import ConfigError, StorageFailed
from tokenlake.store.format import read_lake
from tokenlake.store.index import Index

__all__ = ["AuditSummary", "LakeAudit", "signature"]

_MEMORY = 1 << 30
"""What DuckDB may hold; beyond it spills to the state. One group's rows and calls have to fit."""

_BATCH = 16 << 20
"""Bytes of deltas and rows whose groups are looked at together; one larger group is looked at alone."""
_INTAKE = 8 << 20
_TABLES = ("progress/tl_audited", "progress/tl_found")
_MARK = "audit.json"
_FETCH = 1024

_Group = tuple[str, int, int, int, int, int]
"""Group id, events, calls, rows, bytes of the calls and rows, how many groups are due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSummary:
    """What an audit looked at, and what pins it."""

    lake_id: str
    groups: int
    calls: int
    """Delta records, committed or not."""
    rows: int
    """Training rows on disk, published or not."""
    faults: int
    notices: int
    digest: str
    """64 hexadecimal digits; the same after compaction and for another index."""


def signature(key: bytes, lake_id: str, digest: str) -> str:
    """HMAC-SHA256 of a lake's digest, as 64 hexadecimal digits."""
    return hmac.new(key, f"tokenlake.audit.1\n{lake_id}\n{digest}".encode(), hashlib.sha256).hexdigest()


class LakeAudit:
    """One audit of a lake. `state` is a folder for what it knows so far, which `close` removes once all is done.

    Raises `NotFound` where there is no lake, `ConfigError` for the state of another lake's audit.
    """

    def __init__(
        self, path: Path, *, state: Path | None = None, memory_bytes: int = _MEMORY, batch_bytes: int = _BATCH
    ) -> None:
        self.lake_id = cast("str", read_lake(path)["lake_id"])
        self._batch_bytes = batch_bytes
        self._done = state is None
        self._state = Path(tempfile.mkdtemp(prefix="tokenlake-audit-")) if state is None else state
        self._mark()
        config: dict[str, Any] = {"memory_limit": f"{memory_bytes}B", "temp_directory": str(self._state / "spill")}
        self._con = duckdb.connect(str(self._state / "index.duckdb"), config=config)
        self._index = Index(path, self._con)
        for name in _TABLES:
            self._con.execute(sql.read(name))

    def run(self, progress: Callable[[int, int], None] | None = None) -> AuditSummary:
        """Look at everything; `progress` is told how many of the groups that were due are done, and how many were.

        Raises `StorageFailed` when the state, or one group, needs more room than there is.
        """
        try:
            self._take_in()
            self._look([("", 0, 0, 0, 0, 0)])
            self._look_at_all(progress)
            # What was removed meanwhile may have been retired meanwhile: what is said of it was said too early.
            self._take_in()
            while self._look_at_all(None, again=True):
                self._take_in()
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise StorageFailed(f"the audit has not enough room, with its state in {self._state}: {error}") from error
        self._done = True
        return self.summary()

    def _take_in(self) -> None:
        while self._index.refresh(limit=_INTAKE):
            self._index.maps.clear()

    def _look_at_all(self, progress: Callable[[int, int], None] | None, *, again: bool = False) -> int:
        """Look at what is due, or `again` at those groups of which something was found; returns how many there were."""
        due = self._con.cursor()
        try:
            due.execute(sql.read("progress/due"), [again])
            done = 0
            for batch in self._batches(due):
                self._look(batch)
                self._index.maps.clear()
                done += len(batch)
                if progress is not None:
                    progress(done, batch[0][5])
            return done
        finally:
            due.close()

    def summary(self) -> AuditSummary:
        """What was looked at so far."""
        groups, calls, rows, faults, notices = self._con.execute(sql.read("progress/totals")).fetchall()[0]
        digest = hashlib.sha256(f"tokenlake.audit.1\n{self.lake_id}\n".encode())
        leaves = self._con.execute(sql.read("progress/digests"))
        while found := leaves.fetchmany(_FETCH):
            digest.update("".join(f"{group_id} {leaf}\n" for group_id, leaf in found).encode())
        return AuditSummary(
            lake_id=self.lake_id,
            groups=groups,
            calls=calls,
            rows=rows,
            faults=faults,
            notices=notices,
            digest=digest.hexdigest(),
        )

    def findings(self) -> pa.Table:
        """What was found so far, worst first."""
        return self._con.sql(sql.read("progress/found")).to_arrow_table()

    def close(self) -> None:
        """Let go of everything; what an unfinished audit knows stays in the state it was given."""
        self._index.close()
        if self._done:
            shutil.rmtree(self._state, ignore_errors=True)

    def _batches(self, due: duckdb.DuckDBPyConnection) -> Iterator[list[_Group]]:
        batch: list[_Group] = []
        size = 0
        while found := cast("list[_Group]", due.fetchmany(_FETCH)):
            for group in found:
                if batch and size + group[4] > self._batch_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(group)
                size += group[4]
        if batch:
            yield batch

    def _look(self, batch: list[_Group]) -> None:
        """Keep the findings and the digests of some groups, in one transaction; the first batch is of no group."""
        names = [group[0] for group in batch]
        con = self._index.cursor(names)
        try:
            con.execute("BEGIN")
            con.execute(sql.read("progress/forget_found"), [names])
            con.execute(sql.read("progress/forget_audited"), [names])
            con.execute(sql.read("progress/find"), [names[0]])
            columns = [list(column) for column in zip(*batch, strict=True)]
            con.execute(sql.read("progress/audited"), columns[:4])
            con.execute("COMMIT")
        finally:
            con.close()
        if not names[0]:
            self._con.execute(sql.read("progress/find_in_files"))

    def _mark(self) -> None:
        """Say whose state the folder is, or see that it is this lake's."""
        mark = self._state / _MARK
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            if not mark.exists():
                if any(self._state.iterdir()):
                    raise ConfigError(f"{self._state} holds something else than an audit: name an empty folder")
                mark.write_text(json.dumps({"lake_id": self.lake_id}) + "\n")
            elif json.loads(mark.read_bytes()) != {"lake_id": self.lake_id}:
                raise ConfigError(f"{self._state} is the state of another lake's audit: name another folder")
        except OSError as error:
            raise StorageFailed(f"the audit cannot keep its state in {self._state}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
