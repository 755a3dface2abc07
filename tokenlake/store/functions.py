"""The digests of format 1 as DuckDB functions, so that views recompute them instead of trusting what is stored.

Each function takes a whole vector as Arrow arrays and hashes slices of their buffers; no token becomes a Python number.
A function never raises for what a record holds: where the format requires a value that is NULL, the digest is NULL, and
the view that compares it says what is wrong.

    tl_chain_hash(parent, token_ids)              chain hash of a delta after its parent's
    tl_delta_digest(schema_version, ...)          digest of a delta record
    tl_row_digest(schema_version, ...)            digest of a row: the columns of `ROW` but two, in their order
    tl_event_hash(event)                          hash of a lineage event, given as a struct of all its columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.store import digest
from tokenlake.store.digest import ArrayBytes
from tokenlake.store.schema import DELTA, LINEAGE, ROW

__all__ = ["register"]

_Column = pa.ChunkedArray | pa.Array
_WIDTHS: dict[pa.DataType, int] = {pa.int32(): 4, pa.uint8(): 1, pa.float32(): 4}
_ROW_COLUMNS = tuple(name for name in ROW.names if name not in ("published_at", "row_digest"))


def register(con: duckdb.DuckDBPyConnection) -> None:
    """Register the digest functions on a connection's database. Twice is once."""
    blob, text, whole = (duckdb.sqltypes.BLOB, duckdb.sqltypes.VARCHAR, duckdb.sqltypes.BIGINT)
    ids, mask, logprobs = (_sql_type(DELTA.field(name).type) for name in ("token_ids", "token_mask", "logprobs"))
    sampling = _sql_type(DELTA.field("sampling").type)
    _add(con, "tl_chain_hash", _chain_hash, [blob, ids])
    arrays = [ids, mask, logprobs]
    versions = [whole, whole]
    head = [whole, text, whole, text, text, text, whole, whole]
    _add(con, "tl_delta_digest", _delta_digest, [*head, *versions, text, sampling, text, blob, *arrays])
    _add(con, "tl_row_digest", _row_digest, [_sql_type(ROW.field(name).type) for name in _ROW_COLUMNS])
    _add(con, "tl_event_hash", _event_hash, [duckdb.struct_type({f.name: _sql_type(f.type) for f in LINEAGE})])
