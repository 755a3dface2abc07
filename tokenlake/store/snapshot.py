"""`index.snapshot.DIGEST.duckdb`: what the owner's index knew once; a reader that has it need not read every file.

The owner writes it whole beside its index and renames it to a name that holds its SHA-256. A reader works on a copy of
its own, which has no name any more once it is open, and takes in what was written since; a snapshot that is missing, of
another version or damaged costs only the time that it would have saved. What is in one is as trusted as `index.duckdb`
itself: an audit and a rebuild read the Arrow files, and neither of the two.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb

from tokenlake import sql
from tokenlake.store.index import TABLES, Index, layout
from tokenlake.store.scratch import Scratch
from tokenlake.store.segment import sync_directory
from tokenlake.store.space import FreeSpace

__all__ = ["open_snapshot", "remove_snapshot", "write_snapshot"]

_log = logging.getLogger(__name__)
_NAMES = "index.snapshot.*.duckdb"
_PARTIAL = "index.snapshot.partial"
_CHUNK = 8 << 20
_LEAST = 25_000
"""Events and records from which a snapshot saves more time than it costs."""
_BYTES = 400
"""Of each, more than a snapshot takes."""


def write_snapshot(root: Path, index: Index, space: FreeSpace) -> bool:
    """Write what the index knows, if it is much, a quarter of it is new and there is room; the caller owns the lake.

    Returns whether it was written; a disk that refuses is told in a warning, since nothing but time is lost.
    """
    try:
        with closing(index.cursor(query="")) as con:
            size, old = _size(con), _newest(root)
            if size < _LEAST or (old is not None and 4 * (size - _known(old)) < size):
                return False
            if not space.has_room_for(size * _BYTES):
                _log.warning("a snapshot of the index of %s was not written: too little of its disk is free", root)
                return False
            _fill(con, root / _PARTIAL)
        with (root / _PARTIAL).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (root / _PARTIAL).rename(root / _NAMES.replace("*", digest))
        sync_directory(root)
        if old is not None:
            _remove(old)
        return True
    except (duckdb.Error, OSError) as error:
        _log.warning("a snapshot of the index of %s was not written: %s", root, str(error).splitlines()[0])
        return False


def _fill(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Write every table of an index, as of one moment, into a new file."""
    _remove(path)
    con.execute(sql.read("snapshot/attach"), [str(path)])
    try:
        con.begin()
        for name in (*TABLES, "tl_layout"):
            con.table(name).create(f"snapshot.{name}")
        con.commit()
    finally:
        con.execute(sql.read("snapshot/detach"))


def remove_snapshot(root: Path) -> None:
    """Delete the snapshot."""
    for path in root.glob(_NAMES):
        _remove(path)


def open_snapshot(root: Path, config: dict[str, Any]) -> Index | None:
    """A reader's own index as the snapshot left it, not refreshed; None where there is none that can be used."""
    path = _newest(root)
    if path is None:
        return None
    index = scratch = None
    try:
        scratch = Scratch()
        copy = scratch.path / path.name
        if _NAMES.replace("*", _copied(path, copy)) != path.name:
            raise OSError("its bytes are not those that were written")
        con = duckdb.connect(str(copy), config=config)
        # The copy goes when the last handle does, however this process ends; DuckDB's log of it still needs the folder.
        copy.unlink()
        try:
            if con.execute(sql.read("index/layout")).fetchall() == [(layout(),)]:
                index = Index(root, con)
                index.when_closed = weakref.finalize(index, scratch.remove)
        finally:
            if index is None:
                con.close()
    except (duckdb.Error, OSError) as error:
        _log.warning("%s cannot be used, every file is read: %s", path, str(error).splitlines()[0])
    if index is None and scratch is not None:
        scratch.remove()
    return index


def _newest(root: Path) -> Path | None:
    """The one snapshot; two for the moment between two steps of the owner, either of which will do."""
    return min(root.glob(_NAMES), default=None)


def _copied(path: Path, copy: Path) -> str:
    """Copy a file; the SHA-256 of its bytes."""
    hashed = hashlib.sha256()
    with path.open("rb") as source, copy.open("wb") as target:
        while data := source.read(_CHUNK):
            hashed.update(data)
            target.write(data)
    return hashed.hexdigest()


def _size(con: duckdb.DuckDBPyConnection) -> int:
    return con.execute(sql.read("snapshot/size")).fetchall()[0][0]


def _known(path: Path) -> int:
    """Events and records of a snapshot; 0 for one that cannot be used."""
    try:
        con = duckdb.connect(str(path), read_only=True)
    except duckdb.Error:
        return 0
    try:
        return _size(con) if con.execute(sql.read("index/layout")).fetchall() == [(layout(),)] else 0
    except duckdb.Error:
        return 0
    finally:
        con.close()


def _remove(path: Path) -> None:
    for each in (path, path.with_name(f"{path.name}.wal")):
        each.unlink(missing_ok=True)
