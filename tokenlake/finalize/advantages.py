"""GRPO advantages on tensors: the same numbers as the view `advantages`, to the last bit in float64.

A row is weighed against the valid rows of its group and no others; a placeholder never moves its siblings. Rows belong
together by their group, never by position or prompt. Sums run over rewards in order of their value, as in the view, so
that neither the order of rows nor of batches changes a bit. A group has no signal, and all its advantages are exactly
0.0, when fewer than two of its rollouts are valid or all valid rewards are equal, compared exactly.

Source of the baselines: GRPO (arXiv:2402.03300), and RLOO (arXiv:2402.14740) for leaving one out.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from tokenlake.errors import ConfigError, MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("advantages on tensors need torch: pip install 'tokenlake[torch]'") from error

__all__ = ["Baseline", "group_advantages", "trained_tokens"]

Baseline = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards: torch.Tensor,
    sample_mask: torch.Tensor,
    group_index: torch.Tensor,
    *,
    segment_index: torch.Tensor | None = None,
    baseline: Baseline = "mean",
    normalize: bool = True,
) -> torch.Tensor:
    """float64 [R]: what each of R rows is worth.

    `rewards`: [R], any value on placeholders. `sample_mask`: [R], 1 valid. `group_index`: integers [R], equal for rows
    of one group. `segment_index`: integers [R]; only rows with 0 count in the baseline, so that a rollout of several
    segments counts once; None: every row is a rollout. `baseline`: a valid reward less the mean of all valid ones, or
    of the others. `normalize`: divide by the sample standard deviation of the valid rewards.
    """
    if baseline not in ("mean", "leave_one_out"):
        raise ConfigError(f"baseline must be mean or leave_one_out, not {baseline!r}")
    values = rewards.detach().to(torch.float64).cpu()
    valid = sample_mask.detach().cpu() == 1
    numbers: dict[int, int] = {}
    indices: Any = group_index.detach().cpu()
    place = torch.tensor([numbers.setdefault(each, len(numbers)) for each in indices.tolist()], dtype=torch.int64)
    votes = valid if segment_index is None else valid & (segment_index.detach().cpu() == 0)
    table, count = _sorted_by_group(values[votes], place[votes], len(numbers))
    average = _fold(table, count) / count
    last = (count - 1).clamp(min=0)
    lowest, highest = table[:, 0], table.gather(1, last[:, None])[:, 0]
    signal = (count > 1) & (lowest != highest)
    distance = values - average[place]
    if normalize:
        scale = torch.maximum(average - lowest, highest - average)
        scaled = (table - average[:, None]) / scale[:, None]
        variance: Any = _fold(scaled * scaled, count) / (count - 1)
        # torch's own square root may be off by the last bit; that of C, and of DuckDB, is not.
        deviation = values.new_tensor([math.sqrt(each) if each > 0 else math.nan for each in variance.tolist()])
        distance = distance / scale[place] / deviation[place]
    if baseline == "leave_one_out":
        distance = distance * (count.to(torch.float64) / (count - 1))[place]
    return torch.where(valid & signal[place], distance, 0.0).to(rewards.device)


def trained_tokens(token_mask: torch.Tensor, sample_mask: torch.Tensor) -> torch.Tensor:
    """int64 scalar: sampled tokens of valid rows, the denominator of a loss averaged over tokens.

    `token_mask`: [R, T]; `sample_mask`: [R].
    """
    return ((token_mask == 1) & (sample_mask == 1)[:, None]).sum()


def _sorted_by_group(values: torch.Tensor, place: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's values in rising order [G, widest group], 0.0 beyond them, and how many they are [G]."""
    count = torch.bincount(place, minlength=groups)
    order = torch.argsort(values, stable=True)
    order = order[torch.argsort(place[order], stable=True)]
    first = count.cumsum(0) - count
    column = torch.arange(len(order)) - first[place[order]]
    table = values.new_zeros((groups, max(1, int(count.max())) if groups else 1))
    table[place[order], column] = values[order]
    return table, count


def _fold(table: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Sum the first `count` columns of each row, one after the other: `sum` would take another order."""
    total = table.new_zeros(len(table))
    for column in range(table.shape[1]):
        total = torch.where(count > column, total + table[:, column], total)
    return total
