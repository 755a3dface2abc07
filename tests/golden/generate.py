"""Writes the golden vectors of format 1 by an independent, slow reading of the byte tables in `docs/format.md`.

It shares no code with the package: `python tests/golden/generate.py` must always print that nothing changed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "v1"


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def i64(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def f64(value: float) -> bytes:
    return struct.pack("<d", value)


def text(value: str) -> bytes:
    return u64(len(value.encode("utf-8"))) + value.encode("utf-8")


def optional(value: Any, encode: Any) -> bytes:
    return b"\x00" if value is None else b"\x01" + encode(value)


def array(values: list[Any] | None, code: str) -> bytes:
    if values is None:
        return b"\xff" * 8
    nulls = [position for position, value in enumerate(values) if value is None]
    out = u64(len(values))
    for value in values:
        out += struct.pack("<" + code, 0 if value is None else value)
    return out + u64(len(nulls)) + b"".join(u64(position) for position in nulls)


def chain_hash(v: dict[str, Any]) -> bytes:
    parent = None if v["parent"] is None else bytes.fromhex(v["parent"])
    out = b"tokenlake.chain.1" + optional(parent, bytes)
    out += u64(len(v["token_ids"])) + b"".join(struct.pack("<i", token) for token in v["token_ids"])
    return out


def extras_digest(v: dict[str, Any]) -> bytes:
    if v["extras"] is None:
        return b"tokenlake.extras.1\x00"
    canonical = json.dumps(v["extras"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return b"tokenlake.extras.1\x01" + text(canonical)


def sampling(v: list[Any]) -> bytes:
    temperature, top_p, top_k, mode = v
    return optional(temperature, f64) + optional(top_p, f64) + optional(top_k, i64) + optional(mode, text)


def delta_digest(v: dict[str, Any]) -> bytes:
    out = b"tokenlake.delta.1" + u64(v["schema_version"]) + text(v["rollout_id"]) + i64(v["attempt"])
    out += text(v["call_id"]) + optional(v["parent_call_id"], text) + text(v["mode"])
    out += i64(v["prev_len"]) + i64(v["cum_len"])
    out += optional(v["weight_version"], i64) + optional(v["weight_version_end"], i64)
    out += optional(v["finish_reason"], text) + optional(v["sampling"], sampling)
    out += bytes.fromhex(v["extras_digest"]) + bytes.fromhex(v["chain_hash"])
    return out + array(v["token_ids"], "i") + array(v["token_mask"], "B") + array(v["logprobs"], "f")


def row_digest(v: dict[str, Any]) -> bytes:
    out = b"tokenlake.row.1" + u64(v["schema_version"]) + text(v["sample_id"]) + text(v["rollout_id"])
    out += text(v["group_id"]) + i64(v["segment_index"]) + i64(v["segment_count"]) + i64(v["attempt"])
    out += i64(v["sample_mask"]) + optional(v["reason"], text) + optional(v["reward"], f64)
    for name in ("weight_version_min", "weight_version_max", "group_min_wv", "group_max_wv"):
        out += optional(v[name], i64)
    out += optional(v["temperature"], f64) + optional(v["logprob_mode"], text) + i64(int(v["truncated"]))
    out += i64(v["turns"]) + i64(v["sampled_tokens"]) + i64(v["dropped_sampled_tokens"])
    out += optional(v["terminal_call_id"], text) + u64(len(v["call_ids"]))
    out += b"".join(text(call_id) for call_id in v["call_ids"])
    out += array(v["prompt_ids_for_adv"], "i") + array(v["input_ids"], "i")
    return out + array(v["token_mask"], "B") + array(v["logprobs"], "f")


def event_hash(v: dict[str, Any]) -> bytes:
    """`event` lists (column, kind, value) in schema order: t text, i integer or bool, f float, b bytes as hex."""
    out = b"tokenlake.event.1" + bytes.fromhex(v["prev_hash"])
    for name, kind, value in v["event"]:
        out += text(name) + kind.encode()
        if kind == "t":
            out += text(value)
        elif kind == "i":
            out += i64(int(value))
        elif kind == "f":
            out += f64(value)
        else:
            out += u64(len(bytes.fromhex(value))) + bytes.fromhex(value)
    return out


Z, A, B = "00" * 32, "11" * 32, "ab" * 32
DELTA: dict[str, Any] = {
    "schema_version": 1,
    "rollout_id": "g7_g0",
    "attempt": 0,
    "call_id": "c0",
    "parent_call_id": None,
    "mode": "text",
    "prev_len": 0,
    "cum_len": 5,
    "weight_version": 4,
    "weight_version_end": 4,
    "finish_reason": "stop",
    "sampling": [1.0, 1.0, 0, "processed"],
    "extras_digest": A,
    "chain_hash": B,
    "token_ids": [10, 11, 12, 13, 14],
    "token_mask": [0, 0, 0, 1, 1],
    "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2],
}
ROW: dict[str, Any] = {
    "schema_version": 1,
    "sample_id": "g7_g0",
    "rollout_id": "g7_g0",
    "group_id": "g7",
    "segment_index": 0,
    "segment_count": 1,
    "attempt": 0,
    "sample_mask": 1,
    "reason": None,
    "reward": 1.0,
    "weight_version_min": 4,
    "weight_version_max": 4,
    "group_min_wv": 4,
    "group_max_wv": 5,
    "temperature": 1.0,
    "logprob_mode": "processed",
    "truncated": False,
    "turns": 1,
    "sampled_tokens": 2,
    "dropped_sampled_tokens": 0,
    "terminal_call_id": "c0",
    "call_ids": ["c0"],
    "prompt_ids_for_adv": [10, 11, 12],
    "input_ids": [10, 11, 12, 13, 14],
    "token_mask": [0, 0, 0, 1, 1],
    "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2],
}
VECTORS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "chain_hash": (
        chain_hash,
        [
            {"parent": None, "token_ids": []},
            {"parent": None, "token_ids": [1, 2, 3]},
            {"parent": A, "token_ids": [0, 2147483647]},
        ],
    ),
    "extras_digest": (
        extras_digest,
        [{"extras": None}, {"extras": {}}, {"extras": {"b": [True, None, -5, 1.5, "é"], "a": {}}}],
    ),
    "delta_digest": (
        delta_digest,
        [
            DELTA,
            DELTA | {"parent_call_id": "p", "mode": "token_in", "prev_len": 3, "cum_len": 8, "attempt": 2},
            DELTA | {"weight_version": None, "weight_version_end": None, "finish_reason": None, "sampling": None},
            DELTA | {"sampling": [None, None, None, None], "rollout_id": "gé_g0"},
            DELTA | {"logprobs": [0.0, 0.0, 0.0, -0.1, None]},
            DELTA | {"logprobs": [0.0, 0.0, 0.0, -0.1, 0.0]},
            DELTA | {"logprobs": None},
            DELTA | {"token_ids": [], "token_mask": [], "logprobs": [], "cum_len": 0},
        ],
    ),
    "row_digest": (
        row_digest,
        [
            ROW,
            ROW
            | {
                "sample_mask": 0,
                "reason": "never_sealed",
                "reward": None,
                "weight_version_min": None,
                "temperature": None,
                "terminal_call_id": None,
                "call_ids": [],
                "input_ids": [10, 11, 12],
                "token_mask": [0, 0, 0],
                "logprobs": [0.0, 0.0, 0.0],
            },
        ],
    ),
    "event_hash": (
        event_hash,
        [
            {
                "prev_hash": Z,
                "event": [
                    ["schema_version", "i", 1],
                    ["event_seq", "i", 0],
                    ["at", "i", 1700000000000000],
                    ["event_type", "t", "lake_opened"],
                    ["event_writer", "t", "w"],
                ],
            },
            {
                "prev_hash": A,
                "event": [
                    ["schema_version", "i", 1],
                    ["event_seq", "i", 7],
                    ["at", "i", 5],
                    ["attempt", "i", 0],
                    ["reward", "f", 0.5],
                    ["answered", "i", True],
                    ["digest", "b", B],
                    ["event_type", "t", "rollout_sealed"],
                    ["event_writer", "t", "w"],
                    ["rollout_id", "t", "g7_g0"],
                ],
            },
        ],
    ),
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, (encode, inputs) in VECTORS.items():
        path = HERE / f"{name}.json"
        vectors = [
            {"input": v, "bytes": encode(v).hex(), "sha256": hashlib.sha256(encode(v)).hexdigest()} for v in inputs
        ]
        content = json.dumps(vectors, indent=1, ensure_ascii=False) + "\n"
        if path.exists() and path.read_text() != content:
            raise SystemExit(f"{path.name} would change: golden vectors never do")
        path.write_text(content)
    sys.stdout.write("golden vectors are as they were\n")


if __name__ == "__main__":
    main()
