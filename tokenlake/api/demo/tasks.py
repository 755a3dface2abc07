"""Arithmetic tasks from reasoning-gym, scored by its own verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenlake.errors import MissingExtra
from tokenlake.ingest.tiny.tasks import final_answer

try:
    import reasoning_gym
except ImportError as error:
    raise MissingExtra("the demo needs reasoning-gym: pip install 'tokenlake[demo]'") from error

__all__ = ["Task", "make_tasks"]


@dataclass(frozen=True, slots=True)
class Task:
    """One question and how to score an answer to it."""

    question: str
    entry: Mapping[str, Any]
    dataset: Any

    def score(self, answer: str) -> float:
        """1.0 for the right number, less for anything else, by the data set's own verifier."""
        return float(self.dataset.score_answer(final_answer(answer), self.entry))


def make_tasks(count: int, seed: int) -> list[Task]:
    """`count` tasks, the same for the same seed."""
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=count, seed=seed, min_terms=2, max_terms=3, min_digits=1, max_digits=2
    )
    return [Task(question=entry["question"], entry=entry, dataset=dataset) for entry in dataset]
