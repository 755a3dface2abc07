"""Small real lakes: calls as an import file says them, captured, published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenlake.finalize.publish import PublishedGroup, publish_due
from tokenlake.ingest.importer import import_file
from tokenlake.store.lake import OwnedLake

Record = dict[str, Any]


def call(rollout_id: str, call_id: str, prompt: Sequence[int], sampled: Sequence[int], **more: Any) -> Record:
    """A call of weight version 7 unless it says otherwise."""
    return {
        "type": "call",
        "rollout_id": rollout_id,
        "call_id": call_id,
        "prompt_token_ids": list(prompt),
        "generation_token_ids": list(sampled),
        "generation_logprobs": [-0.5 - position / 8 for position in range(len(sampled))],
        "weight_version": 7,
        **more,
    }


def group(group_id: str, rewards: Sequence[float | None], *, purpose: str = "train", **more: Any) -> list[Record]:
    """A group of one-call rollouts of growing length; a reward of None is a rollout that failed."""
    records: list[Record] = [{"type": "group", "group_id": group_id, "n": len(rewards), "purpose": purpose}]
    for index, reward in enumerate(rewards):
        rollout_id = f"{group_id}_g{index}"
        if reward is None:
            records.append({"type": "fail", "rollout_id": rollout_id, "reason": "environment_failed"})
            continue
        records.append(call(rollout_id, f"{rollout_id}-c0", [10, 11], [20 + index] * (index + 1), **more))
        records.append({"type": "seal", "rollout_id": rollout_id, "reward": reward})
    return records


class Field:
    """One lake, its owner, and the files that went into it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lake"
        self._folder = folder
        self._files = 0
        self.lake = OwnedLake.open(self.path)

    def add(self, *records: Record) -> None:
        self._files += 1
        path = self._folder / f"{self._files}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        import_file(self.lake, path)

    def publish(self, *records: Record) -> list[PublishedGroup]:
        self.add(*records)
        return publish_due(self.lake)

    def restart(self) -> None:
        self.lake.close()
        self.lake = OwnedLake.open(self.path)

    def rows(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        return self.lake.sql(query, list(params)).fetchall()


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    made = Field(tmp_path)
    yield made
    made.lake.close()
