"""B46: whatever older attempts of a rollout left, and whenever it came, its row is of the highest attempt alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.finalize.conftest import Field, Record, call
from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.store.retention import retire_named

R = "R_g0"
"""Stands for the rollout of a case."""
Row = tuple[int, list[int], list[int], float | None, str | None]


def a(attempt: int, name: str, prompt: list[int], sampled: list[int], **more: Any) -> Record:
    return call(R, name, prompt, sampled, attempt=attempt, **more)


def seal(attempt: int, reward: float = 1.0, **more: Any) -> Record:
    return {"type": "seal", "rollout_id": R, "attempt": attempt, "reward": reward, **more}


def fail(attempt: int) -> Record:
    return {"type": "fail", "rollout_id": R, "attempt": attempt, "reason": "timeout"}


OLD = [a(0, "c0", [1, 2], [3]), a(0, "c1", [1, 2, 3, 4], [5])]
NEW = a(1, "d0", [1, 2], [8, 9])
ROW = (1, [1, 2, 8, 9], [0, 0, 1, 1], 1.0, None)
CASES: dict[str, tuple[list[Record], Row]] = {
    "a_zombie_stages_afterwards": ([*OLD, NEW, seal(1), a(0, "c2", [1, 2, 3, 4, 5, 6], [7])], ROW),
    "a_zombie_stages_in_between": ([*OLD, NEW, a(0, "z", [1, 2, 8, 9, 4], [7]), seal(1)], ROW),
    "nothing_older": ([NEW, seal(1)], ROW),
    "three": ([*OLD, a(1, "x", [1, 2], [6]), a(2, "d0", [1, 2], [8, 9]), seal(2)], (2, *ROW[1:])),
    "a_gap": ([*OLD, a(7, "d0", [1, 2], [8, 9]), seal(7)], (7, *ROW[1:])),
    "the_older_was_sealed": ([*OLD, seal(0, 1.0), NEW, seal(1, 0.0)], (*ROW[:3], 0.0, None)),
    "the_older_is_sealed_afterwards": ([*OLD, NEW, seal(1, 0.0), seal(0, 1.0)], (*ROW[:3], 0.0, None)),
    "the_older_had_failed": ([*OLD, fail(0), NEW, seal(1)], ROW),
    "the_older_fails_afterwards": ([*OLD, NEW, seal(1), fail(0)], ROW),
    "the_newer_failed": ([*OLD, seal(0), NEW, fail(1)], (1, [1], [0], None, "timeout")),
    "the_newer_has_no_call": ([*OLD, seal(0), seal(1)], (1, [1], [0], None, "no_calls")),
    "the_same_call_id": ([*OLD, a(1, "c0", [1, 2], [8, 9]), seal(1)], ROW),
    "the_same_call": ([a(0, "c0", [1, 2], [8, 9]), a(1, "c0", [1, 2], [8, 9]), seal(1)], ROW),
    "a_prompt_that_goes_on_from_the_older": (
        [*OLD, a(1, "d0", [1, 2, 3, 4, 5, 6], [7]), seal(1)],
        (1, [1, 2, 3, 4, 5, 6, 7], [0] * 6 + [1], 1.0, None),
    ),
    "a_parent_in_the_older": (
        [*OLD, a(1, "d0", [1, 2, 3, 4], [8], parent_call_id="c0"), seal(1)],
        (1, [1], [0], None, "parent_foreign"),
    ),
    "a_terminal_in_the_older": ([*OLD, NEW, seal(1, terminal_call_id="c1")], (1, [1], [0], None, "terminal_unknown")),
    "a_damaged_older": ([a(0, "c0", [1, 2], [3], generation_logprobs=[None]), NEW, seal(1)], ROW),
    "an_older_newer_version": ([a(0, "c0", [1, 2], [3], weight_version=9), NEW, seal(1)], ROW),
    "two_turns": (
        [*OLD, NEW, a(1, "d1", [1, 2, 8, 9, 4], [5]), seal(1)],
        (1, [1, 2, 8, 9, 4, 5], [0, 0, 1, 1, 0, 1], 1.0, None),
    ),
}


@pytest.fixture(scope="module", params=["terminal", "segments"])
def field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """A group a case, whose second rollout is a bystander of one call."""
    made = Field(tmp_path_factory.mktemp("attempts"))
    set_policy(made.lake, {"rows": request.param, "mixed_weight_version": "reject"})
    for name, (records, _) in CASES.items():
        sibling = f"{name}_g1"
        made.add(
            {"type": "group", "group_id": name, "n": 2},
            *[record | {"rollout_id": f"{name}_g0"} for record in records],
            call(sibling, "s", [1], [2]),
            {"type": "seal", "rollout_id": sibling, "reward": 0.5},
        )
    yield made
    made.lake.close()


ROWS = """
    SELECT sample_id, attempt, input_ids, token_mask::INTEGER[], reward, reason, group_min_wv
    FROM {} ORDER BY sample_id, segment_index
"""
SUPERSEDED = """
    SELECT group_id, list(call_id ORDER BY call_id) FROM calls WHERE superseded GROUP BY group_id ORDER BY group_id
"""


def test_the_row_is_of_the_highest_attempt_alone_and_stays_when_the_deltas_go(field: Field) -> None:
    wanted = {f"{name}_g0": (*row, 7) for name, (_, row) in CASES.items()}
    wanted |= {f"{name}_g1": (0, [1, 2], [0, 1], 0.5, None, 7) for name in CASES}
    for relation in ("publishable_rows", "ready_rows"):
        assert {name: tuple(row) for name, *row in field.rows(ROWS.format(relation))} == wanted
        publish_due(field.lake)
    assert len(field.rows(ROWS.format("ready_rows"))) == 2 * len(CASES)
    old = {
        name: sorted(each["call_id"] for each in records if each["type"] == "call" and each["attempt"] < row[0])
        for name, (records, row) in CASES.items()
    }
    assert dict(field.rows(SUPERSEDED)) == {name: calls for name, calls in old.items() if calls}
    before = field.rows("SELECT * FROM ready_rows ORDER BY ALL")
    retire_named(field.lake, rollouts=[f"{name}_g0" for name in CASES])
    field.restart()
    assert field.rows("SELECT * FROM ready_rows ORDER BY ALL") == before
    assert field.rows("SELECT count(*) FROM deltas") == [(len(CASES),)]
