"""W1 for Tokenlake: calls as the gate hands them to the capture core, to durable deltas.

The whole prompt is an `array('i')` and the parent's ids are bytes, as the gate splices and caches them; what was
sampled is Python lists, as an engine gives it. Each variant does the whole of capture inside the clock: the prompt is
compared with the parent's ids, the lists become arrays, the digests are computed, the record is appended and synced.
`prepared` leaves out capture and stages records that were built before, which is the part that the disk's floor can be
compared with.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.measure import Timing, one_by_one, together, writers
from bench.workload import Call, Rollout, rollouts
from tokenlake.ingest.capture import CaptureCore, ParentLink, Stager
from tokenlake.ingest.coords import Coords
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake

__all__ = ["commit", "fill", "finished", "prepared", "stage", "stage_processes", "stage_threads"]

_IN_FLIGHT = 64
"""Rollouts at a time, of a lake that is filled: their calls lie between each other, as a service leaves them."""
_NOWHERE = Place(writer="none", segment=0, byte_offset=0, byte_length=0)


class _Chain:
    """One rollout on its way through a capture core: knows what its next call continues."""

    def __init__(self, core: CaptureCore, rollout: Rollout) -> None:
        self.core = core
        self.coords: list[Coords] = []
        self.work = [(self, call, rollout.prompt(call), rollout.prefix(call)) for call in rollout.calls]
        for call in rollout.calls:
            _ = call.sampled_ids, call.sampled_logprobs  # made before the clock: an engine has them already

    def parent(self, prefix: bytes) -> ParentLink | None:
        if not self.coords:
            return None
        last = self.coords[-1]
        if last.chain_hash is None:
            raise AssertionError(f"{last.rollout_id} {last.call_id} was not staged: {last.reason}")
        return ParentLink(
            call_id=last.call_id,
            root_call_id=last.root_call_id,
            depth=last.depth,
            cum_len=last.cum_len,
            chain_hash=last.chain_hash,
            token_ids=prefix,
        )


_Work = tuple[_Chain, Call, "array[int]", bytes]


def _capture(work: _Work) -> Coords:
    chain, call, prompt, prefix = work
    parent = chain.parent(prefix)
    ticket = chain.core.begin(rollout_id=call.rollout_id, attempt=0, call_id=call.call_id, parent=parent)
    coords = chain.core.complete(
        ticket,
        prompt_token_ids=prompt,
        token_ids=call.sampled_ids,
        logprobs=call.sampled_logprobs,
        finish_reason="stop",
        weight_version=call.weight_version,
        weight_version_end=call.weight_version,
    )
    chain.coords.append(coords)
    return coords


def _chains(writer: Stager, work: Sequence[Rollout]) -> list[_Chain]:
    core = CaptureCore(writer)
    return [_Chain(core, rollout) for rollout in work]


def _checked(chains: Sequence[_Chain], timing: Timing) -> Timing:
    failed = [at.reason for chain in chains for at in chain.coords if at.disposition != "staged"]
    if failed:
        raise AssertionError(f"{len(failed)} calls were not staged: {failed[0]}")
    return timing


class _Collector:
    """A stager that keeps the delta."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def stage(self, delta: Delta) -> Place:
        self.deltas.append(delta)
        return _NOWHERE


def prepared(folder: Path, work: Sequence[Rollout]) -> Timing:
    """Stage deltas whose digests were computed before: format, append and sync."""
    collector = _Collector()
    for chain in _chains(collector, work):
        for item in chain.work:
            _capture(item)
    with OwnedLake.open(folder / "prepared") as lake:
        return one_by_one(lake.delta_writer("w0").stage, collector.deltas)


def stage(folder: Path, work: Sequence[Rollout]) -> Timing:
    """Capture and stage, one call at a time."""
    with OwnedLake.open(folder / "stage") as lake:
        chains = _chains(lake.delta_writer("w0"), work)
        return _checked(chains, one_by_one(_capture, [item for chain in chains for item in chain.work]))


def stage_threads(folder: Path, work: Sequence[Rollout], *, threads: int) -> Timing:
    """Capture and stage with many rollouts in flight in one process: they share syncs."""
    with OwnedLake.open(folder / "threads") as lake:
        chains = _chains(lake.delta_writer("w0"), work)
        return _checked(chains, together(_capture, [chain.work for chain in chains], threads=threads))


def stage_processes(folder: Path, spec: Sequence[tuple[int, int, int, int]]) -> Timing:
    """Capture and stage in several processes, each with a writer of its own in the same lake."""
    path = folder / "processes"
    OwnedLake.open(path).close()
    return writers(_writer, [(path, f"w{index}", *part) for index, part in enumerate(spec)])


def _writer(barrier: Barrier, path: Path, name: str, count: int, calls: int, delta: int, seed: int) -> Timing:
    writer = DeltaWriter(path, name)
    chains = _chains(writer, rollouts(count, calls=calls, delta=delta, seed=seed))
    items = [item for chain in chains for item in chain.work]
    try:
        barrier.wait()
        return _checked(chains, one_by_one(_capture, items))
    finally:
        writer.close()


def commit(folder: Path, work: Sequence[Rollout]) -> Timing:
    """Capture, stage, and append the gate's `call_committed` event: a call as an agent waits for it."""
    with OwnedLake.open(folder / "commit") as lake:
        chains = _chains(lake.delta_writer("w0"), work)

        def put(item: _Work) -> None:
            coords = _capture(item)
            lake.lineage.append("call_committed", **coords.columns())

        return _checked(chains, one_by_one(put, [item for chain in chains for item in chain.work]))


def finished(writer: Stager, work: Sequence[Rollout]) -> tuple[list[dict[str, Any]], list[list[Coords]]]:
    """Stage whole rollouts, many at a time; returns the events that they still need, and each one's coordinates."""
    chains = _chains(writer, work)
    _checked(chains, together(_capture, [chain.work for chain in chains], threads=_IN_FLIGHT))
    sizes = Counter(rollout.group_id for rollout in work)
    events: list[dict[str, Any]] = [
        {"event_type": "group_registered", "group_id": name, "n": n} for name, n in sizes.items()
    ]
    for rollout, chain in zip(work, chains, strict=True):
        about = {"group_id": rollout.group_id, "rollout_id": rollout.rollout_id, "attempt": 0}
        events.append({"event_type": "rollout_registered", **about})
        events += [{"event_type": "call_committed", **coords.columns(), **about} for coords in chain.coords]
        terminal = rollout.calls[-1].call_id
        events.append({"event_type": "rollout_sealed", "reward": 1.0, "terminal_call_id": terminal, **about})
    return events, [chain.coords for chain in chains]


def fill(path: Path, work: Sequence[Rollout]) -> list[list[Coords]]:
    """A lake of finished rollouts, ready to be linearized; returns the coordinates of every call."""
    with OwnedLake.open(path) as lake:
        events, coords = finished(lake.delta_writer("w0"), work)
        lake.lineage.append_many(events)
        return coords
