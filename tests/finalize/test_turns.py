"""B38: a rollout of any number of turns, told in any way and order, is one row, and each token is stored once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch

from tests.finalize.conftest import Field, Record, call
from tokenlake.finalize import RowLoader
from tokenlake.finalize.publish import publish_due, set_policy

Turn = tuple[list[int], list[int]]
"""What a call adds to the conversation: its suffix, and what is sampled."""
FIXED: list[list[Turn]] = [
    [([1, 2], [3])],
    [([1, 2], [3]), ([4], [5])],
    [([1, 2], [3]), ([4], [5]), ([6], [7])],
    [([turn] * 60, [100 + turn] * 40) for turn in range(10)],
    [([1], [2])] * 30,
    [([1, 2], [3]), ([], [5]), ([], [7])],
    [([1, 2], []), ([4], [5]), ([6], []), ([7], [8])],
    [([0], [0]), ([2**31 - 1], [2**31 - 1])],
]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One conversation, and how it is told."""

    name: str
    turns: list[Turn]
    form: str

    @property
    def ids(self) -> list[int]:
        return [token for suffix, sampled in self.turns for token in (*suffix, *sampled)]

    @property
    def mask(self) -> list[int]:
        return [sampled for turn in self.turns for sampled, part in enumerate(turn) for _ in part]

    def records(self) -> list[Record]:
        made: list[Record] = []
        lengths = [0, *accumulate(len(suffix) + len(sampled) for suffix, sampled in self.turns)]
        for number, (suffix, sampled) in enumerate(self.turns):
            prompt = [*self.ids[: lengths[number]], *suffix]
            record = call(self.name, f"{self.name}-{number:03d}", prompt, sampled)
            if self.form != "prompt":
                record["parent_call_id"] = f"{self.name}-{number - 1:03d}" if number else None
            if self.form == "suffix" and number:
                record |= {"prompt_suffix_token_ids": suffix, "prev_len": lengths[number]}
                del record["prompt_token_ids"]
            made.append(record)
        return [*made, {"type": "seal", "rollout_id": self.name, "reward": 1.0}]


def told(seed: int) -> list[Rollout]:
    """The fixed ones, and as many of random turns."""
    draw = random.Random(seed)

    def turn(number: int) -> Turn:
        suffix = [draw.randrange(5) for _ in range(draw.randint(number == 0, 4))]
        return suffix, [draw.randrange(5) for _ in range(draw.randint(not suffix, 4))]

    chosen = [*FIXED, *([*map(turn, range(draw.randint(1, 9))), ([1], [2])] for _ in FIXED)]
    return [Rollout(f"g_g{at}", turns, ("prompt", "parent", "suffix")[at % 3]) for at, turns in enumerate(chosen)]


def test_every_conversation_is_one_row_and_each_token_is_stored_once(field: Field) -> None:
    rollouts = told(seed=1)
    left = [rollout.records() for rollout in rollouts]
    records: list[Record] = [{"type": "group", "group_id": "g", "n": len(rollouts)}]
    draw = random.Random(7)
    while left := [each for each in left if each]:
        records.append(draw.choice(left).pop(0))
    half = len(records) // 2
    field.add(*records[:half])
    field.restart()
    field.add(*records[half:])
    field.add(*records)
    set_policy(field.lake, {"rows": "segments"})
    ordered = (
        "SELECT input_ids, token_mask::INTEGER[], len(logprobs), turns FROM {} ORDER BY length(sample_id), sample_id"
    )
    wanted = [(each.ids, each.mask, len(each.ids), len(each.turns)) for each in rollouts]
    assert field.rows(ordered.format("publishable_rows")) == wanted
    publish_due(field.lake)
    assert field.rows(ordered.format("ready_rows")) == wanted
    assert field.rows("SELECT sum(len(token_ids)) FROM deltas") == [(sum(len(each.ids) for each in rollouts),)]
    assert field.rows("SELECT count(*) FROM calls WHERE cum_len - prev_len < sampled_tokens") == [(0,)]
    (batch,) = RowLoader(field.path)
    for row, (ids, mask, length, _) in enumerate(wanted):
        assert batch["input_ids"][row, :length].tolist() == ids
        assert batch["token_mask"][row, :length].tolist() == mask
    assert torch.equal(batch["logprobs"] < 0, batch["token_mask"] == 1)
    field.lake.compact()
    field.lake.rebuild()
    assert field.rows(ordered.format("candidate_rows")) == wanted
    assert field.rows("SELECT kind FROM audit_findings") == []
