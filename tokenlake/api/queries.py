"""Reading a lake for an HTTP answer: tables, JSON rows, Arrow streams, and queries of others within bounds.

Runs in threads; each query takes its own connection.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import threading
import uuid
from collections.abc import Sequence
from typing import Any, cast

import duckdb
import pyarrow as pa

from tokenlake.api.settings import Settings
from tokenlake.errors import Deadline, QueryError
from tokenlake.store.lake import OwnedLake

__all__ = ["ARROW_STREAM", "as_json_rows", "as_stream", "bounded_query", "fetch"]

ARROW_STREAM = "application/vnd.apache.arrow.stream"


def fetch(lake: OwnedLake, text: str, params: Sequence[Any], *, groups: Sequence[str] | None = None) -> pa.Table:
    """The result of one of our own queries, over the whole lake or over some groups only."""
    con = lake.connect(groups=groups, query=text)
    try:
        return con.sql(text, params=list(params)).to_arrow_table()
    finally:
        con.close()


def bounded_query(lake: OwnedLake, text: str, params: Sequence[Any], settings: Settings) -> tuple[pa.Table, bool]:
    """The result of somebody's query, and whether it had more rows than are given.

    Raises `QueryError` for what cannot run or is not one reading statement, `Deadline` when it takes too long.
    """
    con = lake.connect(query=text)
    timer = threading.Timer(settings.sql_timeout_s, con.interrupt)
    timer.daemon = True
    try:
        statements = con.extract_statements(text)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("give one SELECT statement: this route only reads")
        timer.start()
        relation: Any = con.sql(text, params=list(params) or None)
        reader = relation.to_arrow_reader(settings.sql_max_rows + 1)
        batches: list[pa.RecordBatch] = []
        rows = 0
        for batch in reader:
            batches.append(batch)
            rows += batch.num_rows
            if rows > settings.sql_max_rows:
                break
        table = pa.Table.from_batches(batches, reader.schema)
        return table.slice(0, settings.sql_max_rows), rows > settings.sql_max_rows
    except duckdb.InterruptException as error:
        raise Deadline(f"the query ran longer than {settings.sql_timeout_s:g} s") from error
    except duckdb.Error as error:
        raise QueryError(f"the query cannot run: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()
        con.close()


def as_stream(table: pa.Table) -> bytes:
    """An Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def as_json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as JSON values: bytes as hex, times as ISO 8601, floats so that they come back exactly."""
    return [cast("dict[str, Any]", _json(row)) for row in table.to_pylist()]


def _json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast("list[Any]", value)]
    return str(value)
