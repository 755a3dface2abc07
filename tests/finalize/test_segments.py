"""Policy `rows=segments`: every chain that holds sampled tokens is a row, and each sampled token is trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.finalize.conftest import Field, Record, call
from tests.long import either
from tests.sql.records import connect
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.errors import DamagedLake
from tokenlake.finalize import RowLoader
from tokenlake.finalize.advantages import group_advantages
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.store.schema import ROW


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a made-up rollout."""

    parent: int | None
    """An earlier turn; None: a root."""
    sampled: int
    damaged: bool


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[Turn], int]:
    """The calls of an attempt in the order in which they were committed, and which of them was scored."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        turns.append(Turn(parent, draw(st.integers(0, 3)), draw(st.sampled_from([False] * 5 + [True]))))
    return turns, draw(st.integers(0, len(turns) - 1))


def path_to(turns: Sequence[Turn], last: int) -> list[int]:
    path: list[int] = []
    at: int | None = last
    while at is not None:
        path.insert(0, at)
        at = turns[at].parent
    return path


def rows_of(turns: Sequence[Turn], terminal: int) -> list[Record]:
    """What the lake would publish of a group of that one rollout; token ids are 100 for each call and a position."""
    deltas = [
        {
            "rollout_id": "g_g0",
            "call_id": f"c{number}",
            "parent_call_id": None if turn.parent is None else f"c{turn.parent}",
            "token_ids": [100 * number + position for position in range(1 + turn.sampled)],
            "token_mask": [0] + [1] * turn.sampled,
            **({"logprobs": [0.5] * (1 + turn.sampled)} if turn.damaged else {}),
        }
        for number, turn in enumerate(turns)
    ]
    named = {"group_id": "g", "rollout_id": "g_g0", "attempt": 0}
    lineage = [
        {"event_type": "policy_set", "detail": '{"rows": "segments"}'},
        {"event_type": "group_registered", "group_id": "g", "n": 1},
        {"event_type": "rollout_registered", **named},
        *({"event_type": "call_committed", **named, "call_id": delta["call_id"]} for delta in deltas),
        {"event_type": "rollout_sealed", **named, "reward": 1.0, "terminal_call_id": f"c{terminal}"},
    ]
    con = connect({"deltas": deltas, "lineage": lineage, "rows": [], "lake_findings": []})
    return con.sql("SELECT * FROM publishable_rows ORDER BY segment_index").to_arrow_table().to_pylist()


@given(attempts())
@settings(max_examples=either(10, 50), deadline=None)
def test_every_sampled_token_of_every_valid_chain_is_trained_exactly_once(attempt: tuple[list[Turn], int]) -> None:
    turns, terminal = attempt
    rows = rows_of(turns, terminal)
    main = path_to(turns, terminal)
    leaves = [each for each in range(len(turns)) if all(turn.parent != each for turn in turns) and each != terminal]
    sound = [path for path in (path_to(turns, leaf) for leaf in leaves) if not any(turns[at].damaged for at in path)]
    valid = not any(turns[at].damaged for at in main) and sum(turns[at].sampled for at in main) > 0
    delivered = {at for path in (main, *sound) for at in path} if valid else set[int]()
    trained = Counter(
        token for row in rows for token, mask in zip(row["input_ids"], row["token_mask"], strict=True) if mask
    )
    assert trained == Counter(100 * at + 1 + position for at in delivered for position in range(turns[at].sampled))
    everything = sum(turn.sampled for turn in turns)
    assert sum(row["sampled_tokens"] + row["dropped_sampled_tokens"] for row in rows) == everything
    assert [row["segment_index"] for row in rows] == list(range(len(rows)))
    assert {row["segment_count"] for row in rows} == {len(rows)}
    if not valid:
        assert [row["sample_mask"] for row in rows] == [0]
        return
    assert rows[0]["call_ids"] == [f"c{at}" for at in main]
    assert sum(rows[0]["token_mask"]) == sum(turns[at].sampled for at in main)
    for row in rows:
        path = path_to(turns, int(row["terminal_call_id"][1:]))
        assert row["call_ids"] == [f"c{at}" for at in path]
        assert row["input_ids"] == [100 * at + i for at in path for i in range(1 + turns[at].sampled)]
        assert sum(row["token_mask"]) == row["sampled_tokens"] > 0
        assert [value == 0.0 for value in row["logprobs"]] == [mask == 0 for mask in row["token_mask"]]


def branching(group_id: str, *, n: int = 3, reward: float = 1.0) -> list[Record]:
    """A rollout that summarized its history and had a helper, one of a single call, one that failed."""
    first, second, third = (f"{group_id}_g{index}" for index in range(3))
    records: list[Record] = [
        {"type": "group", "group_id": group_id, "n": n},
        call(first, f"{group_id}-c0", [1], [2, 3]),
        call(first, f"{group_id}-h", [1, 2, 3, 4], [5]),
        call(first, f"{group_id}-s", [9], [10, 11]),
        call(first, f"{group_id}-t", [9, 10, 11, 12], [13], weight_version=8),
        {"type": "seal", "rollout_id": first, "reward": reward, "terminal_call_id": f"{group_id}-t"},
        call(second, f"{group_id}-o", [1], [7]),
        {"type": "seal", "rollout_id": second, "reward": 0.0},
    ]
    return records if n < 3 else [*records, {"type": "fail", "rollout_id": third, "reason": "timeout"}]


ROWS = """
    SELECT sample_id, segment_index, segment_count, input_ids, token_mask, reward, sampled_tokens,
        dropped_sampled_tokens, group_min_wv, group_max_wv
    FROM ready_rows ORDER BY sample_id, segment_index
