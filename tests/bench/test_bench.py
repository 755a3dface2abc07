"""A benchmark is worth reading when its contenders do the same work: they agree, and refuse the same damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import by_hand, tokenlake_rows, tokenlake_stage
from bench.measure import Sample, ratio, summarize
from bench.workload import rollouts


def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    first, again, other = (rollouts(2, calls=3, delta=8, seed=seed)[1] for seed in (5, 5, 6))
    assert first.token_ids == again.token_ids != other.token_ids
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(first.calls, again.calls, strict=True))


def test_half_of_a_delta_is_prompt_without_logprobs_and_half_is_sampled_with_them() -> None:
    for call in rollouts(1, calls=2, delta=6, seed=1)[0].calls:
        assert call.token_mask.tolist() == [0, 0, 0, 1, 1, 1]
        assert not call.logprobs[:3].any()
        assert (call.logprobs[3:] < 0).all()


def test_sql_numpy_and_python_give_the_same_rows(tmp_path: Path) -> None:
    work = rollouts(6, calls=3, delta=16, seed=3)
    coords = tokenlake_stage.fill(tmp_path / "lake", work)
    found = {row["rollout_id"]: row for row in tokenlake_rows.linear_rows(tmp_path / "lake")[1].to_pylist()}
    assert set(found) == {rollout.rollout_id for rollout in work}
    for rollout, at in zip(work, coords, strict=True):
        row = found[rollout.rollout_id]
        by_array = by_hand.numpy_row(by_hand.array_records(rollout, at))
        by_list = by_hand.python_row(by_hand.list_records(rollout, at))
        assert row["input_ids"] == by_array[0].tolist() == by_list[0] == rollout.token_ids
        assert row["token_mask"] == by_array[1].tolist() == by_list[1]
        assert row["logprobs"] == by_array[2].tolist() == by_list[2]


@pytest.mark.parametrize("column", ["token_ids", "token_mask", "logprobs"])
def test_one_changed_token_is_refused_by_numpy_and_by_python(tmp_path: Path, column: str) -> None:
    work = rollouts(1, calls=3, delta=16, seed=3)
    coords = tokenlake_stage.fill(tmp_path / "lake", work)[0]
    arrays, lists = by_hand.array_records(work[0], coords), by_hand.list_records(work[0], coords)
    changed = getattr(arrays[1], column).copy()
    changed[-1] = 0
    arrays[1] = replace(arrays[1], **{column: changed})
    lists[1] = replace(lists[1], **{column: changed.tolist()})
    with pytest.raises(ValueError, match="c001"):
        by_hand.numpy_row(arrays)
    with pytest.raises(ValueError, match="c001"):
        by_hand.python_row(lists)


@pytest.mark.parametrize("variant", ["commit", "prepared", "stage"])
def test_every_staged_call_has_a_latency(tmp_path: Path, variant: str) -> None:
    start, end, latencies = getattr(tokenlake_stage, variant)(tmp_path, rollouts(2, calls=2, delta=8, seed=1))
    assert len(latencies) == 4
    assert sum(latencies) <= end - start


def test_threads_and_processes_stage_every_call(tmp_path: Path) -> None:
    threads = tokenlake_stage.stage_threads(tmp_path, rollouts(6, calls=2, delta=8, seed=1), threads=4)
    processes = tokenlake_stage.stage_processes(tmp_path, [(2, 2, 8, 1), (1, 2, 8, 2)])
    assert (len(threads[2]), len(processes[2])) == (12, 6)


def test_a_ratio_is_taken_inside_a_round() -> None:
    slow_then_fast = [Sample(value=value) for value in (5.0, 10.0, 20.0)]
    base = [Sample(value=value) for value in (2.5, 5.0, 10.0)]
    assert ratio(slow_then_fast, base) == 2.0
    assert ratio(slow_then_fast, base, less=True) == 0.5
    assert summarize(slow_then_fast).value == 10.0
