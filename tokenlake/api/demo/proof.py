"""The proof that published rows are right, by two witnesses that know nothing of the capture path.

First, the weights: for every valid row the log-probabilities of `input_ids` are computed again, in one forward pass
under the weights of each call's version, and compared with the row's at the sampled positions. Second, the engine's own
trace, written beside the engine and read from a file: a row must hold exactly the prompt and answer of its terminal
call, and its mask and log-probabilities exactly what the calls of its chain sampled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenlake import sql
from tokenlake.store.reader import Lake

__all__ = ["Proof", "Scorer", "prove"]

Scorer = Callable[[int | None, Sequence[int]], Sequence[float]]
"""(weight version, ids) to the log-probability of each id given the ids before it."""


@dataclass(slots=True)
class Proof:
    """What the two witnesses said."""

    rows: int = 0
    sampled_tokens: int = 0
    largest_difference: float = 0.0
    """Largest |recomputed - stored| log-probability at a sampled position."""
    disagreements: int = 0
    """Rows that differ from the engine's trace; 0 or the demo fails."""


def prove(lake: Lake, trace: Path, score: Scorer) -> Proof:
    """Check every valid ready row of the lake."""
    calls = _read_trace(trace)
    chains: dict[str, list[dict[str, Any]]] = {}
    for link in lake.sql(sql.read("reads/chain_links")).to_arrow_table().to_pylist():
        chains.setdefault(link["rollout_id"], []).append(link)
    proof = Proof()
    for row in lake.sql(sql.read("reads/valid_rows")).to_arrow_table().to_pylist():
        chain = chains[row["rollout_id"]]
        proof.rows += 1
        proof.sampled_tokens += sum(row["token_mask"])
        proof.disagreements += not _agrees(row, chain, calls)
        proof.largest_difference = max(proof.largest_difference, _difference(row, chain, score))
    return proof


def _read_trace(path: Path) -> dict[str, Mapping[str, Any]]:
    with path.open() as file:
        return {record["request_id"]: record for record in map(json.loads, file)}


def _agrees(row: Mapping[str, Any], chain: list[dict[str, Any]], calls: Mapping[str, Mapping[str, Any]]) -> bool:
    last = calls[chain[-1]["call_id"]]
    ids = [*last["prompt_token_ids"], *last["token_ids"]]
    mask = [0] * len(ids)
    logprobs = [0.0] * len(ids)
    for link in chain:
        traced = calls[link["call_id"]]
        start = len(traced["prompt_token_ids"])
        end = start + len(traced["token_ids"])
        if ids[:end] != [*traced["prompt_token_ids"], *traced["token_ids"]]:
            return False
        mask[start:end] = [1] * (end - start)
        logprobs[start:end] = traced["logprobs"]
    return (
        row["call_ids"] == [link["call_id"] for link in chain]
        and row["input_ids"] == ids
        and row["token_mask"] == mask
        and _bits(row["logprobs"]) == _bits(logprobs)
    )


def _bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _difference(row: Mapping[str, Any], chain: list[dict[str, Any]], score: Scorer) -> float:
    scored: dict[int | None, Sequence[float]] = {}
    largest = 0.0
    for link in chain:
        version = link["weight_version"]
        if version not in scored:
            scored[version] = score(version, row["input_ids"])
        for position in range(link["cum_len"] - link["sampled_tokens"], link["cum_len"]):
            largest = max(largest, abs(scored[version][position] - row["logprobs"][position]))
    return largest
