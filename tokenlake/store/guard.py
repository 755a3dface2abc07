"""A database that only answers: no file, socket, extension or variable of the process, and no setting to change.

What a query cannot reach, nobody has to recognize in its text: DuckDB itself refuses, also what `query(...)`, a nested
call or a statement behind `EXPLAIN ANALYZE` would do. A notebook's own `lake.connect()` is another database and free.
"""

from __future__ import annotations

import duckdb

from tokenlake import sql

__all__ = ["lock"]

_LOCKS = ("guard/no_outside", "guard/no_variables", "guard/no_settings")


def lock(con: duckdb.DuckDBPyConnection) -> None:
    """Lock the whole database of a connection, for good."""
    for name in _LOCKS:
        con.execute(sql.read(name))