"""
SEGMENTS: list[tuple[Any, ...]] = [
    ("g_g0", 0, 2, [9, 10, 11, 12, 13], [0, 1, 1, 0, 1], 1.0, 3, 0, 7, 8),
    ("g_g0", 1, 2, [1, 2, 3, 4, 5], [0, 1, 1, 0, 1], 1.0, 3, 0, 7, 8),
    ("g_g1", 0, 1, [1, 7], [0, 1], 0.0, 1, 0, 7, 8),
    ("g_g2", 0, 1, [9], [0], None, 0, 0, 7, 8),
]


def test_a_group_is_published_with_all_its_segments_and_stays_as_it_was_published(field: Field) -> None:
    set_policy(field.lake, {"rows": "segments"})
    (done,) = field.publish(*branching("g"))
    assert (done.n, done.rows, done.valid, dict(done.reasons)) == (3, 4, 2, {"timeout": 1})
    set_policy(field.lake, {"rows": "terminal"})
    assert publish_due(field.lake, groups=["g"]) == []
    assert field.rows(ROWS) == SEGMENTS
    assert field.rows("SELECT kind FROM audit_findings") == []
    assert field.rows("SELECT state, valid, placeholders FROM groups") == [("published", 2, 1)]
    field.publish(*branching("h"))
    assert field.rows("SELECT segment_count, dropped_sampled_tokens FROM ready_rows WHERE sample_id = 'h_g0'") == [
        (1, 3)
    ]
    (field.path / "index.duckdb").unlink()
    field.restart()
    assert field.rows(ROWS)[:4] == SEGMENTS


@pytest.mark.parametrize(("version", "rows"), [({}, 2), ({"weight_version": None}, 2), ({"weight_version_end": 8}, 1)])
def test_a_chain_of_one_version_is_kept_also_where_nobody_knows_which(field: Field, version: Record, rows: int) -> None:
    set_policy(field.lake, {"rows": "segments", "mixed_weight_version": "reject"})
    (done,) = field.publish(
        {"type": "group", "group_id": "g", "n": 1},
        call("g_g0", "a", [1], [2, 3], weight_version=None),
        call("g_g0", "b", [7], [8], **version),
        {"type": "seal", "rollout_id": "g_g0", "reward": 1.0, "terminal_call_id": "a"},
    )
    assert (done.rows, done.valid) == (rows, 1)


@pytest.mark.parametrize("width", [None, 16])
def test_loader_claims_and_baseline_take_a_rollout_of_several_segments_as_one(field: Field, width: int | None) -> None:
    set_policy(field.lake, {"rows": "segments"})
    field.publish(*branching("g"), *branching("h", n=2, reward=0.5))
    claim = ReplayBuffer(field.lake).claim("t", groups=5)
    assert [(group.group_id, group.n) for group in claim.groups] == [("g", 3), ("h", 2)]
    loader = RowLoader(field.path, groups=["g", "h"], groups_per_batch=2, pack_tokens=width, token_versions=True)
    (batch,) = loader
    assert batch["sample_ids"] == ["g_g0", "g_g0", "g_g1", "g_g2", "h_g0", "h_g0", "h_g1"]
    assert batch["segment_index"].tolist() == [0, 1, 0, 0, 0, 1, 0]
    worth = group_advantages(
        batch["rewards"],
        batch["sample_mask"],
        batch["group_index"],
        segment_index=batch["segment_index"],
        normalize=False,
    )
    assert worth.tolist() == [0.5, 0.5, -0.5, 0.0, 0.25, 0.25, -0.25]
    in_sql = "SELECT mean FROM advantages ORDER BY sample_id, segment_index"
    assert field.rows(in_sql) == [(each,) for each in worth.tolist()]
    assert torch.equal(batch["weight_versions"] >= 0, batch["token_mask"] == 1)
    assert int(batch["token_mask"].sum()) == 14


def test_the_same_rows_come_over_http(field: Field) -> None:
    set_policy(field.lake, {"rows": "segments"})
    field.publish(*branching("g"))
    with embedded(Service(field.lake, TinyEngine(seed=0))) as running:
        (over_http,) = RowLoader(running.url, token=running.token)
    (here,) = RowLoader(field.path)
    assert torch.equal(over_http["input_ids"], here["input_ids"])
    assert over_http["segment_index"].tolist() == here["segment_index"].tolist() == [0, 1, 0, 0]


def test_a_group_that_lost_a_segment_is_an_error_and_never_a_smaller_group(field: Field) -> None:
    set_policy(field.lake, {"rows": "segments"})
    field.publish(*branching("g"))
    path = field.path / "rows" / "000000.arrow"
    table = pa.ipc.open_file(path).read_all()
    field.lake.close()
    path.unlink()
    with pa.ipc.new_file(str(path), ROW) as writer:
        writer.write_table(table.filter(pc.equal(table["segment_index"], 0)))
    (field.path / "index.duckdb").unlink()
    field.restart()
    assert field.rows("SELECT * FROM ready_rows") == []
    assert ("group_incomplete",) in field.rows("SELECT kind FROM audit_findings")
    with pytest.raises(DamagedLake, match="does not hold the 3 rollouts of group g"):
        list(RowLoader(field.path))
