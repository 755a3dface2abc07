"""W2: the calls of one rollout by key, and all calls."""

from __future__ import annotations

from collections.abc import Callable

from bench.measure import Timing, rate, typical
from bench.peers import peer
from bench.plan import Plan
from bench.reads import Reads
from bench.table import Figure, Row, alone
from bench.workload import rollouts

__all__ = ["rows"]


def rows(plan: Plan) -> list[Row]:
    """The rows of reading."""
    count, calls, delta = plan.size.stage
    work = rollouts(count, calls=calls, delta=delta, seed=plan.seed)
    reads = Reads(plan.scratch, work)
    plan.held.callback(reads.close)

    def one(name: str, run: Callable[[], Timing]) -> Figure:
        return alone(name, lambda: typical(run()[2]))

    def every(name: str, run: Callable[[], Timing]) -> Figure:
        return alone(name, lambda: rate(run(), count * calls))

    pread, sqlite = one("pread", reads.raw_one), one("SQLite", reads.sqlite_one)
    lance, queue = (peer(plan, name, "read", count, calls, delta) for name in ("lance", "transferqueue"))
    by_key = (sqlite, *lance("one"), *queue("one"))
    pread_all = every("pread", reads.raw_all)
    in_all = [every("SQLite", reads.sqlite_all), *lance("all"), *queue("all")]
    return [
        Row(
            work="W2",
            what=f"{calls} calls of a rollout, places from lineage",
            unit="ms",
            ours=one("tokenlake", reads.places_one),
            floor=pread,
            peers=by_key,
        ),
        Row(
            work="W2",
            what=f"{calls} calls of a rollout, SQL by key",
            unit="ms",
            ours=one("tokenlake", reads.query_one),
            floor=pread,
            peers=by_key,
        ),
        Row(
            work="W2",
            what="all calls, SQL to Arrow",
            unit="calls/s",
            ours=every("tokenlake", reads.query_all),
            floor=pread_all,
            peers=in_all,
        ),
        Row(
            work="W2",
            what="all calls, scan_deltas to Arrow",
            unit="calls/s",
            ours=every("tokenlake", reads.scan_all),
            floor=pread_all,
            peers=in_all,
        ),
    ]
