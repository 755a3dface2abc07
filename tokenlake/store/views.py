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

__all__ = ["create_views", "needed_views", "ordered_views"]

_FOLDERS = ("views", "audits")
_CATALOG = {"describe", "duckdb_functions", "duckdb_tables", "duckdb_views", "information_schema", "show", "summarize"}
_COMMENT = re.compile(r"^\s*--.*$", re.MULTILINE)
_HEADER = re.compile(r"-- reads: (?P<names>[a-z_, ]+(?:\n--   [a-z_, ]+)*)")


def create_views(con: duckdb.DuckDBPyConnection) -> None:
    """Create or replace every macro, view and audit on a connection."""
    for name in ordered_views():
        con.execute(sql.read(name))


def needed_views(query: str) -> tuple[str, ...]:
    """Names of the view files that a query may need, in order: those it names and what they read.

    All of them for a query that asks about the catalog itself. Lines that are a comment name nothing.
    """
    words = set(re.findall(r"[a-z_]+", _COMMENT.sub("", query.lower())))
    if words & _CATALOG:
        return ordered_views()
    graph = _graph()
    wanted = [name for name in graph if name.rpartition("/")[2] in words]
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += graph[name]
    return tuple(name for name in ordered_views() if name in seen)


@cache
def ordered_views() -> tuple[str, ...]:
    """Names of all view files, each after those it reads."""
    return tuple(TopologicalSorter(_graph()).static_order())


@cache
def _graph() -> dict[str, list[str]]:
    """Each view file to the view files that it reads."""
    files = {name.rpartition("/")[2]: name for folder in _FOLDERS for name in sql.names(folder)}
    return {path: [files[each] for each in _reads(path) if each in files] for path in files.values()}


def _reads(path: str) -> list[str]:
    header = _HEADER.search(sql.read(path))
    return [] if header is None else re.findall(r"[a-z_]+", header["names"])
