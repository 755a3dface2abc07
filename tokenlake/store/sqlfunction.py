"""Registering a vectorized function on a DuckDB connection."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import duckdb
import pyarrow as pa
from duckdb.func import ARROW, SPECIAL

__all__ = ["add_function"]


def add_function(
    con: duckdb.DuckDBPyConnection,
    name: str,
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    returns: Any,
    *,
    fixed: bool = True,
) -> None:
    """Register `function`, which takes one `pa.Array` a parameter and sees NULLs, under `name`.

    `parameters` maps names to DuckDB types; `returns` is the DuckDB type of the Arrow array that comes back. Cursors of
    the connection have the function too. One that is not `fixed` is called each time, whatever its arguments.
    """

    def vector(*columns: pa.ChunkedArray) -> Any:
        return function(*map(_whole, columns))

    # DuckDB counts the parameters of the callable.
    kind = inspect.Parameter.POSITIONAL_ONLY
    vector.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])
    con.create_function(
        name, vector, list(parameters.values()), returns, type=ARROW, null_handling=SPECIAL, side_effects=not fixed
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
