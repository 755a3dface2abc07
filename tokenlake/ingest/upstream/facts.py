"""What is known of an upstream before the first call: asked and proven once, at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenlake.ingest.engine import LogprobMode

__all__ = ["Route", "UpstreamFacts"]

Route = Literal["generate", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamFacts:
    """One served model."""

    name: str
    version: str | None = None
    """What the server says it is; None when it does not say."""
    max_model_len: int = 0
    route: Route = "completions"
    """Where tokens are sampled: `/inference/v1/generate` where it is served, else `/v1/completions`."""
    stop_ids: tuple[int, ...] = ()
    """Ids that were seen to end a generation."""
    pad_id: int = 0
    vocab_size: int | None = None
    """None where the server does not tell."""
    logprob_mode: LogprobMode = "raw"
    opens_thinking: bool = False
    """The template's generation prompt ends inside a think block, so that a sampled text starts there."""
    tokenizer_digest: str | None = None
    """Of `/tokenizer_info`; None where that is not served."""
    template_digest: str | None = None
    """Of what the template makes of one fixed conversation."""
