"""Digests of format 1 against golden vectors that were made by an independent reading of `docs/format.md`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tokenlake.errors import InvalidInput
from tokenlake.store import digest
from tokenlake.store.digest import ArrayBytes

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
ARRAYS = {"token_ids": "i", "prompt_ids_for_adv": "i", "input_ids": "i", "token_mask": "B", "logprobs": "f"}


def vectors(name: str) -> list[Any]:
    return [
        pytest.param(v["input"], v["sha256"], id=f"{name}-{i}")
        for i, v in enumerate(json.loads((GOLDEN / f"{name}.json").read_text()))
    ]


def pack(values: list[Any] | None, code: str) -> ArrayBytes | None:
    if values is None:
        return None
    nulls = [i for i, value in enumerate(values) if value is None]
    return ArrayBytes(len(values), array(code, [0 if v is None else v for v in values]).tobytes(), nulls)


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    packed = {name: pack(value, ARRAYS[name]) if name in ARRAYS else value for name, value in given.items()}
    for name in ("extras_digest", "chain_hash"):
        if name in packed:
            packed[name] = bytes.fromhex(packed[name])
    if packed.get("sampling") is not None:
        packed["sampling"] = tuple(packed["sampling"])
    return packed


@pytest.mark.parametrize(("given", "expected"), vectors("chain_hash"))
def test_chain_hash_is_the_golden_one(given: dict[str, Any], expected: str) -> None:
    parent = None if given["parent"] is None else bytes.fromhex(given["parent"])
    assert digest.chain_hash(parent, pack(given["token_ids"], "i")).hex() == expected


@pytest.mark.parametrize(("given", "expected"), vectors("extras_digest"))
def test_extras_digest_is_the_golden_one(given: dict[str, Any], expected: str) -> None:
    assert digest.extras_digest(digest.canonical_extras(given["extras"])).hex() == expected


def test_extras_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest.canonical_extras({"b": {"y": 1, "x": 2}, "a": 0}) == digest.canonical_extras(
        {"a": 0, "b": {"x": 2, "y": 1}}
    )


@pytest.mark.parametrize("extras", [{"a": float("nan")}, {"a": b"x"}, {"a": {1: 2}}, {1: 2}])
def test_extras_that_json_cannot_hold_are_refused(extras: dict[Any, Any]) -> None:
    with pytest.raises(InvalidInput, match="extras"):
        digest.canonical_extras(extras)


@pytest.mark.parametrize(("given", "expected"), vectors("delta_digest"))
def test_delta_digest_is_the_golden_one(given: dict[str, Any], expected: str) -> None:
    assert digest.delta_digest(**arguments(given)).hex() == expected


def test_a_null_and_a_zero_do_not_hash_alike() -> None:
    digests = [v["sha256"] for v in json.loads((GOLDEN / "delta_digest.json").read_text())]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(("given", "expected"), vectors("row_digest"))
def test_row_digest_is_the_golden_one(given: dict[str, Any], expected: str) -> None:
    assert digest.row_digest(**arguments(given)).hex() == expected


@pytest.mark.parametrize(("given", "expected"), vectors("event_hash"))
def test_event_hash_is_the_golden_one(given: dict[str, Any], expected: str) -> None:
    event = {name: bytes.fromhex(value) if kind == "b" else value for name, kind, value in given["event"]}
    assert digest.event_hash(bytes.fromhex(given["prev_hash"]), event).hex() == expected


def test_an_event_column_that_would_not_be_bound_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown lineage columns: nonsense"):
        digest.event_hash(digest.ZERO_HASH, {"event_type": "lake_opened", "nonsense": 1})
