"""The same rows as people make them who have no captured tokens: the conversation's text, tokenized again.

The chat template renders the whole conversation, and each turn of the model is encoded on its own, so the mask is as
right as it can be. Still the tokens are not always those that were sampled: the template drops the thinking of earlier
turns, writes an end of turn that nobody sampled, and the tokenizer has one way to spell a text where the policy has
many. The sampler's log-probabilities are laid beside a turn that kept its length; one that did not has none (NaN).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from tokenlake.api.demo.solver import Conversation
from tokenlake.finalize.tensors import Batch
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL
from tokenlake.ingest.tiny.tokenizer import END_OF_TURN

__all__ = ["Retokenized", "retokenize"]

_TURN = re.compile(rf"(?<=<\|im_start\|>assistant\n).*?{re.escape(END_OF_TURN)}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenized:
    """A padded batch made from text, and how far it is from what was sampled."""

    batch: Batch
    differ: int
    """Valid rows whose ids are not those that were sampled from."""


def retokenize(engine: TinyEngine, batch: Batch, said: Mapping[str, Conversation]) -> Retokenized:
    """The padded batch with the valid rows' sequences made anew from what their agents saw."""
    sequences: list[tuple[list[int], list[int], list[float]]] = []
    differ = 0
    for row, sample_id in enumerate(batch["sample_ids"]):
        length = int(batch["lengths"][row])
        arrays = (batch[name][row, :length] for name in ("input_ids", "token_mask", "logprobs"))
        ids, mask, logprobs = (cast("Any", each).tolist() for each in arrays)
        if batch["sample_mask"][row] == 1:
            made = _row(engine, said[sample_id], _turns(mask, logprobs))
            differ += made[0] != ids
            sequences.append(made)
        else:
            sequences.append((ids, mask, logprobs))
    width = max(len(ids) for ids, _, _ in sequences)

    def padded(values: list[list[int]] | list[list[float]], fill: float, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*each, *[fill] * (width - len(each))] for each in values], dtype=kind)

    shape = (len(sequences), width)
    lengths = torch.tensor([len(ids) for ids, _, _ in sequences])
    there = (torch.arange(width)[None] < lengths[:, None]).to(torch.int64)
    made_batch: dict[str, Any] = {
        **batch,
        "input_ids": padded([ids for ids, _, _ in sequences], engine.pad_id, torch.int64),
        "token_mask": padded([mask for _, mask, _ in sequences], 0, torch.float32),
        "logprobs": padded([logprobs for _, _, logprobs in sequences], 0.0, torch.float32),
        "weight_versions": torch.full(shape, -1),
        "lengths": lengths,
        "attention_mask": there,
        "sequence_ids": there,
        "position_ids": torch.arange(width)[None] * there,
    }
    return Retokenized(batch=cast("Batch", made_batch), differ=differ)


def _turns(mask: list[int], logprobs: list[float]) -> list[list[float]]:
    """The sampler's log-probabilities, a list for each turn of the model."""
    runs = itertools.groupby(zip(mask, logprobs, strict=True), key=lambda each: each[0] == 1)
    return [[value for _, value in run] for sampled, run in runs if sampled]


def _row(
    engine: TinyEngine, conversation: Conversation, turns: list[list[float]]
) -> tuple[list[int], list[int], list[float]]:
    text = engine.render_text(
        [dict(message) for message in conversation.messages], [CALCULATOR_TOOL], add_generation_prompt=False
    )
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    written = 0
    for turn, told in itertools.zip_longest(_TURN.finditer(text), turns, fillvalue=None):
        if turn is None:
            break
        carried, sampled = engine.encode(text[written : turn.start()]), engine.encode(turn[0])
        known = told if told is not None and len(told) == len(sampled) else [math.nan] * len(sampled)
        ids += carried + sampled
        mask += [0] * len(carried) + [1] * len(sampled)
        logprobs += [0.0] * len(carried) + known
        written = turn.end()
    return ids, mask, logprobs
