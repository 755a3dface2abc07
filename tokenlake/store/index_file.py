"""`index.duckdb`: opened, or built anew from the Arrow files when it is of no use.

One that cannot be used is moved aside first; one that another version left, with other tables, is not worth keeping.
Where the disk takes neither, the index is held in memory until the next start: it is only an index.
"""

from __future__ import annotations

import logging
from pathlib import Path

import duckdb

from tokenlake import sql
from tokenlake.store.index import Index, layout

__all__ = ["memory_index", "open_index", "remove_index"]

_log = logging.getLogger(__name__)
_NAME = "index.duckdb"
_LOG_NAME = "index.duckdb.wal"


def open_index(root: Path) -> Index:
    """The refreshed index of a lake; the caller owns the lake. An index that cannot be opened is moved aside."""
    try:
        if not (root / _NAME).exists() and not (root / _LOG_NAME).exists():
            return _opened(root, str(root / _NAME))
        try:
            return _opened_again(root)
        except duckdb.Error as error:
            kept = _move_aside(root)
            _log.warning("%s of %s cannot be used (%s): kept as %s, and built anew", _NAME, root, _line(error), kept)
            return _opened(root, str(root / _NAME))
    except duckdb.Error as error:
        return memory_index(root, error)


def memory_index(root: Path, error: duckdb.Error) -> Index:
    """The refreshed index of a lake in memory, after `error` of the one on disk; what it shows is the same."""
    _log.warning("%s of %s cannot be written (%s): in memory until the next start", _NAME, root, _line(error))
    return _opened(root, ":memory:")


def remove_index(root: Path) -> None:
    """Delete the index file and its log."""
    for name in (_NAME, _LOG_NAME):
        (root / name).unlink(missing_ok=True)


def _opened(root: Path, database: str) -> Index:
    return _filled(root, duckdb.connect(database))


def _opened_again(root: Path) -> Index:
    """The index that is there, unless another version left it."""
    con = duckdb.connect(str(root / _NAME))
    usable = False
    try:
        usable = not _outdated(con)
    finally:
        if not usable:
            con.close()
    if usable:
        return _filled(root, con)
    _log.info("%s of %s is of another version: built anew", _NAME, root)
    remove_index(root)
    return _opened(root, str(root / _NAME))


def _filled(root: Path, con: duckdb.DuckDBPyConnection) -> Index:
    """The refreshed index on a connection, which it owns; closed when that fails."""
    usable = False
    try:
        index = Index(root, con)
        con.execute(sql.read("tables/tl_layout"))
        con.execute(sql.read("index/stamp"), [layout()])
        index.refresh()
        usable = True
        return index
    finally:
        if not usable:
            con.close()


def _outdated(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether the index has other tables than this version: nothing would miss their columns until a query did."""
    try:
        return con.execute(sql.read("index/layout")).fetchall() != [(layout(),)]
    except duckdb.CatalogException:
        return True


def _move_aside(root: Path) -> str:
    n = 1
    while (root / f"{_NAME}.bad-{n}").exists() or (root / f"{_NAME}.bad-{n}.wal").exists():
        n += 1
    for name, kept in ((_NAME, f"{_NAME}.bad-{n}"), (_LOG_NAME, f"{_NAME}.bad-{n}.wal")):
        if (root / name).exists():
            (root / name).rename(root / kept)
    return f"{_NAME}.bad-{n}"


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]
