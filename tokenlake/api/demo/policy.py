"""The model that a demo plays with: what serves it, which weights it has loaded, and what it says it has sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tokenlake.api.backend import Backend
from tokenlake.ingest.tiny import TinyEngine

__all__ = ["EmbeddedPolicy", "Policy", "State", "Traced"]

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One call as the engine itself wrote it down, beside the capture path."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int] | None
    """None: the engine's trace has none."""
    logprobs: Sequence[float] | None
    """None: the engine's trace has none."""


class Policy(Protocol):
    """A model behind the gate."""

    @property
    def title(self) -> str:
        """What it is, for the summary."""
        ...

    @property
    def backend(self) -> Backend:
        """What the gate asks."""
        ...

    @property
    def weights(self) -> State:
        """What is loaded, under the embedded model's names."""
        ...

    async def load(self, state: State, version: int) -> None:
        """Replace the weights and say that they are `version`; nothing is being sampled."""
        ...

    def traced(self) -> Mapping[str, Traced]:
        """Every call by its id, once nothing is being sampled any more."""
        ...


class EmbeddedPolicy:
    """The embedded engine. Its trace is a file that the engine writes by itself."""

    title = "the embedded engine"

    def __init__(self, trace: Path, seed: int) -> None:
        self._trace = trace
        self._engine = TinyEngine(seed=seed, trace_path=trace)

    @property
    def backend(self) -> Backend:
        """The engine, captured in the gate's own process."""
        return Backend(engine=self._engine)

    @property
    def weights(self) -> State:
        """A copy."""
        return {name: weight.detach().clone() for name, weight in self._engine.model.state_dict().items()}

    async def load(self, state: State, version: int) -> None:
        """Between two tokens."""
        await self._engine.set_weights(state, version)

    def traced(self) -> Mapping[str, Traced]:
        """From the engine's file."""
        with self._trace.open() as file:
            return {
                record["request_id"]: Traced(
                    prompt_token_ids=record["prompt_token_ids"],
                    token_ids=record["token_ids"],
                    logprobs=record["logprobs"],
                )
                for record in map(json.loads, file)
            }
