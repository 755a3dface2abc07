"""What a capture worker says of itself, whatever samples there."""

from __future__ import annotations

from dataclasses import dataclass

from tokenlake.ingest.engine import LogprobMode

__all__ = ["WorkerFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker and the model that it serves."""

    worker_id: str
    """Also the writer of its deltas."""
    lake_id: str
    model: str
    max_model_len: int
    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    logprob_mode: LogprobMode
    opens_thinking: bool
    """The template's generation prompt ends inside a think block, so that a sampled text starts there."""
    parses: bool
    """Whether the worker reads tool calls or reasoning; where it reads neither, the gate does."""
    parses_tools: bool
    tokenizer_digest: str
    template_digest: str
