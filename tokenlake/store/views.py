"""Creates the views: reads the SQL files in the order their `-- reads:` headers demand and runs them.

Python adds nothing to their text. The views need relations named `deltas`, `lineage`, `rows` and `lake_findings`, and
the functions of `tokenlake.store.functions`, on the same connection.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter

import duckdb

from tokenlake import sql

__all__ = ["create_views", "ordered_views"]

_FOLDERS = ("views", "audits")
_HEADER = re.compile(r"-- reads: (?P<names>[a-z_, ]+(?:\n--   [a-z_, ]+)*)")


def create_views(con: duckdb.DuckDBPyConnection) -> None:
    """Create or replace every macro, view and audit on a connection."""
    for name in ordered_views():
        con.execute(sql.read(name))


@cache
def ordered_views() -> tuple[str, ...]:
    """Names of all view files, each after those it reads."""
    files = {name.rpartition("/")[2]: name for folder in _FOLDERS for name in sql.names(folder)}
    graph = {name: [each for each in _reads(path) if each in files] for name, path in files.items()}
    return tuple(files[name] for name in TopologicalSorter(graph).static_order())


def _reads(path: str) -> list[str]:
    header = _HEADER.search(sql.read(path))
    return [] if header is None else re.findall(r"[a-z_]+", header["names"])
