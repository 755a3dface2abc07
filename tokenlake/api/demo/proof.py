"""The proof that published rows are right, by two witnesses that know nothing of the capture path.

First, the weights: for every valid row the log-probabilities of `input_ids` are computed again, in one forward pass
under the weights of each call's version, and compared with the row's at the sampled positions. Second, the engine's own
trace, which it writes down beside the capture path: a row must hold exactly the prompt and answer of its terminal call,
and its mask and log-probabilities exactly what the calls of its chain sampled, as far as the trace goes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenlake import sql
from tokenlake.api.demo.policy import Traced
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


def prove(lake: Lake, calls: Mapping[str, Traced], score: Scorer) -> Proof:
    """Check every valid ready row of the lake; `calls` is the engine's trace by call id."""
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


def _agrees(row: Mapping[str, Any], chain: list[dict[str, Any]], calls: Mapping[str, Traced]) -> bool:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for link in chain:
        traced = calls.get(link["call_id"])
        if traced is None or list(traced.prompt_token_ids[: len(ids)]) != ids:
            return False
        start, end = len(traced.prompt_token_ids), link["cum_len"]
        sampled = row["input_ids"][start:end] if traced.token_ids is None else traced.token_ids
        given = row["logprobs"][start:end] if traced.logprobs is None else traced.logprobs
        carried = start - len(ids)
        ids = [*traced.prompt_token_ids, *sampled]
        mask += [0] * carried + [1] * len(sampled)
        logprobs += [0.0] * carried + list(given)
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
