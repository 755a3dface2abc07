"""The DuckDB type of an Arrow type, for the types that records use."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from duckdb import sqltypes

__all__ = ["sql_type"]

_TYPES: dict[pa.DataType, Any] = {
    pa.int32(): sqltypes.INTEGER,
    pa.int64(): sqltypes.BIGINT,
    pa.uint8(): sqltypes.UTINYINT,
    pa.float32(): sqltypes.FLOAT,
    pa.float64(): sqltypes.DOUBLE,
    pa.bool_(): sqltypes.BOOLEAN,
    pa.string(): sqltypes.VARCHAR,
    pa.binary(32): sqltypes.BLOB,
    pa.large_binary(): sqltypes.BLOB,
    pa.timestamp("us", tz="UTC"): sqltypes.TIMESTAMP_TZ,
}


def sql_type(kind: pa.DataType) -> Any:
    """Lists and structs of known types included; `KeyError` for others."""
    # `duckdb.list_type` and `struct_type` would open the database of the whole process, with threads of its own.
    if pa.types.is_list(kind):
        return sqltypes.DuckDBPyType(list[sql_type(kind.value_type)])
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return sqltypes.DuckDBPyType({field.name: sql_type(field.type) for field in fields})
    return _TYPES[kind]
