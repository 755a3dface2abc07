"""One group, 8 x 16 x 512: from the seal of its last rollout to `group_published`, in a lake that holds others.

The owner's path is the service's own: the seal becomes an event and its receipt is made, the publisher takes the
group's lock and has it published in a thread: judged by the views, its rows written, the event appended and anchored.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import by_hand, tokenlake_stage
from bench.measure import Sample, one_by_one, typical
from bench.peers import peer
from bench.plan import Plan
from bench.stub_engine import StubEngine
from bench.table import Row, alone
from bench.workload import Rollout, rollouts
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment
from tokenlake.finalize.publish import publish_due
from tokenlake.store.lake import OwnedLake

__all__ = ["rows"]

_SIZE, _CALLS, _DELTA = 8, 16, 512
_ROWS = "SELECT rollout_id, input_ids, token_mask, logprobs FROM ready_rows"


class _Lake:
    """A lake with published groups and a service over it; more groups are sealed and published one by one."""

    def __init__(self, lake: OwnedLake, *, before: int, seed: int, calls: int = _CALLS, delta: int = _DELTA) -> None:
        self._lake, self._seed, self._made = lake, seed, 0
        self._calls, self._delta = calls, delta
        self.groups = self._staged(before)
        publish_due(lake)
        environment = Environment(token="t", token_given=True, capability_key="ab" * 32, state_dir=lake.path)
        self._service = Service(lake, StubEngine(), environment=environment)

    def _staged(self, count: int) -> list[list[list[by_hand.ArrayRecord]]]:
        """Stage and seal whole groups; returns their records by group and rollout."""
        work = self._rollouts(count)
        events, coords = tokenlake_stage.finished(self._lake.delta_writer("w0"), work)
        self._lake.lineage.append_many(events)
        records = [by_hand.array_records(rollout, at) for rollout, at in zip(work, coords, strict=True)]
        return [records[at : at + _SIZE] for at in range(0, len(records), _SIZE)]

    def _rollouts(self, count: int) -> list[Rollout]:
        first, self._made = self._made * _SIZE, self._made + count
        shape = {"calls": self._calls, "delta": self._delta, "group_size": _SIZE}
        return rollouts(count * _SIZE, **shape, seed=self._seed, first=first)

    def check(self) -> None:
        """Every published row is what numpy makes of the same calls, or nothing is measured."""
        found = {row["rollout_id"]: row for row in self._lake.sql(_ROWS).to_arrow_table().to_pylist()}
        for records in itertools.chain.from_iterable(self.groups):
            row = found.pop(records[0].tags.rollout_id)
            for column, wanted in zip(("input_ids", "token_mask", "logprobs"), by_hand.numpy_row(records), strict=True):
                if not np.array_equal(np.asarray(row[column], wanted.dtype), wanted):
                    raise AssertionError(f"{records[0].tags.rollout_id}: publishing and numpy disagree about {column}")
        if found:
            raise AssertionError(f"{len(found)} rows are of no rollout")

    def publish(self, count: int) -> list[float]:
        """Seconds of each of `count` new groups."""
        return asyncio.run(self._publish(count))

    async def _publish(self, count: int) -> list[float]:
        work, writer = self._rollouts(count), self._lake.delta_writer("w0")
        latencies: list[float] = []
        events, _ = tokenlake_stage.finished(writer, work)
        last = {rollout.rollout_id: rollout for rollout in work[_SIZE - 1 :: _SIZE]}
        await self._service.ledger.append(
            *(
                event
                for event in events
                if not (event["event_type"] == "rollout_sealed" and event["rollout_id"] in last)
            )
        )
        for rollout_id, rollout in last.items():
            began = time.perf_counter()
            await self._service.lifecycle.seal(
                rollout_id, reward=1.0, attempt=0, terminal_call_id=rollout.calls[-1].call_id
            )
            done = await self._service.publisher.publish([rollout.group_id])
            latencies.append(time.perf_counter() - began)
            if [(group.rows, group.valid) for group in done] != [(_SIZE, _SIZE)]:
                raise AssertionError(f"{rollout.group_id} was not published whole: {done}")
        return latencies


def _by_numpy(path: Path, groups: Sequence[Sequence[Sequence[by_hand.ArrayRecord]]]) -> Sample:
    """The rows of each group from memory, their bytes in one append, one sync."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def publish(group: Sequence[Sequence[by_hand.ArrayRecord]]) -> None:
        made = [by_hand.numpy_row(records) for records in group]
        os.write(handle, b"".join(column.tobytes() for row in made for column in row))
        os.fdatasync(handle)

    try:
        return typical(one_by_one(publish, groups)[2])
    finally:
        os.close(handle)


def rows(plan: Plan) -> list[Row]:
    """The row of one group."""
    lake = _Lake(
        plan.held.enter_context(OwnedLake.open(plan.scratch / "lake")), before=plan.size.groups_before, seed=plan.seed
    )
    lake.check()
    groups = lake.groups[: plan.size.groups]
    share = max(1, plan.size.groups // plan.size.peer_share)
    return [
        Row(
            work="group",
            what=f"{_SIZE} x {_CALLS} x {_DELTA}, seal to published",
            unit="ms",
            ours=alone("tokenlake", lambda: typical(lake.publish(plan.size.groups))),
            floor=alone("numpy", plan.fresh(lambda folder: _by_numpy(folder / "rows.bin", groups))),
            peers=peer(plan, "nemo-gym", "groups", share, _SIZE, _CALLS, _DELTA)("group"),
        )
    ]
