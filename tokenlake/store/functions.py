"""The digests of format 1 as DuckDB functions, so that views recompute them instead of trusting what is stored.

Each function takes a whole vector as Arrow arrays and hashes slices of their buffers; no token becomes a Python number.
A function never raises for what a record holds: where the format requires a value that is NULL, the digest is NULL, and
the view that compares it says what is wrong. Deltas, of which there are many, are framed a column at a time with memos
for what repeats, in a third of the time of `digest.delta_digest`; a test holds the two equal.

    tl_chain_hash(parent, token_ids)              chain hash of a delta after its parent's
    tl_delta_digest(schema_version, ...)          digest of a delta record, its arguments as in `_DELTA_ARGUMENTS`
    tl_row_digest(schema_version, ...)            digest of a row, its arguments as those of `digest.row_digest`
    tl_event_hash(event)                          hash of a lineage event, given as a struct of all its columns
"""

from __future__ import annotations

import inspect
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise, repeat
from operator import sub
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from duckdb import sqltypes

from tokenlake.store import digest
from tokenlake.store.digest import ArrayBytes
from tokenlake.store.schema import DELTA, LINEAGE, ROW
from tokenlake.store.sqlfunction import add_function
from tokenlake.store.sqltypes import sql_type

__all__ = ["register"]

_DELTA_ARGUMENTS = (
    "schema_version",
    "rollout_id",
    "attempt",
    "call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "cum_len",
    "weight_version",
    "weight_version_end",
    "finish_reason",
    "sampling",
    "extras",
    "chain_hash",
    "token_ids",
    "token_mask",
    "logprobs",
)
_DELTA_REQUIRED = ("schema_version", "rollout_id", "attempt", "call_id", "mode", "prev_len", "cum_len", "chain_hash")
_DELTA_NESTED = ("sampling", "chain_hash", "token_ids", "token_mask", "logprobs")
_ROW_ARGUMENTS = tuple(inspect.signature(digest.row_digest).parameters)
_ROW_ARRAYS = ("prompt_ids_for_adv", "input_ids", "token_mask", "logprobs")
_ROW_OPTIONAL = frozenset(field.name for field in ROW if field.nullable) | frozenset(_ROW_ARRAYS)


def register(con: duckdb.DuckDBPyConnection) -> None:
    """Register the digest functions on a connection that has none yet; its cursors have them too."""
    delta_types = {name: sql_type(DELTA.field(name).type) for name in _DELTA_ARGUMENTS}
    chain: dict[str, Any] = {"parent": sqltypes.BLOB, "token_ids": delta_types["token_ids"]}
    event = duckdb.struct_type({field.name: sql_type(field.type) for field in LINEAGE})
    add_function(con, "tl_chain_hash", _digests(_chain_hashes), chain, sqltypes.BLOB)
    add_function(con, "tl_delta_digest", _digests(_delta_digests), delta_types, sqltypes.BLOB)
    add_function(
        con,
        "tl_row_digest",
        _digests(_row_digests),
        {name: sql_type(ROW.field(name).type) for name in _ROW_ARGUMENTS},
        sqltypes.BLOB,
    )
    add_function(con, "tl_event_hash", _digests(_event_hashes), {"event": event}, sqltypes.BLOB)


def _digests(function: Callable[..., Iterable[bytes | None]]) -> Callable[..., pa.Array]:
    def vector(*columns: pa.ChunkedArray) -> pa.Array:
        return pa.array(function(*map(_whole, columns)), pa.binary())

    return vector


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


_u64 = lru_cache(maxsize=4096)(struct.Struct("<Q").pack)
_i64 = lru_cache(maxsize=4096)(struct.Struct("<q").pack)
_f64 = struct.Struct("<d").pack
_NULL_ARRAY = b"\xff" * 8
_NO_NULLS = bytes(8)


def _id(value: str) -> bytes:
    raw = value.encode()
    return _u64(len(raw)) + raw


_text = lru_cache(maxsize=256)(_id)


