"""The embedded engine: a small real language model, so that the whole loop runs on any machine.

Needs the `torch` extra; without it the import fails with `tokenlake.errors.MissingExtra`.
"""

from tokenlake.ingest.tiny._extra import EXTRA
from tokenlake.ingest.tiny.engine import TinyEngine
from tokenlake.ingest.tiny.model import TinyConfig, TinyModel, load_model
from tokenlake.ingest.tiny.score import score, sequence_logprobs

__all__ = ["EXTRA", "TinyConfig", "TinyEngine", "TinyModel", "load_model", "score", "sequence_logprobs"]
