"""Running one query: a caller's, which reads and nothing else and whose errors become ours, or one of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import QueryError

__all__ = ["Connects", "fetch", "fetch_table", "run_query"]

_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


class Connects(Protocol):
    """A lake that is owned, or one that is read."""

    def connect(self, *, groups: Sequence[str] | None = None, query: str | None = None) -> duckdb.DuckDBPyConnection:
        """A connection of the caller's own, over some groups or all, with the views that `query` names."""
        ...


def fetch(lake: Connects, text: str, params: Sequence[Any], *, groups: Sequence[str] | None = None) -> pa.Table:
    """The result of one of our own queries, over the whole lake or over some groups only, which costs those groups."""
    con = lake.connect(groups=groups, query=text)
    try:
        return con.sql(text, params=list(params)).to_arrow_table()
    finally:
        con.close()


def run_query(
    con: duckdb.DuckDBPyConnection, query: str, params: Sequence[Any] | dict[str, Any] | None
) -> duckdb.DuckDBPyRelation:
    """The relation of one reading statement, on a connection that is its own from now on.

    Raises `QueryError` for what does not parse, bind or run, or writes.
    """
    try:
        statements = con.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in _READING:
            raise QueryError("a lake is read-only here: give one SELECT statement")
        con.execute(sql.read("guard/read_only"))
        relation = con.sql(statements[0], params=params)  # parsed already
    except duckdb.Error as error:
        raise QueryError(f"the query cannot run: {error}") from error
    # The stubs do not say so, but a statement without a result gives None.
    found = cast("duckdb.DuckDBPyRelation | None", relation)
    if found is None:
        raise QueryError("the statement gives no rows: a lake is read with SELECT")
    return found


def fetch_table(relation: duckdb.DuckDBPyRelation) -> pa.Table:
    """All of a relation. Raises `QueryError` for what fails only when it runs."""
    try:
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(f"the query cannot run: {error}") from error
