"""Tables as HTTP answers: JSON rows and Arrow streams."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from typing import Any, cast

import pyarrow as pa

from tokenlake.api.output import interval

__all__ = ["ARROW_STREAM", "as_json_rows", "as_stream", "from_stream"]

ARROW_STREAM = "application/vnd.apache.arrow.stream"


def from_stream(stream: bytes) -> pa.Table:
    """The table of an Arrow IPC stream, over its bytes."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_all()


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
    if isinstance(value, pa.MonthDayNano):
        return interval(value)
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast("list[Any]", value)]
    return str(value)
