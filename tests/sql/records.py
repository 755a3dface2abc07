"""A lake in memory for a case: what its JSON leaves out is filled in as a sound recorder would have written it.

A delta needs `rollout_id`, `call_id`, `token_ids` and `token_mask`; lengths, hashes and digest follow from them and
from its parent. A `call_committed` event says what its delta says. A key that is given, null included, stays as it is.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tokenlake.store import functions, views
from tokenlake.store.digest import (
    ZERO_HASH,
    ArrayBytes,
    chain_hash,
    delta_digest,
    event_hash,
    extras_digest,
    row_digest,
)
from tokenlake.store.schema import DELTA, LINEAGE, ROW

Record = dict[str, Any]
START = datetime(2025, 1, 1, tzinfo=UTC)
ROWS = ROW.append(pa.field("segment", pa.int32()))
FINDINGS = pa.schema([("kind", pa.string()), ("place", pa.string()), ("detail", pa.string())])
BOUND = (
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
    "extras_digest",
    "chain_hash",
)
RELATIONS = {
    "lineage": LINEAGE,
    "deltas": DELTA.append(pa.field("group_id", pa.string())),
    "rows": ROWS,
    "lake_findings": FINDINGS,
}


def read_relations(folder: Path) -> dict[str, list[Record]]:
    """The relations of a case folder; one without a file is empty."""
    return {
        name: json.loads(path.read_text()) if (path := folder / f"{name}.json").exists() else [] for name in RELATIONS
    }


def connect(relations: Mapping[str, Sequence[Record]]) -> duckdb.DuckDBPyConnection:
    """A connection with all views over complete relations."""
    con = duckdb.connect()
    con.execute("SET TimeZone = 'UTC'")
    functions.register(con)
    deltas = [complete_delta(each, relations["deltas"]) for each in relations["deltas"]]
    known = {
        "deltas": deltas,
        "lineage": complete_events(relations["lineage"], deltas),
        "rows": [complete_row(each) for each in relations["rows"]],
        "lake_findings": list(relations["lake_findings"]),
    }
    for name, schema in RELATIONS.items():
        table = pa.Table.from_pylist(known[name], schema=schema)
        con.register("given", table)
        con.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        con.unregister("given")
    views.create_views(con)
    return con


def raw(code: str, values: Sequence[Any] | None) -> ArrayBytes | None:
    """What is hashed of an array."""
    if values is None:
        return None
    nulls = tuple(i for i, value in enumerate(values) if value is None)
    return ArrayBytes(len(values), array(code, [0 if value is None else value for value in values]).tobytes(), nulls)


def complete_delta(given: Record, others: Sequence[Record]) -> Record:
    """The delta as a sound worker would have staged it."""
    given = _bytes(given, "digest", "chain_hash", "extras_digest")
    parent = next(
        (
            complete_delta(other, others)
            for other in others
            if other["call_id"] == given.get("parent_call_id")
            and other["rollout_id"] == given["rollout_id"]
            and other.get("attempt", 0) == given.get("attempt", 0)
            and other["call_id"] != given["call_id"]
            and other.get("parent_call_id") != given["call_id"]
        ),
        None,
    )
    ids, mask = given.get("token_ids"), given.get("token_mask")
    orphan = given.get("parent_call_id") is not None and (parent is None or parent["depth"] is None)
    delta: Record = {
        "schema_version": 1,
        "group_id": given["rollout_id"].rpartition("_g")[0],
        "attempt": 0,
        "depth": None if orphan else parent["depth"] + 1 if parent else 0,
        "root_call_id": None if orphan else parent["root_call_id"] if parent else given["call_id"],
        "parent_call_id": None,
        "prev_len": 0 if parent is None else parent["cum_len"],
        "mode": "text" if parent is None else "token_in",
        "finish_reason": "stop",
        "weight_version": 7,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": None, "logprob_mode": "raw"},
        "extras": None,
        "staged_at": START,
        "logprobs": None if mask is None else [-0.5 if bit else 0.0 for bit in mask],
    } | given
    delta.setdefault("weight_version_end", delta["weight_version"])
    delta.setdefault("cum_len", delta["prev_len"] + len(ids or mask or ()))
    delta.setdefault("extras_digest", extras_digest(delta["extras"]))
    delta.setdefault("chain_hash", chain_hash(None if parent is None else parent["chain_hash"], raw("i", ids)))
    sampling = delta["sampling"]
    delta.setdefault(
        "digest",
        delta_digest(
            **{name: delta[name] for name in BOUND},
            sampling=tuple(sampling[field.name] for field in DELTA.field("sampling").type),
            token_ids=raw("i", ids),
            token_mask=raw("B", mask),
            logprobs=raw("f", delta["logprobs"]),
        ),
    )
    return delta


def _bytes(record: Record, *names: str) -> Record:
    """Digests of a case are hex texts."""
    return {name: bytes.fromhex(v) if name in names and isinstance(v, str) else v for name, v in record.items()}


def complete_events(given: Sequence[Record], deltas: Sequence[Record]) -> list[Record]:
    """The events as one gate would have appended them, a second apart."""
    events: list[Record] = []
    previous: dict[str, tuple[int, bytes]] = {}
    for position, each in enumerate(given):
        writer = each.get("event_writer", "gate")
        seq, prev_hash = previous.get(writer, (-1, ZERO_HASH))
        event: Record = {
            "schema_version": 1,
            "event_seq": seq + 1,
            "at": START + timedelta(seconds=position),
            "event_writer": writer,
            "prev_hash": prev_hash,
        }
        if each["event_type"] == "call_committed":
            event |= _committed(each, deltas)
        event |= {name: json.dumps(v) if isinstance(v, dict) else v for name, v in each.items()}
        for name in ("at", "deadline_at", "cutoff_at"):
            if isinstance(event.get(name), int):
                event[name] = START + timedelta(seconds=event[name])
        event = _bytes(event, "digest", "chain_hash", "extras_digest", "prompt_digest", "event_hash")
        hashed = {name: _micros(value) for name, value in event.items() if name not in ("prev_hash", "event_hash")}
        event.setdefault("event_hash", event_hash(event["prev_hash"], hashed))
        previous[writer] = (event["event_seq"], event["event_hash"])
        events.append(event)
    return events


def _micros(value: Any) -> Any:
    return (
        (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        if isinstance(value, datetime)
        else value
    )


def _committed(event: Record, deltas: Sequence[Record]) -> Record:
    key = (event["rollout_id"], event.get("attempt", 0), event["call_id"])
    delta = next((d for d in deltas if (d["rollout_id"], d["attempt"], d["call_id"]) == key), None)
    if delta is None:
        return {}
    same = {name: delta[name] for name in LINEAGE.names if name in delta and name not in ("at", "schema_version")}
    return same | {
        "delta_len": len(delta["token_ids"] or ()),
        "sampled_tokens": sum(filter(None, delta["token_mask"] or ())),
        "temperature": delta["sampling"]["temperature"],
        "top_p": delta["sampling"]["top_p"],
        "top_k": delta["sampling"]["top_k"],
        "logprob_mode": delta["sampling"]["logprob_mode"],
        "writer": "w0",
        "segment": 0,
        "byte_offset": 8,
    }


def complete_row(given: Record) -> Record:
    """The row as publishing would have written it: valid, the last id sampled, unless it says otherwise."""
    ids = given.get("input_ids", [1, 2])
    valid = given.get("sample_mask", 1)
    row: Record = {
        "schema_version": 1,
        "segment_index": 0,
        "segment_count": 1,
        "attempt": 0,
        "sample_mask": 1,
        "reward": 1.0 if valid else None,
        "weight_version_min": 7 if valid else None,
        "weight_version_max": 7 if valid else None,
        "group_min_wv": 7,
        "group_max_wv": 7,
        "temperature": 1.0 if valid else None,
        "truncated": False,
        "turns": valid,
        "sampled_tokens": valid,
        "dropped_sampled_tokens": 0,
        "published_at": START,
        "sample_id": given["rollout_id"],
        "reason": None,
        "terminal_call_id": "c0" if valid else None,
        "logprob_mode": "raw" if valid else None,
        "call_ids": ["c0"] if valid else [],
        "prompt_ids_for_adv": ids[:-1] if valid else ids,
        "input_ids": ids,
        "token_mask": [0] * (len(ids) - valid) + [1] * valid,
        "logprobs": [0.0] * (len(ids) - valid) + [-0.5] * valid,
        "segment": 0,
    } | given
    content = {n: v for n, v in row.items() if n not in ("segment", "published_at", "row_digest")}
    content |= {name: raw("i", row[name]) for name in ("prompt_ids_for_adv", "input_ids")}
    content |= {"token_mask": raw("B", row["token_mask"]), "logprobs": raw("f", row["logprobs"])}
    row.setdefault("row_digest", row_digest(**content))
    return _bytes(row, "row_digest")
