"""Tables for people and for programs: one Arrow table in, text or bytes out.

Floats are printed so that the value comes back exactly: 9 significant digits for float32, the shortest text for
float64.
"""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FORMATS", "interval", "json_value", "write_table"]

_WIDEST_CELL = 48


def json_value(value: Any, kind: pa.DataType) -> Any:
    """A value of an Arrow column as JSON can hold it; times and intervals as ISO 8601, bytes as hexadecimal text."""
    if value is None:
        return None
    if pa.types.is_float32(kind):
        return float(f"{value:.9g}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [json_value(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: json_value(value[field.name], field.type) for field in kind}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, str | int | float | bool):
        return value
    return interval(value) if isinstance(value, pa.MonthDayNano) else str(value)


def interval(value: pa.MonthDayNano) -> str:
    """An interval of SQL as ISO 8601 has it: its months, days and seconds, none turned into another."""
    seconds = decimal.Decimal(value.nanoseconds).scaleb(-9).normalize()
    return f"P{value.months}M{value.days}DT{seconds:f}S"


def _records(table: pa.Table) -> Iterator[dict[str, Any]]:
    kinds = {field.name: field.type for field in table.schema}
    for batch in table.to_batches(max_chunksize=1024):
        for record in batch.to_pylist():
            yield {name: json_value(value, kinds[name]) for name, value in record.items()}


def _jsonl(table: pa.Table, out: BinaryIO) -> None:
    out.writelines(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in _records(table))


def _csv(table: pa.Table, out: BinaryIO) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.schema.names)
    for record in _records(table):
        writer.writerow([json.dumps(v) if isinstance(v, list | dict) else v for v in record.values()])
    out.write(text.getvalue().encode())


def _arrow(table: pa.Table, out: BinaryIO) -> None:
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def _parquet(table: pa.Table, out: BinaryIO) -> None:
    pq.write_table(table, out)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.6g}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"


def _table(table: pa.Table, out: BinaryIO) -> None:
    rows = [table.schema.names, *([_cell(value) for value in record.values()] for record in _records(table))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.schema.names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append(f"({table.num_rows} row{'' if table.num_rows == 1 else 's'})")
    out.write("\n".join(lines).encode() + b"\n")


FORMATS: dict[str, Callable[[pa.Table, BinaryIO], None]] = {
    "arrow": _arrow,
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "table": _table,
}
"""Format name to writer."""


def write_table(table: pa.Table, form: str, out: BinaryIO) -> None:
    """Write a table in one of `FORMATS`."""
    FORMATS[form](table, out)
