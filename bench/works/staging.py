"""W1: calls to durable deltas, one at a time, many in flight, several processes; beside the disk's floor and SQLite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench import floors, tokenlake_stage
from bench.measure import Timing, rate
from bench.peers import peer
from bench.plan import Plan
from bench.table import Figure, Row, alone
from bench.workload import rollouts

__all__ = ["rows"]

_WRITERS, _THREADS = 4, 64


def rows(plan: Plan) -> list[Row]:
    """The rows of staging."""
    count, calls, delta = plan.size.stage
    work = rollouts(count, calls=calls, delta=delta, seed=plan.seed)
    parts = [(len(range(i, count, _WRITERS)), calls, delta, plan.seed + i) for i in range(_WRITERS)]

    def figure(name: str, run: Callable[[Path], Timing]) -> Figure:
        fresh = plan.fresh(run)
        return alone(name, lambda: rate(fresh(), count * calls))

    def row(what: str, ours: Callable[[Path], Timing], floor: Figure, *peers: Figure) -> Row:
        return Row(work="W1", what=what, unit="calls/s", ours=figure("tokenlake", ours), floor=floor, peers=peers)

    raw = figure("raw", lambda folder: floors.raw_append(folder, work))
    raw_4 = figure("raw x4", lambda folder: floors.raw_append_processes(folder, parts))
    sqlite = figure("SQLite", lambda folder: floors.sqlite_full(folder, work))
    sqlite_4 = figure("SQLite x4", lambda folder: floors.sqlite_full_processes(folder, parts))
    share = max(1, count // plan.size.peer_share)
    gym, lance = (peer(plan, name, "stage", share, calls, delta) for name in ("nemo-gym", "lance"))
    queue = peer(plan, "transferqueue", "stage", _THREADS, count, calls, delta)
    lance_4 = peer(plan, "lance", "stage_processes", _WRITERS, share, calls, delta, label=f"Lance x{_WRITERS}")
    return [
        row(
            "stage, digests made before",
            lambda folder: tokenlake_stage.prepared(folder, work),
            raw,
            sqlite,
            *lance("stage"),
            *queue("stage"),
        ),
        row(
            "capture + stage, one writer",
            lambda folder: tokenlake_stage.stage(folder, work),
            raw,
            sqlite,
            *gym("stage"),
            *lance("stage"),
            *queue("stage"),
        ),
        row(
            "capture + stage + gate commit, one writer",
            lambda folder: tokenlake_stage.commit(folder, work),
            raw,
            sqlite,
            *gym("commit"),
        ),
        row(
            f"capture + stage, {_THREADS} in flight, one process",
            lambda folder: tokenlake_stage.stage_threads(folder, work, threads=_THREADS),
            raw,
            sqlite,
            *gym("stage"),
            *queue("together"),
        ),
        row(
            f"capture + stage, {_WRITERS} processes",
            lambda folder: tokenlake_stage.stage_processes(folder, parts),
            raw_4,
            sqlite_4,
            *lance_4("stage"),
        ),
    ]
