"""NeMo-Gym's published digests, recomputed: 22 by ours, 12 fingerprints by the package that our resolver uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenlake.errors import InvalidInput
from tokenlake.ingest.nemo_gym import digests

FACTS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "nemo_gym.json").read_text())


def staged(fact: dict[str, Any]) -> str:
    assert fact.pop("digest_version") == digests.STAGING_VERSION
    assert fact.pop("extras_digest_version") == digests.EXTRAS_VERSION
    assert fact.pop("delta_len") == fact["cum_len"] - fact["prev_len"]
    arrays = {
        "token_ids": fact.pop("token_ids_delta"),
        "token_mask": fact.pop("token_mask_delta"),
        "logprobs": fact.pop("generation_log_probs_delta"),
    }
    return digests.staging_digest(**fact, **arrays)


def first_generation(fact: dict[str, Any]) -> str:
    """The first layout: the same fields, the counts of the float arrays left out."""
    ids = b"\1" + digests.token_field(fact["token_ids_delta"])
    parts = [
        b"nemo-rl-staging-digest\1",
        digests.text_field(fact["rollout_id"]) + digests.text_field(fact["call_id"]),
        fact["prev_len"].to_bytes(8) + len(ids).to_bytes(8) + ids,
        digests.float_field(fact["token_mask_delta"])[8:],
        digests.float_field(fact["logprobs_delta"])[8:],
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def gym(name: str) -> Callable[[Any], str]:
    def call(value: Any) -> str:
        return getattr(pytest.importorskip("nemo_gym.token_id_capture.fingerprint"), name)(value)

    return call


KINDS: dict[str, Callable[[Any], str]] = {
    "extras_digest": digests.extras_digest,
    "staging_digest": staged,
    "chain_hash": lambda fact: digests.chain_hash(fact["parent_chain_hash"], fact["token_ids_delta"]),
    "cumulative_hash": digests.cumulative_hash,
    "lineage_token_digest": digests.entry_digest,
    "gen1_staging_digest": first_generation,
    "assistant_fingerprint": gym("assistant_fingerprint"),
    "conversation_digest": gym("conversation_digest"),
    "canonical_tool_arguments": gym("canonicalize_tool_arguments"),
}


def test_there_are_34_facts() -> None:
    assert len({fact["id"] for fact in FACTS}) == len(FACTS) == 34


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["id"])
def test_a_published_fact_is_recomputed(fact: dict[str, Any]) -> None:
    given = fact["input"]
    assert KINDS[fact["kind"]](dict(given) if isinstance(given, dict) else given) == fact["expected"]


def test_an_array_gives_the_digest_of_the_list() -> None:
    ids, logprobs = [7, 2**31 - 1, 0], [-0.1, 0.0, -12.3456]
    assert digests.token_field(np.array(ids, np.int32)) == digests.token_field(ids)
    assert digests.float_field(np.array(logprobs, np.float32)) == digests.float_field(logprobs)


@pytest.mark.parametrize("values", [[float("nan")], [float("-inf")], [1e39]])
def test_a_number_that_no_float32_holds_has_no_digest(values: list[float]) -> None:
    with pytest.raises(InvalidInput, match="not finite"):
        digests.float_field(values)


@pytest.mark.parametrize("extras", [{"a": float("nan")}, {"a": 2**63}, {"a": (1,)}, {"a": b""}, {"a": {1: 2}}])
def test_extras_that_have_no_encoding_are_refused(extras: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        digests.extras_digest(extras)


def test_a_negative_id_has_no_digest() -> None:
    with pytest.raises(InvalidInput, match="negative"):
        digests.token_field([3, -1])
