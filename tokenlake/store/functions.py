"""The digests of format 1 as DuckDB functions, so that views recompute them instead of trusting what is stored.

Each function takes a whole vector as Arrow arrays and hashes slices of their buffers; no token becomes a Python number.
A function never raises for what a record holds: where the format requires a value that is NULL, the digest is NULL, and
the view that compares it says what is wrong. Deltas, of which there are many, are framed a vector at a time
(`framing`); a test holds that equal to `digest.delta_digest`.

    tl_chain_hash(parent, token_ids)              chain hash of a delta after its parent's
    tl_delta_digest(schema_version, ...)          digest of a delta record, its arguments as in `_DELTA_ARGUMENTS`
    tl_delta_facts(parent, vocab_size, ...)       both of these at once, and what `facts` says of the arrays
    tl_sequence(packed, token_ids, ...)           the arrays of a chain: see `sequence`
    tl_row_digest(schema_version, ...)            digest of a row, its arguments as those of `digest.row_digest`
    tl_event_hash(event)                          hash of a lineage event, given as a struct of all its columns
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from duckdb import sqltypes

from tokenlake.store import digest, facts, framing, sequence
from tokenlake.store.digest import ArrayBytes
from tokenlake.store.schema import DELTA, LINEAGE, ROW
from tokenlake.store.sqlfunction import add_function
from tokenlake.store.sqltypes import sql_type

__all__ = ["register", "row_digests"]

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
_DELTA_ARRAYS = ("token_ids", "token_mask", "logprobs")
_LONG = 8192
"""Elements of an array from which copying it costs more than the Python steps that a copy saves."""

_ROW_ARGUMENTS = tuple(inspect.signature(digest.row_digest).parameters)
_ROW_ARRAYS = ("prompt_ids_for_adv", "input_ids", "token_mask", "logprobs")
_ROW_OPTIONAL = frozenset(field.name for field in ROW if field.nullable) | frozenset(_ROW_ARRAYS)


def register(con: duckdb.DuckDBPyConnection) -> None:
    """Register the digest functions on a connection that has none yet; its cursors have them too."""
    delta_types = {name: sql_type(DELTA.field(name).type) for name in _DELTA_ARGUMENTS}
    chain: dict[str, Any] = {"parent": sqltypes.BLOB, "token_ids": delta_types["token_ids"]}
    event = sql_type(pa.struct(list(LINEAGE)))
    add_function(con, "tl_chain_hash", _digests(_chain_hashes), chain, sqltypes.BLOB)
    add_function(con, "tl_delta_digest", _digests(_delta_digests), delta_types, sqltypes.BLOB)
    given = {"parent": sqltypes.BLOB, "vocab_size": sqltypes.BIGINT, **delta_types}
    add_function(con, "tl_delta_facts", _delta_facts, given, sql_type(facts.FACTS))
    add_function(
        con,
        "tl_row_digest",
        _digests(_row_digests),
        {name: sql_type(ROW.field(name).type) for name in _ROW_ARGUMENTS},
        sqltypes.BLOB,
    )
    sequence.register(con)
    add_function(con, "tl_event_hash", _digests(_event_hashes), {"event": event}, sqltypes.BLOB)


def row_digests(rows: pa.RecordBatch) -> list[bytes | None]:
    """The digest of each row of a batch of `ROW`, computed from what it holds; NULL where a required value is NULL."""
    return list(_row_digests(*(rows.column(name) for name in _ROW_ARGUMENTS)))


def _digests(function: Callable[..., Iterable[bytes | None]]) -> Callable[..., pa.Array]:
    def vector(*columns: pa.Array) -> pa.Array:
        return pa.array(function(*columns), pa.binary())

    return vector


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


def _delta_facts(parent: pa.Array, vocab_size: pa.Array, *delta: pa.Array) -> pa.Array:
    arrays = [delta[_DELTA_ARGUMENTS.index(name)] for name in _DELTA_ARRAYS]
    digests = pa.array(_delta_digests(*delta), pa.binary()), pa.array(_chain_hashes(parent, arrays[0]), pa.binary())
    return facts.struct_of(*digests, sequence.pack(arrays), *facts.of_arrays(vocab_size, *arrays))


def _chain_hashes(parent: pa.Array, token_ids: pa.Array) -> list[bytes]:
    odd = _odd(token_ids)
    if odd:
        pairs = zip(parent.to_pylist(), _arrays(token_ids), strict=True)
        return [digest.chain_hash(before, ids) for before, ids in pairs]
    count, raw = framing.counted(token_ids)
    before = framing.optional(parent, parent.cast(pa.large_binary()).fill_null(b""))
    return framing.hashes(framing.joined(b"tokenlake.chain.1", *before, count, raw))


def _delta_digests(*columns: pa.Array) -> Sequence[bytes | None]:
    given: dict[str, pa.Array] = dict(zip(_DELTA_ARGUMENTS, columns, strict=True))
    broken = _broken(given)
    odd = set[int]().union(*(_odd(given[name]) for name in _DELTA_ARRAYS))
    if not broken and not odd:
        return framing.hashes(_delta_frames(given))
    found: list[bytes | None] = [None] * len(columns[0])
    plain = [row for row in range(len(found)) if row not in broken and row not in odd]
    rows = pa.array(plain, pa.int64())
    kept = {name: column.take(rows) for name, column in given.items()}
    for row, hashed in zip(plain, framing.hashes(_delta_frames(kept)), strict=True):
        found[row] = hashed
    for row in odd - broken:
        found[row] = _delta_digest({name: column.slice(row, 1) for name, column in given.items()})
    return found


def _delta_frames(given: Mapping[str, pa.Array]) -> pa.Array:
    """What is hashed of each record, none of which lacks anything."""
    arrays = (piece for name in _DELTA_ARRAYS for piece in (*framing.counted(given[name]), framing.NO_NULLS))
    parent, finish = given["parent_call_id"], given["finish_reason"]
    versions = given["weight_version"], given["weight_version_end"]
    return framing.joined(
        b"tokenlake.delta.1",
        framing.word(given["schema_version"]),
        *framing.text(given["rollout_id"]),
        framing.word(given["attempt"]),
        *framing.text(given["call_id"]),
        *framing.optional(parent, *framing.text(parent)),
        *framing.text(given["mode"]),
        framing.word(given["prev_len"]),
        framing.word(given["cum_len"]),
        *(piece for each in versions for piece in framing.optional(each, framing.word(each))),
        *framing.optional(finish, *framing.text(finish)),
        *_sampling_frames(given["sampling"]),
        _extras_digests(given["extras"]),
        given["chain_hash"].cast(pa.large_binary()),
        *arrays,
    )


def _sampling_frames(column: pa.Array) -> tuple[framing.Piece, ...]:
    *numbers, mode = column.flatten()
    fields = (piece for each in numbers for piece in framing.optional(each, framing.word(each)))
    return framing.optional(column, *fields, *framing.optional(mode, *framing.text(mode)))


def _extras_digests(column: pa.Array) -> framing.Piece:
    if column.null_count == len(column):
        return digest.extras_digest(None)
    return pa.array(map(digest.extras_digest, column.to_pylist()), pa.large_binary())


def _delta_digest(given: Mapping[str, pa.Array]) -> bytes:
    """The digest of one record that has NULLs in its arrays, or long ones."""
    values: dict[str, Any] = {
        name: _arrays(column)[0] if name in _DELTA_ARRAYS else column[0].as_py() for name, column in given.items()
    }
    sampling, extras = values.pop("sampling"), values.pop("extras")
    return digest.delta_digest(
        sampling=None if sampling is None else tuple(sampling.values()),
        extras_digest=digest.extras_digest(extras),
        **values,
    )


def _odd(column: pa.Array) -> set[int]:
    """Lists that are NULL, have a NULL inside, or are so long that their bytes are better hashed where they are."""
    long = pc.greater(pc.list_value_length(column), _LONG).fill_null(True)
    odd = set(pc.indices_nonzero(long).to_pylist()) if pc.any(long).as_py() else set[int]()
    return odd | set(_holes(column.values, _offsets(column)))


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
