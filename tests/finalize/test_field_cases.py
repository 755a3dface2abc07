"""Cases of the field at the trainer's side (B40, B42, B43): what a lake publishes, what SQL and torch make of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.finalize.conftest import Field, Record, call, group
from tests.finalize.test_advantages import KINDS, SCHEMA, connected
from tokenlake.finalize import RowLoader
from tokenlake.finalize.advantages import group_advantages, trained_tokens
from tokenlake.finalize.publish import publish_due

VIEW = "SELECT mean, mean_normalized, leave_one_out, trained_tokens FROM advantages ORDER BY sample_id"


def faulty(rewards: list[float], invalid: set[int], worth: Any = 1.0) -> list[Record]:
    """A group whose `invalid` rollouts have a logprob that nobody can train on, and the reward `worth`."""
    records: list[Record] = [{"type": "group", "group_id": "g", "n": len(rewards)}]
    for index, reward in enumerate(rewards):
        name = f"g_g{index}"
        wrong = {"generation_logprobs": [None]} if index in invalid else {}
        records.append(call(name, f"c{index}", [1], [2], **wrong))
        records.append({"type": "seal", "rollout_id": name, "reward": worth if index in invalid else reward})
    return records


def both(field: Field) -> list[tuple[float, float, float]]:
    """Mean, normalized and leave-one-out of each row, which SQL and torch agree about."""
    (batch,) = RowLoader(field.path)
    given = (batch["rewards"], batch["sample_mask"], batch["group_index"])
    kinds = [
        group_advantages(*given, segment_index=batch["segment_index"], **KINDS[name]).tolist()
        for name in ("mean", "mean_normalized", "leave_one_out")
    ]
    found = list(zip(*kinds, strict=True))
    rows = field.rows(VIEW)
    assert found == [row[:3] for row in rows]
    assert sum(row[3] for row in rows) == int(trained_tokens(batch["token_mask"], batch["sample_mask"]))
    assert all(math.isfinite(value) for row in found for value in row)
    return found


@pytest.mark.parametrize("worth", [1.0, 1000.0, -1000.0, math.nan, None])
def test_b40_a_masked_sample_does_not_move_its_siblings(field: Field, worth: float | None) -> None:
    field.publish(*faulty([1.0, 1.0, 0.0, 0.0], {1}, worth))
    mean, normalized, others = zip(*both(field), strict=True)
    assert mean == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert normalized == pytest.approx([1.1547, 0, -0.5774, -0.5774], abs=1e-4)
    assert others == pytest.approx([1, 0, -0.5, -0.5])
    assert field.rows("SELECT sum(trained_tokens) FROM advantages") == [(3,)]


def test_b40_equal_valid_rewards_beside_an_invalid_one_are_no_signal(field: Field) -> None:
    field.publish(*faulty([0.0, 0.0, 0.0, 0.0], {3}))
    assert both(field) == [(0.0, 0.0, 0.0)] * 4


@pytest.mark.parametrize(
    ("rewards", "invalid", "tokens"),
    [([1, 1, 1, 1], {0, 1, 2, 3}, 0), ([0, 0, 1, 0], {0, 1, 3}, 1), ([1, 1, 0, 0], {2, 3}, 2), ([1], set(), 1)],
)
def test_b42_without_a_baseline_advantages_are_zero_and_the_loss_is_a_number(
    field: Field, rewards: list[float], invalid: set[int], tokens: int
) -> None:
    field.publish(*faulty([float(each) for each in rewards], invalid))
    assert both(field) == [(0.0, 0.0, 0.0)] * len(rewards)
    (batch,) = RowLoader(field.path)
    assert len(batch["sample_ids"]) == len(rewards)
    trained = trained_tokens(batch["token_mask"], batch["sample_mask"])
    assert int(trained) == tokens
    worth = group_advantages(batch["rewards"], batch["sample_mask"], batch["group_index"])
    loss = (worth[:, None] * batch["token_mask"]).sum() / trained.clamp(min=1)
    assert float(loss) == 0.0


def test_b43_a_dead_environment_is_no_reward_of_zero_and_a_wrong_answer_is(field: Field) -> None:
    records = group("g", [1.0, 1.0, 0.0, None])
    field.publish(*records[:-1], call("g_g3", "x", [1], [2]), call("g_g3", "y", [1, 2], [3]), records[-1])
    assert [row[0] for row in both(field)] == pytest.approx([1 / 3, 1 / 3, -2 / 3, 0])
    assert field.rows("SELECT reward, reason FROM ready_rows ORDER BY sample_id")[2:] == [
        (0.0, None),
        (None, "environment_failed"),
    ]


def test_b43_who_never_reports_is_a_placeholder_at_the_deadline_and_not_before(field: Field) -> None:
    assert field.publish(*[each for each in group("g", [1.0, 0.5, 0.0, 1.0]) if each.get("rollout_id") != "g_g3"]) == []
    (done,) = publish_due(field.lake, groups=["g"], force_deadline=True)
    assert (done.valid, dict(done.reasons)) == (3, {"never_sealed": 1})
    assert [row[0] for row in both(field)] == pytest.approx([0.5, 0, -0.5, 0])


def test_b43_all_dead_is_a_group_of_placeholders(field: Field) -> None:
    (done,) = field.publish(*group("g", [None] * 4))
    assert (done.rows, done.valid, dict(done.reasons)) == (4, 0, {"environment_failed": 4})
    assert both(field) == [(0.0, 0.0, 0.0)] * 4


def test_ten_thousand_random_groups_are_worth_the_same_in_sql_and_torch() -> None:
    draw = np.random.default_rng(7)
    of_rollout = np.repeat(np.arange(10_000), draw.integers(1, 9, 10_000))
    count = len(of_rollout)
    kinds = np.stack([np.full(count, np.nan), draw.integers(0, 2, count), draw.uniform(-9, 9, count)])
    kinds = np.concatenate([kinds, draw.choice([0.1, 0.3], (1, count))])
    segments = draw.choice([1, 1, 1, 3], count)
    rollout = np.repeat(np.arange(count), segments)
    order = draw.permutation(len(rollout))
    rollout, segment = (
        rollout[order],
        (np.arange(len(rollout)) - np.repeat(segments.cumsum() - segments, segments))[order],
    )
    reward = kinds[draw.integers(0, 4, count), np.arange(count)][rollout]
    rows = {
        "group_id": of_rollout[rollout].astype(str),
        "rollout_id": rollout.astype(str),
        "sample_id": np.arange(len(rollout)).astype(str),
        "segment_index": segment,
        "sample_mask": ~np.isnan(reward),
        "reward": reward,
        "sampled_tokens": np.ones(len(rollout)),
    }
    con = connected()
    con.register("ready_rows", pa.table({name: pa.array(rows[name], from_pandas=True) for name in rows}).cast(SCHEMA))
    found = con.sql("SELECT * FROM advantages ORDER BY sample_id::INTEGER").to_arrow_table()
    given = [torch.from_numpy(rows[name]) for name in ("reward", "sample_mask")]
    for name, how in KINDS.items():
        worth = group_advantages(
            *given, torch.from_numpy(of_rollout[rollout]), segment_index=torch.from_numpy(segment), **how
        )
        assert worth.numpy().tobytes() == found[name].to_numpy().tobytes()
        assert np.count_nonzero(worth) > count / 2
