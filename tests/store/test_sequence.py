"""The arrays of calls become those of their chain, whether a record was packed or carried as lists."""

from __future__ import annotations

import random
from array import array
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tests.sql.records import connect
from tokenlake.store import sequence

KINDS = {"token_ids": pa.int32(), "token_mask": pa.uint8(), "logprobs": pa.float32()}
Lists = tuple[list[Any] | None, list[Any] | None, list[Any] | None]
SOUND: list[Lists] = [([1, 2], [0, 1], [0.0, -0.5]), ([], [], []), ([7], [1], [-1.5]), ([3, 4, 5], [1, 1], [])]
ODD: list[Lists] = [([1, None], [0, 1], [0.0, -2.0]), (None, [1], [-1.0]), (None, None, None), ([1], [None], [None])]


def columns(records: list[Lists]) -> list[pa.Array]:
    return [pa.array([each[i] for each in records], pa.list_(kind)) for i, kind in enumerate(KINDS.values())]


def test_only_whole_records_are_packed_and_their_bytes_are_those_of_the_arrays() -> None:
    mixed = [each for pair in zip(SOUND, ODD, strict=True) for each in pair]
    for arrays in (columns(mixed), [each.slice(3, 4) for each in columns(mixed)]):
        packed = sequence.pack(arrays).to_pylist()
        for row, found in enumerate(packed):
            record = [each[row].as_py() for each in arrays]
            if tuple(record) in ODD:
                assert found is None
            else:
                codes = zip(KINDS, "iBf", record, strict=True)
                assert found == {name: array(code, values).tobytes() for name, code, values in codes}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_chains_are_put_end_to_end(share: float) -> None:
    """`share`: of the records that are odd; over more rollouts than a vector holds."""
    pick = random.Random(7)
    chains: list[list[Any]] = [
        [pick.choice(ODD if pick.random() < share else SOUND) for _ in range(pick.randrange(5))] for _ in range(2500)
    ]
    flat = [record for chain in chains for record in chain]
    arrays = columns(flat)
    whole = pa.table(
        {
            "rollout": pa.array([i for i, chain in enumerate(chains) for _ in chain]),
            "packed": sequence.pack(arrays),
            **dict(zip(KINDS, arrays, strict=True)),
        }
    )
    con = duckdb.connect()
    sequence.register(con)
    con.register("given", whole)
    found = dict(
        con.execute(
            "SELECT rollout, tl_sequence(list(packed), list(CASE WHEN packed IS NULL THEN token_ids END), "
            "list(CASE WHEN packed IS NULL THEN token_mask END), list(CASE WHEN packed IS NULL THEN logprobs END)) "
            "FROM given GROUP BY rollout"
        ).fetchall()
    )
    assert len(found) == sum(map(bool, chains))
    for number, made in found.items():
        for i, name in enumerate(KINDS):
            assert made[name] == [value for record in chains[number] for value in record[i] or ()]
    assert con.execute("SELECT tl_sequence(NULL, NULL, NULL, NULL)").fetchall() == [(None,)]


def test_a_very_long_rollout_is_carried_as_lists() -> None:
    ids = [list(range(140_000)), list(range(70_000))]
    masks = [[*[0] * (len(each) - 1), 1] for each in ids]
    deltas = [
        {"rollout_id": "g_g0", "call_id": "a", "token_ids": ids[0], "token_mask": masks[0]},
        {"rollout_id": "g_g0", "call_id": "b", "parent_call_id": "a", "token_ids": ids[1], "token_mask": masks[1]},
    ]
    lineage = [
        {"event_type": "group_registered", "group_id": "g", "n": 1},
        *({"event_type": "call_committed", "rollout_id": "g_g0", "call_id": each["call_id"]} for each in deltas),
        {"event_type": "rollout_sealed", "rollout_id": "g_g0", "reward": 1.0},
    ]
    con = connect({"deltas": deltas, "lineage": lineage, "rows": [], "lake_findings": []})
    packed = con.execute("SELECT call_id, facts.packed IS NOT NULL FROM verified_calls ORDER BY ALL").fetchall()
    assert packed == [("a", False), ("b", True)]
    found = con.execute("SELECT reason, input_ids, token_mask, len(logprobs) FROM linear_rows").fetchall()
    assert found == [(None, ids[0] + ids[1], masks[0] + masks[1], 210_000)]
