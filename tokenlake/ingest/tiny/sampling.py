"""Logits to a token and its log-probability.

Sampling and re-scoring go through the same `processed_logprobs`, so that the distribution a token is said to come
from is the one it came from. The draw inverts the cumulative distribution at one uniform number from the request's
own generator: what a request samples does not depend on who else is in the batch, beyond float rounding of the
logits.
"""

# The stubs of torch and safetensors leave these partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from tokenlake.ingest.engine import SamplingParams

__all__ = ["check_params", "draw", "processed_logprobs"]

_GREEDY_BELOW = 1e-5
"""A lower temperature is taken for 0, as vLLM does: logits divided by it would leave the range of a float."""


def check_params(params: SamplingParams) -> None:
    """ValueError that names the first parameter out of range."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise ValueError(f"temperature must be a finite number from 0, got {params.temperature}")
    if not 0.0 < params.top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {params.top_p}")
    if params.top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or more, got {params.top_k}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, got {params.max_tokens}")
    if "" in params.stop:
        raise ValueError("a stop string must not be empty")


def processed_logprobs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities after temperature, then top_k, then top_p.

    `logits` is `[B, V]`, `params` has one entry a row or one for all; the result is float32 `[B, V]`, -inf where
    filtered. Ties at the top_k border all stay; the token that crosses the top_p mass stays. Temperature 0 (below 1e-5)
    is greedy: its row is the plain log-softmax, filtered by nothing.
    """
    temperatures = torch.tensor([[p.temperature if _draws(p) else 1.0] for p in params])
    scaled = logits.float() / temperatures
    for row, p in enumerate(params):
        if _draws(p) and (p.top_k or p.top_p < 1.0):
            rows = slice(row, row + 1) if len(params) > 1 else slice(None)
            scaled[rows] = _filter(scaled[rows], p)
    return torch.log_softmax(scaled, dim=-1)


def _draws(params: SamplingParams) -> bool:
    return params.temperature >= _GREEDY_BELOW


def _filter(scaled: Tensor, params: SamplingParams) -> Tensor:
    if 0 < params.top_k < scaled.shape[-1]:
        border = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < border, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        outside = mass.cumsum(dim=-1) - mass >= params.top_p
        outside[:, 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return scaled


def draw(logprobs: Tensor, params: Sequence[SamplingParams], generators: Sequence[Generator]) -> list[int]:
    """One token id a row of `[B, V]` log-probabilities; temperature 0 takes the most likely and draws nothing."""
    uniforms = torch.tensor(
        [
            [torch.rand((), generator=g, dtype=torch.float64).item() if _draws(p) else 0.0]
            for p, g in zip(params, generators, strict=True)
        ],
        dtype=torch.float64,
    )
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    best = logprobs.argmax(dim=-1)
    greedy = torch.tensor([not _draws(p) for p in params])
    return torch.where(greedy, best, drawn).tolist()
