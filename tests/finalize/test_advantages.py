"""Advantages: right, in SQL and torch alike to the last bit, and never moved by a row that is not trained."""

from __future__ import annotations

import math
import random
import statistics
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.finalize.conftest import Field, group
from tests.long import either
from tokenlake import sql
from tokenlake.errors import ConfigError
from tokenlake.finalize.advantages import group_advantages, trained_tokens

Groups = list[list[tuple[float | None, int]]]
"""Rollouts of each group: reward (None: a placeholder) and number of segments."""
KINDS: dict[str, dict[str, Any]] = {
    "mean": {"normalize": False},
    "mean_normalized": {},
    "leave_one_out": {"baseline": "leave_one_out", "normalize": False},
    "leave_one_out_normalized": {"baseline": "leave_one_out"},
}
SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("sample_id", pa.string()),
        ("segment_index", pa.int32()),
        ("sample_mask", pa.uint8()),
        ("reward", pa.float64()),
        ("sampled_tokens", pa.int32()),
    ]
)
rewards = st.sampled_from([None, 0.0, -0.0, 1.0, 0.1, 0.3]) | st.floats(-1e150, 1e150) | st.just(5e-324)
rollouts = st.tuples(rewards, st.integers(1, 3))


def in_sql(groups: Groups, seed: int) -> list[dict[str, Any]]:
    """The view's rows over ready rows that come in a random order."""
    given_rows = [
        {
            "group_id": f"g{number}",
            "rollout_id": f"g{number}_g{index}",
            "sample_id": f"g{number}_g{index}_{segment}",
            "segment_index": segment,
            "sample_mask": int(reward is not None),
            "reward": reward,
            "sampled_tokens": 3,
        }
        for number, members in enumerate(groups)
        for index, (reward, segments) in enumerate(members)
        for segment in range(segments)
    ]
    random.Random(seed).shuffle(given_rows)
    con = connected()
    con.register("ready_rows", pa.Table.from_pylist(given_rows, SCHEMA))
    return con.sql("SELECT * FROM advantages").to_arrow_table().to_pylist()


@cache
def connected() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    con.register("ready_rows", SCHEMA.empty_table())
    for name in ("ordered_sum", "advantages"):
        con.execute(sql.read(f"views/{name}"))
    return con


def in_torch(rows: list[dict[str, Any]], **how: Any) -> list[float]:
    return group_advantages(
        torch.tensor([math.nan if row["reward"] is None else row["reward"] for row in rows], dtype=torch.float64),
        torch.tensor([row["sample_mask"] for row in rows], dtype=torch.float32),
        torch.tensor([int(row["group_id"][1:]) for row in rows]),
        segment_index=torch.tensor([row["segment_index"] for row in rows]),
        **how,
    ).tolist()


@given(groups=st.lists(st.lists(rollouts, min_size=1, max_size=9), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_sql_and_torch_agree_to_the_last_bit_in_any_order_of_rows(groups: Groups, seed: int) -> None:
    rows = in_sql(groups, seed)
    for name, how in KINDS.items():
        found = [row[name] for row in rows]
        assert [value.hex() for value in found] == [value.hex() for value in in_torch(rows, **how)]
        assert all(math.isfinite(value) for value in found)
    again = {row["sample_id"]: row for row in in_sql(groups, seed + 1)}
    assert {row["sample_id"]: row for row in rows} == again


@given(st.lists(st.integers(-50, 50).map(lambda n: n / 8), min_size=2, max_size=9), st.integers(0, 3))
@settings(max_examples=either(20, 100), deadline=None)
def test_the_numbers_are_those_of_the_definition(valid: list[float], placeholders: int) -> None:
    rows = in_sql([[(reward, 1) for reward in [*valid, *[None] * placeholders]]], 0)
    for row in rows:
        wanted = dict.fromkeys(KINDS, 0.0)
        if row["sample_mask"] == 1 and len(set(valid)) > 1:
            others = list(valid)
            others.remove(row["reward"])
            deviation = statistics.stdev(valid)
            wanted["mean"] = row["reward"] - statistics.fmean(valid)
            wanted["leave_one_out"] = row["reward"] - statistics.fmean(others)
            wanted |= {f"{name}_normalized": wanted[name] / deviation for name in ("mean", "leave_one_out")}
        assert {name: row[name] for name in KINDS} == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("members", [[], [0.1], [0.1] * 3, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [0.0, -0.0]])
def test_without_signal_everything_is_exactly_zero(members: list[float]) -> None:
    rows = in_sql([[(reward, 1) for reward in [*members, None]]], 0)
    for name, how in KINDS.items():
        assert [row[name].hex() for row in rows] == [(0.0).hex()] * len(rows)
        assert [value.hex() for value in in_torch(rows, **how)] == [(0.0).hex()] * len(rows)


def test_masked_rows_and_other_groups_move_nobody() -> None:
    alone = in_sql([[(1.0, 1), (0.25, 1)]], 0)
    among = in_sql([[(1.0, 1), (0.25, 1), (None, 1), (None, 2)], [(0.5, 1), (9.0, 1)]], 0)
    wanted = {row["sample_id"]: row for row in alone}
    assert {row["sample_id"]: row for row in among if row["sample_id"] in wanted} == wanted


def test_a_rollout_of_many_segments_votes_once_and_each_segment_gets_its_worth() -> None:
    rows = in_sql([[(1.0, 3), (0.0, 1), (0.0, 1)]], 0)
    assert sorted((row["rollout_id"], row["mean"]) for row in rows) == [
        *[("g0_g0", 1 - 1 / 3)] * 3,
        ("g0_g1", -1 / 3),
        ("g0_g2", -1 / 3),
    ]


def test_the_view_weighs_published_rows_and_counts_the_tokens_that_are_trained(field: Field) -> None:
    field.publish(*group("g", [1.0, None, 0.0]), *group("h", [0.5]))
    found = field.rows("SELECT sample_id, leave_one_out, trained_tokens FROM advantages ORDER BY sample_id")
    assert found == [("g_g0", 1.0, 1), ("g_g1", 0.0, 0), ("g_g2", -1.0, 3), ("h_g0", 0.0, 1)]


def test_the_denominator_counts_sampled_tokens_of_valid_rows() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert trained_tokens(mask, torch.tensor([1.0, 0.0, 1.0])).item() == 2


def test_no_row_is_no_advantage_and_an_unknown_baseline_is_refused() -> None:
    nothing = torch.zeros(0)
    assert group_advantages(nothing, nothing, nothing).shape == (0,)
    with pytest.raises(ConfigError, match="baseline"):
        group_advantages(nothing, nothing, nothing, baseline="median")  # type: ignore[arg-type]
