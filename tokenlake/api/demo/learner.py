"""One gradient step of GRPO on a batch, and what it says about the batch before it changes the weights.

The ratio is against the log-probabilities that the sampler captured, so rows of older weights are corrected for what
has changed since. How far trainer and sampler are apart is the estimator k3 of the KL divergence
(http://joschu.net/blog/kl-approx.html): r - 1 - log r, r the ratio of their probabilities of a sampled token, averaged
over the sampled tokens. Against the weights that a row was sampled with it is float noise, however old the row is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenlake.finalize.advantages import group_advantages, trained_tokens
from tokenlake.finalize.tensors import Batch, NextToken, next_token
from tokenlake.ingest.tiny.model import TinyConfig, TinyModel

__all__ = ["Learner", "Update"]

_CLIP = 0.2
_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step saw, before it changed the weights."""

    reward: float
    """Mean over the valid rows."""
    rows: int
    valid_rows: int
    tokens: int
    """Sampled tokens that were trained."""
    staleness: float
    """Versions that the valid rows' oldest token lies behind the trainer's, on average."""
    staleness_max: int
    kl: float
    """k3 between the trainer's weights and the sampler over all trained tokens: what has been learned since."""
    kl_same: float
    """k3 between the weights of a row's own version and the sampler, over rows of one version; NaN without any."""
    kl_same_max: float
    """The largest k3 of a single token among these."""
    same_rows: int


class Learner:
    """The trainer's copy of the model, and its optimizer."""

    def __init__(
        self, config: TinyConfig, state: Mapping[str, torch.Tensor], learning_rate: float, version: int, remembered: int
    ) -> None:
        """`version`: of `state`. `remembered`: versions that are kept to look at rows of their own."""
        self.version = version
        self._config = config
        self._remembered = remembered
        self._model = TinyModel.from_state(config, state).requires_grad_(requires_grad=True)
        self._past = {version: self.state()}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the weights, for the engine to serve."""
        return {name: each.detach().clone() for name, each in self._model.state_dict().items()}

    def step(self, batch: Batch, sampled: torch.Tensor) -> Update:
        """Train on a padded batch, which makes the next version.

        `sampled`: int64 [R, 2], the oldest and the newest version among a row's sampled tokens. A log-probability of
        NaN is one that nobody knows: such a token has the ratio 1 and stays out of the KL.
        """
        step = next_token(batch)
        valid = batch["sample_mask"] == 1
        mask = step.mask * valid[:, None]
        worth = group_advantages(
            batch["rewards"], batch["sample_mask"], batch["group_index"], segment_index=batch["segment_index"]
        ).float()
        logprobs = _logprobs(self._model, step)
        known = torch.where(step.logprobs.isnan(), logprobs.detach(), step.logprobs)
        log_ratio = (logprobs - known) * mask
        ratio = torch.exp(log_ratio)
        gain = torch.minimum(ratio * worth[:, None], ratio.clamp(1 - _CLIP, 1 + _CLIP) * worth[:, None])
        tokens = int(trained_tokens(batch["token_mask"], batch["sample_mask"]))
        loss: torch.Tensor = -(gain * mask).sum() / max(tokens, 1)
        told = (mask == 1) & ~step.logprobs.isnan()
        same, same_rows = self._same(step, told, sampled)
        self._optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _GRADIENT_NORM)
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        behind = (self.version - sampled[valid, 0]).float()
        self.version += 1
        self._past[self.version] = self.state()
        self._past.pop(self.version - self._remembered, None)
        return Update(
            reward=float(batch["rewards"][valid].mean()),
            rows=len(valid),
            valid_rows=int(valid.sum()),
            tokens=tokens,
            staleness=_mean(behind),
            staleness_max=int(behind.max()) if len(behind) else 0,
            kl=_mean(_k3(log_ratio.detach()[told])),
            kl_same=_mean(same),
            kl_same_max=float(same.max()) if same.numel() else math.nan,
            same_rows=same_rows,
        )

    def _same(self, step: NextToken, told: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, int]:
        """k3 of each token of the rows that one remembered version sampled, under that version; and their number."""
        found: list[torch.Tensor] = [torch.empty(0)]
        rows = 0
        for version, state in self._past.items():
            own = (sampled == version).all(dim=1) & told.any(dim=1)
            if own.any():
                rows += int(own.sum())
                part = NextToken(*(each[own] for each in step))
                with torch.no_grad():
                    logprobs = _logprobs(TinyModel.from_state(self._config, state), part)
                found.append(_k3((logprobs - part.logprobs)[told[own]]))
        return torch.cat(found), rows


def _logprobs(model: TinyModel, step: NextToken) -> torch.Tensor:
    """[S, T-1]: the log-probability of each target."""
    return torch.log_softmax(model(step.inputs).float(), dim=-1).gather(-1, step.targets[..., None])[..., 0]


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan
