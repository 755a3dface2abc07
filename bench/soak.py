"""A soak of the gate: many rollouts at once over real sockets, and afterwards every call is looked at.

The clients run in a process of their own. What counts: no answered call is missing from lineage, none is there twice,
and every prompt that the engine saw starts with the whole sequence of the call before it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from bench.agents import Agent, Played, play
from bench.restart import fill, measure
from bench.stub_engine import StubEngine
from tokenlake.api.client import Client
from tokenlake.api.control import Control
from tokenlake.api.serve import embedded, few_collections
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment
from tokenlake.store.lake import OwnedLake

__all__ = ["Soak", "held", "soak"]

_TOKEN = "soak"
_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What came of one soak."""

    calls: int
    """Answers that clients got."""
    lost: int
    """Answers without an event in lineage."""
    duplicated: int
    """Events beyond one an answer."""
    wrong_prefixes: int
    """Later turns whose prompt does not start with the whole sequence before it."""
    seconds: float
    latencies: list[float]
    """Seconds of each call as its client saw them."""
    overheads: list[float]
    """Seconds of each call outside the engine, in order of size."""

    def overhead(self, fraction: float) -> float:
        """A quantile of the overhead, in milliseconds."""
        return 1e3 * self.overheads[min(len(self.overheads) - 1, int(fraction * len(self.overheads)))]


class _Overheads(list[float]):
    """Stands in for the service's histogram, whose buckets are too wide to compare with."""

    observe = list[float].append


def soak(lake_path: Path, *, rollouts: int, turns: int, in_flight: int) -> Soak:
    """Run rollouts of some turns each, at most `in_flight` of them at a time, and check everything."""
    engine, overheads = StubEngine(), _Overheads()
    environment = Environment(token=_TOKEN, token_given=True, capability_key="ab" * 32, state_dir=lake_path)
    with OwnedLake.open(lake_path) as lake:
        service = Service(lake, engine, environment=environment)
        service.metrics.overhead = cast("Any", overheads)
        with few_collections(), embedded(service) as running, Client(running.url, _TOKEN) as client:
            agents: list[Agent] = []
            for group in range(-(-rollouts // _GROUP)):
                size = min(_GROUP, rollouts - group * _GROUP)
                slots = client.register_group(f"soak{group}", size)["rollouts"]
                agents.extend((slot["rollout_id"], slot["base_url"], slot["data_capability"]) for slot in slots)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                played: Played = pool.apply(play, (agents, turns, in_flight))
        events = [event for event in lake.lineage.events() if event["event_type"] == "call_committed"]
    known = {event["call_id"]: event for event in events}
    got = [call_id for calls in played.calls for call_id in calls]
    wrong = sum(
        known[call_id].get("parent_call_id") != before
        or engine.seen[call_id][0][: known[before]["cum_len"]] != engine.seen[before][0] + engine.seen[before][1]
        for calls in played.calls
        for before, call_id in pairwise(calls)
    )
    return Soak(
        calls=len(got),
        lost=len(set(got) - set(known)) + rollouts * turns - len(set(got)),
        duplicated=len(events) - len(set(got)),
        wrong_prefixes=wrong,
        seconds=played.seconds,
        latencies=played.latencies,
        overheads=sorted(overheads),
    )


def held(lake: OwnedLake) -> float:
    """Bytes of the gate's memory for each call of an open rollout, with all that it keeps of the events."""
    lake.open_events()
    tracemalloc.start()
    events = lake.open_events()
    control = Control()
    while events:
        control.apply(events.pop(0))
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    calls = sum(
        attempt.committed
        for group in control.groups.values()
        for rollout in group.rollouts.values()
        for attempt in rollout.attempts.values()
    )
    return size / calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--open", type=int, default=1000, help="open rollouts of the restart")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        for in_flight in arguments.in_flight:
            rollouts = arguments.rollouts if in_flight > 1 else max(1, arguments.rollouts // 10)
            found = soak(
                Path(folder) / f"soak{in_flight}", rollouts=rollouts, turns=arguments.turns, in_flight=in_flight
            )
            print(
                f"{rollouts} rollouts x {arguments.turns} turns, {in_flight} in flight: {found.calls} calls in "
                f"{found.seconds:.1f} s, lost {found.lost}, duplicated {found.duplicated}, wrong prefixes "
                f"{found.wrong_prefixes}; overhead p50 {found.overhead(0.5):.1f} ms, p99 {found.overhead(0.99):.1f} ms"
            )
        path = Path(folder) / "restart"
        with OwnedLake.open(path) as lake:
            fill(lake, arguments.open, closed=False, tag="o")
            print(f"memory of the gate: {held(lake):.0f} bytes for each call of an open rollout")
        start = measure(path, StubEngine())
        print(f"start with {start.rollouts} open rollouts: {start.lake_s + start.service_s:.2f} s")


if __name__ == "__main__":
    main()