def _opt_id(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + _id(value)


_opt_text = lru_cache(maxsize=256)(_opt_id)


@lru_cache(maxsize=4096)
def _opt_int(value: int | None) -> bytes:
    return b"\0" if value is None else b"\1" + _i64(value)


@lru_cache(maxsize=4096)
def _sampling(value: tuple[float | None, float | None, int | None, str | None] | None) -> bytes:
    if value is None:
        return b"\0"
    temperature, top_p, top_k, logprob_mode = value
    floats = (b"\0" if each is None else b"\1" + _f64(each) for each in (temperature, top_p))
    return b"".join((b"\1", *floats, _opt_int(top_k), _opt_text(logprob_mode)))


def _structs(column: pa.Array) -> list[tuple[Any, ...] | None]:
    rows = zip(*(column.field(i).to_pylist() for i in range(column.type.num_fields)), strict=True)
    if column.null_count:
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    return list(rows)


def _arrays(column: pa.Array) -> list[ArrayBytes | None]:
    """Each list of a vector as what is hashed of it: elements as raw bytes, zero where one is NULL."""
    values = column.values
    width = values.type.bit_width // 8
    data = values.buffers()[1]
    raw = memoryview(b"" if data is None else data)[values.offset * width :]
    offsets = _offsets(column)
    found: list[ArrayBytes | None] = [
        ArrayBytes(end - start, raw[start * width : end * width]) for start, end in pairwise(offsets)
    ]
    for row, nulls in _holes(values, offsets).items():
        whole = bytearray(raw[offsets[row] * width : offsets[row + 1] * width])
        for at in nulls:
            whole[at * width : (at + 1) * width] = bytes(width)
        found[row] = ArrayBytes(len(whole) // width, whole, nulls)
    if column.null_count:
        return [each if valid else None for each, valid in zip(found, column.is_valid().to_pylist(), strict=True)]
    return found


def _offsets(column: pa.Array) -> list[int]:
    buffer = column.buffers()[1]
    return [0] if buffer is None else memoryview(buffer).cast("i")[column.offset :][: len(column) + 1].tolist()


def _holes(values: pa.Array, offsets: list[int]) -> dict[int, list[int]]:
    """Positions of NULL elements inside each list that has some."""
    inside: dict[int, list[int]] = {}
    if values.null_count:
        for hole in pc.indices_nonzero(pc.is_null(values)).to_pylist():
            row = bisect_right(offsets, hole) - 1
            if 0 <= row < len(offsets) - 1:
                inside.setdefault(row, []).append(hole - offsets[row])
    return inside


def _framed(column: pa.Array) -> Iterable[tuple[bytes, Any, bytes]]:
    """What is hashed of each list of a vector: its count, its raw elements, the positions of its NULLs."""
    values = column.values
    if column.null_count or values.null_count:
        return map(_frame, _arrays(column))
    width = values.type.bit_width // 8
    data = values.buffers()[1]
    raw = memoryview(b"" if data is None else data)[values.offset * width :]
    offsets = _offsets(column)
    ends = [offset * width for offset in offsets]
    return zip(
        map(_u64, map(sub, offsets[1:], offsets)),
        map(raw.__getitem__, map(slice, ends, ends[1:])),
        repeat(_NO_NULLS, len(column)),
        strict=True,
    )


def _frame(array: ArrayBytes | None) -> tuple[bytes, Any, bytes]:
    if array is None:
        return (_NULL_ARRAY, b"", b"")
    nulls = array.nulls
    return (_u64(array.count), array.raw, struct.pack(f"<{len(nulls) + 1}Q", len(nulls), *nulls))


def _blobs(column: pa.Array) -> Iterable[memoryview]:
    """Each value of a vector of binaries, empty where it is NULL."""
    data = column.buffers()[2]
    offsets = _offsets(column)
    return map(memoryview(b"" if data is None else data).__getitem__, map(slice, offsets, offsets[1:]))


def _chain_hashes(parent: pa.Array, token_ids: pa.Array) -> Iterator[bytes]:
    given = (b"tokenlake.chain.1\0", b"tokenlake.chain.1\1")
    heads = map(b"".join, zip(map(given.__getitem__, parent.is_valid().to_pylist()), _blobs(parent), strict=True))
    for head, (count, raw, _) in zip(heads, _framed(token_ids), strict=True):
        hashed = sha256(head + count)
        hashed.update(raw)
        yield hashed.digest()


def _delta_digests(*columns: pa.Array) -> Iterator[bytes | None]:
    given: dict[str, pa.Array] = dict(zip(_DELTA_ARGUMENTS, columns, strict=True))
    broken = _broken(given)
    read = {name: column.to_pylist() for name, column in given.items() if name not in _DELTA_NESTED}
    for name in _DELTA_REQUIRED if broken else ():
        if name in read:
            read[name] = _filled(read[name], name)
    heads = map(
        b"".join,
        zip(
            repeat(b"tokenlake.delta.1", len(columns[0])),
            map(_u64, read["schema_version"]),
            map(_id, read["rollout_id"]),
            map(_i64, read["attempt"]),
            map(_id, read["call_id"]),
            map(_opt_id, read["parent_call_id"]),
            map(_text, read["mode"]),
            map(_i64, read["prev_len"]),
            map(_i64, read["cum_len"]),
            map(_opt_int, read["weight_version"]),
            map(_opt_int, read["weight_version_end"]),
            map(_opt_text, read["finish_reason"]),
            map(_sampling, _structs(given["sampling"])),
            map(_extras_digest, read["extras"]),
            _blobs(given["chain_hash"]),
            strict=True,
        ),
    )
    arrays = [_framed(given[name]) for name in ("token_ids", "token_mask", "logprobs")]
    for row, (head, ids, mask, logprobs) in enumerate(zip(heads, *arrays, strict=True)):
        # Updates cost less than a copy of the elements.
        hashed = sha256(head + ids[0])
        hashed.update(ids[1])
        hashed.update(ids[2] + mask[0])
        hashed.update(mask[1])
        hashed.update(mask[2] + logprobs[0])
        hashed.update(logprobs[1])
        hashed.update(logprobs[2])
        yield None if row in broken else hashed.digest()


def _filled(values: list[Any], name: str) -> list[Any]:
    """Values that can be framed, for rows that have no digest anyway."""
    spare: Any = "" if pa.types.is_string(DELTA.field(name).type) else 0
    return [spare if value is None or (name == "schema_version" and value < 0) else value for value in values]


_extras_digest = lru_cache(maxsize=64)(digest.extras_digest)


def _broken(columns: Mapping[str, pa.Array]) -> set[int]:
    """Rows of a vector that lack a value the format requires, or hold one that it cannot bind."""
    rows: set[int] = set()
    for name in _DELTA_REQUIRED:
        if columns[name].null_count:
            rows.update(pc.indices_nonzero(columns[name].is_null()).to_pylist())
    rows.update(pc.indices_nonzero(pc.fill_null(pc.less(columns["schema_version"], 0), False)).to_pylist())
    return rows


def _row_digests(*columns: pa.Array) -> Iterator[bytes | None]:
    read = (
        _arrays(column) if name in _ROW_ARRAYS else column.to_pylist()
        for name, column in zip(_ROW_ARGUMENTS, columns, strict=True)
    )
    for values in zip(*read, strict=True):
        row = dict(zip(_ROW_ARGUMENTS, values, strict=True))
        complete = all(value is not None or name in _ROW_OPTIONAL for name, value in row.items())
        if complete and None not in row["call_ids"] and row["schema_version"] >= 0:
            yield digest.row_digest(**row)
        else:
            yield None


def _event_hashes(event: pa.Array) -> Iterator[bytes | None]:
    columns: dict[str, list[Any]] = {}
    for position, field in enumerate(LINEAGE):
        column = event.field(position)
        if field.name not in ("prev_hash", "event_hash") and column.null_count < len(column):
            columns[field.name] = (column.cast(pa.int64()) if pa.types.is_timestamp(field.type) else column).to_pylist()
    previous = event.field(LINEAGE.get_field_index("prev_hash")).to_pylist()
    rows = zip(*columns.values(), strict=True) if columns else ((),) * len(event)
    for prev_hash, values in zip(previous, rows, strict=True):
        yield None if prev_hash is None else digest.event_hash(prev_hash, dict(zip(columns, values, strict=True)))
