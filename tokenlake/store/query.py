"""Running one query of a caller: it reads and nothing else, and its errors become ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import QueryError

__all__ = ["fetch_table", "run_query"]

_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


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
