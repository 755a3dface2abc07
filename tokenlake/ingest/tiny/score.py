"""Log-probabilities recomputed from ids alone.

The proof that a training row is right: one full forward over the row's ids, without cache or batch, must give what
the engine said when it sampled. It agrees to about 1e-5 where one version of the weights sampled the whole sequence;
after a swap in mid-request the cached keys and values are those of the older weights, and no single version
reproduces them.
"""

# The stubs of torch and safetensors leave these partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tokenlake.ingest.engine import SamplingParams
from tokenlake.ingest.tiny.model import TinyConfig, TinyModel
from tokenlake.ingest.tiny.sampling import check_params, processed_logprobs

__all__ = ["HasModel", "score", "sequence_logprobs"]


class HasModel(Protocol):
    """What holds a model, as `TinyEngine` does."""

    @property
    def model(self) -> TinyModel:
        """The network that samples."""
        ...


def score(
    state: Mapping[str, Tensor],
    input_ids: Sequence[int],
    *,
    config: TinyConfig | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Tensor:
    """Float32 `[T]`: at i the log-probability of `input_ids[i]` given `input_ids[:i]` under these weights; 0.0 at 0.

    Raises:
        ValueError: no ids, more than the context holds, an id outside the vocabulary, or weights that do not fit.
    """
    model = TinyModel.from_state(config or TinyConfig(), state)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    return _score(model, input_ids, params)


def sequence_logprobs(
    engine_or_model: HasModel | TinyModel,
    input_ids: Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[float]:
    """As `score`, with the weights that an engine or model holds now, as a list.

    A token that top_p or top_k removes is -inf; so, rarely, is one at the border when rounding moves it out. Not to be
    called while another thread replaces the engine's weights.
    """
    model = engine_or_model if isinstance(engine_or_model, TinyModel) else engine_or_model.model
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    return _score(model, input_ids, params).tolist()


def _score(model: TinyModel, input_ids: Sequence[int], params: SamplingParams) -> Tensor:
    check_params(params)
    config = model.config
    if not 0 < len(input_ids) <= config.max_model_len:
        raise ValueError(f"{len(input_ids)} ids cannot be scored; the model holds 1 to {config.max_model_len}")
    if min(input_ids) < 0 or max(input_ids) >= config.vocab_size:
        raise ValueError(f"an id is outside the vocabulary of {config.vocab_size}")
    ids = torch.tensor(input_ids)
    with torch.no_grad():
        logprobs = processed_logprobs(model(ids[None, :-1])[0], [params]) if len(ids) > 1 else torch.empty(0, 1)
        return torch.cat((torch.zeros(1), logprobs.gather(-1, ids[1:, None])[:, 0]))
