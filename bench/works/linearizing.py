"""W3: rollouts to verified rows, in SQL and by hand; then sixteen times the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

import tokenlake
from bench import by_hand, tokenlake_rows, tokenlake_stage
from bench.measure import Timing, rate
from bench.peers import peer
from bench.plan import Plan, Shape
from bench.table import Figure, Row, alone
from bench.workload import Rollout, rollouts

__all__ = ["rows", "timed"]


def rows(plan: Plan) -> list[Row]:
    """The rows of linearizing."""
    return [*_small(plan), *_large(plan)]


def _small(plan: Plan) -> list[Row]:
    count, calls, delta = shape = plan.size.linear
    work, path = rollouts(count, calls=calls, delta=delta, seed=plan.seed), plan.scratch / "linear"
    coords = tokenlake_stage.fill(path, work)
    arrays = [by_hand.array_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    lists = [by_hand.list_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    _check_rows(work, tokenlake_rows.linear_rows(path)[1], arrays, lists)
    lake = plan.held.enter_context(tokenlake.open(path))
    numpy = _figure("numpy", shape, lambda: timed(lambda: [by_hand.numpy_row(records) for records in arrays]))
    python = _figure("Python", shape, lambda: timed(lambda: [by_hand.python_row(records) for records in lists]))
    gym = peer(plan, "nemo-gym", "linearize", max(1, count // plan.size.peer_share), calls, delta)
    queue = peer(plan, "transferqueue", "linearize", count, calls, delta)
    peers = (python, *gym("linearize"), *queue("linearize"))

    def row(what: str, run: Callable[[], Timing]) -> Row:
        what = f"{count:,} x {calls} x {delta}: {what}"
        ours = _figure("tokenlake", shape, run)
        return Row(work="W3", what=what, unit="M tokens/s", ours=ours, floor=numpy, peers=peers)

    return [
        row("SQL views, fresh open", lambda: tokenlake_rows.linear_rows(path)[0]),
        row("SQL views, lake open", lambda: tokenlake_rows.open_rows(lake)),
        row("its deltas by hand", lambda: tokenlake_rows.deltas_by_hand(lake)),
    ]


def _large(plan: Plan) -> list[Row]:
    count, calls, delta = shape = plan.size.linear_large
    work, path = rollouts(count, calls=calls, delta=delta, seed=plan.seed), plan.scratch / "large"
    coords = tokenlake_stage.fill(path, work)
    arrays = [by_hand.array_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
    share = max(1, count // (40 * plan.size.peer_share))
    return [
        Row(
            work="W3",
            what=f"{count:,} x {calls} x {delta}: SQL views, fresh open",
            unit="M tokens/s",
            ours=_figure("tokenlake", shape, lambda: tokenlake_rows.linear_rows(path)[0]),
            floor=_figure("numpy", shape, lambda: timed(lambda: [by_hand.numpy_row(each) for each in arrays])),
            peers=peer(plan, "nemo-gym", "linearize", share, calls, delta)("linearize"),
        )
    ]


def _figure(name: str, shape: Shape, run: Callable[[], Timing]) -> Figure:
    count, calls, delta = shape
    return alone(name, lambda: rate(run(), count * calls * delta / 1e6))


def timed(run: Callable[[], object]) -> Timing:
    """The timing of one run."""
    start = time.monotonic()
    run()
    return start, time.monotonic(), []


def _check_rows(
    work: Sequence[Rollout],
    table: pa.Table,
    arrays: Sequence[Sequence[by_hand.ArrayRecord]],
    lists: Sequence[Sequence[by_hand.ListRecord]],
) -> None:
    """All three give the same rows, or nothing is measured."""
    found = {row["rollout_id"]: row for row in table.to_pylist()}
    for rollout, by_array, by_list in zip(work, arrays, lists, strict=True):
        ids, mask, logprobs = by_hand.numpy_row(by_array)
        row = found[rollout.rollout_id]
        if not (row["input_ids"] == ids.tolist() == rollout.token_ids and row["token_mask"] == mask.tolist()):
            raise AssertionError(f"{rollout.rollout_id}: SQL and numpy disagree about ids or mask")
        if not np.array_equal(np.asarray(row["logprobs"], np.float32), logprobs):
            raise AssertionError(f"{rollout.rollout_id}: SQL and numpy disagree about logprobs")
        if by_hand.python_row(by_list)[:2] != (ids.tolist(), mask.tolist()):
            raise AssertionError(f"{rollout.rollout_id}: Python and numpy disagree")
